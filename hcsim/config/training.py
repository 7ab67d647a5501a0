"""The task and the method of a training: the `[training]` table, and the specs in it that name a thing and its
figures.

A spec ("topk:0.01", "diloco:16,lr=0.7", "int8:stochastic") is a name, and after a colon the values that differ from
the defaults: `field=value`, the bare value of the first field, or the bare name of a switch. The fields are those of
a struct, which checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from hcsim.config.table import Count, Table, in_words
from hcsim.errors import ConfigError
from hcsim.units import PositiveBytes, PositiveSeconds, did_you_mean

T = TypeVar("T", bound=msgspec.Struct)
Positive = Annotated[float, Meta(gt=0, le=1e9)]


Shared: TypeAlias = Annotated[str, Meta(pattern=r"^auto(:[1-9][0-9]{0,8})?\Z")]


class Training(Table, frozen=True):
    """A training run. Figures that are left out are those of the task."""

    task: str = "digits"
    strategy: str = "ddp"
    """A strategy and its arguments: "ddp", "local_sgd:8", "diloco:16", "parameter_server:async", …"""
    compressor: str = "none"
    """A compressor, its arguments, and "+ef" for error feedback: "topk:0.01+ef"."""
    algorithm: str = "auto"
    """Algorithm of the collectives."""
    steps: Count = 200
    batch: Count | Annotated[tuple[Count, ...], Meta(min_length=1)] | Shared | None = None
    """Samples per rank and step: one number for all ranks, or one for each rank. "auto": shares by speed, of as many
    as with the task's batch each; "auto:96": of 96."""
    lr: Positive | None = None
    momentum: Annotated[float, Meta(ge=0, lt=1)] | None = None
    optimizer: Literal["sgd", "adamw"] = "sgd"
    warmup: Annotated[int, Meta(ge=0)] = 0
    """Steps over which the learning rate rises to its full value."""
    scale_lr: bool = False
    """Multiply the learning rate by the number of ranks."""
    clip: Positive | None = None
    """Largest norm of an averaged gradient."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of weights, activations and gradients; the optimizer keeps float32 copies of bf16 weights."""
    recompute: bool = False
    """Keep only the inputs of blocks for the backward pass, and compute each block again there."""
    bucket_bytes: PositiveBytes = PositiveBytes(25 << 20)
    """Gradients are exchanged in buckets of about this size, while the backward pass goes on."""
    evaluate_every: Count = 20
    timeout_s: PositiveSeconds = PositiveSeconds(60)
    server: str | None = None
    """Address at which workers reach a parameter server, if not directly at its machine:
    "wss://ps.example.org/home"."""
    listen: str | None = None
    """Address on which it then listens, for the tunnel or proxy in front of it: "ws://127.0.0.1:8080"."""

    @property
    def shared_samples(self) -> int | None:
        """The samples of a step that are shared out; None: as many as with the task's batch each."""
        return int(self.batch.partition(":")[2] or 0) or None if isinstance(self.batch, str) else None


def read_spec(text: str, kinds: Mapping[str, type[T]], what: str) -> T:
    """Return the struct that the text describes; `what` is the noun for such specs in errors."""
    name, colon, rest = text.partition(":")
    if name not in kinds:
        raise ConfigError(f'there is no {what} "{name}"{did_you_mean(name, kinds)}; known: {", ".join(kinds)}')
    kind = kinds[name]
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    given: dict[str, str | bool] = {}
    for number, part in enumerate(rest.split(",") if colon else ()):
        key, equals, value = part.partition("=")
        if not equals and fields.get(key) is bool:
            given[key] = True
        elif part and not equals and number == 0 and fields:
            given[next(iter(fields))] = key
        elif equals and key in fields:
            given[key] = value
        else:
            raise ConfigError(f'{what} "{text}": "{part}" cannot be used; {_usage(name, kind)}')
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        where = place.strip(".`") or name
        raise ConfigError(f'{what} "{text}": {where}: {in_words(problem)}; {_usage(name, kind)}') from None


def _usage(name: str, kind: type[msgspec.Struct]) -> str:
    known = [
        f.name if f.type is bool else f"{f.name}={'…' if f.default in (msgspec.NODEFAULT, None) else f.default}"
        for f in msgspec.structs.fields(kind)
    ]
    return f'"{name}" knows {", ".join(known)}' if known else f'"{name}" has nothing to set'
