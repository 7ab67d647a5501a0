"""What encoding and decoding cost, in the one currency that carries over to other machines: memory traffic.

A factor is how many bytes a plain copy would have moved in the same time, for each byte of input: a copy itself
reads and writes each byte and has the factor 2. Measured in one thread on 25 million normally distributed
floats (Neoverse-N1, copying at 15 GB/s) by

    python -m experiments.compressors

(random-k when it still read all of the tensor, as it does with error feedback and in a sum, which is how it trains).
Top-k and random-k at 1 %, PowerSGD at rank 4, zstd at level 1; other settings are taken to cost the same.
"""

from __future__ import annotations

from typing import NamedTuple


class Factors(NamedTuple):
    """Bytes moved for each byte of the tensor."""

    encode: float
    decode: float


WORK = {
    "none": Factors(2.0, 2.0),
    "topk": Factors(8.2, 1.1),
    "randomk": Factors(2.3, 2.2),
    "fp16": Factors(7.1, 6.5),
    "bf16": Factors(3.1, 2.2),
    "int8": Factors(3.5, 2.5),
    "int8:block": Factors(3.7, 2.6),
    "int8:stochastic": Factors(21.2, 2.5),
    "onebit": Factors(4.8, 1.2),
    "powersgd": Factors(6.9, 3.5),
    "zstd": Factors(57.3, 20.9),
}
COMPENSATE = 3.0
"""Of adding a residual to a tensor: two arrays are read and one is written."""
