"""Well-known models by their shapes: their size, FLOPs and memory traffic, without any data.

FLOPs are of the forward pass for one sample (an image, or a text as long as the context): two for each
multiply-add of the convolutions and matrix products. Attention is included and counted in full, as customary,
although half of a causal one is masked. Bytes are of float32 activations: each result is written once and read
once. Attention is assumed to be fused: its scores never reach memory.

A task of shapes is for timing: it costs what the model would, and learns nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TypeAlias

import msgspec

from hcsim.runtime.channel import Phantom
from hcsim.training.layout import FLOAT_BYTES, Layout
from hcsim.training.task import Block, Defaults, Flat, Indices, Task


class PhantomTask(msgspec.Struct, frozen=True):
    """A model given by its blocks."""

    name: str
    blocks: tuple[Block, ...]
    samples: int
    defaults: Defaults

    @property
    def phantom(self) -> bool:
        return True

    @property
    def fingerprint(self) -> str:
        """A digest of the costs."""
        return hashlib.sha256(repr((self.name, self.blocks)).encode()).hexdigest()

    def replica(self, seed: int, device: str = "cpu") -> PhantomReplica:
        return PhantomReplica(Layout.of([block.shapes for block in self.blocks]))

    def score(self, parameters: Flat) -> None: ...


def shapes_of(task: Task) -> PhantomTask:
    """Return a task that costs what this one does, without its data."""
    return PhantomTask(task.name, tuple(task.blocks), task.samples, task.defaults)


class PhantomReplica:
    """A replica with sizes and no values."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.parameters = Phantom(layout.size_bytes, FLOAT_BYTES)
        self.gradients = Phantom(layout.size_bytes, FLOAT_BYTES)

    def forward(self, batch: Indices) -> float:
        return float("nan")

    def backward(self, block: int) -> None: ...


Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]

WRITTEN_AND_READ = 2 * FLOAT_BYTES
"""Bytes moved for each element of an activation."""


class _Conv(msgspec.Struct, frozen=True):
    """A square convolution without bias, followed by batch normalisation."""

    name: str
    inputs: int
    outputs: int
    kernel: int
    side: int
    """The side of its result, in pixels."""
    activated: bool = True

    def shapes(self) -> Shapes:
        norm = f"{self.name}.bn"
        weight = (self.outputs, self.inputs, self.kernel, self.kernel)
        return (
            (f"{self.name}.conv", weight),
            (f"{norm}.weight", (self.outputs,)),
            (f"{norm}.bias", (self.outputs,)),
        )

    def flops(self) -> float:
        return 2.0 * self.inputs * self.outputs * self.kernel**2 * self.side**2

    def written(self) -> int:
        """Elements written by the convolution, the normalisation, and the activation."""
        return (3 if self.activated else 2) * self.outputs * self.side**2


def resnet50() -> PhantomTask:
    """ResNet-50 on ImageNet, 224 × 224 (He et al., https://arxiv.org/abs/1512.03385).

    As in torchvision (v1.5): in a bottleneck that halves the image, the 3 × 3 convolution has the stride."""
    pooled = 64 * 56**2
    blocks = [_convolutions("stem", [_Conv("stem", 3, 64, 7, 112)], pooled)]
    channels = 64
    for stage, (repeats, width, side) in enumerate([(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)], 1):
        for repeat in range(repeats):
            blocks.append(_bottleneck(f"layer{stage}.{repeat}", channels, width, side, stage > 1 and repeat == 0))
            channels = 4 * width
    head = Block("head", (("fc.weight", (1000, 2048)), ("fc.bias", (1000,))), 2.0 * 2048 * 1000,
                 WRITTEN_AND_READ * (2048 + 1000.0))  # fmt: skip
    return PhantomTask("resnet50", (*blocks, head), 1_281_167, Defaults(lr=0.1, momentum=0.9, batch=32))


def _bottleneck(name: str, channels: int, width: int, side: int, halves: bool) -> Block:
    convolutions = [
        _Conv(f"{name}.1", channels, width, 1, 2 * side if halves else side),
        _Conv(f"{name}.2", width, width, 3, side),
        _Conv(f"{name}.3", width, 4 * width, 1, side, activated=False),
    ]
    if channels != 4 * width:
        convolutions.append(_Conv(f"{name}.shortcut", channels, 4 * width, 1, side, activated=False))
    summed_and_activated = 2 * 4 * width * side**2
    return _convolutions(name, convolutions, summed_and_activated)


def _convolutions(name: str, convolutions: list[_Conv], further_written: int) -> Block:
    return Block(
        name,
        tuple(shape for conv in convolutions for shape in conv.shapes()),
        sum(conv.flops() for conv in convolutions),
        WRITTEN_AND_READ * (further_written + sum(float(conv.written()) for conv in convolutions)),
        2 + sum(3 if conv.activated else 2 for conv in convolutions),
    )


