"""The machines: how fast they compute, encode, and handle messages, and a catalogue of them by name.

A machine of the catalogue is a data sheet with efficiencies. A measured one has curves instead: the time of a kernel
of each kind against its size, of each compressor, and what a message costs. `Basis` says of each figure where it comes
from.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias, get_args

from msgspec import Meta, field
from msgspec.structs import replace

from hcsim.config.table import Table
from hcsim.errors import UsageError
from hcsim.registry import Registry
from hcsim.units import ByteRate, Bytes, FlopRate, PositiveShare, Seconds

KernelKind: TypeAlias = Literal[
    "matmul", "convolution", "convolution_backward", "grouped_convolution", "grouped_convolution_backward",
    "wide_grouped_convolution", "wide_grouped_convolution_backward", "thin_convolution", "thin_convolution_backward",
    "pointwise_convolution", "pointwise_convolution_backward", "attention", "attention_backward", "recurrent",
    "recurrent_backward", "elementwise", "transcendental", "gelu", "update", "batch_norm", "batch_norm_backward",
    "norm", "norm_backward", "softmax", "softmax_backward", "reduction", "pooling", "pooling_backward", "upsampling",
    "upsampling_backward", "gather", "gather_backward", "lookup", "lookup_backward", "scatter", "copy", "fill",
    "random", "view",
]  # fmt: skip
"""A wide convolution has windows of more than 3 × 3, a pointwise one has windows of one pixel, and a thin one fewer
than 8 channels at either side. An update is in place, as an optimizer's are, and a lookup copies whole rows. A view
moves nothing: it takes the host a moment, and the device no time."""
BROADER: dict[str, KernelKind] = {
    "wide_grouped_convolution": "grouped_convolution",
    "wide_grouped_convolution_backward": "grouped_convolution_backward",
    "thin_convolution": "convolution",
    "thin_convolution_backward": "convolution_backward",
    "pointwise_convolution": "convolution",
    "pointwise_convolution_backward": "convolution_backward",
    "batch_norm_backward": "norm_backward",
    "softmax": "norm",
    "softmax_backward": "norm_backward",
    "lookup": "gather",
    "lookup_backward": "scatter",
    "upsampling": "pooling",
    "upsampling_backward": "pooling_backward",
    "fill": "copy",
}
"""The kind whose curves stand for one that was not measured by itself."""
BY_FLOPS: tuple[KernelKind, ...] = (
    "matmul", "convolution", "convolution_backward", "grouped_convolution", "grouped_convolution_backward",
    "wide_grouped_convolution", "wide_grouped_convolution_backward", "thin_convolution", "thin_convolution_backward",
    "pointwise_convolution", "pointwise_convolution_backward", "attention", "attention_backward", "recurrent",
    "recurrent_backward",
)  # fmt: skip
"""Kinds whose size is in FLOPs; that of the others is in bytes that are read or written."""


def size_and_intensity(kind: str, flops: float, moved_bytes: float, rows: float) -> tuple[float, float]:
    """Return what a kernel's time is looked up by: its size, and the FLOPs per byte, or the bytes per row where rows
    matter, or else 0."""
    if kind in BY_FLOPS:
        return flops, max(flops, 1.0) / max(moved_bytes, 1.0)
    return moved_bytes, max(moved_bytes, 1.0) / rows if rows else 0.0


class Basis(Table, frozen=True):
    """Where a figure comes from, and how far it can be trusted."""

    kind: Literal["measured", "published", "estimated"] = "estimated"
    source: str = ""
    """Where it was published, from what it was estimated, or the software that was measured."""
    date: str = ""
    """The day of the measurement: "2026-11-19"."""
    spread: Annotated[float, Meta(ge=0)] = 0.0
    """Half of the distance between its 10th and its 90th percentile, relative to the figure."""


def _check_points(what: str, points: tuple[tuple[float, float], ...]) -> None:
    sizes = [size for size, _ in points]
    if any(later <= earlier for earlier, later in pairwise(sizes)) or any(map(_is_odd, sum(points, ()))):
        raise UsageError(f"{what}: points must be pairs of a size and seconds, in the order of increasing sizes")


def _is_odd(value: float) -> bool:
    return not math.isfinite(value) or value < 0


def interpolated_s(points: tuple[tuple[float, float], ...], size: float) -> float:
    """Return the time for this size: linear between the points, constant below the first, and in proportion to the
    size above the last."""
    first_size, first_s = points[0]
    if size <= first_size:
        return first_s
    for (below, below_s), (above, above_s) in pairwise(points):
        if size <= above:
            return below_s + (above_s - below_s) * (size - below) / (above - below)
    last_size, last_s = points[-1]
    return last_s * size / last_size


Points: TypeAlias = Annotated[tuple[tuple[float, float], ...], Meta(min_length=1)]


class KernelCurve(Table, frozen=True):
    """The time of one kernel of a kind, launch included, against its size (see `BY_FLOPS`)."""

    kind: KernelKind
    points: Points
    dtype: str = "float32"
    basis: Basis = Basis("measured")
    intensity: Annotated[float, Meta(ge=0)] = 0.0
    """The FLOPs per byte of the kernels that were measured, or their bytes per row; between several such curves of a
    kind is interpolated. 0: it is for all intensities."""
    signature: str = ""
    """The one operation, with its shapes, that the curve is for; empty: for all of its kind."""
    launch_s: Seconds = Seconds(0)
    """What the host is busy for with the launch of one, while the device computes those before it; 0 where the host
    computes by itself, and its launches are part of the points."""
    cold_s: Seconds = Seconds(0)
    """How much longer the first kernel of the kind in a step takes, or its launch where there is one, since caches
    are full of other things; the k-th takes this divided by √k longer."""

    def __post_init__(self) -> None:
        _check_points(f"kernel {self.kind} {self.dtype}", self.points)


class KernelEfficiency(Table, frozen=True):
    """The share of the data-sheet figure that kernels of a kind reach: of the peak for a matmul, a convolution and an
    attention, and of the memory's bandwidth for all others."""

    kind: KernelKind
    share: PositiveShare
    basis: Basis = Basis()


