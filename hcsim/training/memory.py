"""How much memory a rank needs to train: a model, from the shapes of the task and the settings alone.

    weights       as they are computed with, frozen ones too; float32, or bfloat16
    gradients     of what is trained
    optimizer     the momentum of SGD, or both moments of AdamW; a float32 copy of bfloat16 weights
    activations   at the worst moment of the backward pass, see `activation_bytes`
    strategy      what the strategy holds besides: anchors, changes, an outer momentum, a server's pushes
    compression   residuals, factors that are remembered, and payloads
    exchange      what collectives keep and receive into
    checkpoint    a copy of the state, and the file that is made of it
    framework     Python, torch and this package

A strategy says which share of each kind a rank holds (`Held`), so that one that shards needs no change here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

import msgspec

from hcsim.collectives.buffers import KEPT_BYTES
from hcsim.compressors.base import Compressor, PayloadKind
from hcsim.compressors.cast import Dense
from hcsim.compressors.feedback import ErrorFeedback
from hcsim.compressors.powersgd import PowerSGD
from hcsim.config.training import Training
from hcsim.training.blockwise import tied_blocks
from hcsim.training.layout import FLOAT_BYTES, Bucket, Layout
from hcsim.training.precision import compressor_of
from hcsim.training.task import Block, Task, sequential, stage_blocks

FRAMEWORK_BYTES = 300 << 20
"""What a process occupies that has imported this package and torch, and has trained nothing (`python -m
experiments.memory` measures it)."""

_CUBLAS_THREADS = 2
_HOPPER = 9
_HOPPER_WORKSPACE_BYTES = 32 << 20
_CUBLAS_WORKSPACE_BYTES = (2 * 4096 + 8 * 16) << 10


class StageHeld(msgspec.Struct, frozen=True):
    """What a stage of a pipeline holds."""

    first: int
    end: int
    samples: int
    """In a microbatch."""
    microbatches: int
    """Whose activations it keeps at once."""
    replicas: int = 1
    """The ranks that hold the same stage, and average its gradients."""
    backups: int = 0
    """Copies of a stage's parameters and optimizer."""


class Held(msgspec.Struct, frozen=True):
    """What a strategy makes a rank hold; shares are of the whole model's."""

    weights: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    copies: float = 0.0
    """Further float32 arrays as large as all that is trained."""
    payloads: float = 0.0
    """Further encoded gradients."""
    passing: Literal[0, 2, 3] = 0
    """What is there whole only while the rank computes with it: 2: the gradients of a bucket, 3: those of a block, and
    the parameters of two blocks. The rank computes all blocks, whereas with a `stage` it computes some, and holds what
    it computes with all the time."""
    computes: Literal["own", "all", "nothing"] = "own"
    """The batches that the rank computes with."""
    stage: StageHeld | None = None
    """The run of blocks that the rank holds; None: all of them."""


