"""The hardware of a host: a device, a clock, and a disk.

The device calls functions at once and charges virtual time for them, as `runtime.work_time` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from math import prod
from typing import Literal, Protocol, TypeAlias, TypeVar

from msgspec.structs import replace

from hcsim.config import CATALOGUE, Machine, Node
from hcsim.errors import ConfigError
from hcsim.runtime.clock import Limit
from hcsim.runtime.host import Chip, Work
from hcsim.runtime.work_time import KernelTimes, seconds
from hcsim.virtual.loop import VirtualLoop
from hcsim.virtual.processor import Cores


def machine_of(node: Node) -> Machine:
    """Return the node's own profile, or the one that it names, with the node's memory."""
    machine = node.machine
    if not isinstance(machine, Machine):
        try:
            machine = CATALOGUE.named(machine)
        except ConfigError as error:
            raise ConfigError(f'node "{node.name}": {error}') from None
    return machine if node.memory_bytes is None else replace(machine, ram_bytes=node.memory_bytes)


T = TypeVar("T")
Spoiler: TypeAlias = Callable[[memoryview], bool]
"""May change a result; returns True when it is finished and must not be called again."""


class WorkClock:
    """A work clock: it advances at the speed of the device, and not at all while the device is stopped."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._speed = 1.0
        self._before_s = 0.0
        self._since_s = 0.0
        self._waiting: dict[asyncio.Future[None], tuple[float, Context]] = {}
        self._timers: dict[asyncio.Future[None], asyncio.TimerHandle] = {}

    def now(self) -> float:
        """Return the time so far, in seconds of work at full speed."""
        return self._before_s + (self._loop.time() - self._since_s) * self._speed

    def change(self, speed: float) -> None:
        """Continue at this fraction of the full speed."""
        self._before_s, self._since_s = self.now(), self._loop.time()
        self._speed = speed
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for future in self._waiting:
            self._set_timer(future)

    async def reach(self, when_s: float) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting[future] = when_s, copy_context()
        self._set_timer(future)
        try:
            await future
        finally:
            del self._waiting[future]
            if (timer := self._timers.pop(future, None)) is not None:
                timer.cancel()

    def _set_timer(self, future: asyncio.Future[None]) -> None:
        if self._speed > 0.0:
            when_s, context = self._waiting[future]
            left_s = (when_s - self.now()) / self._speed
            self._timers[future] = self._loop.call_later(left_s, _end, future, context=context)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class DeviceHost(Protocol):
    """What a device asks of the host that it is part of."""

    loop: VirtualLoop
    alive: bool
    pauses: int
    """How many faults hold it at the moment."""


