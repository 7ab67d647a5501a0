"""The interface of a host: one machine, with its metrics, local network, store and device.

A component asks for a metric's series once and keeps it, so recording a value is a single addition. Values that
exist anyway (a link's bytes) are not counted again: a collector updates the series when the metrics are read.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import msgspec

from hcsim.errors import UNDECODABLE, ConfigError
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.clock import Clock
from hcsim.runtime.timeline_clock import TimelineClock

T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
PeerCheck: TypeAlias = Callable[[str], bool]
"""Returns whether a node with this id is the wanted peer."""
_MARK = b"hcsim record 1\n"
_CRC_BYTES = 4


class Counter(Protocol):
    """A monotonically increasing number."""

    value: float
    """May be added to directly where a call would cost too much."""

    def add(self, amount: float = 1) -> None: ...


class Gauge(Protocol):
    """A number that can go up and down."""

    value: float

    def set(self, value: float) -> None: ...


class Histogram(Protocol):
    """A distribution of values."""

    def observe(self, value: float) -> None: ...


class Metrics(Protocol):
    """A host's metrics. Names and labels are those of the table of metrics; others raise a `UsageError`."""

    def counter(self, name: str, **labels: str) -> Counter:
        """Return the counter with these labels; the same one for the same labels."""

    def gauge(self, name: str, **labels: str) -> Gauge: ...

    def histogram(self, name: str, **labels: str) -> Histogram: ...

    def collect(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Register a collector: `tell` is called whenever the metrics are read, to bring its series up to date.
        Call the returned function to unregister it; it calls `tell` a last time."""


class Service(msgspec.Struct, frozen=True):
    """One announcement: a name, an address, and properties."""

    name: str
    address: str
    properties: Mapping[str, str] = {}


class Sighting(msgspec.Struct, frozen=True):
    """A service appeared, changed, or (`gone`) left."""

    service: Service
    gone: bool = False


class Lan(Protocol):
    """Advertise and browse services (mDNS, or a modelled broadcast domain)."""

    async def advertise(self, service: Service) -> str:
        """Announce a service until it is withdrawn; announcing the name again replaces it.

        Return the name that others see, which differs if another host announces that name already. Locally the
        service keeps its name."""

    async def withdraw(self, name: str) -> None:
        """Withdraw a service; browsing hosts are notified."""

    def browse(self) -> AsyncIterator[Sighting]:
        """Yield all current services, then every change, including this host's own."""


class Store(Protocol):
    """Small named records that survive a crash; writes are atomic."""

    def load(self, name: str) -> bytes | None:
        """Return the last saved record of that name; None if there is none."""

    def save(self, name: str, data: bytes) -> None:
        """Replace the record; once this returns, a crash cannot lose it."""

    def where(self, name: str) -> str:
        """Return where a user finds the record of that name."""


def keep(store: Store, name: str, record: Any) -> None:
    """Save a record with a checksum."""
    store.save(name, packed(record))


def kept(store: Store, name: str, kind: type[T]) -> T | None:
    """Return the record that `keep` has saved, or None."""
    saved = store.load(name)
    return None if saved is None else unpacked(saved, kind, store.where(name))


def packed(record: Any) -> bytes:
    """Serialise a record with its checksum."""
    data = msgspec.msgpack.encode(record)
    return _MARK + zlib.crc32(data).to_bytes(_CRC_BYTES, "big") + data


def unpacked(saved: bytes, kind: type[T], where: str) -> T:
    """Deserialise a record; `where` names its location in errors."""
    mark, rest = saved[: len(_MARK)], saved[len(_MARK) :]
    crc, data = rest[:_CRC_BYTES], rest[_CRC_BYTES:]
    if mark != _MARK:
        why = "it is damaged, or was written by another version"
    elif crc != zlib.crc32(data).to_bytes(_CRC_BYTES, "big"):
        why = "it is damaged"
    else:
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except UNDECODABLE as error:
            why = f"it was written by another version ({error})"
    raise ConfigError(f"{where}: cannot be read: {why}; remove it to start afresh")


class KernelGroup(msgspec.Struct, frozen=True):
    """Kernels of one kind and size."""

    kind: str
    """One of `config.KernelKind`."""
    flops: float
    """Of each."""
    moved_bytes: float
    """That each reads from and writes to memory."""
    count: int = 1
    dtype: str = "float32"
    signature: str = ""
    """The operation with its shapes, for a machine on which it was measured by itself."""
    rows: float = 0.0
    """What is summed up, normalised, or copied as one; 0 where that is not known."""
    colds: float = 0.0
    """The sum of 1/√k over all of the group, of which each was the k-th of its kind in a step."""


class CodecCall(msgspec.Struct, frozen=True):
    """Tensors that a compressor encodes or decodes."""

    compressor: str
    decodes: bool
    size_bytes: float
    """Of each tensor, uncompressed."""
    moved_bytes: float
    """By an estimate of what all of them cost; part of the work's."""
    count: float = 1.0


class TaskPart(msgspec.Struct, frozen=True):
    """A part of a task's step, for a machine on which it was measured by itself."""

    signature: str
    samples: float


class Work(msgspec.Struct, frozen=True):
    """The amount of work, for a machine whose time is modelled."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    """Bytes read from and written to memory."""
    kernels: int = 1
    """Kernels launched one after the other, each with the machine's launch overhead."""
    groups: tuple[KernelGroup, ...] = ()
    """The same work by kind of kernel, for a machine whose kernels were measured; empty where it is not known."""
    estimated: bool = False
    """Whether the kinds are estimated: then the efficiency of a whole step is nearer than those of kinds, and only
    measured kernels are nearer than that."""
    steps: int = 0
    """Training steps that end with this work; each costs what the machine's steps cost beside their kernels."""
    codecs: tuple[CodecCall, ...] = ()
    """The part of the work that compressors do, for a machine on which they were measured."""
    part: TaskPart | None = None
    """All of the work, for a machine on which it was measured by itself; with what a step costs beside it."""

    def figures(self) -> tuple[int, int]:
        """Return the FLOPs and the bytes, as an execution trace counts them."""
        return round(self.flops), round(self.moved_bytes)


def joined_work(works: Iterable[Work], times: float = 1.0) -> Work:
    """Return the arithmetic, the traffic and the compressors of all of them as one kernel, so many times."""
    each = list(works)
    codecs: dict[tuple[str, bool, float], tuple[float, float]] = {}
    for call in (call for work in each for call in work.codecs):
        key = call.compressor, call.decodes, call.size_bytes
        moved_bytes, count = codecs.get(key, (0.0, 0.0))
        codecs[key] = moved_bytes + times * call.moved_bytes, count + times * call.count
    calls = (CodecCall(*key, moved, count) for key, (moved, count) in codecs.items())
    return Work(
        times * sum(work.flops for work in each), times * sum(work.moved_bytes for work in each), codecs=tuple(calls)
    )


class Chip(msgspec.Struct, frozen=True):
    """The chip of a machine."""

    name: str
    """The vendor's name: "Apple M2 Ultra"."""
    memory_bytes: int | None = None
    """All of the machine's memory; None if unknown."""


class MachineFacts(msgspec.Struct, frozen=True):
    """The system, the processor and the software of a machine."""

    system: str
    chip: str
    versions: dict[str, str]


class Readings(msgspec.Struct, frozen=True):
    """The state of a machine at one moment; None for what the system does not tell."""

    free_bytes: int | None = None
    """Memory that programs can still get."""
    temperature_c: float | None = None
    """Of the hottest part of the processor or the board."""
    power_w: float | None = None
    speed_limit: float | None = None
    """The share of its speed at which the system holds the processor because of heat."""


class Device(Protocol):
    """One machine's processor. It does one piece of work at a time."""

    @property
    def name(self) -> str:
        """The name for users: "M2 Ultra", "cuda:0", "cpu"."""

    @property
    def torch_name(self) -> str:
        """The torch device that really computes: "mps", "cuda", "cpu"."""

    @property
    def chip(self) -> Chip: ...

    def exercise(self, kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
        """Return a benchmark function for `run`: a product of two square float32 matrices of this size, or an
        in-place sum of two float32 vectors of this length."""

    def predict_s(self, work: Work) -> float | None:
        """Return how long the work takes by the profile of this machine; None if the machine is not known."""

    async def run(self, work: Work, function: Callable[[], T], into: memoryview | None = None) -> T:
        """Call the function without blocking the network, and take the time of the work.

        `into` is the memory that the function writes its numbers to, if it does not return them."""

    async def touch(self, moved_bytes: int) -> None:
        """Charge memory traffic that the caller causes itself, such as adding a segment."""


class Medium(Enum):
    """The medium of an interface, ordered from fast to slow."""

    LOOPBACK = "loopback"
    THUNDERBOLT = "thunderbolt"
    ETHERNET = "ethernet"
    WIFI = "wifi"
    TUNNEL = "tunnel"
    """A VPN, or another interface on top of one of the others."""
    UNKNOWN = "unknown"
    VIRTUAL = "virtual"
    """A network of virtual machines or containers within the machine, which no other machine reaches."""


class Interface(msgspec.Struct, frozen=True):
    """One of a host's network interfaces."""

    name: str
    medium: Medium
    rate_bps: float | None = None
    """The nominal line rate, if the system reports it."""
    addresses: tuple[str, ...] = ()


def fastest_first(interfaces: Iterable[Interface]) -> tuple[Interface, ...]:
    """Sort by medium, then by name."""
    order = list(Medium)
    return tuple(sorted(interfaces, key=lambda interface: (order.index(interface.medium), interface.name)))


class Host(Protocol):
    """One machine."""

    @property
    def name(self) -> str:
        """The name, unique within the cluster."""

    @property
    def clock(self) -> Clock: ...

    @property
    def device(self) -> Device: ...

    @property
    def lan(self) -> Lan:
        """The local network in which it announces services."""

    @property
    def store(self) -> Store:
        """Persistent records, which survive restarts."""

    @property
    def metrics(self) -> Metrics: ...

    @property
    def timeline_clock(self) -> TimelineClock | None:
        """The clock that this machine's timeline shares with others; None if the transport is to note no frames."""

    def interfaces(self) -> tuple[Interface, ...]:
        """The host's network interfaces, `fastest_first`."""

    async def readings(self) -> Readings:
        """Return the present state of the machine."""

    async def listen(self, address: str) -> Listener:
        """Listen for channels at `host:port` (port 0: any free one)."""

    async def connect(
        self, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S, is_peer: PeerCheck | None = None
    ) -> Channel:
        """Open a channel; retry with backoff until the deadline.

        Raise `PeerRefused` if connections were refused until the end, `DeadlineExceeded` if there was no answer.

        With `is_peer`, hosts of the address where another node proves its identity are left out: the address of a
        virtual machine's network leads every machine to itself. Raise `WrongPeer` at once if they all are.
        Hosts that do not know the peer's identity ignore `is_peer`."""

    def spawn(
        self, work: Coroutine[Any, Any, Any], *, name: str, over: Callable[[asyncio.Task[Any]], None] | None = None
    ) -> asyncio.Task[Any]:
        """Run a task that ends with this host. The name appears in reports.

        `over` is called with the task once it has ended, with or without an error, before tasks that wait for it
        resume."""

    def rng(self, *name: str | int) -> random.Random:
        """Return this host's random stream of that name."""

    def trace(self, kind: str, *fields: str | int | float) -> None: ...

    def note(self, kind: str, *fields: str | int | float) -> None:
        """Write a line for people into the file of the trace, if there is one. It is no event, and not in the
        digest."""

    def interval(
        self, purpose: str, detail: object = "", about: Callable[[], Sequence[str | int | float]] | None = None
    ) -> AbstractContextManager[None]:
        """Note in the timeline, if one is written, that the host does this in the block: "compute", "encode", "wait",
        "operation" or "repeat". The detail is turned into text, and `about` asked for figures of it, only then."""
