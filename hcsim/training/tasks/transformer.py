"""Decoder transformers by their shapes: published ones, and those of any size ("transformer:3e8").

A transformer of P parameters has them in its layers, 12 d² in each of width d (attention 4 d², feed-forward 8 d²), and
is 128 times as wide as deep, as models in use are; small ones have at least four layers:

    layers = max(4, (P / (12 · 128²))^(1/3))        width = (P / (12 · layers))^(1/2)

The published ones are GPT-2 (Radford et al. 2019), Llama 2 (https://arxiv.org/abs/2307.09288) and Llama 3
(https://arxiv.org/abs/2407.21783).

Without a vocabulary there is neither an embedding nor a head. With one, their matrix is shared.

LoRA (Hu et al., https://arxiv.org/abs/2106.09685) trains a product of two thin matrices beside a frozen one, r × inputs
and outputs × r, so that r (inputs + outputs) parameters are trained and exchanged. The backward pass has no gradients
of frozen weights: for these it takes as many FLOPs as the forward pass, instead of twice as many. It goes down to the
lowest adapters: the first layer's matrices pass nothing on to the embedding.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import msgspec
from msgspec import Meta

from hcsim.config.table import Count
from hcsim.errors import ConfigError
from hcsim.training.layout import FLOAT_BYTES
from hcsim.training.task import Activations, Block, Defaults, Shapes, TaskSpec
from hcsim.training.tasks.shapes import WRITTEN_AND_READ, PhantomTask
from hcsim.units import did_you_mean

Matrix: TypeAlias = Literal["query", "key", "value", "output", "gate", "up", "down"]
ASPECT = 128
"""The width over the number of layers."""
HEAD_WIDTH = 64
FEWEST_LAYERS = 4
TEXTS = 1_000_000


class Lora(NamedTuple):
    """Adapters of one rank."""

    rank: int
    matrices: tuple[str, ...]


class _Product(NamedTuple):
    """A matrix of a layer."""

    name: Matrix
    outputs: int
    inputs: int

    @property
    def size(self) -> int:
        return self.outputs * self.inputs


class Architecture(msgspec.Struct, frozen=True):
    """A transformer's figures; 0: as is usual."""

    depth: int
    width: int
    vocabulary: int
    heads: int = 0
    kv_heads: int = 0
    """Fewer than heads, if several share keys and values."""
    hidden: int = 0
    """The width of the feed-forward network: 4 × width; 8/3 × width if gated, which is as many parameters."""
    positions: int = 0
    """Rows of the table of positions, for a model that has one."""
    gated: bool = False
    """Llama's variant: a gated feed-forward, RMS norms, rotary positions, no biases. Otherwise GPT-2's."""
    tied: bool = True
    """Whether the output matrix is that of the embedding."""

    @property
    def head_count(self) -> int:
        return self.heads or max(1, round(self.width / HEAD_WIDTH))

    @property
    def kv_width(self) -> int:
        return self.width * (self.kv_heads or self.head_count) // self.head_count

    @property
    def inner(self) -> int:
        return self.hidden or (round(8 * self.width / 3) if self.gated else 4 * self.width)

    def products(self) -> Iterator[_Product]:
        """Yield the matrices of a layer."""
        yield _Product("query", self.width, self.width)
        yield _Product("key", self.kv_width, self.width)
        yield _Product("value", self.kv_width, self.width)
        yield _Product("output", self.width, self.width)
        if self.gated:
            yield _Product("gate", self.inner, self.width)
        yield _Product("up", self.inner, self.width)
        yield _Product("down", self.width, self.inner)

    def blocks(self, tokens: int, adapters: Lora | None = None) -> tuple[Block, ...]:
        """Return the embedding, the layers, the head. A tied matrix belongs to the embedding: its gradient is ready
        last."""
        layers = self.layers(tokens, adapters)
        if not self.vocabulary:
            return layers
        return (self._embedding(tokens, adapters), *layers, self._head(tokens, adapters))

    def layers(self, tokens: int, adapters: Lora | None = None) -> tuple[Block, ...]:
        return tuple(
            _Layer(self, f"layer{number}", tokens, adapters, number == 0).block() for number in range(self.depth)
        )

    def norm(self, name: str) -> Shapes:
        weight = (f"{name}.weight", (self.width,))
        return (weight,) if self.gated else (weight, (f"{name}.bias", (self.width,)))

    def _embedding(self, tokens: int, adapters: Lora | None) -> Block:
        tables: Shapes = (("embedding.tokens", (self.vocabulary, self.width)),)
        if self.positions:
            tables += (("embedding.positions", (self.positions, self.width)),)
        trained, frozen = (tables, ()) if adapters is None else ((), tables)
        return Block(
            "embedding", trained, 0.0, _moved(tokens, self.width),
            frozen=frozen,
            backward_flops=None if adapters is None else 0.0,
            activations=_activations(tokens, 0, 0, self.width),
        )  # fmt: skip

    def _head(self, tokens: int, adapters: Lora | None) -> Block:
        shapes = self.norm("head.norm")
        if not self.tied:
            shapes += (("head.weight", (self.vocabulary, self.width)),)
        flops = 2.0 * tokens * self.vocabulary * self.width
        trained, frozen = (shapes, ()) if adapters is None else ((), shapes)
        kept = (1 if adapters else 2) * self.width + self.vocabulary
        return Block(
            "head", trained, flops, _moved(tokens, self.width + self.vocabulary),
            frozen=frozen,
            backward_flops=None if adapters is None else flops,
            # The loss keeps the logarithms of its probabilities, and has two gradients of that size.
            activations=_activations(tokens, self.width, kept, 2 * self.vocabulary),
        )  # fmt: skip