class VirtualDevice:
    """A simulated device with one queue for work and one for memory traffic.

    Where it computes on the processor that handles the messages, its speed is its share of the `cores`."""

    def __init__(self, host: DeviceHost, machine: Machine, cores: Cores | None = None) -> None:
        self._host = host
        self._cores = cores
        self._share = 1.0
        self._running = 0
        self._machine = machine
        self._times = KernelTimes(machine)
        self._factors: list[float] = []
        self._stuck = 0
        """The number of faults that hang the device."""
        self._pace = WorkClock(host.loop)
        self._waited_s: float | None = None
        """Extra waiting time of the function being called; None outside a call."""
        self._spoilers: list[Spoiler] = []
        self._busy_until_s = 0.0
        self._memory_until_s = 0.0
        self._memory_bytes_ps = machine.memory_Bps * machine.efficiency_memory

    @property
    def name(self) -> str:
        """The chip; "ideal" takes no time."""
        return self._machine.name

    @property
    def torch_name(self) -> str:
        """Always "cpu": the simulator computes there, whatever it models."""
        return "cpu"

    @property
    def chip(self) -> Chip:
        ram_bytes = self._machine.ram_bytes
        return Chip(self._machine.name, None if ram_bytes is None else int(ram_bytes))

    def exercise(self, kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
        """Return a function that does nothing; only the duration of the work counts."""
        return lambda: None

    def predict_s(self, work: Work) -> float | None:
        """See `runtime.host.Device.predict_s`: what the machine does at full speed, whatever faults slow it down."""
        return seconds(self._machine, work, times=self._times)

    async def run(self, work: Work, function: Callable[[], T], into: memoryview | None = None) -> T:
        """See `runtime.host.Device.run`."""
        self._waited_s = 0.0
        try:
            result = function()
        finally:
            waited_s, self._waited_s = self._waited_s, None
        if into is not None and self._spoilers:
            self._spoilers = [spoiler for spoiler in self._spoilers if not spoiler(into)]
        # At full speed; but launching kernels takes as long on a machine that is throttled.
        lasts_s = (seconds(self._machine, work, self.throttle, self._times) + waited_s) * self.throttle
        if lasts_s > 0.0 or self._stuck:
            with self._busy():
                self._busy_until_s = max(self._busy_until_s, self._pace.now()) + lasts_s
                await self._pace.reach(self._busy_until_s)
        return result

    async def touch(self, moved_bytes: int) -> None:
        """See `runtime.host.Device.touch`."""
        lasts_s = moved_bytes / self._memory_bytes_ps
        if lasts_s > 0.0 or self._stuck:
            with self._busy():
                self._memory_until_s = max(self._memory_until_s, self._pace.now()) + lasts_s
                await self._pace.reach(self._memory_until_s)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Take part in the sharing of the cores, if the device runs on them."""
        if self._cores is None:
            yield
            return
        self._running += 1
        if self._running == 1:
            self._cores.enter(self)
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._cores.leave(self)
                self.run_at(1.0)

    # The world's side of a device.

    def run_at(self, share: float) -> None:
        """Go on with this share of a core."""
        if share != self._share:
            self._share = share
            self.go_on()

    @property
    def throttle(self) -> float:
        """The remaining fraction of the full speed."""
        return prod(self._factors)

    def slow_down(self, factor: float) -> None:
        self._factors.append(factor)
        self.go_on()

    def recover(self, factor: float) -> None:
        self._factors.remove(factor)
        self.go_on()

    def hang(self) -> None:
        """Accept work but finish none, until each `hang` is undone by an `unhang`."""
        self._stuck += 1
        self.go_on()

    def unhang(self) -> None:
        self._stuck -= 1
        self.go_on()

    def wait(self, seconds: float) -> bool:
        """Extend the function being called by this time; return whether there is one."""
        if self._waited_s is None:
            return False
        self._waited_s += seconds
        return True

    def stop(self) -> None:
        """Stop computing until `go_on`."""
        self._pace.change(0.0)

    def go_on(self) -> None:
        """Continue at the remaining speed, unless the host is suspended, the device hangs, or the host is down."""
        if self._host.alive:
            self._pace.change(0.0 if self._host.pauses or self._stuck else self.throttle * self._share)

    def spoil(self, spoiler: Spoiler) -> None:
        """Pass all results to a spoiler until it returns True."""
        self._spoilers.append(spoiler)

    def go_on_from(self, before: VirtualDevice) -> None:
        """Take over the speed and the faults of the device in the machine's previous life."""
        self._factors = list(before._factors)
        self._stuck = before._stuck
        self._pace.change(0.0 if self._stuck else self.throttle)
        self._spoilers = before._spoilers


class VirtualClock:
    """A host's clock: the virtual time with drift and jumps."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._rate = 1.0
        self.offset_s = 0.0
        self._elapsed_offset_s = 0.0
        self._stood_at_s: float | None = None
        self._asleep_s = 0.0

    def now(self) -> float:
        return self._loop.time() * self._rate + self.offset_s

    def elapsed(self) -> float:
        return self._loop.time() * self._rate + self._elapsed_offset_s

    def asleep(self) -> float:
        return self._asleep_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._rate)

    def timeout(self, seconds: float | None) -> Limit:
        return asyncio.timeout(None if seconds is None else seconds / self._rate)

    def postpone(self, limit: Limit, seconds: float) -> None:
        """See `runtime.clock.Clock.postpone`."""
        assert isinstance(limit, asyncio.Timeout)
        due_s = limit.when()
        if due_s is not None and not limit.expired():
            with suppress(RuntimeError):  # its body has ended
                limit.reschedule(max(due_s, self._loop.time() + seconds / self._rate))

    # The world's side of a clock.

    def multiply_rate(self, factor: float) -> None:
        """Change the rate of the clock; its reading does not jump."""
        faster = self._rate * factor
        gained_s = self._loop.time() * (faster - self._rate)
        self.offset_s -= gained_s
        self._elapsed_offset_s -= gained_s
        self._rate = faster

    def stand_still(self) -> None:
        """Stop the monotonic clock, because the machine sleeps."""
        if self._stood_at_s is None:
            self._stood_at_s = self.elapsed()

    def go_on(self) -> None:
        """Continue the monotonic clock."""
        if self._stood_at_s is not None:
            slept_s = self.elapsed() - self._stood_at_s
            self._elapsed_offset_s -= slept_s
            self._asleep_s += slept_s
            self._stood_at_s = None

    def go_on_from(self, before: VirtualClock) -> None:
        """Take over the state of the clock in the machine's previous life."""
        before.go_on()
        self._rate, self.offset_s, self._elapsed_offset_s = before._rate, before.offset_s, before._elapsed_offset_s
        self._asleep_s = before._asleep_s


class VirtualStore:
    """A host's disk, in one life of the host."""

    def __init__(self, records: Mapping[str, bytes], before: VirtualStore | None = None) -> None:
        self.records = dict(records)
        self._at_start = dict(records)
        self._copies: dict[float, dict[str, bytes]] = before._copies if before is not None else {}
        self.before_saving: list[Callable[[str], None]] = before.before_saving if before is not None else []
        """Called with the name of each record before it is saved; an exception makes the save fail."""

    def where(self, name: str) -> str:
        """Return a description of the location; there is no real path."""
        return f"{name}, on a virtual disk"

    def load(self, name: str) -> bytes | None:
        """See `runtime.host.Store.load`."""
        return self.records.get(name)

    def save(self, name: str, data: bytes) -> None:
        """See `runtime.host.Store.save`."""
        for act in self.before_saving:
            act(name)
        self.records[name] = data

    def keep_copy(self, as_of_s: float) -> None:
        """Keep a copy of the current records for a restart with stale state."""
        self._copies[as_of_s] = dict(self.records)

    def copy_of(self, as_of_s: float | None) -> dict[str, bytes]:
        """Return the records at that time, or at the start of this life."""
        return self._at_start if as_of_s is None else self._copies[as_of_s]
