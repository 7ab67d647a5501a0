"""The record of a twin."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hcsim.config import Basis, Machine, parse_scenario
from hcsim.files import append_line
from hcsim.twin.ledger import (
    FIRST_STEPS,
    PHASES,
    VERSION,
    InterfaceState,
    Ledger,
    MachineState,
    Pair,
    advice,
    line_of,
    notices,
    phase_times,
    read_ledger,
    record_of,
    twin_digest,
)
from hcsim.units import ByteRate, FlopRate

TODAY = date(2026, 11, 19)
_seconds = st.floats(0, 1e6, allow_nan=False)
_phases = st.dictionaries(st.sampled_from([*PHASES.values()]), _seconds)
_pairs = st.builds(
    Pair,
    version=st.just(VERSION),
    date=st.just("2026-11-19T17:30:00+00:00"),
    task=st.text(max_size=20),
    strategy=st.just("ddp"),
    compressor=st.text(max_size=20),
    settings=st.just("ab"),
    twin=st.sampled_from(["now", "before"]),
    nodes=st.just(("mini", "studio")),
    device=st.just("cpu"),
    steps=st.integers(0, 1000),
    machine=st.builds(MachineState, name=st.text(max_size=20)),
    predicted=_phases,
    measured=_phases,
    band=st.dictionaries(st.sampled_from([*PHASES.values()]), st.tuples(_seconds, _seconds)),
)


def pair(predicted_s: float, measured_s: float, compute_s: float = 0.0, **changes: object) -> Pair:
    usual = Pair(
        date="2026-11-19T17:30:00+00:00",
        task="digits",
        strategy="ddp",
        compressor="none",
        settings="ab",
        twin="now",
        nodes=("mini", "studio"),
        device="cpu",
        steps=20,
        machine=MachineState("mini"),
        predicted={"compute": compute_s, "wait": predicted_s, "step": predicted_s},
        measured={"compute": compute_s, "wait": measured_s, "step": measured_s},
    )
    return replace(usual, **changes)


@given(st.lists(_pairs, max_size=5))
def test_what_is_written_is_read_back(pairs: list[Pair]) -> None:
    assert read_ledger(b"".join(line_of(each) + b"\n" for each in pairs)) == Ledger(tuple(pairs))


@given(st.lists(_pairs, min_size=1, max_size=4), _pairs, st.data())
def test_a_crash_within_a_line_costs_that_line_alone(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[Pair], later: Pair, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("twin") / "home.ledger.jsonl"
    for each in pairs:
        append_line(path, line_of(each))
    written = path.read_bytes()
    cut = data.draw(st.integers(1, len(line_of(pairs[-1]))))  # 1: only the end of the line is missing
    path.write_bytes(written[:-cut])
    append_line(path, line_of(later))
    whole = (*pairs, later) if cut == 1 else (*pairs[:-1], later)
    assert read_ledger(path.read_bytes()).pairs == whole


@given(st.binary(max_size=200), _pairs)
def test_lines_that_are_no_pairs_are_counted_and_left_out(garbage: bytes, good: Pair) -> None:
    ledger = read_ledger(garbage.replace(b"{", b"") + b"\n" + line_of(good) + b"\n")
    assert ledger.pairs == (good,)
    assert ledger.damaged == sum(bool(line.strip()) for line in garbage.replace(b"{", b"").splitlines())


@given(_pairs, st.integers(VERSION + 1, 99))
def test_lines_of_a_newer_version_are_left_out(known: Pair, version: int) -> None:
    newer = b'{"version": %d, "what": "nobody knows yet"}\n' % version
    assert read_ledger(newer + line_of(known) + b"\n" + newer) == Ledger((known,), newer=2)


def laps(*whole_s: float) -> list[dict[str, float]]:
    return [{"compute": 0.1, "whole": each} for each in whole_s]


def test_the_first_steps_and_an_odd_one_do_not_count() -> None:
    found = phase_times(laps(*[9.0] * FIRST_STEPS, 1.0, 1.0, 5.0, 1.0, 1.0))
    assert found == {"compute": 0.1, "encode": 0.0, "exchange": 0.0, "wait": 0.0, "step": 1.0}


@pytest.mark.parametrize("steps", [12, 13, 17, 18])
def test_an_exchange_in_every_fourth_step_is_in_each_of_the_counted_times(steps: int) -> None:
    run = laps(*[2.0 if step % 4 == 3 else 1.0 for step in range(steps)])
    assert phase_times(run, 4)["step"] == 1.25


@given(st.lists(_seconds, min_size=1, max_size=10), st.integers(1, 5))
def test_a_run_of_any_length_has_times_between_its_shortest_and_its_longest_step(
    whole_s: list[float], every: int
) -> None:
    assert min(whole_s) * 0.999 <= phase_times(laps(*whole_s), every)["step"] <= max(whole_s) * 1.001


def test_the_record_has_the_errors_of_each_phase_and_the_worst_of_them() -> None:
    record = record_of([pair(1.1, 1.0), pair(0.8, 1.0), pair(1.3, 1.0, twin="before")], "now")
    step = next(each for each in record.phases if each.phase == "step")
    assert (record.runs, record.present, record.worst, record.trend) == (3, 2, "wait", "unknown")
    assert (step.runs, round(step.median, 6), round(step.last, 6)) == (3, 0.2, 0.3)
    assert step.median <= step.p90 <= 0.3
    assert "encode" not in [each.phase for each in record.phases]  # no run has encoded anything


@pytest.mark.parametrize(("before", "now", "trend"), [(1.5, 1.1, "better"), (1.1, 1.5, "worse"), (1.1, 1.11, "steady")])
def test_the_trend_compares_the_last_runs_with_those_before(before: float, now: float, trend: str) -> None:
    pairs = [pair(before, 1.0)] * 5 + [pair(now, 1.0)] * 5
    assert record_of(pairs, "now").trend == trend


@pytest.mark.parametrize("steps", [16, 18])
def test_a_round_has_one_exchange_whatever_a_run_exchanges_at_its_end(steps: int) -> None:
    """A strategy that exchanges every fourth step does so after the last one, too."""
    laps = [{"network": 8.0 if step % 4 == 0 or step == steps else 0.0, "whole": 10.0} for step in range(1, steps + 1)]
    found = phase_times(laps, every=4)
    assert (found["exchange"], found["step"]) == (2.0, 10.0)


def test_bands_are_held_against_the_measured_steps() -> None:
    inside, outside = pair(1.0, 1.0, band={"step": (0.9, 1.1)}), pair(1.0, 1.2, band={"step": (0.9, 1.1)})
    assert record_of([inside, outside, pair(1.0, 1.0)], "now").in_band == 0.5


HOME = """
name = "home"
[[medium]]
kind = "ethernet"
name = "switch"
rate = "1 Gb/s"
basis = { kind = "measured", date = "2026-11-01" }
[[machine]]
name = "mini"
peak = "1 TFLOPS"
memory = "50 GB/s"
basis = { kind = "measured", source = "hcsim 0.1.0, torch 2.6.0 on cpu", date = "2026-11-01" }
[[node]]
name = "mini"
machine = "mini"
links = ["switch"]
"""
TWIN = parse_scenario(HOME, "home.toml")
SAME = MachineState("mini", {"hcsim": "0.1.0", "torch": "2.6.0"}, (InterfaceState("en0", "ethernet", 1e9),))


def told(pairs: Sequence[Pair] = (), here: MachineState = SAME, today: date = TODAY) -> str:
    return "\n".join(notices(TWIN, pairs, here, today))


def test_nothing_is_out_of_date_where_nothing_has_changed() -> None:
    assert told([pair(1.0, 1.0, machine=SAME)]) == ""


def test_other_software_than_was_measured_is_noticed() -> None:
    assert "torch is 2.7.1, and was 2.6.0" in told(here=replace(SAME, versions={"torch": "2.7.1", "hcsim": "0.1.0"}))
    assert told(here=replace(SAME, name="studio", versions={"torch": "2.7.1"})) == ""


def test_old_figures_are_noticed() -> None:
    old = told(today=date(2027, 11, 1))
    assert "mini was measured 365 days ago" in old
    assert "link switch was measured 365 days ago" in old


def test_interfaces_that_have_changed_since_the_last_run_are_noticed() -> None:
    wifi = replace(SAME, interfaces=(InterfaceState("en1", "wifi"),))
    assert "en0 is gone, en1 is new" in told([pair(1.0, 1.0, machine=SAME)], here=wifi)
    faster = replace(SAME, interfaces=(InterfaceState("en0", "ethernet", 1e10),))
    assert "en0 has another medium or rate" in told([pair(1.0, 1.0, machine=SAME)], here=faster)
    before = pair(1.0, 1.0, machine=wifi, date="2026-10-01T00:00:00+00:00")
    since = pair(1.0, 1.0, machine=SAME, date="2026-10-02T00:00:00+00:00")
    assert told([before, since]) == ""  # the links were measured after that


def test_a_machine_that_was_held_back_is_noticed() -> None:
    hot = replace(SAME, speed_limit=0.7, temperature_c=98.0)
    assert "mini was held at 70% of its speed in its last run, at 98 °C" in told([pair(1.0, 1.0, machine=hot)])
    assert told([pair(1.0, 1.0, machine=hot), pair(1.0, 1.0, machine=SAME)]) == ""


def test_what_is_to_be_measured_again_follows_from_the_worst_phase_and_from_what_is_out_of_date() -> None:
    good, slow_links = record_of([pair(1.0, 1.0)], "now"), record_of([pair(1.5, 1.0)], "now")
    assert advice(good, [], "home.toml") == []
    assert advice(slow_links, [], "home.toml") == ["the links: hcsim probe --cluster -o home.toml"]
    outdated = told(here=replace(SAME, versions={"torch": "2.7.1"})).splitlines()
    assert advice(good, outdated, "home.toml") == ["on each machine: hcsim probe -o home.toml"]


def test_the_digest_of_a_twin_changes_with_its_figures_and_not_with_its_comments() -> None:
    commented = parse_scenario(f"# mine\n{HOME}\n[training]\nsteps = 5\n", "home.toml")
    faster = parse_scenario(HOME.replace("1 Gb/s", "2.5 Gb/s"), "home.toml")
    machine = Machine("mini", FlopRate(1e12), ByteRate(50e9), basis=Basis("measured"))
    other = replace(TWIN, nodes=tuple(replace(node, machine=machine) for node in TWIN.nodes))
    assert twin_digest(commented) == twin_digest(TWIN)
    assert len({twin_digest(each) for each in (TWIN, faster, other)}) == 3


def test_a_line_is_not_lost_among_those_of_other_writers(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for number in range(3):
        append_line(path, b"%d" % number)
    assert path.read_bytes() == b"0\n1\n2\n"
