"""The backend does what gloo does, and docs/reference/torch.md says so."""

from __future__ import annotations

import pytest

from tests.torch_backend.matrix import BACKENDS, Found, find, shown, table
from tests.torch_backend.ranks import Ranks

REFUSED_BY_TORCH = {("`monitored_barrier`", "of torch.distributed")}
"""torch asks for gloo by its name."""


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> dict[str, Found]:
    return {backend: find(ranks, backend) for backend in BACKENDS}


@pytest.mark.slow
def test_what_works_with_gloo_works_with_hcsim(found: dict[str, Found]) -> None:
    worse = {probe: text for probe, text in found["hcsim"].items() if text and not found["gloo"][probe]}
    assert set(worse) <= REFUSED_BY_TORCH, worse


@pytest.mark.slow
def test_the_readme_has_the_table(found: dict[str, Found]) -> None:
    assert shown() == table(found), "python -m tests.torch_backend.matrix writes the table into docs/reference/torch.md"


@pytest.mark.slow
def test_three_ranks_can_do_what_four_can(ranks: Ranks, found: dict[str, Found]) -> None:
    of_three = find(ranks, "hcsim", size=3)
    assert {probe: text for probe, text in of_three.items() if text and not found["hcsim"][probe]} == {}
