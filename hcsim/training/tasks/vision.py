"""Residual networks and vision transformers by their shapes, with ImageNet's 1,000 classes.

ResNets (He et al., https://arxiv.org/abs/1512.03385) are as in torchvision: in a bottleneck that halves the image,
the 3 × 3 convolution has the stride (v1.5). Vision transformers (Dosovitskiy et al., https://arxiv.org/abs/2010.11929)
cut the image into patches of 16 × 16 pixels, which are the tokens, with one more for the class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from hcsim.errors import ConfigError
from hcsim.training.layout import FLOAT_BYTES
from hcsim.training.task import Activations, Block, Defaults, Shapes, TaskSpec
from hcsim.training.tasks.shapes import WRITTEN_AND_READ, PhantomTask
from hcsim.training.tasks.transformer import Architecture, Lora, adapters_of

CLASSES = 1000
IMAGES = 1_281_167
INDEX_BYTES = 8
"""Of a maximum's place, which its pooling keeps."""
PATCH = 16


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

    @property
    def elements(self) -> int:
        """Of its result."""
        return self.outputs * self.side**2

    def written(self) -> int:
        """Elements written by the convolution, the normalisation, and the activation."""
        return (3 if self.activated else 2) * self.elements

    def kept(self) -> int:
        """Elements of the normalisation's input, and of the activation's result."""
        return (2 if self.activated else 1) * self.elements


