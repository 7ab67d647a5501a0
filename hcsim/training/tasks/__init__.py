"""The tasks by name. A task's module, and torch with it, is imported when the task is requested.

A spec is a name and, for some, figures of its own: "llama-7b:tokens=512,lora=16".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, TypeAlias, cast

import msgspec
from msgspec import Meta

from hcsim.config.training import read_spec
from hcsim.registry import Registry
from hcsim.training.task import Task, TaskSpec
from hcsim.training.tasks.transformer import Gpt2, Llama1B, Llama7B, Llama8B, Qwen9B, Transformer
from hcsim.training.tasks.vision import ResNet18, ResNet50, ResNet101, ViTBase, ViTSmall

TaskFactory: TypeAlias = Callable[[], Task] | type[TaskSpec]
"""A function, or the figures that a spec of the name may have."""


def _digits() -> Task:
    """Images of handwritten digits, by a small convolutional network."""
    from hcsim.training.tasks.torch_task import digits

    return digits()


class _Text(TaskSpec, frozen=True):
    """The names of Unicode's characters, by a small transformer."""

    lora: Annotated[int, Meta(ge=0, le=64)] = 0
    """The rank of adapters; 0: all weights are trained."""
    matrices: str = "heads"
    """The matrices that get adapters."""
    base: str | None = None
    """A saved model of this task, with the weights that are frozen."""

    def task(self, name: str) -> Task:
        from hcsim.training.tasks.torch_task import text

        return text(name, self.lora, self.matrices, None if self.base is None else Path(self.base))


def _convex() -> Task:
    """Ridge regression: small, quick, and its optimum is known."""
    from hcsim.training.tasks.convex import Convex

    return Convex()


def _slopes() -> Task:
    """Gradients that do not depend on the model, to count what was learned."""
    from hcsim.training.tasks.convex import LinearTask

    return LinearTask()


TASKS: Registry[TaskFactory] = Registry(
    "task",
    {
        "digits": _digits,
        "text": _Text,
        "convex": _convex,
        "slopes": _slopes,
        "resnet18": ResNet18,
        "resnet50": ResNet50,
        "resnet101": ResNet101,
        "vit-s16": ViTSmall,
        "vit-b16": ViTBase,
        "gpt2": Gpt2,
        "llama-1b": Llama1B,
        "llama-7b": Llama7B,
        "llama-8b": Llama8B,
        "qwen3.5-9b": Qwen9B,
        "transformer": Transformer,
    },
)
"""Those from resnet18 on are shapes of large models: to simulate, not to train for real."""


def figures_of(spec: str) -> tuple[str, ...]:
    """Return the names of the figures that a task of this spec may have."""
    make = TASKS.get(spec.partition(":")[0])
    return make.__struct_fields__ if isinstance(make, type) and issubclass(make, TaskSpec) else ()


class _NoFigures(msgspec.Struct, frozen=True):
    pass


@cache
def task(spec: str) -> Task:
    """Return the task of that spec. Ranks of one process share it and its data."""
    name = spec.partition(":")[0]
    make = TASKS.named(name)
    if isinstance(make, type) and issubclass(make, TaskSpec):
        return read_spec(spec, {name: make}, "task").task(spec)
    if spec != name:
        read_spec(spec, {name: _NoFigures}, "task")
    return cast("Callable[[], Task]", make)()
