"""Where tensors are encoded and decoded: on this rank's device, in its time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from hcsim.compressors.base import Compressor, Shape
from hcsim.runtime.device import Work
from hcsim.runtime.host import Host
from hcsim.training.learner import Ledger

T = TypeVar("T")


class Bench:
    """Runs a compressor's work on a host's device and books the time."""

    def __init__(self, host: Host, ledger: Ledger, compressor: Compressor) -> None:
        self._host = host
        self._ledger = ledger
        self._compressor = compressor

    def of(self, compressor: Compressor) -> Bench:
        """The same place, for another compressor's work."""
        return Bench(self._host, self._ledger, compressor)

    async def encode(self, shapes: Iterable[Shape], function: Callable[[], T], share: float = 1.0) -> T:
        """Call what encodes tensors of these shapes; `share` is the part of the work that is done now."""
        return await self._run(map(self._compressor.encode_work, shapes), function, share)

    async def decode(self, shapes: Iterable[Shape], function: Callable[[], T], times: float = 1.0) -> T:
        """Call what decodes tensors of these shapes, so many times each."""
        return await self._run(map(self._compressor.decode_work, shapes), function, times)

    async def _run(self, works: Iterable[Work], function: Callable[[], T], times: float) -> T:
        each = list(works)
        total = Work(times * sum(w.flops for w in each), times * sum(w.moved_bytes for w in each))
        if not total.flops and not total.moved_bytes:
            return function()
        with self._ledger.spent_on("encode"):
            return await self._host.device.run(total, function)


def nothing() -> None:
    """What is done with a phantom: only its time passes."""
