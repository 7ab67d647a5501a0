"""Predicted against measured after a real run on machines with a twin, and `hcsim twin`."""

from __future__ import annotations

import ipaddress
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table

from hcsim.cli import screen
from hcsim.config import Scenario, Training, load_scenario
from hcsim.errors import ConfigError, HcsimError
from hcsim.files import append_line
from hcsim.launch import DEFAULT_PORT
from hcsim.real.hardware import installed_versions
from hcsim.real.interfaces import host_name, leads_out, list_interfaces
from hcsim.real.sensors import Sensors
from hcsim.runtime.address import parse, with_port
from hcsim.training.run import Point
from hcsim.transport.groups import Wire
from hcsim.twin.job_band import USUAL_VARIANTS
from hcsim.twin.ledger import (
    InterfaceState,
    Ledger,
    MachineState,
    Pair,
    Record,
    advice,
    line_of,
    notices,
    phase_times,
    read_ledger,
    record_of,
    settings_digest,
    twin_digest,
)
from hcsim.twin.prediction import (
    PredictedRun,
    Uncertainty,
    exchanges_every,
    is_quick,
    nodes_of,
    predict,
    uncertainty,
)

_TRENDS = {"better": "becomes smaller", "worse": "becomes larger", "steady": "is as it was"}


class ChosenTwin(msgspec.Struct, frozen=True):
    """A twin whose prediction of a run is wanted."""

    path: Path
    scenario: Scenario
    bands: int | None = None
    """See `PredictionSettings`."""


class MeasuredRun(msgspec.Struct, frozen=True):
    """A real run, as one of its ranks saw it."""

    settings: Training
    seed: int
    wire: Wire
    names: tuple[str, ...]
    """Of the machines, in the order of the ranks."""
    rank: int
    device: str
    points: Sequence[Point]
    forms_cluster: bool = False


class _Report(msgspec.Struct, frozen=True):
    """What `hcsim twin --json` prints."""

    twin: str
    record: Record
    outdated: list[str]
    advice: list[str]
    damaged: int
    newer: int
    pairs: tuple[Pair, ...]


def chosen_twin(path: Path, bands: int | None) -> ChosenTwin:
    """Read a twin, before the run that is compared with it."""
    scenario = load_scenario(path)
    if not scenario.nodes:
        raise ConfigError(f"{path}: there is no [[node]] in it, so it predicts nothing")
    return ChosenTwin(path, scenario, bands)


def names_of_peers(peers: Sequence[str], here: str) -> tuple[str, ...]:
    """Return the names of the machines at these addresses: the host names without their domain, and for the loopback
    this machine's. Several ranks of a machine are called as `count` calls copies of a node."""
    hosts = [parse(with_port(peer, DEFAULT_PORT)).hosts[0] for peer in peers]
    return as_copies([here if _is_here(host) else host if _is_address(host) else host.partition(".")[0]
                      for host in hosts])  # fmt: skip


