"""Predicts the steps of models from what was measured, and tells how far each prediction is off."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import msgspec

from experiments.compute.recorded import Recorded
from experiments.compute.unseen import UNSEEN
from hcsim.config import KernelCurve, Machine
from hcsim.runtime.host import KernelGroup, Work
from hcsim.runtime.work_time import KernelTimes, seconds
from hcsim.torch_kernels import VIEW, KernelTally
from hcsim.twin.kernels import MeasuredKernels, TimedStep, kernels_of, own_curves
from hcsim.twin.machine import measured_now
from hcsim.twin.timing import summary
from hcsim.units import ByteRate, FlopRate, Seconds


class Measured(msgspec.Struct, frozen=True):
    """One model's steps, and its kernels."""

    model: str
    steps_s: tuple[float, ...]
    groups: tuple[KernelGroup, ...]
    """Of one step."""
    own_s: float
    """By the times of its own kernels."""
    kinds_s: dict[str, float]
    """How long its own kernels of each kind took."""
    launches_s: tuple[float, ...] = ()
    """How long the host took to launch each step, where the device is asynchronous."""

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def spread(self) -> float:
        """Half of the distance between the tenth and the ninetieth percentile, relative to the median."""
        return summary(self.steps_s).spread

    @property
    def apart(self) -> float:
        """How far the later half of its steps is from the earlier one, which is of another turn."""
        half = len(self.steps_s) // 2
        if not half:
            return 0.0
        return abs(statistics.median(self.steps_s[half:]) / statistics.median(self.steps_s[:half]) - 1)


class Row(msgspec.Struct, frozen=True):
    """A line of the table: one prediction of one model's step."""

    on: str
    model: str
    method: str
    measured_s: float
    spread: float
    predicted_s: float
    error: float
    device_s: float
    """What the kernels take, of what is predicted."""
    launches_s: float
    """What the host takes for their launches; 0 where it computes by itself."""
    farthest: str
    apart: float
    """How far the same steps of two turns are apart, relative to the first."""
    unseen: bool
    """Whether nobody had looked at the model's errors when the kinds of kernels were chosen."""


class Record(msgspec.Struct, frozen=True):
    """What was measured on one device, with one number of threads."""

    threads: int
    step_s: float
    """What a step costs beside its kernels."""
    curves: tuple[KernelCurve, ...]
    models: tuple[Measured, ...]
    device: str = "cpu"

    @property
    def on(self) -> str:
        return self.device if self.device != "cpu" else f"{self.threads} thread{'s' if self.threads > 1 else ''}"

    def predicted_s(self, model: Measured) -> float:
        """Return the duration of the model's step by the machine's curves."""
        return seconds(machine_with(self.curves, self.step_s), Work(groups=model.groups, steps=1))

    def rows(self) -> list[Row]:
        """Return the table's rows, of predictions by kind and by the model's own kernels."""
        return [row for model in self.models for row in self._rows_of(model)]

    def _rows_of(self, model: Measured) -> Iterable[Row]:
        times = KernelTimes(machine_with(self.curves, self.step_s))
        paths = times.total_s(model.groups), times.launches_s(model.groups) if times.asynchronous else 0.0
        for method, predicted_s, (device_s, launches_s), farthest in (
            ("curves", self.predicted_s(model), paths, self.farthest(model)),
            ("own kernels", model.own_s, (sum(model.kinds_s.values()), 0.0), ""),
        ):
            error = predicted_s / model.step_s - 1
            yield Row(self.on, model.model, method, model.step_s, model.spread, predicted_s, error,
                      device_s, launches_s, farthest, model.apart, model.model.split(" ×")[0] in UNSEEN)  # fmt: skip

    def farthest(self, model: Measured) -> str:
        """Return the kind whose kernels' time is farthest from what the model's own took, with the difference."""
        times = KernelTimes(machine_with(self.curves))
        missed_s = {
            kind: times.total_s(group for group in model.groups if group.kind == kind) - own_s
            for kind, own_s in model.kinds_s.items()
        }
        kind = max(missed_s, key=lambda kind: abs(missed_s[kind]))
        return f"{kind} {1e3 * missed_s[kind]:+.1f} ms"


def machine_with(curves: tuple[KernelCurve, ...], step_s: float = 0.0) -> Machine:
    """Return a machine of which only the kernels matter."""
    none = Seconds(0)
    return Machine("measured", FlopRate(1e11), ByteRate(1e10), overhead_s=none, kernels=curves, step_s=Seconds(step_s))


def record_of(found: Recorded) -> Record:
    """Return what follows from the measurements."""
    kernels = kernels_of([found.blocks[number] for number in sorted(found.blocks)], measured_now(found.device))
    models = tuple(_measured(name, each, kernels, found.device) for name, each in found.models.items())
    return Record(found.threads, kernels.rest.step_s, kernels.curves, models, found.device)


def _measured(name: str, timed: TimedStep, machine: MeasuredKernels, device: str) -> Measured:
    rest = machine.rest
    curves = own_curves(timed.samples, rest, measured_now(device))
    curves += tuple(curve for curve in machine.curves if curve.kind == "view")
    tally, signed = KernelTally(), KernelTally()
    kinds_s: dict[str, float] = {}
    for sample in timed.samples:
        lasts_s = rest.with_share(statistics.median(sample.seconds), sample.kernel)
        kinds_s[sample.kernel.kind] = kinds_s.get(sample.kernel.kind, 0.0) + lasts_s
        tally.add(sample.kernel)
        signed.add(sample.kernel, sample.signature)
    for _ in range(timed.views):
        tally.add(VIEW)
        signed.add(VIEW)
    own_s = seconds(machine_with(curves, rest.step_s), Work(groups=signed.take(), steps=1))
    steps = timed.steps
    return Measured(name, tuple(steps.durations), tally.take(), own_s, kinds_s, tuple(steps.launches))
