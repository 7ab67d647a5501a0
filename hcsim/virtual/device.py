"""A modelled processor: the function is called at once, and its time is charged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from hcsim.config import Machine
from hcsim.runtime.device import Chip, Work
from hcsim.virtual.machines import seconds

if TYPE_CHECKING:
    from hcsim.virtual.host import VirtualHost

T = TypeVar("T")
Spoiler: TypeAlias = Callable[[memoryview], bool]
"""May change what was computed; says whether it is done with it for good."""


class VirtualDevice:
    """One machine. Work queues up on it; so does memory traffic, on a lane of its own."""

    def __init__(self, host: VirtualHost, machine: Machine) -> None:
        self._host = host
        self._machine = machine
        self.throttle = 1.0
        """How much of its speed is left: 1 is all of it."""
        self._spoilers: list[Spoiler] = []
        self._busy_until_s = 0.0
        self._memory_until_s = 0.0
        self._memory_bytes_ps = machine.memory_Bps * machine.efficiency_memory

    @property
    def name(self) -> str:
        """The chip; "ideal" is one that takes no time."""
        return self._machine.name

    @property
    def torch_name(self) -> str:
        """The simulator computes here, whatever it models."""
        return "cpu"

    @property
    def chip(self) -> Chip:
        """As the scenario says."""
        return Chip(self._machine.name, self._machine.ram_bytes)

    def exercise(self, kind: Literal["matmul", "axpy"], size: int) -> Callable[[], object]:
        """Nothing: the work's time is all that counts."""
        return lambda: None

    async def run(self, work: Work, function: Callable[[], T], into: memoryview | None = None) -> T:
        """See `runtime.device.Device.run`."""
        result = function()
        if into is not None and self._spoilers:
            self._spoilers = [spoiler for spoiler in self._spoilers if not spoiler(into)]
        lasts_s = seconds(self._machine, work, self.throttle)
        if lasts_s > 0.0:
            now_s = self._host.loop.time()
            self._busy_until_s = max(self._busy_until_s, now_s) + lasts_s
            await self._host.clock.sleep(self._busy_until_s - now_s)
        return result

    async def touch(self, moved_bytes: int) -> None:
        """See `runtime.device.Device.touch`."""
        lasts_s = moved_bytes / (self._memory_bytes_ps * self.throttle)
        if lasts_s > 0.0:
            now_s = self._host.loop.time()
            self._memory_until_s = max(self._memory_until_s, now_s) + lasts_s
            await self._host.clock.sleep(self._memory_until_s - now_s)

    # The world's side of a device.

    def spoil(self, spoiler: Spoiler) -> None:
        """Have something look at all results from now on, until it has done its damage."""
        self._spoilers.append(spoiler)

    def go_on_from(self, before: VirtualDevice) -> None:
        """Be that device in the machine's next life: as slow, and as faulty."""
        self.throttle = before.throttle
        self._spoilers = before._spoilers
