"""The soak: its schedule is the same in both worlds, its figures follow from traces, and pieces add up."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from experiments.soak.__main__ import LEAST_PERIODS, reference
from experiments.soak.figures import Held, Piece, keep, kept, losses, table, violations
from experiments.soak.history import History
from experiments.soak.job import NAMES, job
from experiments.soak.schedule import PROFILES, VIRTUAL, Planned, Strike, as_fault, is_calm, strikes
from experiments.soak.virtual import home, simulate
from hcsim.config.check import complete
from hcsim.telemetry.trace import Event

STEP_S = 0.2
KILL = PROFILES["kill"]
LATE_S = 1.0
"""How long the step takes in which the member of the test is lost."""


def trace(periods: int) -> tuple[list[Event], list[Strike]]:
    """Steps of equal length, but for one that lasts longer in each period with a fault."""
    plan = strikes(KILL, NAMES, periods, 1)
    starts_s = [strike.at_s for strike in plan]
    events: list[Event] = []
    at_s, step = 0.1, 0
    while at_s < periods * KILL.period_s:
        step += 1
        events.append((round(at_s * 1e9), "applied", "a", 1, step))
        struck = any(at_s <= start_s < at_s + STEP_S for start_s in starts_s)
        at_s += STEP_S + LATE_S if struck else STEP_S
    return events, plan


def test_what_a_fault_costs_is_what_the_calm_periods_have_more() -> None:
    periods = 14
    events, plan = trace(periods)
    calm, lost = losses(History(events), Planned(KILL, plan, periods, 0.0))
    assert len(calm) == sum(map(is_calm, range(1, periods)))
    assert [loss.lost_s for loss in lost] == pytest.approx([LATE_S] * len(plan), abs=STEP_S)


def test_a_change_of_members_is_told_in_its_phases() -> None:
    def view(at_s: float, host: str, epoch: int, members: str) -> Event:
        return round(at_s * 1e9), "view", host, "lineage", epoch, epoch - 1, members

    events: list[Event] = [
        view(1.0, "a", 1, "a#1,b#1,c#1"),
        (round(10.1e9), "group failed", "a", 0, "lost"),
        view(10.3, "c", 2, "a#1,c#1"),
        view(10.4, "a", 2, "a#1,c#1"),
        (round(10.9e9), "applied", "a", 2, 8),
        (round(19.9e9), "applied", "a", 2, 9),
        view(20.0, "a", 3, "a#1,c#1,b#2"),
        (round(20.6e9), "applied", "a", 3, 10),
    ]
    assert History(events).change("b", 10.0, 40.0) == pytest.approx((0.1, 0.4, 0.9, 0.7), abs=1e-6)
    assert History(events).change("c", 30.0, 40.0) == (None,) * 4


def test_two_working_views_of_one_epoch_are_found() -> None:
    events: list[Event] = [
        (1, "view", "a", "lineage", 4, 3, "a#1,b#1"),
        (2, "view", "c", "lineage", 4, 3, "c#1,d#1"),
        (3, "applied", "a", 4, 1),
    ]
    assert History(events).splits() == ["epoch 4: a#1,b#1 and c#1,d#1"]


@pytest.mark.slow
def test_every_kind_of_fault_can_be_simulated_and_mixed_faults_have_all_of_them() -> None:
    plan = strikes(PROFILES["mixed"], NAMES, 24, 3)
    assert {strike.kind for strike in plan} == {*VIRTUAL}
    assert plan == strikes(PROFILES["mixed"], NAMES, 24, 3)
    faults = tuple(as_fault(strike, 5.0) for strike in plan)
    assert complete(replace(home(job(10, "home"), 1), faults=faults)).faults == faults


def test_a_piece_says_what_does_not_hold_and_pieces_add_up_in_a_table(tmp_path: Path) -> None:
    events, plan = trace(LEAST_PERIODS)
    history = History(events)
    calm, lost = losses(history, Planned(KILL, plan, LEAST_PERIODS, 0.0))
    held = Held(30, 90.0, 10.0, 0)
    piece = Piece("real", "kill", "home", 1, KILL.period_s, history.count, calm, lost, history.longest_gap_s(), held)
    assert not list(violations(piece, ["x", "x"]))
    bad = replace(piece, stall_s=1000.0, held=Held(1000, 90.0, 1e6, 1))
    assert len(list(violations(bad, ["x", "y"]))) == 5
    file = tmp_path / "pieces.jsonl"
    for each in (piece, replace(piece, seed=2)):
        keep(each, file)
    assert kept(file) == [piece, replace(piece, seed=2)]
    *_, row = table(kept(file))
    assert f"**kill**, every 30 s: {2 * len(plan)} |" in row


@pytest.mark.soak
@pytest.mark.parametrize("profile", [*PROFILES])
def test_a_virtual_cluster_keeps_most_of_its_speed_and_its_parameters(profile: str) -> None:
    history, plan, digests = simulate(PROFILES[profile], LEAST_PERIODS, 1, "home")
    assert {*digests} == {reference(history.count, history)}
    _, lost = losses(history, plan)
    assert sum(loss.lost_s for loss in lost) / len(lost) / plan.profile.period_s < 0.4
