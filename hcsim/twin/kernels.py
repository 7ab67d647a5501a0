"""Measures how long kernels take on this machine, in the conditions of training.

A kernel measured alone in a loop finds its data in the nearest cache and its memory allocated. In a training step it
does not. So kernels are measured where they run: in the steps of small blocks of layers, forward, backward and
optimizer, each operation timed for itself. The blocks are made of the layers that models are made of, and their shapes
are drawn, log-uniformly and always the same, from the ranges that models use.

A kind's curve goes through the medians of kernels of about the same size. Products, convolutions, attention and
recurrent layers get a curve for each range of arithmetic intensity: a convolution of few channels does ten times fewer
FLOPs in a second than one of many.

A step takes longer than its kernels: Python calls modules, autograd keeps its graph, an optimizer goes through its
parameters, and memory is handed back to the system. What that costs each step, each kernel and each byte is found by
a regression over the blocks; the shares of kernels and bytes are part of the curves.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from hcsim.config import Basis, KernelCurve, KernelKind
from hcsim.config.machine import BY_FLOPS
from hcsim.torch_kernels import Kernel, KernelMode, Operation, kernel_of, signature_of, size_bytes
from hcsim.twin.timing import summary

Array: TypeAlias = npt.NDArray[np.float64]
Provenance: TypeAlias = Callable[[float], Basis]
"""Makes the provenance of a figure from its spread."""
_MOST_FLOPS = 1.5e9
"""Of one layer's forward pass."""
_MOST_ELEMENTS = 1 << 22
"""Of one activation."""


class Sample(NamedTuple):
    """A kernel of a step, and the seconds that it took in each repetition."""

    name: str
    signature: str
    kernel: Kernel
    seconds: list[float]


class Stopwatch(KernelMode):  # type: ignore[no-untyped-call]
    """Times every kernel."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._wait = waiting(device)
        self.taken: list[tuple[str, str, Kernel, float]] = []

    def launch(self, func: OpOverload, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = signature_of(func, args, kwargs)
        moved_bytes = size_bytes(args)
        self._wait()
        began_s = time.perf_counter()
        result = func(*args, **kwargs)
        self._wait()
        lasted_s = time.perf_counter() - began_s
        moved_bytes += size_bytes(result)
        kernel = kernel_of(operation, operation.flops(args, kwargs, result), moved_bytes, args, result)
        self.taken.append((func.overloadpacket.__name__, signature, kernel, lasted_s))
        return result


def waiting(device: str) -> Callable[[], object]:
    """Return a function that waits until the device is done."""
    return {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device, _nothing)


def _nothing() -> None:
    """The CPU computes while it is called."""


def time_kernels(
    step: Callable[[], object], device: str = "cpu", *, repeats: int = 5, warm_up: int = 1, limit_s: float = 60.0
) -> list[Sample]:
    """Time the kernels of a step, some repetitions long."""
    for _ in range(warm_up):
        step()
    began_s = time.perf_counter()
    samples: list[Sample] = []
    for repeat in range(repeats):
        with Stopwatch(device) as stopwatch:
            step()
        if not repeat:
            samples = [Sample(name, signature, kernel, []) for name, signature, kernel, _ in stopwatch.taken]
        if [sample.signature for sample in samples] == [signature for _, signature, _, _ in stopwatch.taken]:
            for sample, (*_, lasted_s) in zip(samples, stopwatch.taken, strict=True):
                sample.seconds.append(lasted_s)
        if time.perf_counter() - began_s > limit_s:
            break
    return samples


class _Draw:
    """Draws shapes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def size(self, low: int, high: int, multiple: int = 1) -> int:
        """Return a number, log-uniformly between the two."""
        value = float(low * (high / low) ** self._random.random())
        return max(multiple, round(value / multiple) * multiple)

    def width(self, low: int, high: int) -> int:
        """Return a number of channels or features: a power of two, one and a half of it, or, less often, another
        multiple of 8."""
        if self._random.random() < 0.25:
            return self.size(low, high, 8)
        widths = [base * 2**power for base in (8, 12) for power in range(12) if low <= base * 2**power <= high]
        return self.one_of(*widths)  # type: ignore[no-any-return]

    def one_of(self, *choices: Any) -> Any:
        return self._random.choice(choices)


