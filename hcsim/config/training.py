"""What a cluster learns, and how: the `[training]` table."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from hcsim.config.table import Count, Table
from hcsim.units import PositiveBytes, PositiveSeconds

Positive = Annotated[float, Meta(gt=0, le=1e9)]


class Training(Table, frozen=True):
    """A training run. Where a figure is left out, the task's own is used."""

    task: str = "digits"
    strategy: str = "ddp"
    """A name and its figure: "ddp", "local_sgd:8", "diloco:16", "parameter_server:async", …"""
    compressor: str = "none"
    """A name, its figure, and "+ef" for error feedback: "topk:0.01+ef"."""
    algorithm: str = "auto"
    """Of the collectives."""
    steps: Count = 200
    batch: Count | Annotated[tuple[Count, ...], Meta(min_length=1)] | None = None
    """Samples per rank and step: one figure for all, or one for each rank."""
    lr: Positive | None = None
    momentum: Annotated[float, Meta(ge=0, lt=1)] | None = None
    optimizer: Literal["sgd", "adamw"] = "sgd"
    warmup: Annotated[int, Meta(ge=0)] = 0
    """Steps over which the learning rate rises to its full value."""
    scale_lr: bool = False
    """Multiply the learning rate by the number of ranks."""
    clip: Positive | None = None
    """Largest norm of an averaged gradient."""
    bucket_bytes: PositiveBytes = PositiveBytes(25 << 20)
    """Gradients are exchanged in buckets of about this size, while the backward pass goes on."""
    evaluate_every: Count = 20
    timeout_s: PositiveSeconds = PositiveSeconds(60)
    server: str | None = None
    """Where workers reach a parameter server, if not straight at its machine: "wss://ps.example.org/home"."""
    listen: str | None = None
    """Where it then listens, for the tunnel or proxy that stands before it: "ws://127.0.0.1:8080"."""
