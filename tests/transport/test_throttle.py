"""The throttle: failures cost time, twice as much each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcsim.transport import admission_queue
from hcsim.transport.admission_queue import FailureBackoff


def guesses_within(seconds: float) -> int:
    """How many wrong guesses a source can make that tries again at once whenever it may."""
    doors, now_s, count = FailureBackoff(), 0.0, 0
    while now_s < seconds:
        doors.failed("stranger", now_s)
        count += 1
        now_s += doors.wait_s("stranger", now_s)
    return count


def test_a_day_of_guessing_is_not_even_two_thousand_guesses() -> None:
    first = admission_queue.FREE_FAILURES + 7  # 0.5 + 1 + … + 32 s, then a minute each
    assert guesses_within(86_400.0) <= first + 86_400 / admission_queue.LONGEST_WAIT_S + 1 < 2000


def test_the_wait_doubles_up_to_a_minute() -> None:
    doors = FailureBackoff()
    waits = []
    for _ in range(15):
        doors.failed("stranger", 0.0)
        waits.append(doors.wait_s("stranger", 0.0))
    assert waits == [0.0] * 5 + [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_success_and_time_forgive() -> None:
    doors = FailureBackoff()
    for _ in range(20):
        doors.failed("stranger", 0.0)
    assert doors.wait_s("another", 0.0) == 0.0
    assert doors.wait_s("stranger", 59.0) == 1.0
    assert doors.wait_s("stranger", admission_queue.FORGIVEN_AFTER_S + 1) == 0.0
    doors.succeeded("stranger")
    assert doors.wait_s("stranger", 0.0) == 0.0


@given(st.lists(st.integers(0, 30), max_size=50), st.integers(0, 20))
def test_many_addresses_do_not_fill_the_memory(again: list[int], many: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission_queue, "MAX_SOURCES", 10)
        doors = FailureBackoff()
        for address in [*range(many), *again]:
            for _ in range(admission_queue.FREE_FAILURES + 1):
                doors.failed(str(address), 0.0)
    last = dict.fromkeys(reversed([*range(many), *again]))
    assert [address for address in last if doors.wait_s(str(address), 0.0)] == [*last][:10]