class Block(NamedTuple):
    """Some layers, and what goes into them."""

    module: nn.Module
    inputs: Tensor


class _Chain(nn.Module):
    """Layers one after the other, each of which may be a module or a function."""

    def __init__(self, *layers: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._modules.update(
            {f"{number}": layer for number, layer in enumerate(layers) if isinstance(layer, nn.Module)}
        )
        self._layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = layer(x)
        return x


def _perceptron(draw: _Draw) -> Block:
    """Linear layers between two widths, on vectors or on sequences of them."""
    while True:
        rows, width, hidden = draw.size(4, 4096), draw.width(8, 2048), draw.width(8, 2048)
        if 2.0 * rows * width * hidden < _MOST_FLOPS and rows * max(width, hidden) < _MOST_ELEMENTS:
            break
    activation = draw.one_of(nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU)
    shape = (rows, width) if draw.one_of(True, False) else (max(1, rows // 32), min(rows, 32), width)
    layers = [layer for _ in range(2) for layer in (nn.Linear(width, hidden), activation(), nn.Linear(hidden, width))]
    return Block(_Chain(nn.Linear(width, width), *layers), torch.randn(shape))


def _convolutions(draw: _Draw) -> Block:
    """Convolutions with a normalisation and an activation."""
    while True:
        samples, channels, outputs = draw.size(1, 64), draw.width(8, 512), draw.width(8, 512)
        kernel, stride, side = draw.one_of(1, 1, 3, 3, 3, 5), draw.one_of(1, 1, 2), draw.size(4, 64, 2)
        depthwise = kernel > 1 and draw.one_of(True, False, False)
        outputs = channels if depthwise else outputs
        pixels = samples * side * side
        flops = 2.0 * pixels * kernel**2 * channels * (1 if depthwise else outputs) / stride**2
        if 1e5 < flops < _MOST_FLOPS and pixels * max(channels, outputs) < _MOST_ELEMENTS:
            break
    groups = channels if depthwise else 1
    norm = draw.one_of(nn.BatchNorm2d, nn.BatchNorm2d, lambda width: nn.GroupNorm(4, width))
    activation = draw.one_of(nn.ReLU, nn.ReLU, nn.SiLU)
    bias = draw.one_of(True, False)
    convolve = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, groups=groups, bias=bias)
    back = nn.Conv2d(outputs, channels, kernel, 1, kernel // 2, groups=groups, bias=bias)
    again = nn.Conv2d(channels, outputs, kernel, 1, kernel // 2, groups=groups, bias=bias)
    layers = (convolve, norm(outputs), activation(), back, norm(channels), activation(), again)
    return Block(_Chain(*layers), torch.randn(samples, channels, side, side))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, fused: bool) -> None:
        super().__init__()
        self.into, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self._heads, self._causal, self._fused = heads, causal, fused

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = self.into(self.norm(x)).view(samples, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        if self._fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self._causal)
        else:
            mixed = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))  # type: ignore[no-any-return]


def _attention(draw: _Draw) -> Block:
    """Self-attention: fused, and of its products."""
    while True:
        samples, length, heads, depth = draw.size(1, 32), draw.size(8, 512), draw.size(1, 12), draw.one_of(16, 32, 64)
        width, tokens = heads * depth, samples * length
        products = 2.0 * tokens * width * 3 * width + 4.0 * tokens * length * width
        if (
            products < _MOST_FLOPS
            and samples * heads * length**2 < _MOST_ELEMENTS
            and 3 * tokens * width < _MOST_ELEMENTS
        ):
            break
    causal, fused = draw.one_of(True, False), draw.one_of(True, True, False)
    layers = (_Attention(width, heads, causal, fused) for _ in range(2))
    return Block(_Chain(*layers), torch.randn(samples, length, width))


def _pointwise(draw: _Draw) -> Block:
    """Activations, dropout, norms, sums and products of tensors of one shape, and a residual sum."""
    width = draw.width(16, 1024)
    rows = draw.size(8, max(8, _MOST_ELEMENTS // width))
    kinds = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Sigmoid, lambda: nn.LayerNorm(width), lambda: nn.Softmax(-1),
             lambda: _Scaled(), lambda: nn.LayerNorm(width))  # fmt: skip
    layers = [nn.Dropout(0.1), *(draw.one_of(*kinds)() for _ in range(5))]
    return Block(_Residual(*layers), torch.randn(rows, width))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + x


class _Residual(_Chain):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def _recurrent(draw: _Draw) -> Block:
    """LSTMs."""
    while True:
        samples, length, width, hidden = draw.size(4, 64), draw.size(8, 128), draw.width(32, 512), draw.width(32, 512)
        if 8.0 * samples * length * hidden * (width + hidden) < _MOST_FLOPS:
            break
    lstm = nn.LSTM(width, hidden, batch_first=draw.one_of(True, False))
    return Block(_Chain(lstm, lambda found: found[0]), torch.randn(samples, length, width))


def _sequences(draw: _Draw) -> Block:
    """Convolutions of sequences."""
    while True:
        samples, channels, outputs = draw.size(1, 32), draw.width(16, 256), draw.width(16, 256)
        kernel, dilation, length = draw.one_of(1, 2, 3, 5), draw.one_of(1, 1, 2, 8), draw.size(32, 2048, 8)
        flops = 2.0 * samples * length * channels * outputs * kernel
        if 1e5 < flops < _MOST_FLOPS and samples * length * max(channels, outputs) < _MOST_ELEMENTS:
            break
    convolve = nn.Conv1d(channels, outputs, kernel, dilation=dilation, padding=dilation * (kernel - 1) // 2)
    back = nn.Conv1d(outputs, channels, kernel, dilation=dilation, padding=dilation * (kernel - 1) // 2)
    return Block(_Chain(convolve, nn.ReLU(), back), torch.randn(samples, channels, length))


def _resampling(draw: _Draw) -> Block:
    """Pooling and upsampling, of what is scaled before each."""
    while True:
        samples, channels, side = draw.size(1, 64), draw.width(8, 256), draw.size(8, 64, 4)
        if samples * channels * side**2 < _MOST_ELEMENTS:
            break
    down = draw.one_of(lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2), lambda: nn.MaxPool2d(3, 2, 1))
    mode = draw.one_of("nearest", "nearest", "bilinear")
    layers = (_Scaled(), down(), _Scaled(), nn.Upsample(scale_factor=2, mode=mode), down(), nn.AdaptiveAvgPool2d(1))
    return Block(_Chain(*layers), torch.randn(samples, channels, side, side))


def _embedding(draw: _Draw) -> Block:
    """An embedding, and the cross-entropy over its words."""
    while True:
        words, width, samples = draw.size(64, 16384), draw.width(16, 512), draw.size(16, 2048)
        if 2.0 * words * width * samples < _MOST_FLOPS and words * max(width, samples) < _MOST_ELEMENTS:
            break
    codes = torch.randint(0, words, (max(1, samples // 32), min(samples, 32)))

    def loss(x: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x.flatten(0, -2), codes.to(x.device).flatten())

    return Block(_Chain(nn.Embedding(words, width), nn.LayerNorm(width), nn.Linear(width, words), loss), codes)


class _Joined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return torch.cat([high * low, low], -1).transpose(-1, -2).contiguous().transpose(-1, -2) + x


def _rearranging(draw: _Draw) -> Block:
    """Parts of tensors, joined and transposed."""
    while True:
        samples, rows, width = draw.size(1, 64), draw.size(8, 512), draw.width(16, 512)
        if samples * rows * width < _MOST_ELEMENTS:
            break
    return Block(_Chain(_Scaled(), _Joined(), _Joined()), torch.randn(samples, rows, width))


class _Messages(nn.Module):
    """Sums of rows over the edges of a graph."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.edges = nn.Buffer(edges)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros_like(x).index_add(0, self.edges[1], x[self.edges[0]])


def _neighbours(draw: _Draw) -> Block:
    """Rows that are gathered, and added up elsewhere."""
    while True:
        rows, width, edges = draw.size(64, 16384), draw.width(8, 256), draw.size(256, 65536)
        if max(rows, edges) * width < _MOST_ELEMENTS:
            break
    return Block(_Chain(*(_Messages(torch.randint(0, rows, (2, edges))) for _ in range(2))), torch.randn(rows, width))


def _small(draw: _Draw) -> Block:
    """Layers so small that what a step costs beside its kernels is a large part of it."""
    layers = (layer for _ in range(draw.size(1, 16)) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()))
    return Block(_Chain(*layers), torch.randn(4, 8))


_FAMILIES: tuple[tuple[Callable[[_Draw], Block], int], ...] = (
    (_convolutions, 40), (_perceptron, 24), (_attention, 20), (_pointwise, 16), (_recurrent, 14), (_resampling, 12),
    (_sequences, 8), (_embedding, 10), (_rearranging, 8), (_neighbours, 8), (_small, 8),
)  # fmt: skip
"""Kinds of blocks, and how many of each are drawn."""


def blocks() -> Iterator[Block]:
    """Yield all blocks, those of one family far from each other."""
    draws = [_Draw(number) for number in range(len(_FAMILIES))]
    turns = [(turn / count, number) for number, (_, count) in enumerate(_FAMILIES) for turn in range(count)]
    for _, number in sorted(turns):
        yield _FAMILIES[number][0](draws[number])


def training_step(block: Block, device: str, optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[], None]:
    """Return a training step of a block."""
    module, inputs = block.module.to(device), block.inputs.to(device)
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
        if steps is not None:
            steps.step()

    return step


def _sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


_OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (torch.optim.AdamW, _sgd, torch.optim.Adam)


class TimedStep(NamedTuple):
    """The kernels of a block's step, and the durations of whole steps."""

    samples: list[Sample]
    durations: list[float]

    def add(self, later: TimedStep) -> None:
        """Add the times of later repetitions."""
        self.durations.extend(later.durations)
        for sample, again in zip(self.samples, later.samples, strict=True):
            sample.seconds.extend(again.seconds)


def time_blocks(device: str, timed: dict[int, TimedStep], *, every: int = 1, repeats: int = 3) -> None:
    """Time the steps of all blocks, or of one in `every`, and their kernels; add the times to those of earlier
    passes, by the block's number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for number, block in enumerate(blocks()):
            if number % every:
                continue
            step = training_step(block, device, _OPTIMIZERS[number % len(_OPTIMIZERS)])
            samples = time_kernels(step, device, repeats=repeats)
            found = TimedStep(samples, step_durations(step, device, repeats=repeats, warm_up=0))
            if number in timed:
                timed[number].add(found)
            else:
                timed[number] = found


class Rest(NamedTuple):
    """What a step costs beside the times of its kernels."""

    step_s: float = 0.0
    kernel_s: float = 0.0
    byte_s: float = 0.0
    """For each byte that a kernel moves: memory is handed back, and fetched again."""

    def of(self, kernel: Kernel) -> float:
        return self.kernel_s + (0.0 if kernel.kind == "update" else self.byte_s * kernel.moved_bytes)


def rest_of(timed: Sequence[TimedStep]) -> Rest:
    """Return what explains best, by a robust regression, how much longer the blocks' steps take than their kernels."""
    rows, missing, lasted = [], [], []
    for samples, durations in timed:
        kernels_s = sum(statistics.median(sample.seconds) for sample in samples)
        moved = sum(sample.kernel.moved_bytes for sample in samples if sample.kernel.kind != "update")
        rows.append((1.0, len(samples), moved))
        missing.append(statistics.median(durations) - kernels_s)
        lasted.append(statistics.median(durations))
    design, rest_s = np.array(rows), np.array(missing)
    weights = 1.0 / np.array(lasted)
    kept = [0, 1, 2]
    while True:
        found = _robust(design[:, kept], rest_s, weights)
        if not kept or (found >= 0).all():
            break
        kept.remove(kept[int(np.argmin(found * design[:, kept].mean(axis=0)))])
    values = dict(zip(kept, map(float, found), strict=True))
    return Rest(*(values.get(number, 0.0) for number in range(3)))


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
_INTENSITIES = (10, 30, 50, 70, 90)
"""Percentiles of the intensities of a kind's kernels, at which there is a curve."""
_FEWEST = 8
"""Kernels of a kind and a dtype below which there is no curve."""


def curves_of(samples: Iterable[Sample], rest: Rest, basis: Provenance) -> tuple[KernelCurve, ...]:
    """Return a curve for each kind, dtype, and intensity, through the medians of the samples, with their share of the
    rest."""
    by_kind: dict[tuple[KernelKind, str], list[Sample]] = {}
    for sample in samples:
        by_kind.setdefault((sample.kernel.kind, sample.kernel.dtype), []).append(sample)
    curves = []
    for (kind, dtype), found in sorted(by_kind.items()):
        if len(found) >= _FEWEST and "float" in dtype:  # others count as float32
            curves += _curves(kind, dtype, found, rest, basis)
    return tuple(curves)


def _curves(kind: KernelKind, dtype: str, samples: list[Sample], rest: Rest, basis: Provenance) -> list[KernelCurve]:
    sizes = [sample.kernel.flops if kind in BY_FLOPS else sample.kernel.moved_bytes for sample in samples]
    log_sizes = np.log(np.maximum(sizes, 1.0))
    log_s = np.log([statistics.median(sample.seconds) for sample in samples])
    steps = max(1, math.ceil((log_sizes.max() - log_sizes.min()) / math.log(_SIZE_FACTOR)))
    grid = np.unique(np.linspace(log_sizes.min(), log_sizes.max(), steps + 1).round(3))
    if kind in BY_FLOPS:
        log_intensities = np.log([max(s.kernel.flops, 1.0) / max(s.kernel.moved_bytes, 1.0) for s in samples])
        levels = np.unique(np.percentile(log_intensities, _INTENSITIES).round(3))
    else:
        log_intensities, levels = np.zeros(len(samples)), np.zeros(1)
    where = np.stack([log_sizes, log_intensities], axis=1)
    residual = [abs(y - _smoothed(at, where, log_s)) for at, y in zip(where, log_s, strict=True)]
    spread = float(np.percentile(residual, 80))
    curves = []
    for level in levels:
        points = []
        for log_size in grid:
            size, intensity = math.exp(log_size), math.exp(level)
            moved_bytes = size / intensity if kind in BY_FLOPS else size
            lasts_s = math.exp(_smoothed(np.array([log_size, level]), where, log_s))
            lasts_s += rest.of(Kernel(kind, size, moved_bytes, dtype))
            points.append((float(f"{size:.4g}"), float(f"{lasts_s:.4g}")))
        intensity = float(f"{math.exp(level):.4g}") if kind in BY_FLOPS else 0.0
        curves.append(KernelCurve(kind, tuple(points), dtype, basis(spread), intensity))
    return curves


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


_PASSES = (7, 1, 1)
"""Which blocks are timed in each pass: one in so many. A slow moment of the machine hits few kernels in all."""


def measure_kernels(device: str, basis: Provenance) -> Iterator[MeasuredKernels]:
    """Measure this machine's kernels, with as many threads as torch has, in less than a minute; yield what is known
    after each pass. `basis` makes the provenance from the spread."""
    timed: dict[int, TimedStep] = {}
    for every in _PASSES:
        time_blocks(device, timed, every=every)
        yield kernels_of(list(timed.values()), basis)


def kernels_of(timed: Sequence[TimedStep], basis: Provenance) -> MeasuredKernels:
    """Return the curves that follow from the blocks' steps."""
    rest = rest_of(timed)
    return MeasuredKernels(curves_of((sample for each in timed for sample in each.samples), rest, basis), rest)


def step_durations(
    step: Callable[[], object], device: str = "cpu", *, repeats: int = 10, warm_up: int = 1
) -> list[float]:
    """Return the durations of some steps."""
    wait, found = waiting(device), []
    for number in range(warm_up + repeats):
        wait()
        began_s = time.perf_counter()
        step()
        wait()
        if number >= warm_up:
            found.append(time.perf_counter() - began_s)
    return found


def own_curves(samples: Iterable[Sample], rest: Rest, basis: Provenance) -> tuple[KernelCurve, ...]:
    """Return a curve for each operation of a script, with its shapes."""
    by_signature: dict[str, list[Sample]] = {}
    for sample in samples:
        by_signature.setdefault(sample.signature, []).append(sample)
    curves = []
    for signature, found in by_signature.items():
        kernel = found[0].kernel
        size = kernel.flops if kernel.kind in BY_FLOPS else kernel.moved_bytes
        lasts_s = statistics.mean(statistics.median(sample.seconds) for sample in found) + rest.of(kernel)
        spread = statistics.mean(summary(sample.seconds).spread for sample in found)
        curve = KernelCurve(kernel.kind, ((size, lasts_s),), kernel.dtype, basis(spread), signature=signature)
        curves.append(curve)
    return tuple(curves)
