"""Measures how long kernels take on this machine, in the conditions of training.

A kernel measured alone in a loop finds its data in the nearest cache and its memory allocated. In a training step it
does not. So kernels are measured where they run: in the steps of small blocks of layers, forward, backward and
optimizer, each operation timed for itself. The blocks are made of the layers that models are made of, and their shapes
are drawn, log-uniformly and always the same, from the ranges that models use.

A kind's curve goes through the medians of kernels of about the same size. Products, convolutions, attention and
recurrent layers get a curve for each range of arithmetic intensity: a convolution of few channels does ten times fewer
FLOPs in a second than one of many. So do sums, norms and lookups for each range of bytes per row: many short rows are
summed up faster than few long ones, or slower.

The first kernel of a kind in a step finds the processor's caches full of other code, and later ones less and less so:
the k-th takes cold / √k longer. On a GPU that is so of its launch. `cold` comes from kernels of the same shapes that a
step repeats, most of all from small networks of many layers.

On a device that computes while Python goes on, a step has two paths, and takes as long as the longer one: the device's
kernels, and the host's launches of them. Both are measured, each without waiting for the other (`stopwatch`).

A step takes longer than its kernels: Python calls modules, autograd keeps its graph, views are made, an optimizer goes
through its parameters, and memory is handed back to the system. And it takes less, since kernels are slower while each
is watched. What that is for each step, kernel, byte and view is found by a regression over the blocks; the shares of
kernels and bytes are part of the curves. On an asynchronous device most of it is on the host's path.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hcsim.config import Basis, KernelCurve, KernelKind
from hcsim.config.machine import BY_FLOPS, size_and_intensity
from hcsim.torch_kernels import Kernel
from hcsim.twin.blocks import Block, blocks
from hcsim.twin.stopwatch import ASYNCHRONOUS as ASYNCHRONOUS
from hcsim.twin.stopwatch import Sample as Sample
from hcsim.twin.stopwatch import Steps as Steps
from hcsim.twin.stopwatch import alike, time_queued, time_steps
from hcsim.twin.stopwatch import time_kernels as time_kernels
from hcsim.twin.timing import rounded, summary
from hcsim.units import Seconds

Array: TypeAlias = npt.NDArray[np.float64]
Provenance: TypeAlias = Callable[[float], Basis]
"""Makes the provenance of a figure from its spread."""


def training_step(block: Block, optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[], None]:
    """Return a training step of a block, which is on the device."""
    module, inputs, clips = block
    if inputs.is_floating_point():
        inputs.requires_grad_()
    parameters = list(module.parameters())
    steps = optimizer(parameters) if parameters else None

    def step() -> None:
        if steps is not None:
            steps.zero_grad()
        inputs.grad = None
        outputs = module(inputs)
        (outputs if outputs.dim() == 0 else outputs.square().mean()).backward()
        if clips:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        if steps is not None:
            steps.step()

    return step


def _sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


_OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (torch.optim.AdamW, _sgd, torch.optim.Adam)


class TimedStep(msgspec.Struct):
    """The kernels of a step, and how long whole steps took."""

    samples: list[Sample]
    steps: Steps
    views: int = 0
    """How many views the step makes."""

    def add(self, later: TimedStep) -> None:
        """Add the times of later repetitions."""
        self.steps.add(later.steps)
        for sample, again in alike(self.samples, later.samples):
            sample.seconds.extend(again.seconds)
            sample.launches.extend(again.launches)
            sample.gaps.extend(again.gaps)


_REPEATS, _BLOCK_S = 3, 0.3
"""How often a block's step is watched, and timed; less often where all would take longer than that."""


_FEWEST_BLOCKS = 24
"""Of each pass, however long they take."""


def time_blocks(
    device: str, timed: dict[int, TimedStep], *, every: int = 1, limit_s: float = math.inf
) -> dict[int, str]:
    """Time the steps of all blocks, or of one in `every`, and their kernels; add the times to those of earlier
    passes, by the block's number. Return why a block could not be timed: the device lacks an operation or memory."""
    failed: dict[int, str] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        began_s = time.perf_counter()
        for turn, (number, block) in enumerate(blocks(device, every)):
            if turn >= _FEWEST_BLOCKS and time.perf_counter() - began_s > limit_s:
                break
            step = training_step(block, _OPTIMIZERS[number % len(_OPTIMIZERS)])
            try:
                found = time_step(step, device)
            except (RuntimeError, TypeError, AssertionError) as error:  # whatever torch raises for such devices
                failed[number] = f"{type(error).__name__}: {error}"
                continue
            if number in timed:
                timed[number].add(found)
            else:
                timed[number] = found
    return failed