class MemoryNeed(msgspec.Struct, frozen=True):
    """The bytes that a rank needs at its worst moment."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    strategy: int
    compression: int
    exchange: int
    checkpoint: int
    framework: int = FRAMEWORK_BYTES

    @property
    def parts(self) -> dict[str, int]:
        return msgspec.structs.asdict(self)

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Place(msgspec.Struct, frozen=True):
    """Where training takes place."""

    ranks: int
    samples: int
    """That the rank computes with at once."""
    saves: bool = False
    """Whether the rank saves checkpoints."""
    mirrored: bool = False
    """Whether the device has memory of its own (or MPS, which is used as if it had): weights and gradients are there
    and on the host."""


class _Part(NamedTuple):
    """What a rank computes."""

    task: Task
    blocks: Sequence[Block]
    layout: Layout

    @classmethod
    def of(cls, task: Task, held: Held) -> _Part:
        blocks = task.blocks if held.stage is None else stage_blocks(task, held.stage.first, held.stage.end)
        return cls(task, blocks, Layout.of([block.shapes for block in blocks], blocks[0].element_bytes))

    @property
    def weights_bytes(self) -> int:
        return self.layout.size_bytes + self.frozen_bytes

    @property
    def frozen_bytes(self) -> int:
        return sum(block.element_bytes * block.frozen_length for block in self.blocks)

    def activation_bytes(self, held: Held, samples: int) -> int:
        if held.stage is None:
            return activation_bytes(self.blocks, samples)
        return stage_bytes(self.task, self.blocks, held.stage)


def memory_need(task: Task, settings: Training, held: Held, place: Place) -> MemoryNeed:
    """Return what a rank needs to train the task, which is as its settings want it (`precision.prepared`)."""
    part, stage = _Part.of(task, held), held.stage
    layout, trained = part.layout, part.layout.length
    if stage is not None:
        place = msgspec.structs.replace(place, ranks=stage.replicas)
    state = optimizer_bytes(settings, layout) * trained
    weights, gradients, activations = _resident(part, settings, held, place.samples)
    if place.mirrored:
        there = _on_device(part, held)
        weights, gradients = weights + there[0], gradients + there[1]
    compressor = compressor_of(settings, 0, 0)
    payload = sum(compressor.size_bytes(tensor.shape) for tensor in layout.tensors)
    strategy = held.copies * FLOAT_BYTES * trained + held.payloads * payload
    if stage is not None:
        strategy += stage.backups * (layout.size_bytes + state)
    alone = place.ranks == 1
    exchange = 0 if alone else _exchange_bytes(_buckets(layout, settings, held), place.ranks if held.passing else 1)
    if stage is not None and len(part.blocks) < len(task.blocks):
        exchange = max(exchange, KEPT_BYTES + _shared_bytes(task, stage))
    return MemoryNeed(
        weights=round(weights),
        gradients=round(gradients),
        optimizer=round(held.optimizer * state),
        activations=round(activations) if place.samples else 0,
        strategy=round(strategy),
        compression=0 if alone else compression_bytes(compressor, layout, place.ranks),
        exchange=exchange,
        checkpoint=2 * (layout.size_bytes + state) if place.saves else 0,
    )


def activation_bytes(blocks: Sequence[Block], samples: int) -> int:
    """Return what activations and their gradients occupy at most, in both passes over so many samples.

    What a block keeps is released by its backward pass. That of a block needs what all blocks before it keep, its own,
    and the gradients of its activations; or those of its weights, each of which is there once more until it is added to
    the others. A block that is computed again keeps its input until then."""
    return round(max(_activation_moments(blocks, samples)))


def _activation_moments(blocks: Sequence[Block], samples: int) -> list[float]:
    """Return the same for each block, while its backward pass runs."""
    before_bytes, moments = 0.0, list[float]()
    for block in blocks:
        entering, kept, working = _activations(block)
        own_bytes = samples * kept if block.is_trained else 0.0
        gradient_bytes = block.element_bytes * max((prod(shape) for _, shape in block.shapes), default=0)
        moments.append(before_bytes + own_bytes + max(samples * working, float(gradient_bytes)))
        before_bytes += samples * entering if block.recompute else own_bytes
    return moments


def _shared_bytes(task: Task, stage: StageHeld) -> int:
    """Return the bytes of the largest parameter that a stage shares with another one, which is received before it is
    added."""
    inside = range(stage.first, stage.end)
    shared = [tie for tie in sequential(task).ties if (tie.owner in inside) != (tie.user in inside)]
    shapes = {name: shape for tie in shared for name, shape in task.blocks[tie.owner].shapes}
    width = task.blocks[0].element_bytes
    return max((width * prod(shapes[tie.tensor]) for tie in shared if tie.tensor in shapes), default=0)


def stage_bytes(task: Task, blocks: Sequence[Block], stage: StageHeld) -> int:
    """Return what activations occupy in a stage of a pipeline: those of the microbatch whose backward pass it is, of
    the others under way, and what is sent and received meanwhile.

    One activation and one gradient are received ahead of their turn, and one of each may still be on its way out."""
    entering = sequential(task).entering
    width = task.blocks[0].element_bytes
    others = stage.samples * sum(
        each[0] if block.recompute else each[1] if block.is_trained else 0.0
        for block, each in zip(blocks, map(_activations, blocks), strict=True)
    )
    ends = [bound for bound in (stage.first, stage.end) if 0 < bound < len(entering)]
    moving = 2 * stage.samples * width * sum(entering[bound] for bound in ends)
    return round((stage.microbatches - 1) * others) + activation_bytes(blocks, stage.samples) + moving


def _activations(block: Block) -> tuple[float, float, float]:
    """Return what enters, what is kept, and the gradients, in bytes for one sample."""
    if block.activations is None:
        written = block.moved_bytes / 2
        return 0.0, written, 0.0
    return block.activations.entering_bytes, block.activations.kept_bytes, block.activations.working_bytes


def optimizer_bytes(settings: Training, layout: Layout) -> int:
    """Return the bytes of each trained element's state."""
    arrays = 2 if settings.optimizer == "adamw" else int(settings.momentum != 0)
    return FLOAT_BYTES * (arrays + (layout.element_bytes < FLOAT_BYTES))


