"""What the simulator does for a message, counted rather than timed."""

from __future__ import annotations

import sys

import pytest
import simpy

from experiments import speed
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


@pytest.mark.slow
def test_a_message_takes_as_much_work_among_many_ranks_as_among_few():
    """Time also depends on caches, which many ranks overflow; nothing here may depend on how many there are."""
    few, many = calls_per_message(8, 20), calls_per_message(64, 1)
    assert many < 1.25 * few


def test_growth_compares_what_messages_cost_without_the_turns_of_the_few(monkeypatch):
    """Worlds that only let a clock pass: 2 µs for a message among few ranks, 3 among many, and in SimPy 1 and 4."""
    now_s = 0.0

    def costs(few_us: float, many_us: float, beside: speed.Beside | None, messages: int) -> None:
        nonlocal now_s
        if beside is not None:
            env = simpy.Environment()
            env.process(beside.process(env, 1))
            env.run()
        now_s += (few_us if beside is None else many_us) * messages

    def ours(count: int, ranks: int, beside: speed.Beside | None = None) -> None:
        costs(2.0, 3.0, beside, count * 2 * (ranks - 1) * ranks)

    def bare(rounds: int, nodes: int, delay_s: float, beside: speed.Beside | None = None) -> None:
        costs(1.0, 4.0, beside, rounds * nodes)

    monkeypatch.setattr(speed, "perf_counter", lambda: now_s)
    monkeypatch.setattr(speed, "our_all_reduces", ours)
    monkeypatch.setattr(speed, "bare_free_ring", bare)
    assert speed.growth(8, 512) == pytest.approx({"hcsim": 1.5, "simpy": 4.0})


@pytest.mark.slow
def test_a_rank_sends_as_many_messages_among_few_as_among_many():
    cases = [case for case in speed.cases() if case.name == "all-reduces"]
    each = [case.messages / case.ranks for case in cases]
    assert [case.ranks for case in cases] == [8, 64, 512]
    assert max(each) < 1.02 * min(each)


def test_the_few_take_all_their_turns_while_the_many_run():
    taken = []
    beside = speed.Beside(lambda: taken.append(1))
    our_all_reduces(3, 4, beside)
    assert len(taken) == speed.TURNS_BESIDE
    assert 0 < beside.took_s < beside.stopped_s