class _ResNet(TaskSpec, frozen=True):
    side: Annotated[int, Meta(ge=32, le=4096)] = 224
    """Of the image, in pixels."""
    depths: ClassVar[tuple[int, ...]]
    bottleneck: ClassVar[bool] = True

    def task(self, name: str) -> PhantomTask:
        if self.side % 32:
            raise ConfigError(f'task "{name}": side = {self.side}: give a multiple of 32, by which the image shrinks')
        side = self.side // 4
        pooled = 64 * side**2
        blocks = [_stem(self.side, pooled)]
        channels = 64
        for stage, repeats in enumerate(self.depths):
            width, end = 64 * 2**stage, side // 2**stage
            for repeat in range(repeats):
                block = _Residual(f"layer{stage + 1}.{repeat}", channels, width, end, stage > 0 and repeat == 0)
                blocks.append(block.bottleneck() if self.bottleneck else block.basic())
                channels = (4 if self.bottleneck else 1) * width
        blocks.append(_classifier(channels, channels * (side // 8) ** 2))
        return PhantomTask(name, tuple(blocks), IMAGES, Defaults(lr=0.1, momentum=0.9, batch=32))


class ResNet18(_ResNet, frozen=True):
    """ResNet-18 on ImageNet."""

    depths = (2, 2, 2, 2)
    bottleneck = False


class ResNet50(_ResNet, frozen=True):
    """ResNet-50 on ImageNet."""

    depths = (3, 4, 6, 3)


class ResNet101(_ResNet, frozen=True):
    """ResNet-101 on ImageNet."""

    depths = (3, 4, 23, 3)


class _Residual(msgspec.Struct, frozen=True):
    """Convolutions beside a shortcut, whose sum is activated."""

    name: str
    channels: int
    width: int
    side: int
    halves: bool

    def bottleneck(self) -> Block:
        width, side = self.width, self.side
        return self._block([
            _Conv(f"{self.name}.1", self.channels, width, 1, 2 * side if self.halves else side),
            _Conv(f"{self.name}.2", width, width, 3, side),
            _Conv(f"{self.name}.3", width, 4 * width, 1, side, activated=False),
        ])  # fmt: skip

    def basic(self) -> Block:
        return self._block([
            _Conv(f"{self.name}.1", self.channels, self.width, 3, self.side),
            _Conv(f"{self.name}.2", self.width, self.width, 3, self.side, activated=False),
        ])  # fmt: skip

    def _block(self, convolutions: list[_Conv]) -> Block:
        outputs, side = convolutions[-1].outputs, self.side
        if self.channels != outputs:
            convolutions.append(_Conv(f"{self.name}.shortcut", self.channels, outputs, 1, side, activated=False))
        summed = outputs * side**2
        entering = self.channels * (2 * side if self.halves else side) ** 2
        kept = summed + sum(conv.kept() for conv in convolutions)
        # The gradients of a convolution's result and of its input, beside that of the sum.
        working = summed + 2 * max(conv.elements for conv in convolutions)
        return _convolutions(self.name, convolutions, 2 * summed, _activations(entering, kept, working))


def _activations(entering: float, kept: float, working: float) -> Activations:
    """Return what so many elements of float32 occupy."""
    return Activations(FLOAT_BYTES * entering, FLOAT_BYTES * kept, FLOAT_BYTES * working)


def _stem(side: int, pooled: int) -> Block:
    conv = _Conv("stem", 3, 64, 7, side // 2)
    image = 3 * side**2
    kept = image + conv.kept() + pooled * (1 + INDEX_BYTES / FLOAT_BYTES)
    return _convolutions("stem", [conv], pooled, _activations(image, kept, 2 * conv.elements))


def _convolutions(name: str, convolutions: Sequence[_Conv], further_written: int, kept: Activations) -> Block:
    return Block(
        name,
        tuple(shape for conv in convolutions for shape in conv.shapes()),
        sum(conv.flops() for conv in convolutions),
        WRITTEN_AND_READ * (further_written + sum(float(conv.written()) for conv in convolutions)),
        2 + sum(3 if conv.activated else 2 for conv in convolutions),
        activations=kept,
    )


def _classifier(width: int, entering: int) -> Block:
    shapes: Shapes = (("fc.weight", (CLASSES, width)), ("fc.bias", (CLASSES,)))
    kept = _activations(entering, width + CLASSES, entering + 2 * CLASSES)
    return Block("head", shapes, 2.0 * width * CLASSES, WRITTEN_AND_READ * (width + float(CLASSES)), activations=kept)


class _VisionTransformer(TaskSpec, frozen=True):
    side: Annotated[int, Meta(ge=PATCH, le=4096)] = 224
    """Of the image, in pixels."""
    lora: Annotated[int, Meta(ge=0)] = 0
    """The rank of adapters; 0: all weights are trained."""
    matrices: str = "query+value"
    """The matrices that get adapters."""
    width: ClassVar[int]
    heads: ClassVar[int]

    def task(self, name: str) -> PhantomTask:
        if self.side % PATCH:
            raise ConfigError(f'task "{name}": side = {self.side}: give a multiple of {PATCH}, the side of a patch')
        patches = (self.side // PATCH) ** 2
        layers = Architecture(12, self.width, 0, heads=self.heads)
        adapters = adapters_of(name, self.lora, self.matrices, layers)
        blocks = (self._patches(patches, adapters), *layers.layers(patches + 1, adapters), self._head(patches + 1))
        return PhantomTask(name, blocks, IMAGES, Defaults(lr=0.1, momentum=0.9, batch=32))

    def _patches(self, patches: int, adapters: Lora | None) -> Block:
        width, image = self.width, 3 * self.side**2
        shapes: Shapes = (
            ("patches.conv", (width, 3, PATCH, PATCH)), ("patches.bias", (width,)),
            ("class", (1, 1, width)), ("positions", (1, patches + 1, width)),
        )  # fmt: skip
        trained, frozen = (shapes, ()) if adapters is None else ((), shapes)
        return Block(
            "patches", trained, 2.0 * patches * 3 * PATCH**2 * width, WRITTEN_AND_READ * 3.0 * (patches + 1) * width, 3,
            frozen=frozen,
            # The image is data, which has no gradient.
            backward_flops=0.0 if adapters else 2.0 * patches * 3 * PATCH**2 * width,
            activations=_activations(image, 0 if adapters else image, (patches + 1) * width),
        )  # fmt: skip

    def _head(self, tokens: int) -> Block:
        """Return the classifier, which is trained also where adapters are: it is of the new task."""
        width = self.width
        shapes: Shapes = (
            ("head.norm.weight", (width,)), ("head.norm.bias", (width,)),
            ("head.weight", (CLASSES, width)), ("head.bias", (CLASSES,)),
        )  # fmt: skip
        moved_bytes = WRITTEN_AND_READ * (tokens * width + float(CLASSES))
        kept = _activations(tokens * width, 2 * tokens * width + CLASSES, 2 * tokens * width)
        return Block("head", shapes, 2.0 * width * CLASSES, moved_bytes, 2, activations=kept)


class ViTBase(_VisionTransformer, frozen=True):
    """ViT-B/16 on ImageNet."""

    width = 768
    heads = 12


class ViTSmall(_VisionTransformer, frozen=True):
    """ViT-S/16 on ImageNet."""

    width = 384
    heads = 6
