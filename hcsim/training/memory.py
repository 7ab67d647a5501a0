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
from typing import Literal

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
from hcsim.training.task import Block, Task

FRAMEWORK_BYTES = 300 << 20
"""What a process occupies that has imported this package and torch, and has trained nothing (`python -m
experiments.memory` measures it)."""


class Held(msgspec.Struct, frozen=True):
    """What a strategy makes a rank hold; shares are of the whole model's."""

    weights: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    activations: float = 1.0
    """Less where a rank computes some of the blocks only."""
    copies: float = 0.0
    """Further float32 arrays as large as all that is trained."""
    payloads: float = 0.0
    """Further encoded gradients."""
    passing: Literal[0, 2, 3] = 0
    """What is there whole only while the rank computes with it: 2: the gradients of a bucket, 3: those of a block, and
    the parameters of two blocks."""
    computes: Literal["own", "all", "nothing"] = "own"
    """The batches that the rank computes with."""


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


def memory_need(task: Task, settings: Training, held: Held, place: Place) -> MemoryNeed:
    """Return what a rank needs to train the task, which is as its settings want it (`precision.prepared`)."""
    blocks = task.blocks
    layout = Layout.of([block.shapes for block in blocks], blocks[0].element_bytes)
    trained = layout.length
    state = _optimizer_bytes(settings, layout) * trained
    weights, gradients, activations = _resident(task, layout, settings, held, place.samples)
    if place.mirrored:
        there = _on_device(task, layout, held)
        weights, gradients = weights + there[0], gradients + there[1]
    compressor = compressor_of(settings, 0, 0)
    payload = sum(compressor.size_bytes(tensor.shape) for tensor in layout.tensors)
    strategy = held.copies * FLOAT_BYTES * trained + held.payloads * payload
    alone = place.ranks == 1
    return MemoryNeed(
        weights=round(weights),
        gradients=round(gradients),
        optimizer=round(held.optimizer * state),
        activations=round(held.activations * activations) if place.samples else 0,
        strategy=round(strategy),
        compression=0 if alone else compression_bytes(compressor, layout, place.ranks),
        exchange=0 if alone else _exchange_bytes(_buckets(layout, settings, held), place.ranks if held.passing else 1),
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


def _activations(block: Block) -> tuple[float, float, float]:
    """Return what enters, what is kept, and the gradients, in bytes for one sample."""
    if block.activations is None:
        written = block.moved_bytes / 2
        return 0.0, written, 0.0
    return block.activations.entering_bytes, block.activations.kept_bytes, block.activations.working_bytes


def _optimizer_bytes(settings: Training, layout: Layout) -> int:
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


def _resident(task: Task, layout: Layout, settings: Training, held: Held, samples: int) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and activations in the host's memory at the worst moment.

    Where the model passes block by block, that is the backward pass of some block: the averages of later buckets are
    there already, and the bucket before it is still being reduced, while activations become fewer. Frozen weights are
    not shared out then."""
    blocks = task.blocks
    moments = _activation_moments(blocks, samples)
    frozen = sum(block.element_bytes * block.frozen_length for block in blocks)
    if not held.passing:
        return held.weights * (layout.size_bytes + frozen), held.gradients * layout.size_bytes, max(moments)
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
            weights = held.weights * layout.size_bytes + frozen + gathered_bytes * (held.passing == 3)
            worst = max(worst, (weights, gradients, moments[block]), key=sum)
        arrived_bytes, before_bytes = arrived_bytes + bucket.size_bytes, size_bytes
    return worst


def _on_device(task: Task, layout: Layout, held: Held) -> tuple[float, float]:
    """Return the bytes of weights and gradients in the memory of a device that has its own."""
    blocks = task.blocks
    frozen = sum(block.element_bytes * block.frozen_length for block in blocks)
    if not held.passing:
        return held.weights * (layout.size_bytes + frozen), held.gradients * layout.size_bytes
    tied = _tied_bytes(task)
    others = [block for number, block in enumerate(blocks) if number not in tied_blocks(task)]
    largest = max(block.element_bytes * block.length for block in others) if others else 0
    return largest + tied + frozen, largest + tied


def _tied_bytes(task: Task) -> int:
    return sum(task.blocks[number].element_bytes * task.blocks[number].length for number in tied_blocks(task))


def device_bytes(task: Task, held: Held, samples: int) -> int:
    """Return what of it is in the memory of a device that has its own."""
    blocks = task.blocks
    layout = Layout.of([block.shapes for block in blocks], blocks[0].element_bytes)
    return round(sum(_on_device(task, layout, held)) + held.activations * activation_bytes(blocks, samples))


def _buckets(layout: Layout, settings: Training, held: Held) -> tuple[Bucket, ...]:
    return layout.buckets(1 if held.passing == 3 else settings.bucket_bytes)


def _exchange_bytes(buckets: Sequence[Bucket], parts: int) -> int:
    """Return the scratch memory of collectives: what is kept, and a bucket, or a part of it, that is received before it
    is added."""
    largest = max(bucket.size_bytes for bucket in buckets)
    return KEPT_BYTES + largest // parts
