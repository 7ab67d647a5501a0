"""The table of an operation's states."""

from __future__ import annotations

import pytest

from hcsim.collectives import operation
from hcsim.collectives.operation import DONE, FAILED, NEXT, QUEUED, RUNNING, OperationState


def test_every_operation_can_come_to_a_good_and_to_a_bad_end() -> None:
    for state, following in NEXT.items():
        if state in (DONE, FAILED):
            assert following == ()
        else:
            assert FAILED in following
            assert DONE in reachable(state)


def test_all_states_follow_from_the_first_and_only_one_that_runs_is_done() -> None:
    assert {QUEUED, *reachable(QUEUED)} == {*NEXT}
    assert [state for state, following in NEXT.items() if DONE in following] == [RUNNING]


@pytest.mark.parametrize("state", NEXT)
def test_the_text_at_the_top_of_the_file_names_every_state(state: OperationState) -> None:
    assert operation.__doc__ is not None
    (line,) = [line for line in operation.__doc__.splitlines() if line.strip().startswith(state.upper())]
    named = [other for other in NEXT if other.upper() in line.split(state.upper(), 1)[1]]
    assert named == [other for other in NEXT if other in NEXT[state] and other != FAILED]


def reachable(state: OperationState) -> list[OperationState]:
    found: list[OperationState] = []
    ahead = list(NEXT[state])
    while ahead:
        following = ahead.pop()
        if following not in found:
            found.append(following)
            ahead += NEXT[following]
    return found
