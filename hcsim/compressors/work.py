"""What encoding and decoding cost, in the one currency that carries over to other machines: memory traffic.

A factor is how many bytes a plain copy would have moved in the same time, for each byte of input: a copy itself
reads and writes each byte and has the factor 2. Measured in one thread on 25 million normally distributed
floats (Neoverse-N1, copying at 15 GB/s) by

    python -m experiments.compressors

Top-k and random-k at 1 %, PowerSGD at rank 4, zstd at level 1; other settings are taken to cost the same. fp16 has
bf16's factors: torch converts to fp16 in software on this processor (55 and 17), a Mac's does it in hardware.
"""

from __future__ import annotations

from typing import NamedTuple


class Factors(NamedTuple):
    """Bytes moved for each byte of the tensor."""

    encode: float
    decode: float


WORK = {
    "none": Factors(3.7, 3.8),
    "topk": Factors(11.3, 2.6),
    "randomk": Factors(5.1, 4.6),
    "fp16": Factors(6.5, 4.9),
    "bf16": Factors(6.5, 4.9),
    "int8": Factors(9.4, 3.9),
    "int8:block": Factors(13.5, 6.5),
    "int8:stochastic": Factors(31.0, 3.9),
    "onebit": Factors(8.0, 2.1),
    "powersgd": Factors(12.8, 6.6),
    "zstd": Factors(83.6, 78.4),
}
COMPENSATE = 3.0
"""Of adding a residual to a tensor: two arrays are read and one is written."""
