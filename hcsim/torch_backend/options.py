"""The backend's name in torch, and the options of a process group."""

from __future__ import annotations

import msgspec

NAME = "hcsim"
DEVICES = ["cpu", "cuda", "mps"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a process group, the same on all ranks: `init_process_group("hcsim",
    pg_options=Options(...))`."""

    compression: str = ""
    """Compression of floats in an all_reduce that is a sum or a mean: "int8", "bf16", "topk:0.01". Empty: none.
    float64 tensors are never compressed, since no compressor supports them.

    Compressors with state ("+ef", "powersgd:4") are not supported here: see `hcsim.torch_backend.hooks`."""
    least_bytes: int = 1 << 16
    """Smaller tensors are not compressed."""
    seed: int = 0
