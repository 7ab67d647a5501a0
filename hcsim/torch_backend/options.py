"""What torch calls the backend, and what a program may say of a process group that it makes."""

from __future__ import annotations

import msgspec

NAME = "hcsim"
DEVICES = ["cpu", "cuda", "mps"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`init_process_group("hcsim", pg_options=Options(...))`, the same on all ranks."""

    compression: str = ""
    """How sums and means of floats travel in all_reduce: "int8", "bf16", "topk:0.01"; empty: as they are, and so do
    float64s, which no compressor can hold.

    Not one that remembers tensors from step to step ("+ef", "powersgd:4"): see `hcsim.torch_backend.hooks`."""
    least_bytes: int = 1 << 16
    """Smaller tensors travel as they are."""
    seed: int = 0
    """Of what a compressor draws at random."""
