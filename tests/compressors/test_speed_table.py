"""The table of speeds can be made, and its plain expressions do what the compressors do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.compressors import CASES, is_finite, rows
from hcsim.compressors.codec import WORK


def test_every_compressor_is_measured():
    measured = list(rows(list(CASES), 1 << 16, 1))
    assert [row["compressor"] for row in measured] == list(CASES)
    assert all(value > 0 for row in measured for value in row.values() if not isinstance(value, str))
    assert len(WORK) == len(CASES)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 3001, 65535])
def test_the_plain_look_for_what_is_not_finite_finds_it_and_nothing_else(value, at):
    for x in (torch.zeros(65536), torch.full((65536,), 3e38)):  # of which the sum is too large for a float
        assert is_finite(x)
        x[at] = value
        assert not is_finite(x)


@pytest.mark.parametrize("spec", CASES)
def test_a_plain_expression_decodes_to_something_like_its_input(spec):
    x = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    out = np.zeros_like(x)
    plain = CASES[spec](x, out)
    plain.encode()
    plain.decode()
    if spec != "randomk:0.01":  # draws other places when decoding
        assert (out * x).sum() > 0.02 * (x * x).sum()