class _Layer(msgspec.Struct, frozen=True):
    """One layer with its tokens, and its adapters if it has some."""

    of: Architecture
    name: str
    tokens: int
    adapters: Lora | None
    lowest: bool
    """Whether nothing below it is trained if it has adapters."""

    def block(self) -> Block:
        of, products = self.of, list(self.of.products())
        own: Shapes = (*of.norm(f"{self.name}.norm1"), *of.norm(f"{self.name}.norm2"))
        for matrix in products:
            own += ((f"{self.name}.{matrix.name}.weight", (matrix.outputs, matrix.inputs)),)
            if not of.gated:
                own += ((f"{self.name}.{matrix.name}.bias", (matrix.outputs,)),)
        attention = 2 * (2.0 * self.tokens**2 * of.width)
        flops = 2.0 * self.tokens * sum(matrix.size for matrix in products) + attention
        # Both norms and both residual sums, every product's result, attention's, and the activation's (and gate's).
        written = 5 * of.width + sum(matrix.outputs for matrix in products) + (2 if of.gated else 1) * of.inner
        others = 6 + (2 if of.gated else 1)  # norms, sums, attention, positions; the activation and its gate
        kernels = len(products) + others
        if self.adapters is None:
            moved_bytes = _moved(self.tokens, written)
            return Block(self.name, own, flops, moved_bytes, kernels, activations=self._activations())
        thin = self._thin(products, self.adapters.rank)
        products_flops = 2.0 * self.tokens * sum(prod(shape) for _, shape in thin)
        adapted = [matrix for matrix in products if matrix.name in self.adapters.matrices]
        # Each adapter writes its inner and its outer result, and their sum.
        written += sum(self.adapters.rank + 2 * matrix.outputs for matrix in adapted)
        return Block(
            self.name, thin, flops + products_flops, _moved(self.tokens, written), kernels + 3 * len(adapted),
            frozen=own,
            backward_flops=flops + attention + 2 * products_flops - self._saved(products, self.adapters),
            activations=self._activations(),
        )  # fmt: skip

    def _thin(self, products: list[_Product], rank: int) -> Shapes:
        assert self.adapters is not None
        shapes: Shapes = ()
        for matrix in products:
            if matrix.name in self.adapters.matrices:
                name = f"{self.name}.{matrix.name}"
                shapes += ((f"{name}.lora_a", (rank, matrix.inputs)), (f"{name}.lora_b", (matrix.outputs, rank)))
        return shapes

    def _saved(self, products: list[_Product], adapters: Lora) -> float:
        """Return the FLOPs of gradients that nothing below the lowest layer asks for: those of the inputs of its
        first matrices, of attention if none of these has an adapter, and so on."""
        if not self.lowest:
            return 0.0
        of, flops = self.of, 0.0
        stages = (("query", "key", "value"), ("output",), ("gate", "up"), ("down",))
        for stage in stages:
            mine = [matrix for matrix in products if matrix.name in stage]
            adapted = [matrix for matrix in mine if matrix.name in adapters.matrices]
            flops += 2.0 * self.tokens * sum(matrix.size for matrix in mine)
            flops += 2.0 * self.tokens * sum(adapters.rank * matrix.inputs for matrix in adapted)
            if adapted:
                break
            if stage[0] == "query":
                flops += 2 * 2 * (2.0 * self.tokens**2 * of.width)
        return flops

    def _activations(self) -> Activations:
        """Return what is kept. A product keeps its input for the gradient of its weight, if that is trained."""
        of, width, inner = self.of, self.of.width, self.of.inner
        trained = get_args(Matrix) if self.adapters is None else self.adapters.matrices

        def needed(*names: str) -> bool:
            return any(name in trained for name in names)

        # The inputs of both norms; attention takes a query, a key and a value, and returns as much as the query.
        kept = 2 * width + 2 * width + 2 * of.kv_width
        kept += width * (needed("query", "key", "value") + needed("up", "gate"))
        if of.gated:
            kept += 3 * inner  # what the activation takes, and the two factors
        else:
            kept += inner
        kept += inner * needed("down")
        if self.adapters is not None:
            kept += self.adapters.rank * len(self.adapters.matrices)
        statistics = of.head_count + (2 if of.gated else 4)
        working = width + (2 if of.gated else 1) * inner
        return _activations(self.tokens, width, kept + statistics, working)


def _moved(tokens: int, written: int) -> float:
    """Return the bytes moved for `written` elements of each token."""
    return float(WRITTEN_AND_READ * tokens * written)


