"""Transformers of any size, by their shapes alone: "transformer:3e8" has about 300 million parameters.

A layer has 12 d² parameters (attention 4 d², feed-forward 8 d²). The width d is 128 times the number of layers, as in
models that are in use, except that small ones have at least four layers. Embeddings are left out: they hold
parameters and cost no arithmetic.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from hcsim.config.training import read_spec
from hcsim.training.task import Block, Defaults
from hcsim.training.tasks.shapes import PhantomTask

NAME = "transformer"
ASPECT = 128
"""The width over the number of layers."""
WRITTEN_PER_TOKEN = 18
"""Activations of a layer, in widths: norms, products, the activation, and sums."""


class Transformer(Struct, frozen=True):
    """What the text after the colon says."""

    parameters: Annotated[float, Meta(ge=1e5, le=1e12)]
    tokens: Annotated[int, Meta(ge=1)] = 2048
    """Of one text, which is one sample."""


@cache
def transformer(spec: str) -> PhantomTask:
    """The task of that name."""
    asked = read_spec(spec, {NAME: Transformer}, "task")
    layers = max(4, round((asked.parameters / (12 * ASPECT**2)) ** (1 / 3)))
    width = round((asked.parameters / (12 * layers)) ** 0.5)
    block = Block(
        "",
        (("attention", (4 * width, width)), ("feed_forward", (8 * width, width))),
        asked.tokens * (2.0 * 12 * width**2 + 4.0 * asked.tokens * width),
        8.0 * asked.tokens * WRITTEN_PER_TOKEN * width,
    )
    blocks = tuple(_named(block, f"layer{number}") for number in range(layers))
    return PhantomTask(spec, blocks, 1_000_000, Defaults(lr=0.1, momentum=0.9, batch=1))


def _named(block: Block, name: str) -> Block:
    return replace(block, name=name, shapes=tuple((f"{name}.{tensor}", shape) for tensor, shape in block.shapes))
