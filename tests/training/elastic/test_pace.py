"""When steps that do not fail count as failed: they take much longer than usual, for too long."""

from __future__ import annotations

import pytest

from hcsim.training.elastic.recovery import Pace, SlowSteps

PATIENCE_S = 10.0


def pace_of(step_s: float, steps: int = 8) -> tuple[Pace, int, float]:
    """One that has seen steps of that length; also how many, and the time."""
    pace, now = Pace(PATIENCE_S), 0.0
    pace.began()
    for step in range(steps):
        pace.settled(step, now := now + step_s)
    return pace, steps, now


def go_on(pace: Pace, step: int, now: float, step_s: float, steps: int) -> tuple[int, float]:
    for _ in range(steps):
        pace.settled(step, now := now + step_s)
        step += 1
    return step, now


def test_steps_that_stay_slow_fail() -> None:
    pace, step, now = pace_of(0.1)
    with pytest.raises(SlowSteps, match=r"a step has taken 1 s instead of 0\.1 s"):
        go_on(pace, step, now, 1.0, 11)
    assert pace.slow_s >= PATIENCE_S


def test_a_few_slow_steps_are_nothing() -> None:
    pace, step, now = pace_of(0.1)
    for _ in range(20):
        step, now = go_on(pace, step, now, 2.0, 4)
        step, now = go_on(pace, step, now, 0.1, 1)


def test_steps_that_become_somewhat_slower_are_nothing() -> None:
    pace, step, now = pace_of(0.1)
    go_on(pace, step, now, 0.35, 200)


def test_steps_that_were_always_slow_are_usual() -> None:
    pace, step, now = pace_of(5.0)
    go_on(pace, step, now, 5.0, 100)


def test_what_failed_once_is_usual_afterwards() -> None:
    pace, step, now = pace_of(0.1)
    with pytest.raises(SlowSteps):
        go_on(pace, step, now, 1.0, 20)
    pace.began()
    go_on(pace, 100, 100.0, 1.0, 100)


def test_the_time_between_two_views_is_no_step() -> None:
    pace, step, now = pace_of(0.1)
    for _ in range(20):
        pace.began()
        now += 100.0
        step, now = go_on(pace, step, now, 0.1, 2)


def test_time_is_counted_for_each_step_of_a_period() -> None:
    """A strategy that exchanges every 50 steps settles 50 at once."""
    pace, now = Pace(PATIENCE_S), 0.0
    pace.began()
    for period in range(8):
        pace.settled(50 * period, now := now + 5.0)
    pace.settled(400, now := now + 5.0)
    pace.settled(401, now + 0.1)  # what is left at the end
    assert pace.slow_s == 0.0


def test_one_long_step_is_nothing() -> None:
    pace, step, now = pace_of(0.1)
    step, now = go_on(pace, step, now, 90.0, 1)
    go_on(pace, step, now, 0.1, 1)
