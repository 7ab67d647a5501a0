"""Errors name machines, and first the one that was lost."""

from __future__ import annotations

import pytest

from hcsim.collectives.failure_domain import TOLD
from hcsim.collectives.naming import naming, with_names
from hcsim.errors import ChannelBroken, CollectiveError, CollectiveTimeout, HcsimError

NAMES = ("studio", "laptop", "m4-mini")


def failed(text: str, cause: HcsimError | None = None, phase: str = "receiving") -> CollectiveError:
    error = CollectiveError(text, peer=2, phase=phase)
    error.__cause__ = cause
    return error


def test_a_machine_whose_connection_broke_comes_first_by_its_name() -> None:
    broken = failed("all_to_all #2940 failed while receiving from rank 2 in round 0: over", ChannelBroken("x"))
    told = naming(broken, NAMES)
    assert str(told) == (
        "m4-mini (rank 2) was lost: all_to_all #2940 failed while receiving from m4-mini (rank 2) in round 0: over"
    )
    assert (type(told), told.peer, told.phase) == (CollectiveError, 2, "receiving")


@pytest.mark.parametrize(
    "error",
    [failed("rank 2 gave up"), failed("rank 2 gave up", ChannelBroken("x"), TOLD), CollectiveTimeout("rank 2", peer=2)],
)
def test_one_that_only_told_of_it_or_is_late_was_not_lost(error: CollectiveError) -> None:
    assert str(naming(error, NAMES)).startswith("m4-mini (rank 2)")
    assert "was lost" not in str(naming(error, NAMES))


def test_ranks_with_a_name_and_ranks_without_one_stay_as_they_are() -> None:
    for text in ("rank 2 (c) was lost", "c (rank 2) was lost", "rank 7 gave up", "ranks 1 and 2"):
        assert with_names(text, NAMES) == text
    assert with_names("rank 0 waits for rank 1", NAMES) == "studio (rank 0) waits for laptop (rank 1)"