class _Transformer(msgspec.Struct, frozen=True):
    """A decoder whose output matrix is tied to its embedding or separate."""

    layers: int
    width: int
    vocabulary: int
    context: int
    kv_width: int
    """The width of keys and of values; less than the model's width if heads share them."""
    hidden: int
    gated: bool
    """Llama's variant: a gated feed-forward, RMS norms, rotary positions, no biases. Otherwise GPT-2's."""
    tied: bool

    def blocks(self) -> tuple[Block, ...]:
        """The embedding, the layers, the head. A tied matrix belongs to the embedding: its gradient is ready last."""
        return (self._embedding(), *(self._layer(number) for number in range(self.layers)), self._head())

    def _embedding(self) -> Block:
        tables: Shapes = (("embedding.tokens", (self.vocabulary, self.width)),)
        if not self.gated:
            tables += (("embedding.positions", (self.context, self.width)),)
        return Block("embedding", tables, 0.0, self._moved(self.width))

    def _layer(self, number: int) -> Block:
        name = f"layer{number}"
        matrices = tuple(self._matrices(name))
        shapes: Shapes = (*self._norm(f"{name}.norm1"), *self._norm(f"{name}.norm2"))
        for matrix, shape in matrices:
            shapes += ((f"{matrix}.weight", shape),)
            if not self.gated:
                shapes += ((f"{matrix}.bias", shape[:1]),)
        products = 2.0 * self.context * sum(prod(shape) for _, shape in matrices)
        attention = 2 * (2.0 * self.context**2 * self.width)
        # Both norms and both residual sums, every product's result, attention's, and the activation's (and gate's).
        written = 5 * self.width + sum(shape[0] for _, shape in matrices) + (2 if self.gated else 1) * self.hidden
        others = 6 + (2 if self.gated else 1)  # norms, sums, attention, positions; the activation and its gate
        return Block(name, shapes, products + attention, self._moved(written), len(matrices) + others)

    def _matrices(self, name: str) -> Iterator[tuple[str, tuple[int, int]]]:
        yield f"{name}.query", (self.width, self.width)
        yield f"{name}.key", (self.kv_width, self.width)
        yield f"{name}.value", (self.kv_width, self.width)
        yield f"{name}.output", (self.width, self.width)
        if self.gated:
            yield f"{name}.gate", (self.hidden, self.width)
        yield f"{name}.up", (self.hidden, self.width)
        yield f"{name}.down", (self.width, self.hidden)

    def _head(self) -> Block:
        shapes = self._norm("head.norm")
        if not self.tied:
            shapes += (("head.weight", (self.vocabulary, self.width)),)
        flops = 2.0 * self.context * self.vocabulary * self.width
        return Block("head", shapes, flops, self._moved(self.width + self.vocabulary))

    def _norm(self, name: str) -> Shapes:
        weight = (f"{name}.weight", (self.width,))
        return (weight,) if self.gated else (weight, (f"{name}.bias", (self.width,)))

    def _moved(self, written: int) -> float:
        """Return the bytes moved for `written` elements at each position of the context."""
        return float(WRITTEN_AND_READ * self.context * written)


def gpt2() -> PhantomTask:
    """GPT-2 with 124 million parameters (Radford et al. 2019)."""
    model = _Transformer(12, 768, 50257, 1024, kv_width=768, hidden=3072, gated=False, tied=True)
    return PhantomTask("gpt2", model.blocks(), 1_000_000, Defaults(lr=0.1, momentum=0.9, batch=8))


def llama_1b() -> PhantomTask:
    """Llama 3.2 1B, with texts of 2,048 tokens (https://arxiv.org/abs/2407.21783)."""
    model = _Transformer(16, 2048, 128256, 2048, kv_width=512, hidden=8192, gated=True, tied=True)
    return PhantomTask("llama-1b", model.blocks(), 1_000_000, Defaults(lr=0.1, momentum=0.9, batch=1))


def llama_7b() -> PhantomTask:
    """Llama 2 7B, with texts of 2,048 tokens (https://arxiv.org/abs/2307.09288)."""
    model = _Transformer(32, 4096, 32000, 2048, kv_width=4096, hidden=11008, gated=True, tied=False)
    return PhantomTask("llama-7b", model.blocks(), 1_000_000, Defaults(lr=0.1, momentum=0.9, batch=1))


SHAPES: Mapping[str, Callable[[], PhantomTask]] = {
    "resnet50": resnet50,
    "gpt2": gpt2,
    "llama-1b": llama_1b,
    "llama-7b": llama_7b,
}