def compression_bytes(compressor: Compressor, layout: Layout, ranks: int) -> int:
    """Return what compression holds while all gradients are in flight."""
    if isinstance(compressor, Dense):
        return 0
    inner = compressor.inner if isinstance(compressor, ErrorFeedback) else compressor
    payload = sum(compressor.size_bytes(tensor.shape) for tensor in layout.tensors)
    # A payload's memory is kept for the next step. It is joined with others; what arrives is as much, or is of all.
    total = payload * (2 + (ranks if inner.kind is PayloadKind.SPARSE else 1))
    if isinstance(compressor, ErrorFeedback):
        # The residual, and the next one, until its step is committed; what was lost, until it is known of all parts.
        arrays = 3 if inner.kind is PayloadKind.QUANTISED else 2
        total += arrays * FLOAT_BYTES * layout.length
    if isinstance(inner, PowerSGD):
        factors = (inner.round_bytes(tensor.shape) for tensor in layout.tensors)
        total += 2 * sum(rounds[1] for rounds in factors if len(rounds) > 1)
    return total


def _resident(part: _Part, settings: Training, held: Held, samples: int) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and activations in the host's memory at the worst moment.

    Where the model passes block by block, that is the backward pass of some block: the averages of later buckets are
    there already, and the bucket before it is still being reduced, while activations become fewer. Frozen weights are
    not shared out then."""
    task, blocks, layout = part
    if not held.passing:
        activations = part.activation_bytes(held, samples)
        return held.weights * part.weights_bytes, held.gradients * layout.size_bytes, activations
    moments = _activation_moments(blocks, samples)
    tied = tied_blocks(task)
    always_bytes = _tied_bytes(task)
    lengths = [block.element_bytes * block.length * (number not in tied) for number, block in enumerate(blocks)]
    arrived_bytes = before_bytes = 0.0
    worst = (0.0, 0.0, 0.0)
    for bucket in _buckets(layout, settings, held):
        size_bytes = sum(lengths[block] for block in bucket.blocks)
        gradients = held.gradients * arrived_bytes + before_bytes + size_bytes + always_bytes
        for block in bucket.blocks:
            gathered_bytes = lengths[block] + (lengths[block - 1] if block else 0) + always_bytes
            weights = held.weights * layout.size_bytes + part.frozen_bytes + gathered_bytes * (held.passing == 3)
            worst = max(worst, (weights, gradients, moments[block]), key=sum)
        arrived_bytes, before_bytes = arrived_bytes + bucket.size_bytes, size_bytes
    return worst


def _on_device(part: _Part, held: Held) -> tuple[float, float]:
    """Return the bytes of weights and gradients in the memory of a device that has its own."""
    if not held.passing:
        return held.weights * part.weights_bytes, held.gradients * part.layout.size_bytes
    task = part.task
    tied = _tied_bytes(task)
    others = [block for number, block in enumerate(part.blocks) if number not in tied_blocks(task)]
    largest = max(block.element_bytes * block.length for block in others) if others else 0
    return largest + tied + part.frozen_bytes, largest + tied


def _tied_bytes(task: Task) -> int:
    return sum(task.blocks[number].element_bytes * task.blocks[number].length for number in tied_blocks(task))


def device_bytes(task: Task, held: Held, samples: int) -> int:
    """Return what of it is in the memory of a device that has its own, without the workspaces of its libraries."""
    part = _Part.of(task, held)
    return round(sum(_on_device(part, held))) + part.activation_bytes(held, samples)


def cublas_bytes(capability: tuple[int, int]) -> int:
    """Return the workspaces that cuBLAS keeps in torch's allocator on a CUDA device of this compute capability.

    There is one for each thread that has a handle: the one that computes, and autograd's for the backward pass. Sizes
    are torch's defaults, as it documents them with CUBLAS_WORKSPACE_CONFIG."""
    return _CUBLAS_THREADS * (_HOPPER_WORKSPACE_BYTES if capability[0] == _HOPPER else _CUBLAS_WORKSPACE_BYTES)


def _buckets(layout: Layout, settings: Training, held: Held) -> tuple[Bucket, ...]:
    return layout.buckets(1 if held.passing == 3 else settings.bucket_bytes)


def _exchange_bytes(buckets: Sequence[Bucket], parts: int) -> int:
    """Return the scratch memory of collectives: what is kept, and a bucket, or a part of it, that is received before it
    is added."""
    largest = max(bucket.size_bytes for bucket in buckets)
    return KEPT_BYTES + largest // parts
