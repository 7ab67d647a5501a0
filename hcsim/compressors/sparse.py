"""What the compressors that send a few elements share: how many, and where they go."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from hcsim.compressors import kernels
from hcsim.compressors.base import Array
from hcsim.compressors.codec import Mix


def count_of(ratio: Fraction, elements: int) -> int:
    """k = max(1, ⌈ratio · n⌉): something of every tensor that has anything. The ratio is exact, as it was written."""
    rounded_up = -(-elements * ratio.numerator // ratio.denominator)  # a product of fractions takes four times as long
    return min(elements, max(1, rounded_up))


def scatter(flat: Array, indices: npt.NDArray[np.integer], values: Array, mix: Mix) -> None:
    """Bring values to their places."""
    if mix is None:
        kernels.scatter(indices.astype(np.int64, copy=False), values, flat)
    else:
        flat[indices] = mix(flat[indices], values)
