"""What the simulator does for a message, counted rather than timed."""

from __future__ import annotations

import sys

from experiments.speed import our_all_reduces


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
