"""Where tensors are encoded and decoded: on this rank's device, in its time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import TypeVar

import numpy as np

from hcsim.compressors.base import Compressor, Shape
from hcsim.runtime.device import Work
from hcsim.runtime.host import Host
from hcsim.training.learner import Ledger

T = TypeVar("T")

_FLOAT_BYTES = 4


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
        tensors = list(shapes)
        metrics, compressor = self._host.metrics, self._compressor.spec
        began_s = self._host.clock.elapsed()
        result = await self._run(map(self._compressor.encode_work, tensors), function, share)
        lasted_s = self._host.clock.elapsed() - began_s
        metrics.histogram("hcsim_compression_encode_seconds", compressor=compressor).observe(lasted_s)
        before = share * sum(_FLOAT_BYTES * prod(shape) for shape in tensors)
        expected = share * sum(map(self._compressor.size_bytes, tensors))
        after = _encoded_bytes(result, expected)
        metrics.counter("hcsim_compression_input_bytes_total", compressor=compressor).add(before)
        metrics.counter("hcsim_compression_output_bytes_total", compressor=compressor).add(after)
        if after:
            metrics.gauge("hcsim_compression_ratio", compressor=compressor).set(before / after)
        return result

    async def decode(self, shapes: Iterable[Shape], function: Callable[[], T], times: float = 1.0) -> T:
        """Call what decodes tensors of these shapes, so many times each."""
        began_s = self._host.clock.elapsed()
        result = await self._run(map(self._compressor.decode_work, shapes), function, times)
        seconds = self._host.metrics.histogram("hcsim_compression_decode_seconds", compressor=self._compressor.spec)
        seconds.observe(self._host.clock.elapsed() - began_s)
        return result

    async def _run(self, works: Iterable[Work], function: Callable[[], T], times: float) -> T:
        each = list(works)
        total = Work(times * sum(w.flops for w in each), times * sum(w.moved_bytes for w in each))
        if not total.flops and not total.moved_bytes:
            return function()
        with self._ledger.spent_on("encode"):
            return await self._host.device.run(total, function)


def _encoded_bytes(result: object, expected: float) -> float:
    """The size of one payload, or of one for each rank (beside which may stand what they lost); of a phantom, as
    expected."""
    if isinstance(result, tuple):
        return float(sum(payload.nbytes for payload in result[0]))
    return result.nbytes if isinstance(result, np.ndarray) else expected


def nothing() -> None:
    """What is done with a phantom: only its time passes."""
