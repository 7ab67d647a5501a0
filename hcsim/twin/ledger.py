"""The record of a twin: what was predicted of each real run and what was measured, one line of JSON for each.

A ledger only grows. A line that a crash has cut off, or that a newer version wrote, is counted and skipped.

A phase of a run is the median over its steps, in seconds a step. The first steps are left out: they open connections
and load kernels. Strategies that exchange in every n-th step have their steps taken n at a time, so that the exchange
is in each. An error is (predicted - measured) / measured.
"""

from __future__ import annotations

import hashlib
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import Literal

import msgspec

from hcsim.config import Basis, Scenario, Thunderbolt, Training
from hcsim.errors import UNDECODABLE

VERSION = 1
PHASES = {"compute": "compute", "encode": "encode", "network": "exchange", "wait": "wait", "whole": "step"}
"""The purposes of `Point.spent_s`, and what they are called here."""
FIRST_STEPS = 2
"""Are left out."""
OLD_DAYS = 90
"""Figures that were measured before that are called old."""
RECENT_RUNS = 5
_TREND = 0.02
"""A smaller change of the median error is no trend."""
_TENTH = 0.1

PhaseTimes = dict[str, float]
"""Seconds a step, by phase."""


class InterfaceState(msgspec.Struct, frozen=True):
    """An interface through which others are reached."""

    name: str
    medium: str
    rate_bps: float | None = None


class MachineState(msgspec.Struct, frozen=True):
    """The machine that wrote a pair, at the end of the run."""

    name: str
    versions: dict[str, str] = {}
    interfaces: tuple[InterfaceState, ...] = ()
    temperature_c: float | None = None
    speed_limit: float | None = None


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it was predicted and as it was measured."""

    version: int = VERSION
    date: str
    """With the time: "2026-11-19T17:30:00+00:00"."""
    task: str
    strategy: str
    compressor: str
    settings: str
    """The digest of all settings."""
    twin: str
    """The digest of the twin's figures."""
    nodes: tuple[str, ...]
    device: str
    steps: int
    """That were measured."""
    machine: MachineState
    predicted: PhaseTimes
    measured: PhaseTimes
    band: dict[str, tuple[float, float]] = {}
    """The 10th and the 90th percentile of the prediction, by phase."""

    def error(self, phase: str) -> float | None:
        """Return the error of a phase; None for a phase that the run did not have, or that was not predicted."""
        predicted, measured = self.predicted.get(phase), self.measured.get(phase, 0.0)
        return None if predicted is None or measured <= 0.0 else (predicted - measured) / measured


class Ledger(msgspec.Struct, frozen=True):
    """The lines of a ledger that can be read, in order, and how many cannot."""

    pairs: tuple[Pair, ...] = ()
    damaged: int = 0
    newer: int = 0


class PhaseRecord(msgspec.Struct, frozen=True):
    """The errors of a phase over all runs that had it."""

    phase: str
    runs: int
    median: float
    """Of absolute errors."""
    p90: float
    last: float
    """With its sign."""


class Record(msgspec.Struct, frozen=True):
    """How well a twin has predicted."""

    runs: int
    present: int
    """Runs that were predicted from the figures that the twin has now."""
    phases: tuple[PhaseRecord, ...]
    trend: Literal["better", "worse", "steady", "unknown"]
    """Of the step's error: that of the last runs against that of the ones before."""
    recent: float | None
    """The median of the step's absolute error in the last runs."""
    worst: str | None
    """The phase whose error is most of the step, in the last runs."""
    in_band: float | None
    """The share of the runs with a band whose measured step was in it."""


class _Version(msgspec.Struct):
    version: int


def phase_times(laps: Sequence[Mapping[str, float]], every: int = 1) -> PhaseTimes:
    """Return the phases of a run from its steps' seconds by purpose, for a strategy that exchanges `every` so many.

    A round ends with an exchange. What a run exchanges at its end beside is in none."""
    size = min(every, max(1, len(laps)))
    ends = range(size, len(laps) + 1, size)
    steady = [end for end in ends if end - size >= FIRST_STEPS]
    rounds = [laps[end - size : end] for end in steady or ends]
    return {
        phase: statistics.median(sum(lap.get(purpose, 0.0) for lap in each) / size for each in rounds)
        for purpose, phase in PHASES.items()
        if rounds
    }


def settings_digest(settings: Training, seed: int) -> str:
    """Return a digest that runs with equal settings share."""
    return _digest((settings, seed))