def time_step(step: Callable[[], object], device: str) -> TimedStep:
    """Time a step, and its kernels."""
    (first_s,) = time_steps(step, device, repeats=1, warm_up=0).durations
    repeats = max(1, min(_REPEATS, int(_BLOCK_S / (2 * first_s))))
    samples, views = time_kernels(step, device, repeats=repeats, warm_up=0)
    steps = time_steps(step, device, repeats=repeats, warm_up=0)
    time_queued(step, device, steps, len(samples))
    return TimedStep(samples, steps, views)


class Rest(NamedTuple):
    """What a step costs beside the times of its kernels."""

    step_s: float = 0.0
    """On the host's path, where the device is asynchronous."""
    kernel_s: float = 0.0
    """Less than nothing, if kernels are slower while they are watched."""
    byte_s: float = 0.0
    """For each byte that a kernel moves: memory is handed back, and fetched again."""
    launch_s: float = 0.0
    """For each launch on an asynchronous device: what Python and autograd do before it, less what watching costs."""
    view_s: float = 0.0
    """For each view, on the host's path."""

    def with_share(self, lasts_s: float, kernel: Kernel) -> float:
        """Return the time that was measured of a kernel, with its share of the rest."""
        more_s = self.kernel_s + (0.0 if kernel.kind == "update" else self.byte_s * kernel.moved_bytes)
        return lasts_s + max(more_s, -_MOST_WATCHED * lasts_s)

    def launch_of(self, sample: Sample) -> float:
        """Return what the launch costs the host; nothing where it computes by itself."""
        measured_s = statistics.median(sample.launches) if sample.launches else 0.0
        return measured_s + max(self.launch_s, -_MOST_WATCHED * measured_s) if measured_s else 0.0


def rest_of(timed: Sequence[TimedStep]) -> Rest:
    """Return what explains best, by a robust regression, how much longer the blocks' steps take than their kernels,
    and their launches than the calls."""
    if not any(each.steps.launches for each in timed):
        steps = [(each, each.steps.durations) for each in timed]
        step_s, kernel_s, byte_s, view_s = _beside(steps, _kernels_s, _constant, _count, _bytes, _views)
        return Rest(step_s, kernel_s, byte_s, 0.0, view_s)
    launched = [(each, each.steps.launches) for each in timed]
    queued = [(each, each.steps.queued) for each in timed if each.steps.queued]
    step_s, launch_s, view_s = _beside(launched, _launches_s, _constant, _count, _views)
    kernel_s, byte_s = _beside(queued, _kernels_s, _count, _bytes) if queued else (0.0, 0.0)
    return Rest(step_s, kernel_s, byte_s, launch_s, view_s)


_Feature: TypeAlias = Callable[[TimedStep], float]


def _constant(timed: TimedStep) -> float:
    return 1.0


def _count(timed: TimedStep) -> float:
    return float(len(timed.samples))


def _bytes(timed: TimedStep) -> float:
    return sum(sample.kernel.moved_bytes for sample in timed.samples if sample.kernel.kind != "update")


def _views(timed: TimedStep) -> float:
    return float(timed.views)


def _kernels_s(timed: TimedStep) -> float:
    return sum(statistics.median(sample.seconds) for sample in timed.samples)


def _launches_s(timed: TimedStep) -> float:
    return sum(statistics.median(sample.launches) for sample in timed.samples)


def _beside(timed: Sequence[tuple[TimedStep, list[float]]], known: _Feature, *features: _Feature) -> tuple[float, ...]:
    """Return for each feature what explains best how much longer the steps take than what is known of them. Only what
    is counted for each kernel may be negative: a kernel that is watched takes longer than others."""
    lasted_s = np.array([statistics.median(durations) for _, durations in timed])
    missing_s = lasted_s - np.array([known(each) for each, _ in timed])
    design = np.array([[feature(each) for feature in features] for each, _ in timed])
    kept = list(range(len(features)))
    while True:
        found = _robust(design[:, kept], missing_s, 1.0 / lasted_s)
        shares = {number: value * design[:, number].mean() for number, value in zip(kept, found, strict=True)}
        wrong = [number for number, share in shares.items() if share < 0 and features[number] is not _count]
        if not wrong:
            break
        kept.remove(min(wrong, key=shares.__getitem__))
    values = dict(zip(kept, map(float, found), strict=True))
    return tuple(values.get(number, 0.0) for number in range(len(features)))