def as_copies(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names with those that are there several times numbered, as `count` does with copies of a node."""
    seen: Counter[str] = Counter()
    copies = []
    for name in names:
        seen[name] += 1
        copies.append(name if names.count(name) == 1 else f"{name}-{seen[name]}")
    return tuple(copies)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_here(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback)


def compare(twin: ChosenTwin, run: MeasuredRun) -> Pair | None:
    """Predict a run that is over, show both, and keep and return the pair. What goes wrong here is told, and harms no
    run."""
    try:
        return _compare(twin, run)
    except HcsimError as error:
        screen.note(f"not compared with {twin.path}: {error}")
    except OSError as error:
        screen.note(f"{_ledger_of(twin.path)}: cannot be written: {error.strerror}")
    return None


def _compare(twin: ChosenTwin, run: MeasuredRun) -> Pair:
    if not run.points:
        raise HcsimError("this machine has taken no steps")
    scenario = nodes_of(twin.scenario, run.names)
    predicted_run = PredictedRun(run.settings, run.wire, run.rank, run.forms_cluster)
    point = predict(scenario, predicted_run)
    quick = is_quick(scenario, point.events / point.steps, run.settings)
    bands = (USUAL_VARIANTS if quick else 0) if twin.bands is None else twin.bands
    spread = uncertainty(scenario, predicted_run, bands) if bands else None
    pair = Pair(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        task=run.settings.task,
        strategy=run.settings.strategy,
        compressor=run.settings.compressor,
        settings=settings_digest(run.settings, run.seed),
        twin=twin_digest(twin.scenario),
        nodes=run.names,
        device=run.device,
        steps=len(run.points),
        machine=_this_machine(),
        predicted=point.phases,
        measured=phase_times([point.spent_s for point in run.points], exchanges_every(run.settings)),
        band={} if spread is None else spread.around(point.phases),
    )
    _show_pair(twin.path, pair, spread)
    path = _ledger_of(twin.path)
    append_line(path, line_of(pair))
    screen.note(f"kept in {path}: `hcsim twin {twin.path}` shows the record")
    return pair


def _this_machine() -> MachineState:
    readings = Sensors().read()
    interfaces = [InterfaceState(each.name, each.medium.value, each.rate_bps)
                  for each in list_interfaces() if leads_out(each)]  # fmt: skip
    versions = installed_versions()
    return MachineState(host_name(), versions, tuple(interfaces), readings.temperature_c, readings.speed_limit)


def _ledger_of(twin: Path) -> Path:
    return twin.with_suffix(".ledger.jsonl")


def _show_pair(path: Path, pair: Pair, spread: Uncertainty | None) -> None:
    screen.say(f"a step, predicted by {path} and measured")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = ("", "predicted", *(["p10–p90"] if pair.band else []), "measured", "error")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for phase, predicted_s in pair.predicted.items():
        error = pair.error(phase)
        table.add_row(
            phase,
            screen.duration(predicted_s),
            *([_between(pair.band[phase])] if pair.band else []),
            screen.duration(pair.measured.get(phase, 0.0)),
            "–" if error is None else f"{error:+.1%}",
        )
    screen.show(table)
    if spread is not None and spread.shares:
        screen.say(f"{_rests_on(spread)} of the predicted step")


def _between(band: tuple[float, float]) -> str:
    return f"{screen.duration(band[0])} – {screen.duration(band[1])}"


def _rests_on(spread: Uncertainty) -> str:
    return ", ".join(f"{kind} figures make {share:.0%}" for kind, share in spread.shares.items())


def show_uncertainty(
    scenario: Scenario, run: PredictedRun, points: Sequence[Point], events: int, bands: int | None
) -> None:
    """Show the band of a simulated step. The run itself had so many events."""
    steps = len(points)
    if steps and bands is None:
        bands = USUAL_VARIANTS if is_quick(scenario, events / steps, run.settings) else 0
    if not (steps and bands):
        return
    try:
        spread = uncertainty(scenario, run, bands)
    except HcsimError as error:  # without data, or with fixed ranks, it does not run
        screen.note(f"p10 and p90 are not known: {error}")
        return
    phases = phase_times([point.spent_s for point in points], exchanges_every(run.settings))
    band = _between(spread.around(phases)["step"])
    rest = f"; {_rests_on(spread)} of it" if spread.shares else ""
    screen.say(f"a simulated step takes {screen.duration(phases['step'])}, p10–p90 {band}{rest}")


def show_twin(path: Path, *, as_json: bool) -> None:
    """Show how well a twin has predicted, and what of it is out of date."""
    scenario = load_scenario(path)
    ledger = _read(_ledger_of(path))
    record = record_of(ledger.pairs, twin_digest(scenario))
    outdated = notices(scenario, ledger.pairs, _this_machine(), date.today())
    again = advice(record, outdated, str(path))
    if as_json:
        report = _Report(str(path), record, outdated, again, ledger.damaged, ledger.newer, ledger.pairs)
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
        return
    _show_record(path, ledger, record)
    for title, lines in (("out of date", outdated), ("measure again", again)):
        if lines:
            screen.say(f"{title}:")
        for line in lines:
            screen.say(f"  {line}")


def _read(path: Path) -> Ledger:
    try:
        return read_ledger(path.read_bytes())
    except FileNotFoundError:
        return Ledger()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _show_record(path: Path, ledger: Ledger, record: Record) -> None:
    if ledger.damaged:
        screen.note(f"{_ledger_of(path)}: {screen.counted(ledger.damaged, 'line')} cannot be read, and is left out")
    if ledger.newer:
        screen.note(f"{_ledger_of(path)}: a newer hcsim wrote {screen.counted(ledger.newer, 'line')}; left out")
    if not ledger.pairs:
        screen.say(f"{path}: no run is recorded yet; `hcsim run --real --set twin={path}` records one")
        return
    last = ledger.pairs[-1]
    runs = screen.counted(record.runs, "run")
    screen.say(f"{path}: {runs}, the last on {last.date[:10]}; {record.present} predicted from its present figures")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("error of", "runs", "median", "p90", "last"):
        table.add_column(heading, justify="left" if heading == "error of" else "right", no_wrap=True)
    for each in record.phases:
        table.add_row(each.phase, str(each.runs), f"{each.median:.1%}", f"{each.p90:.1%}", f"{each.last:+.1%}")
    screen.show(table)
    if record.trend != "unknown":
        screen.say(f"the error of a step {_TRENDS[record.trend]}: {record.recent:.1%} in the last runs")
    if record.in_band is not None:
        screen.say(f"{record.in_band:.0%} of the measured steps were between p10 and p90")
    if record.worst is not None:
        screen.say(f"the worst phase is {record.worst}")