class CodecCurve(Table, frozen=True):
    """The time to encode and to decode a tensor against its size in bytes, uncompressed."""

    compressor: str
    encode: Points
    decode: Points
    basis: Basis = Basis("measured")

    def __post_init__(self) -> None:
        _check_points(f"encode {self.compressor}", self.encode)
        _check_points(f"decode {self.compressor}", self.decode)


class MessageCosts(Table, frozen=True):
    """What messages cost a machine's processor."""

    send_s: Seconds = Seconds(0)
    """For each message, whatever its size."""
    receive_s: Seconds = Seconds(0)
    operation_s: Seconds = Seconds(0)
    """For each collective operation that the machine takes part in, beside its messages."""
    send_rate_Bps: ByteRate = ByteRate(math.inf)
    """How many bytes one core passes on to the network in a second."""
    receive_rate_Bps: ByteRate = ByteRate(math.inf)
    tls_send_rate_Bps: ByteRate = ByteRate(math.inf)
    """How many bytes one core encrypts in a second, on top of the cost of plain bytes."""
    tls_receive_rate_Bps: ByteRate = ByteRate(math.inf)
    basis: Basis = Basis("estimated")


class ScriptKernels(Table, frozen=True):
    """What the kernels of one script take in its own steps, with what the script does before each of them; or what the
    parts of one task's step take."""

    name: str
    """Of the script's file, or of the task."""
    basis: Basis = Basis("measured")
    kernels: tuple[KernelCurve, ...] = field(name="kernel", default=())
    """By signature."""


