"""A host: one machine, and everything a component may take from it: metrics, local network, store, device.

Components ask for a metric's series once and keep it; to record is then an addition. What is counted anyway (a link's
bytes) is not counted again: a collector tells it when somebody looks.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from enum import Enum
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from hcsim.errors import UNDECODABLE, ConfigError
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.clock import Clock

T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
_MARK = b"hcsim record 1\n"
_CRC_BYTES = 4


class Counter(Protocol):
    """A number that only grows."""

    value: float
    """May be added to directly where a call would cost too much."""

    def add(self, amount: float = 1) -> None:
        """Count some more."""


class Gauge(Protocol):
    """A number that holds at the moment."""

    value: float

    def set(self, value: float) -> None:
        """It is now this."""


class Histogram(Protocol):
    """Values, by size."""

    def observe(self, value: float) -> None:
        """One more value."""


class Metrics(Protocol):
    """A host's figures. Names and labels are those of the table of metrics; others are a `UsageError`."""

    def counter(self, name: str, **labels: str) -> Counter:
        """The counter with these labels; the same one for the same labels."""

    def gauge(self, name: str, **labels: str) -> Gauge:
        """The gauge with these labels."""

    def histogram(self, name: str, **labels: str) -> Histogram:
        """The histogram with these labels."""

    def collect(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Have `tell` called whenever somebody looks, to bring its series up to date. Call what comes back to end that:
        `tell` is then called a last time."""


class Service(msgspec.Struct, frozen=True):
    """One announcement: a name, where it is reached, and what it says about itself."""

    name: str
    address: str
    properties: Mapping[str, str] = {}


class Sighting(msgspec.Struct, frozen=True):
    """A service came into view, changed, or (`gone`) left."""

    service: Service
    gone: bool = False


class Lan(Protocol):
    """Advertise and browse services (mDNS, or a modelled broadcast domain)."""

    async def advertise(self, service: Service) -> str:
        """Announce a service until it is withdrawn; announcing the name again replaces it.

        Returns the name that others see: another one where somebody else announces that name already. Here the service
        keeps its name."""

    async def withdraw(self, name: str) -> None:
        """Say goodbye; those who browse are told."""

    def browse(self) -> AsyncIterator[Sighting]:
        """All services in view, then every change, our own included."""


class Store(Protocol):
    """Small named records that outlive a crash: written whole or not at all."""

    def load(self, name: str) -> bytes | None:
        """The record of that name, as it was last saved; None where there is none."""

    def save(self, name: str, data: bytes) -> None:
        """Replace the record; once this returns, a crash cannot lose it."""

    def where(self, name: str) -> str:
        """Where a person finds the record of that name."""


def keep(store: Store, name: str, record: Any) -> None:
    """Save a record in a form that shows whether it was damaged since."""
    store.save(name, packed(record))


def kept(store: Store, name: str, kind: type[T]) -> T | None:
    """What `keep` has saved, or None."""
    saved = store.load(name)
    return None if saved is None else unpacked(saved, kind, store.where(name))


def packed(record: Any) -> bytes:
    """A record in that form."""
    data = msgspec.msgpack.encode(record)
    return _MARK + zlib.crc32(data).to_bytes(_CRC_BYTES, "big") + data


def unpacked(saved: bytes, kind: type[T], where: str) -> T:
    """The record; `where` is where a person finds it."""
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


class Work(msgspec.Struct, frozen=True):
    """How much there is to do, for a machine whose time is modelled."""

    flops: float = 0.0
    moved_bytes: float = 0.0
    """Bytes read from and written to memory."""
    kernels: int = 1
    """Pieces that are launched one after the other, each with the machine's overhead."""


class Chip(msgspec.Struct, frozen=True):
    """What a machine is built on."""

    name: str
    """As its maker calls it: "Apple M2 Ultra"."""
    memory_bytes: int | None = None
    """All of the machine's memory; None where nobody knows."""


class Device(Protocol):
    """One machine's processor. Work on it is done one piece after the other."""

    @property
    def name(self) -> str:
        """For people: "M2 Ultra", "cuda:0", "cpu"."""

    @property
    def torch_name(self) -> str:
        """Where torch really computes: "mps", "cuda", "cpu"."""

    @property
    def chip(self) -> Chip:
        """What the machine is built on."""

    def exercise(self, kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
        """A function for `run`, to find out how fast it is here: a product of two square float32 matrices of that size,
        or a sum of two float32 vectors of that length, one of them in place."""

    async def run(self, work: Work, function: Callable[[], T], into: memoryview | None = None) -> T:
        """Call the function without holding up the network, and take the time the work takes.

        `into` is the memory that the function writes its numbers to, where it does not return them."""

    async def touch(self, moved_bytes: int) -> None:
        """Account for memory traffic that the caller causes itself, such as adding a segment."""


class Medium(Enum):
    """What an interface is made of; the order is from fast to slow."""

    LOOPBACK = "loopback"
    THUNDERBOLT = "thunderbolt"
    ETHERNET = "ethernet"
    WIFI = "wifi"
    TUNNEL = "tunnel"
    """A VPN, or whatever else goes over one of the others."""
    UNKNOWN = "unknown"


class Interface(msgspec.Struct, frozen=True):
    """One of a host's network interfaces."""

    name: str
    medium: Medium
    rate_bps: float | None = None
    """Nominal line rate, where the system tells."""
    addresses: tuple[str, ...] = ()


def fastest_first(interfaces: Iterable[Interface]) -> tuple[Interface, ...]:
    """By medium, those of one medium by name."""
    order = list(Medium)
    return tuple(sorted(interfaces, key=lambda interface: (order.index(interface.medium), interface.name)))


class Host(Protocol):
    """One machine."""

    @property
    def name(self) -> str:
        """Unique within its cluster."""

    @property
    def clock(self) -> Clock:
        """This host's own time."""

    @property
    def device(self) -> Device:
        """What it computes with."""

    @property
    def lan(self) -> Lan:
        """The neighbourhood it announces itself in."""

    @property
    def store(self) -> Store:
        """What it remembers across restarts."""

    @property
    def metrics(self) -> Metrics:
        """Its figures, for whoever looks on."""

    def interfaces(self) -> tuple[Interface, ...]:
        """What this host is attached to, `fastest_first`."""

    async def listen(self, address: str) -> Listener:
        """Accept channels at `host:port` (port 0: any free one)."""

    async def connect(self, address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Channel:
        """Open a channel, trying again with backoff until the deadline.

        Raises `PeerRefused` when somebody says no until the end, `DeadlineExceeded` when nobody answers.
        """

    def spawn(
        self, work: Coroutine[Any, Any, Any], *, name: str, over: Callable[[asyncio.Task[Any]], None] | None = None
    ) -> asyncio.Task[Any]:
        """Run a task that lives and dies with this host. The name appears in reports.

        `over` gets the task once it has ended, however it has, and before those who wait for it."""

    def rng(self, *name: str | int) -> random.Random:
        """This host's random stream of that name."""

    def trace(self, kind: str, *fields: str | int | float) -> None:
        """Put an event into the run's trace."""