def _robust(design: Array, values: Array, weights: Array) -> Array:
    """Return the coefficients with the least sum of absolute weighted errors, nearly."""
    found: Array = np.zeros(design.shape[1])
    trust: Array = np.ones(len(values))
    for _ in range(20):
        scale = weights * np.sqrt(trust)
        found = np.asarray(np.linalg.lstsq(design * scale[:, None], values * scale, rcond=None)[0], np.float64)
        trust = 1.0 / np.maximum(np.abs(values - design @ found) * weights, 1e-3)
    return found


_SIZE_FACTOR = 4.0
"""Between a curve's points."""
_INTENSITIES, _MOST_INTENSE = 7, (2, 98)
"""So many curves of a kind, evenly between these percentiles of the logarithms of its kernels' intensities."""
_FEWEST = 8
"""Kernels of a kind and a dtype below which there is no curve."""
_MOST_CHECKED = 60
"""Kernels of a kind, for the spread of its curve."""
_MOST_WATCHED = 0.5
"""The most that a kernel can be faster where nobody watches it."""
_SHORTEST_S = 1e-7
"""Of a kernel; what the host computes takes a GPU no time."""


class _Point(NamedTuple):
    """A kernel that was measured."""

    signature: str
    size: float
    intensity: float
    lasts_s: float
    launch_s: float
    cold: float
    """1/√k for the k-th kernel of its kind in a step."""


def curves_of(steps: Iterable[Sequence[Sample]], rest: Rest, basis: Provenance) -> tuple[KernelCurve, ...]:
    """Return a curve for each kind, dtype, and intensity, through the medians of the samples of steps, with their share
    of the rest."""
    by_kind: dict[tuple[KernelKind, str], list[_Point]] = {}
    for samples in steps:
        of_step: Counter[str] = Counter()
        for sample in samples:
            kind, flops, moved_bytes, dtype, rows = sample.kernel
            of_step[kind] += 1
            size, intensity = size_and_intensity(kind, flops, moved_bytes, rows)
            lasts_s, launch_s = statistics.median(sample.seconds), rest.launch_of(sample)
            point = _Point(sample.signature, max(size, 1.0), intensity, lasts_s, launch_s, of_step[kind] ** -0.5)
            by_kind.setdefault((kind, dtype), []).append(point)
    curves = []
    for (kind, dtype), found in sorted(by_kind.items()):
        if len(found) >= _FEWEST and "float" in dtype:  # others count as float32
            curves += _curves(kind, dtype, found, rest, basis)
    if rest.view_s:
        asynchronous = any(curve.launch_s for curve in curves)
        launch_s, lasts_s = (rest.view_s, 0.0) if asynchronous else (0.0, rest.view_s)
        curves.append(KernelCurve("view", ((1.0, lasts_s),), "float32", basis(0.0), launch_s=Seconds(launch_s)))
    return tuple(curves)