class Machine(Table, frozen=True):
    """The compute hardware of a node. An efficiency is the share of the data-sheet figure that is reached."""

    name: str
    peak_flops: FlopRate
    memory_Bps: ByteRate
    efficiency_compute: PositiveShare = PositiveShare(0.36)
    """Of a whole training step; single kernels are nearer to the peak (`efficiencies`)."""
    efficiency_memory: PositiveShare = PositiveShare(0.82)
    """Of copies and sums."""
    overhead_s: Seconds = Seconds(40e-6)
    """For each launch of a kernel."""
    fanless: bool = False
    sustained: PositiveShare = PositiveShare(0.6)
    """The share of its speed that a fanless machine keeps when it is hot."""
    basis: Basis = Basis()
    """Of the figures above."""
    ram_bytes: Bytes | None = None
    """None: as Macs with the chip are sold, at least."""
    kernels: tuple[KernelCurve, ...] = field(name="kernel", default=())
    """Where there are curves, they replace the efficiencies."""
    efficiencies: tuple[KernelEfficiency, ...] = field(name="efficiency", default=())
    """By kind of kernel, where it is known of which kinds the work is. Other kinds have the efficiencies above."""
    codecs: tuple[CodecCurve, ...] = field(name="codec", default=())
    messages: MessageCosts | None = None
    """None: messages cost no processor time."""
    step_s: Seconds = Seconds(0)
    """What a training step costs beside its kernels, messages and codecs."""
    step_basis: Basis = Basis()
    hand_over_s: Seconds = Seconds(0)
    """What it costs a training to hand each piece of work to the device, and to hear that it is done."""
    shares_processor: bool = False
    """Whether messages and kernels are handled by the same processor, so that each delays the other."""
    scripts: tuple[ScriptKernels, ...] = field(name="script", default=())

    """In runs of a script of that name."""
    tasks: tuple[ScriptKernels, ...] = field(name="task", default=())
    """The parts of a task's step, against the number of samples."""

    def running(self, script: str) -> Machine:
        """Return the machine as a script of this name finds it, which calls torch itself: with the kernels that were
        timed in its own steps. These contain what a step costs beside kernels."""
        machine = replace(self, hand_over_s=Seconds(0)) if self.hand_over_s else self
        own = next((each for each in self.scripts if each.name == script), None)
        return machine if own is None else replace(machine, kernels=(*self.kernels, *own.kernels), step_s=Seconds(0))


# Peaks are fp32 of the largest GPU of each chip: cores × 256 × GHz. Where a source gives a range, its middle.
_CHIPS = {
    "M1": (2.62, 68),
    "M1 Pro": (5.31, 200),
    "M1 Max": (10.6, 400),
    "M1 Ultra": (21.2, 800),
    "M2": (3.58, 100),
    "M2 Pro": (6.80, 200),
    "M2 Max": (13.6, 400),
    "M2 Ultra": (27.2, 800),
    "M3": (3.58, 100),
    "M3 Pro": (6.44, 150),
    "M3 Max": (14.3, 400),
    "M3 Ultra": (28.6, 819),
    "M4": (3.9, 120),  # ? 3.8 to 4.0
    "M4 Pro": (8.1, 273),  # ?
    "M4 Max": (16.7, 546),  # ? 16.2 to 17.2
    "M5": (4.04, 153),
    "M5 Pro": (8.3, 307),  # ?
    "M5 Max": (17.3, 614),  # ? 16.6 to 18
}
_FANLESS = {"M1 Air": "M1", "M2 Air": "M2", "M3 Air": "M3", "M4 Air": "M4"}


# How fast they compute is no data-sheet figure. `python -m experiments.published` has the model, what was published,
# and how well each figure is predicted from the others; tests/experiments/test_published.py holds these numbers to it.
_MEASURED = ("M1 Pro", "M1 Max", "M1 Ultra", "M2 Pro", "M2 Max", "M2 Ultra", "M3", "M3 Pro", "M3 Max")
_TRAINING = Basis("published", "25 training figures of 9 chips in results/fidelity/published_macs.csv", spread=0.32)
_UNKNOWN = Basis("estimated", "the training figures of other chips, M1 Pro to M3 Max", spread=0.4)
_PRODUCT = Basis("published", "matrix products of 8 chips in results/fidelity/published_macs.csv", spread=0.2)
_COPY = Basis("published", "copies on 7 chips in results/fidelity/published_macs.csv", spread=0.09)


