"""What the simulator does for a message, counted rather than timed."""

from __future__ import annotations

import sys

from experiments.speed import Row, growth, our_all_reduces


def calls_per_message(ranks: int, count: int) -> float:
    """Of Python functions and of those in C, over everything that a run does from its first moment on."""
    calls = 0

    def profile(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        our_all_reduces(count, ranks)
    finally:
        sys.setprofile(None)
    return calls / (count * 2 * (ranks - 1) * ranks)


def test_a_message_takes_as_much_work_among_many_ranks_as_among_few():
    """Time also depends on caches, which many ranks overflow; nothing here may depend on how many there are."""
    few, many = calls_per_message(8, 20), calls_per_message(64, 1)
    assert many < 1.25 * few


def test_growth_is_that_of_the_cost_of_a_message_from_the_fewest_ranks_to_the_most():
    def row(case: str, ranks: int, ours: float, bare: float) -> Row:
        return {"case": case, "ranks": ranks, "hcsim_us_per_message": ours, "simpy_us_per_message": bare}

    rows = [row("timers", 8, 1.0, 9.0), row("all-reduces", 8, 20.0, 10.0), row("all-reduces", 512, 25.0, 14.0)]
    assert growth(rows) == "a message costs 1.25 times as much among 512 ranks as among 8; SimPy's 1.40"
    assert growth(rows[:2]) is None