def _curves(kind: KernelKind, dtype: str, points: list[_Point], rest: Rest, basis: Provenance) -> list[KernelCurve]:
    launched = any(point.launch_s for point in points)
    cold_s = _cold_s([point._replace(lasts_s=point.launch_s) for point in points] if launched else points)
    launch_s = statistics.median(point.launch_s - point.cold * cold_s for point in points) if launched else 0.0
    warm: dict[tuple[str, float, float], list[float]] = {}
    for point in points:
        lasts_s = point.lasts_s if launched else point.lasts_s - point.cold * cold_s
        warm.setdefault((point.signature, point.size, point.intensity), []).append(max(_SHORTEST_S, lasts_s))
    where = np.log([(size, max(intensity, 1e-9)) for _, size, intensity in warm])
    log_s = np.log([statistics.median(each) for each in warm.values()])
    lowest, highest = where[:, 0].min(), where[:, 0].max()
    grid = np.linspace(lowest, highest, max(1, math.ceil((highest - lowest) / math.log(_SIZE_FACTOR))) + 1).round(3)
    least, most = np.percentile(where[:, 1], _MOST_INTENSE)
    levels = np.unique(np.linspace(least, most, _INTENSITIES).round(3))
    checked = slice(None, None, 1 + len(log_s) // _MOST_CHECKED)
    residual = [abs(y - _smoothed(at, where, log_s)) for at, y in zip(where[checked], log_s[checked], strict=True)]
    provenance = basis(float(np.percentile(residual, 80)))
    host = Seconds(rounded(launch_s)), Seconds(rounded(cold_s))
    curves = []
    for level in levels:
        along = []
        for log_size in np.unique(grid):
            size, intensity = math.exp(log_size), math.exp(level)
            lasts_s = math.exp(_smoothed(np.array([log_size, level]), where, log_s))
            moved_bytes = size / intensity if kind in BY_FLOPS else size
            lasts_s = rest.with_share(lasts_s, Kernel(kind, size, moved_bytes, dtype))
            along.append((float(f"{size:.4g}"), float(f"{lasts_s:.4g}")))
        intensity = float(f"{math.exp(level):.4g}") if where[:, 1].max() > math.log(2e-9) else 0.0
        curves.append(KernelCurve(kind, tuple(along), dtype, provenance, intensity, "", *host))
    return curves


def _cold_s(points: Sequence[_Point]) -> float:
    """Return how much longer the first kernel of a step takes than later ones, by those that are repeated in it with
    the same shapes."""
    repeated: dict[str, list[_Point]] = {}
    for point in points:
        repeated.setdefault(point.signature, []).append(point)
    pairs = [(one, found[-1]) for found in repeated.values() for one in found[:-1] if one.cold > found[-1].cold]
    if len(pairs) < _FEWEST:
        return 0.0
    design = np.array([[one.cold - last.cold] for one, last in pairs])
    values = np.array([one.lasts_s - last.lasts_s for one, last in pairs])
    weights = np.array([1 / max(last.lasts_s, _SHORTEST_S) for _, last in pairs])
    return max(0.0, float(_robust(design, values, weights)[0]))


_ENOUGH = 8.0
"""How many kernels, by their weights, a local regression needs."""


def _smoothed(at: Array, where: Array, values: Array) -> float:
    """Return the value there by a local linear regression, over as near a neighbourhood as has enough kernels."""
    away = where - at
    bandwidth = 0.35
    while True:
        weights = np.exp(-0.5 * np.sum((away / bandwidth) ** 2, axis=1))
        if weights.sum() >= min(_ENOUGH, 0.5 * len(values)) or bandwidth > 16:
            break
        bandwidth *= 1.2
    design = np.column_stack([np.ones(len(away)), away])
    ridge = np.diag([1e-6, 0.3, 0.3])
    slope = np.array([0.0, 0.7, 0.0])  # where few kernels tell how it grows
    for _ in range(3):
        normal = design.T @ (weights[:, None] * design) + ridge
        found = np.linalg.solve(normal, design.T @ (weights * values) + ridge @ slope)
        errors = np.abs(values - design @ found)
        scale = max(1e-3, float(np.average(errors, weights=weights)))
        robust = weights * np.minimum(1.0, 1.5 * scale / np.maximum(errors, 1e-9))
        weights = robust
    return float(found[0])


class MeasuredKernels(NamedTuple):
    """What was measured of a machine's kernels."""

    curves: tuple[KernelCurve, ...]
    """The rest of a step, as far as it belongs to kernels, is part of them."""
    rest: Rest


_PASSES = ((7, 5.0), (1, 35.0))
"""Which blocks are timed in each pass: one in so many, for about so many seconds. On a machine that is busy or slow the
last ones of each family are left out. A slow moment of the machine hits few kernels of each kind."""


def measure_kernels(device: str, basis: Provenance) -> Iterator[MeasuredKernels]:
    """Measure this machine's kernels, with as many threads as torch has, in less than a minute; yield what is known
    after each pass. `basis` makes the provenance from the spread."""
    timed: dict[int, TimedStep] = {}
    for every, limit_s in _PASSES:
        time_blocks(device, timed, every=every, limit_s=limit_s)
        yield kernels_of(list(timed.values()), basis)


def kernels_of(timed: Sequence[TimedStep], basis: Provenance) -> MeasuredKernels:
    """Return the curves that follow from the blocks' steps."""
    rest = rest_of(timed)
    return MeasuredKernels(curves_of((each.samples for each in timed), rest, basis), rest)


def own_curves(samples: Iterable[Sample], rest: Rest, basis: Provenance) -> tuple[KernelCurve, ...]:
    """Return a curve for each operation of a script, with its shapes."""
    by_signature: dict[str, list[Sample]] = {}
    for sample in samples:
        by_signature.setdefault(sample.signature, []).append(sample)
    curves = []
    for signature, found in by_signature.items():
        kernel = found[0].kernel
        size, _ = size_and_intensity(*kernel[:3], kernel.rows)
        lasts_s = rest.with_share(statistics.fmean(statistics.median(sample.seconds) for sample in found), kernel)
        launch_s = Seconds(statistics.fmean(map(rest.launch_of, found)))
        spread = statistics.fmean(summary(sample.seconds).spread for sample in found)
        curves.append(
            KernelCurve(
                kernel.kind, ((size, lasts_s),), kernel.dtype, basis(spread), signature=signature, launch_s=launch_s
            )
        )
    return tuple(curves)