def twin_digest(scenario: Scenario) -> str:
    """Return the digest of what a prediction depends on: comments and the order of work do not count."""
    return _digest((scenario.nodes, scenario.media, scenario.wan, scenario.tcp, scenario.routes))


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, enc_hook=str, order="deterministic")).hexdigest()[:16]


def line_of(pair: Pair) -> bytes:
    """Return the line of a pair, without its end."""
    return msgspec.json.encode(pair)


def read_ledger(data: bytes) -> Ledger:
    """Read what can be read of a ledger."""
    pairs: list[Pair] = []
    damaged = newer = 0
    for line in filter(None, map(bytes.strip, data.splitlines())):
        try:
            if msgspec.json.decode(line, type=_Version).version > VERSION:
                newer += 1
                continue
            pairs.append(msgspec.json.decode(line, type=Pair))
        except UNDECODABLE:
            damaged += 1
    return Ledger(tuple(pairs), damaged, newer)


def record_of(pairs: Sequence[Pair], twin: str) -> Record:
    """Return the record of these runs; `twin` is the digest of the twin as it is now."""
    phases = [found for phase in PHASES.values() if (found := _phase_record(pairs, phase)) is not None]
    recent, before = pairs[-RECENT_RUNS:], pairs[:-RECENT_RUNS][-RECENT_RUNS:]
    now, then = _typical(recent, "step"), _typical(before, "step")
    trend: Literal["better", "worse", "steady", "unknown"] = "unknown"
    if now is not None and then is not None:
        trend = "better" if now < then - _TREND else "worse" if now > then + _TREND else "steady"
    banded = [pair for pair in pairs if "step" in pair.band and "step" in pair.measured]
    inside = [pair for pair in banded if pair.band["step"][0] <= pair.measured["step"] <= pair.band["step"][1]]
    return Record(
        runs=len(pairs),
        present=sum(pair.twin == twin for pair in pairs),
        phases=tuple(phases),
        trend=trend,
        recent=now,
        worst=worst_phase(recent),
        in_band=len(inside) / len(banded) if banded else None,
    )


def _phase_record(pairs: Sequence[Pair], phase: str) -> PhaseRecord | None:
    errors = [error for pair in pairs if (error := pair.error(phase)) is not None]
    if not errors:
        return None
    absolute = sorted(map(abs, errors))
    tenths = statistics.quantiles(absolute, n=10, method="inclusive") if len(absolute) > 1 else absolute
    return PhaseRecord(phase, len(errors), statistics.median(absolute), tenths[-1], errors[-1])


def _typical(pairs: Iterable[Pair], phase: str) -> float | None:
    errors = [abs(error) for pair in pairs if (error := pair.error(phase)) is not None]
    return statistics.median(errors) if errors else None


def worst_phase(pairs: Sequence[Pair]) -> str | None:
    """Return the phase whose difference is the largest share of the step; None if nothing differs."""
    whole = [pair for pair in pairs if pair.measured.get("step", 0.0) > 0.0]
    shares = {
        phase: statistics.median(
            abs(pair.predicted.get(phase, 0.0) - pair.measured.get(phase, 0.0)) / pair.measured["step"]
            for pair in whole
        )
        for phase in PHASES.values()
        if whole and phase != "step"
    }
    worst = max(shares, key=shares.__getitem__, default=None)
    return worst if worst is not None and shares[worst] > 0.0 else None


def notices(scenario: Scenario, pairs: Sequence[Pair], here: MachineState, today: date) -> list[str]:
    """Return what of a twin is out of date, in a line each. `here` is this machine as it is now, which counts for what
    the last pairs do not say."""
    latest = {pair.machine.name: pair.machine for pair in pairs} | {here.name: here}
    return [
        *_other_software(scenario, latest),
        *_old_figures(scenario, today),
        *_changed_interfaces(scenario, pairs, here),
        *_slowed_down(pairs),
    ]


def _bases(scenario: Scenario) -> dict[str, list[tuple[str, Basis]]]:
    """Return the measured figures of each machine, by the name of its node."""
    found: dict[str, list[tuple[str, Basis]]] = {}
    for node in scenario.nodes:
        machine = node.machine
        if isinstance(machine, str):
            continue
        bases = [("speed", machine.basis), ("training step", machine.step_basis)]
        bases += [(f"{curve.kind} {curve.dtype}", curve.basis) for curve in machine.kernels]
        bases += [(codec.compressor, codec.basis) for codec in machine.codecs]
        bases += [("messages", machine.messages.basis)] if machine.messages is not None else []
        found[node.name] = [(what, basis) for what, basis in bases if basis.kind == "measured"]
    return found


