"""The table of speeds can be made, and its plain expressions do what the compressors do."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.compressors import CASES, rows
from hcsim.compressors.work import WORK


def test_every_compressor_is_measured():
    measured = list(rows(list(CASES), 1 << 16, 1))
    assert [row["compressor"] for row in measured] == list(CASES)
    assert all(value > 0 for row in measured for value in row.values() if not isinstance(value, str))
    assert len(WORK) == len(CASES)


@pytest.mark.parametrize("spec", CASES)
def test_a_plain_expression_decodes_to_something_like_its_input(spec):
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    out = np.zeros_like(x)
    plain = CASES[spec](x, out)
    plain.encode()
    plain.decode()
    if spec != "randomk:0.01":  # draws other places when decoding
        assert (out * x).sum() > 0.02 * (x * x).sum()
