"""How long a machine takes for an amount of work: in the simulator, and where real compute is slept for.

The time follows the roofline model of Williams, Waterman and Patterson ("Roofline: an insightful visual performance
model for multicore architectures", CACM 52:4, 2009): a kernel is bound either by arithmetic or by memory,

    T = max(FLOPs / (η_c · peak), bytes / (η_b · bandwidth)) / throttle + kernels · overhead.

η_c and η_b are the fractions of the data-sheet figures that are reached: by a whole training step, or, where the work
is known by kinds of kernels, by those of each kind. A fanless machine runs at its sustained rate from the start,
because training lasts much longer than its heat reserve. `overhead` is charged for each kernel launch. Where a
machine's kernels were measured, work is the sum of their times instead, and so it is with compressors. A device that
computes while its host launches the next kernels takes as long as the longer of the two paths: the sum of its kernels,
or the sum of the launches.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import log

from msgspec.structs import replace

from hcsim.config import KernelCurve, Machine
from hcsim.config.machine import BROADER, BY_FLOPS, interpolated_s, size_and_intensity
from hcsim.errors import UsageError
from hcsim.runtime.host import CodecCall, KernelGroup, TaskPart, Work


def seconds(machine: Machine, work: Work, throttle: float = 1.0, times: KernelTimes | None = None) -> float:
    """Return the duration of the work. `throttle` in (0, 1] is the remaining fraction of the machine's speed; `times`
    are those of the machine, for a caller that asks often."""
    if not 0 < throttle <= 1:
        raise UsageError(f"a throttle of {throttle} is not in (0, 1]")
    steady = machine.sustained if machine.fanless else 1.0
    if work.part is not None and machine.tasks:
        own_s = (times or KernelTimes(machine)).part_s(work.part)
        if own_s is not None:
            return own_s / (throttle * steady)
    steps_s = work.steps * machine.step_s + machine.hand_over_s
    if work.groups and (machine.kernels or (machine.efficiencies and not work.estimated)):
        times = times or KernelTimes(machine)
        kernels_s = times.total_s(work.groups) / (throttle * steady)
        if times.asynchronous:
            return max(kernels_s, times.launches_s(work.groups) + steps_s)
        return kernels_s + steps_s
    if work.codecs and machine.codecs:
        codec_s, moved_bytes = (times or KernelTimes(machine)).codecs_s(work.codecs)
        work = replace(work, moved_bytes=max(0.0, work.moved_bytes - moved_bytes), codecs=())
        return codec_s / (throttle * steady) + seconds(machine, work, throttle, times)
    compute_s = work.flops / (machine.efficiency_compute * machine.peak_flops)
    memory_s = work.moved_bytes / (machine.efficiency_memory * machine.memory_Bps)
    return max(compute_s, memory_s) / (throttle * steady) + work.kernels * machine.overhead_s + steps_s


class KernelTimes:
    """The times of kernels on a machine, by its curves."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._signed = {curve.signature: curve for curve in machine.kernels if curve.signature}
        self._parts = {curve.signature: curve for known in machine.tasks for curve in known.kernels}
        self._codecs = {codec.compressor: codec for codec in machine.codecs}
        self._curves: dict[tuple[str, str], list[KernelCurve]] = {}
        for curve in sorted(machine.kernels, key=lambda curve: curve.intensity):
            if not curve.signature:
                self._curves.setdefault((curve.kind, curve.dtype), []).append(curve)
        self.asynchronous = any(curve.launch_s for curve in machine.kernels)
        """Whether the device computes while the host launches kernels."""

    def launches_s(self, groups: Iterable[KernelGroup]) -> float:
        """Return how long the host is busy with the launches of all kernels."""
        return sum(self._launches_s(group) for group in groups)

    def _launches_s(self, group: KernelGroup) -> float:
        curve = self._signed.get(group.signature) or next(iter(self._curves_of(group)), None)
        if curve is None:
            return 0.0 if group.kind == "view" else group.count * self._machine.overhead_s
        return group.count * curve.launch_s + group.colds * curve.cold_s

    def _curves_of(self, group: KernelGroup) -> list[KernelCurve]:
        for kind in (group.kind, BROADER.get(group.kind, group.kind)):
            found = self._curves.get((kind, group.dtype)) or self._curves.get((kind, "float32"))
            if found:
                return found
        return []

    def part_s(self, part: TaskPart) -> float | None:
        """Return the time of a part of a task's step; None where it was not measured."""
        curve = self._parts.get(part.signature)
        return None if curve is None else interpolated_s(curve.points, part.samples)

    def codecs_s(self, calls: Iterable[CodecCall]) -> tuple[float, float]:
        """Return the time of those compressors that were measured, and the bytes that the estimate says they move."""
        lasts_s = moved_bytes = 0.0
        for call in calls:
            curve = self._codecs.get(call.compressor)
            if curve is not None:
                points = curve.decode if call.decodes else curve.encode
                lasts_s += call.count * interpolated_s(points, call.size_bytes)
                moved_bytes += call.moved_bytes
        return lasts_s, moved_bytes

    def total_s(self, groups: Iterable[KernelGroup]) -> float:
        return sum(group.count * self.one_s(group) + self._cold_s(group) for group in groups)

    def _cold_s(self, group: KernelGroup) -> float:
        """Return how much longer the first kernels of the group take; nothing where their launches do."""
        curves = () if self.asynchronous or group.signature in self._signed else self._curves_of(group)
        return group.colds * curves[0].cold_s if curves else 0.0

    def one_s(self, group: KernelGroup) -> float:
        """Return the measured time of one kernel of the group; where its kind was not measured, that of the
        roofline."""
        size, intensity = size_and_intensity(group.kind, group.flops, group.moved_bytes, group.rows)
        own = self._signed.get(group.signature)
        if own is not None:
            return interpolated_s(own.points, size)
        curves = self._curves_of(group)
        if not curves and group.kind == "view":
            return 0.0
        if not curves:
            of_peak, of_bandwidth = _efficiencies(self._machine, group.kind)
            compute_s = group.flops / (of_peak * self._machine.peak_flops)
            memory_s = group.moved_bytes / (of_bandwidth * self._machine.memory_Bps)
            return max(compute_s, memory_s) + self._machine.overhead_s
        return _between(curves, size, intensity)


def _between(curves: Sequence[KernelCurve], size: float, intensity: float) -> float:
    """Interpolate between the curves of the next lower and the next higher intensity. Below the lowest one, kernels
    that are measured by their FLOPs are bound by memory: their time is in proportion to their bytes."""
    times = [interpolated_s(curve.points, size) for curve in curves]
    if not intensity:
        return statistics.median(times)
    if intensity < curves[0].intensity:
        slower = curves[0].intensity / max(intensity, 0.1 * curves[0].intensity)
        return times[0] * (slower if curves[0].kind in BY_FLOPS else 1.0)
    for (below, below_s), (above, above_s) in pairwise(zip(curves, times, strict=True)):
        if intensity <= above.intensity:
            share = log(intensity / below.intensity) / log(above.intensity / below.intensity)
            return float(below_s * (above_s / below_s) ** share)
    return times[-1]


def _efficiencies(machine: Machine, kind: str) -> tuple[float, float]:
    """Return the shares of the peak and of the memory's bandwidth that a kernel of this kind reaches."""
    share = next((known.share for known in machine.efficiencies if known.kind == kind), None)
    if share is None:
        return machine.efficiency_compute, machine.efficiency_memory
    return (share, machine.efficiency_memory) if kind in BY_FLOPS else (machine.efficiency_compute, share)
