"""When steps that do not fail count as failed: they take much longer than usual, for too long."""

from __future__ import annotations

import pytest

from hcsim.training.elastic.recovery import SlowSteps, StepTimer

PATIENCE_S = 10.0


def timer_of(step_s: float, steps: int = 8) -> tuple[StepTimer, int, float]:
    """One that has seen steps of that length; also how many, and the time."""
    timer, now = StepTimer(PATIENCE_S), 0.0
    timer.began()
    for step in range(steps):
        timer.settled(step, now := now + step_s)
    return timer, steps, now


def go_on(timer: StepTimer, step: int, now: float, step_s: float, steps: int) -> tuple[int, float]:
    for _ in range(steps):
        timer.settled(step, now := now + step_s)
        step += 1
    return step, now


def test_steps_that_stay_slow_fail() -> None:
    timer, step, now = timer_of(0.1)
    with pytest.raises(SlowSteps, match=r"a step has taken 1 s instead of 0\.1 s"):
        go_on(timer, step, now, 1.0, 11)
    assert timer.slow_s >= PATIENCE_S


def test_a_few_slow_steps_are_nothing() -> None:
    timer, step, now = timer_of(0.1)
    for _ in range(20):
        step, now = go_on(timer, step, now, 2.0, 4)
        step, now = go_on(timer, step, now, 0.1, 1)


def test_steps_that_become_somewhat_slower_are_nothing() -> None:
    timer, step, now = timer_of(0.1)
    go_on(timer, step, now, 0.35, 200)


def test_steps_that_were_always_slow_are_usual() -> None:
    timer, step, now = timer_of(5.0)
    go_on(timer, step, now, 5.0, 100)


def test_what_failed_once_is_usual_afterwards() -> None:
    timer, step, now = timer_of(0.1)
    with pytest.raises(SlowSteps):
        go_on(timer, step, now, 1.0, 20)
    timer.began()
    go_on(timer, 100, 100.0, 1.0, 100)


def test_the_time_between_two_views_is_no_step() -> None:
    timer, step, now = timer_of(0.1)
    for _ in range(20):
        timer.began()
        now += 100.0
        step, now = go_on(timer, step, now, 0.1, 2)


def test_time_is_counted_for_each_step_of_a_period() -> None:
    """A strategy that exchanges every 50 steps settles 50 at once."""
    timer, now = StepTimer(PATIENCE_S), 0.0
    timer.began()
    for period in range(8):
        timer.settled(50 * period, now := now + 5.0)
    timer.settled(400, now := now + 5.0)
    timer.settled(401, now + 0.1)  # what is left at the end
    assert timer.slow_s == 0.0


def test_one_long_step_is_nothing() -> None:
    timer, step, now = timer_of(0.1)
    step, now = go_on(timer, step, now, 90.0, 1)
    go_on(timer, step, now, 0.1, 1)