def _efficiencies(basis: Basis) -> tuple[KernelEfficiency, ...]:
    """A large product comes near the peak. What lies between the products of a model is far from the bandwidth: so the
    efficiency of a training step is half of that of a product."""
    copy = KernelEfficiency("copy", PositiveShare(0.82), _COPY)
    products = [KernelEfficiency(kind, PositiveShare(0.74), _PRODUCT) for kind in BY_FLOPS]
    others = [kind for kind in get_args(KernelKind) if kind not in (*BY_FLOPS, "copy")]
    return (*products, *(KernelEfficiency(kind, PositiveShare(0.39), basis) for kind in others), copy)


GIB = 1 << 30
_MEMORY_GIB = {
    "M1": 8, "M1 Pro": 16, "M1 Max": 32, "M1 Ultra": 64, "M2": 8, "M2 Pro": 16, "M2 Max": 32, "M2 Ultra": 64,
    "M3": 8, "M3 Pro": 18, "M3 Max": 36, "M3 Ultra": 96, "M4": 16, "M4 Pro": 24, "M4 Max": 36,
    "M5": 16, "M5 Pro": 24, "M5 Max": 36,
}  # fmt: skip
"""The least memory that Macs with a chip are sold with (M1 to M3 with 8 GiB: a Mac of that time may have more)."""
SIZES_GIB = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
"""The sizes that Macs are sold with."""
SMALL_BYTES = 36 * GIB


def installed_bytes(machine: str | Machine) -> int | None:
    """Return the memory of a machine, or of a name of the catalogue; None if it is not known."""
    if isinstance(machine, Machine) and machine.ram_bytes is not None:
        return machine.ram_bytes
    name = machine if isinstance(machine, str) else machine.name
    gib = _MEMORY_GIB.get(_FANLESS.get(name, name))
    return None if gib is None else gib * GIB


def usable_bytes(name: str, memory_bytes: int) -> int:
    """Return how much of its memory a machine of that name can train with.

    macOS lets the GPU wire two thirds of up to 36 GiB, and three quarters of more (Metal's
    `recommendedMaxWorkingSetSize`: 10.67 of 16 GiB on an M4, https://github.com/exo-explore/exo/pull/1672; newer
    systems allow more, 11.84 of 16 and 107.5 of 128, https://github.com/AlexsJones/llmfit/pull/754,
    https://github.com/antirez/ds4/pull/893). Of other machines the system is taken to need a tenth."""
    if not (name in _CHIPS or name in _FANLESS or name.startswith("Apple")):
        return memory_bytes * 9 // 10
    return memory_bytes * 2 // 3 if memory_bytes <= SMALL_BYTES else memory_bytes * 3 // 4


def _chip(name: str, chip: str, *, fanless: bool = False) -> Machine:
    tflops, gigabytes_per_s = _CHIPS[chip]
    basis = _TRAINING if chip in _MEASURED and not fanless else _UNKNOWN
    return Machine(
        name,
        FlopRate(tflops * 1e12),
        ByteRate(gigabytes_per_s * 1e9),
        fanless=fanless,
        basis=basis,
        efficiencies=_efficiencies(basis),
    )


_IDEAL = Machine("ideal", FlopRate(math.inf), ByteRate(math.inf), overhead_s=Seconds(0))

CATALOGUE: Registry[Machine] = Registry(
    "machine",
    {
        **{name: _chip(name, name) for name in _CHIPS},
        **{name: _chip(name, chip, fanless=True) for name, chip in _FANLESS.items()},
        _IDEAL.name: _IDEAL,
    },
)
"""Machines by name. Every operation of "ideal" takes no time."""