def _activations(tokens: int, entering: int, kept: int, working: int) -> Activations:
    """Return what so many elements of each token occupy."""
    return Activations(*(float(FLOAT_BYTES * tokens * elements) for elements in (entering, kept, working)))


def adapters_of(name: str, rank: int, matrices: str, of: Architecture) -> Lora | None:
    """Return the adapters that a spec asks for; None without a rank. `name` is the spec, for errors."""
    if not rank:
        return None
    known = [matrix.name for matrix in of.products()]
    if matrices == "all":
        return Lora(rank, tuple(known))
    chosen = tuple(matrices.split("+"))
    for each in chosen:
        if each not in known:
            hint = did_you_mean(each, known)
            raise ConfigError(
                f'task "{name}": there is no matrix "{each}"{hint}; known: {", ".join(known)}; several are joined '
                'by "+", and "all" are all of them'
            )
    return Lora(rank, chosen)


# The names.


class _Decoder(TaskSpec, frozen=True):
    tokens: Count = 2048
    """Of one text, which is one sample."""
    lora: Annotated[int, Meta(ge=0)] = 0
    """The rank of adapters; 0: all weights are trained."""
    matrices: str = "query+value"
    """The matrices that get adapters."""
    architecture: ClassVar[Architecture]
    batch: ClassVar[int] = 1

    def task(self, name: str) -> PhantomTask:
        return _task(name, self.architecture, self, self.batch)


class Gpt2(_Decoder, frozen=True):
    """GPT-2 of 124 million parameters."""

    tokens: Count = 1024
    architecture = Architecture(12, 768, 50257, positions=1024)
    batch = 8


class Llama1B(_Decoder, frozen=True):
    """Llama 3.2 1B."""

    architecture = Architecture(16, 2048, 128256, heads=32, kv_heads=8, hidden=8192, gated=True)


class Llama7B(_Decoder, frozen=True):
    """Llama 2 7B."""

    architecture = Architecture(32, 4096, 32000, heads=32, hidden=11008, gated=True, tied=False)


class Llama8B(_Decoder, frozen=True):
    """Llama 3.1 8B."""

    architecture = Architecture(32, 4096, 128256, heads=32, kv_heads=8, hidden=14336, gated=True, tied=False)


class Transformer(TaskSpec, frozen=True):
    """A transformer of any size, by its parameters, or by its layers and their width."""

    parameters: Annotated[float, Meta(ge=1e5, le=1e12)] | None = None
    """Of its layers."""
    tokens: Count = 2048
    layers: Count | None = None
    width: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    hidden: Count | None = None
    vocabulary: Annotated[int, Meta(ge=0)] = 0
    gated: bool = False
    lora: Annotated[int, Meta(ge=0)] = 0
    matrices: str = "query+value"

    def task(self, name: str) -> PhantomTask:
        layers, width = self._size(name)
        figures = self.heads or 0, self.kv_heads or 0, self.hidden or 0
        positions = 0 if self.gated or not self.vocabulary else self.tokens
        architecture = Architecture(layers, width, self.vocabulary, *figures, positions, self.gated)
        heads, kv_heads = self.heads or 1, self.kv_heads or self.heads or 1
        if self.kv_heads and not self.heads:
            raise ConfigError(f'task "{name}": kv_heads = {kv_heads}: give heads too')
        if width % heads or heads % kv_heads:
            raise ConfigError(f'task "{name}": {width} wide heads × {heads}, {kv_heads} of keys: these do not divide')
        return _task(name, architecture, self, 1)

    def _size(self, name: str) -> tuple[int, int]:
        """Return the layers and the width."""
        size, layers, width = self.parameters, self.layers, self.width
        if size is None:
            if layers is None or width is None:
                raise ConfigError(f'task "{name}": give parameters (transformer:1e8), or layers and width')
            return layers, width
        if layers is not None and width is not None:
            raise ConfigError(f'task "{name}": layers and width say how many parameters there are: leave those out')
        if self.hidden is not None or self.kv_heads is not None:
            raise ConfigError(f'task "{name}": with hidden or kv_heads, give layers and width instead of parameters')
        if width is not None:
            return max(1, round(size / (12 * width**2))), width
        depth = layers or max(FEWEST_LAYERS, round((size / (12 * ASPECT**2)) ** (1 / 3)))
        heads = self.heads or 1
        return depth, max(1, round((size / (12 * depth)) ** 0.5 / heads)) * heads


def _task(name: str, of: Architecture, spec: _Decoder | Transformer, batch: int) -> PhantomTask:
    if of.positions and spec.tokens > of.positions:
        raise ConfigError(f'task "{name}": tokens = {spec.tokens}: this model knows {of.positions} positions')
    blocks = of.blocks(spec.tokens, adapters_of(name, spec.lora, spec.matrices, of))
    tied = (0,) if of.vocabulary and of.tied and not spec.lora else ()
    return PhantomTask(name, blocks, TEXTS, Defaults(lr=0.1, momentum=0.9, batch=batch), tied)
