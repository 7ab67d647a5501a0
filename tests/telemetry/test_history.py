"""The bounded memory of a member's steps and messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hcsim.telemetry.history import LONGEST_MESSAGE, MOST_MESSAGES, MOST_STEPS, HistoryStep, RunHistory


def step(number: int) -> HistoryStep:
    return HistoryStep(float(number), number, 1.0 / number)


@given(st.integers(1, 5000))
def test_steps_are_bounded_in_order_and_span_the_run(count: int) -> None:
    history = RunHistory()
    for number in range(1, count + 1):
        history.step(step(number))
    numbers = [each.step for each in history.steps()]
    assert len(numbers) <= MOST_STEPS + 1
    assert numbers == sorted(dict.fromkeys(numbers))
    assert numbers[-1] == count
    gaps = [after - before for before, after in zip([0, *numbers], numbers, strict=False)]
    assert max(gaps) <= max(1, 4 * count // MOST_STEPS)


def test_a_step_that_is_done_again_replaces_the_ones_from_there_on() -> None:
    history = RunHistory()
    for number in (1, 2, 3, 4):
        history.step(step(number))
    again = HistoryStep(9.0, 3, 0.5)
    history.step(again)
    assert history.steps() == (step(1), step(2), again)
    assert history.latest == again


def test_messages_are_bounded_and_cut() -> None:
    history = RunHistory()
    for number in range(2 * MOST_MESSAGES):
        history.say(number, "x" * 2 * LONGEST_MESSAGE)
    told = history.messages()
    assert len(told) == MOST_MESSAGES
    assert told[-1].at_s == 2 * MOST_MESSAGES - 1
    assert len(told[-1].text) == LONGEST_MESSAGE + 1
    assert [each.at_s for each in history.messages(told[-2].at_s)] == [each.at_s for each in told[-2:]]


@given(st.lists(st.integers(1, 40), max_size=12))
def test_a_copy_that_is_brought_up_to_date_in_pieces_is_the_same(pieces: list[int]) -> None:
    ours, copy, number, known_s = RunHistory(), RunHistory(), 0, -1.0
    for count in pieces:
        for _ in range(count):
            number += 1
            ours.step(step(number))
            ours.say(number, f"step {number}")
        copy.extend(ours.steps(known_s), ours.messages(known_s))
        known_s = float(number)
    assert copy.steps() == ours.steps()
    assert copy.messages() == ours.messages()