def _links(scenario: Scenario) -> list[tuple[str, Basis]]:
    cables = [cable for medium in scenario.media if isinstance(medium, Thunderbolt) for cable in medium.cables]
    named = [
        *((medium.name, medium) for medium in scenario.media),
        *(("–".join(cable.between), cable) for cable in cables),
        *((f"{line.home}.wan", line) for line in scenario.wan),
    ]
    return [
        (name, basis) for name, each in named
        if (basis := getattr(each, "basis", None)) is not None and basis.kind == "measured"
    ]  # fmt: skip


def _other_software(scenario: Scenario, latest: Mapping[str, MachineState]) -> list[str]:
    lines = []
    for node, bases in _bases(scenario).items():
        state = latest.get(node)
        changed: dict[str, None] = {}
        for _, basis in bases:
            for name, version in (state.versions if state is not None else {}).items():
                then = re.search(rf"(?<![\w.]){re.escape(name)} (\d[\w.+-]*)", basis.source)
                if then is not None and then[1] != version:
                    changed[f"{name} is {version}, and was {then[1]}"] = None
        if changed:
            lines.append(f"{node} was measured with other software: {'; '.join(changed)}")
    return lines


def _old_figures(scenario: Scenario, today: date) -> list[str]:
    def age_days(bases: Iterable[tuple[str, Basis]]) -> int:
        days = [day for _, basis in bases if (day := _day(basis.date)) is not None]
        return (today - min(days)).days if days else 0

    owners = {**_bases(scenario), **{f"link {name}": [(name, basis)] for name, basis in _links(scenario)}}
    ages = {owner: age_days(bases) for owner, bases in owners.items()}
    return [f"{owner} was measured {days} days ago" for owner, days in ages.items() if days > OLD_DAYS]


def _day(text: str) -> date | None:
    try:
        return date.fromisoformat(text[:10])
    except ValueError:
        return None


def _changed_interfaces(scenario: Scenario, pairs: Sequence[Pair], here: MachineState) -> list[str]:
    """Links are out of date if a machine's interfaces have changed since they were measured."""
    measured = [day for _, basis in _links(scenario) if (day := _day(basis.date)) is not None]
    states: dict[str, tuple[str, MachineState]] = {}
    changed: dict[str, str] = {}
    after: Callable[[str], bool] = lambda day: not measured or (_day(day) or date.max) >= min(measured)  # noqa: E731
    seen = [(pair.date, pair.machine) for pair in pairs] + ([("", here)] if here.interfaces else [])
    for when, state in seen:
        _, before = states.get(state.name, ("", state))
        if before.interfaces != state.interfaces and after(when):
            changed[state.name] = f"the interfaces of {state.name} are others than before: {_unlike(before, state)}"
        states[state.name] = when, state
    return list(changed.values())


def _unlike(before: MachineState, state: MachineState) -> str:
    then = {each.name: each for each in before.interfaces}
    now = {each.name: each for each in state.interfaces}
    gone = [f"{name} is gone" for name in then if name not in now]
    new = [f"{name} is new" for name in now if name not in then]
    other = [f"{name} has another medium or rate" for name in now if name in then and then[name] != now[name]]
    return ", ".join([*gone, *new, *other])


def _slowed_down(pairs: Sequence[Pair]) -> list[str]:
    last = {pair.machine.name: pair.machine for pair in pairs}
    return [
        f"{state.name} was held at {state.speed_limit:.0%} of its speed in its last run"
        + (f", at {state.temperature_c:.0f} °C" if state.temperature_c is not None else "")
        for state in last.values()
        if state.speed_limit is not None and state.speed_limit < 1.0
    ]


def advice(record: Record, outdated: Sequence[str], twin: str) -> list[str]:
    """Return what to measure again, in a line each."""
    links = any("link " in line or "interfaces" in line for line in outdated)
    machines = any("measured with" in line or (line.endswith("days ago") and "link " not in line) for line in outdated)
    share = next((each.median for each in record.phases if each.phase == record.worst), 0.0)
    off = share > _TENTH
    lines = []
    if machines or (off and record.worst in ("compute", "encode")):
        lines.append(f"on each machine: hcsim probe -o {twin}")
    if links or (off and record.worst in ("exchange", "wait")):
        lines.append(f"the links: hcsim probe --cluster -o {twin}")
    return lines
