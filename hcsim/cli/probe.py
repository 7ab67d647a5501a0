"""`hcsim probe`: measure this machine, or the links of a cluster, and write what was found into a twin."""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace
from rich import box
from rich.table import Table

from hcsim.cli import screen
from hcsim.cli.membership import by_seniority, find_members
from hcsim.cluster.messages import StatusReply
from hcsim.config import CATALOGUE
from hcsim.config.machine import BY_FLOPS, Basis, Machine
from hcsim.errors import ConfigError, HcsimError
from hcsim.files import write_whole
from hcsim.real.hardware import best_torch_device, check_torch_device
from hcsim.real.interfaces import host_name, leads_out, list_interfaces
from hcsim.twin.file import TwinFile
from hcsim.twin.home import Fit, fitted, message_cost_s, predicted_s
from hcsim.twin.links import Surveyed
from hcsim.twin.machine import SHORTEST_HEAT_S, measure_machine, measured_between
from hcsim.twin.meeting import survey_cluster
from hcsim.twin.page import fastest_curves, page
from hcsim.units import ByteRate, FlopRate

_LOOK = "3 s"
_UNKNOWN = Machine(
    "unknown",
    FlopRate(1e12),
    ByteRate(50e9),
    basis=Basis("estimated", "a processor of today; hcsim probe did not run there"),
)


def probe(out: Path, device: str, minutes: float, report: Path | None, *, as_json: bool) -> None:
    """Measure this machine and put it into the twin, part by part."""
    if 0 < 60 * minutes < SHORTEST_HEAT_S:
        raise ConfigError(f"--minutes {minutes:g}: a machine grows hot in {SHORTEST_HEAT_S / 60:g} min at least")
    check_torch_device(device)
    check_report(report)
    device = best_torch_device() if device == "auto" else device
    twin, name = TwinFile(out), host_name()
    interfaces = [each for each in list_interfaces() if leads_out(each)]
    machine = None
    with screen.ProgressLine("probe", 1) as progress:
        try:
            for machine in measure_machine(name, device, twin.machine(name), 60 * minutes, progress.phase):
                twin.put_machine(machine, interfaces)
        except KeyboardInterrupt:
            if machine is not None:
                screen.note(f"what was measured so far is in {out}")
            raise
    assert machine is not None
    write_report(report, twin)
    if as_json:
        data = msgspec.json.encode(machine, enc_hook=plain_number)
        sys.stdout.write(msgspec.json.format(data).decode() + "\n")
    else:
        _show(machine)
        screen.note(f"written to {out}: try `hcsim run {out} --task digits --steps 20`")


def probe_cluster(
    out: Path, home: Path, cluster: str, peers: Sequence[str], report: Path | None, *, as_json: bool
) -> None:
    """Have the members of a running cluster measure the links between them, and put these into the twin."""
    check_report(report)
    twin = TwinFile(out)
    members = by_seniority(find_members(home, cluster, peers, _LOOK))
    replies = [*members.values()]
    names = [_table_name(told.status.us.name) for told in replies]
    if len(names) < 2:
        raise HcsimError(f"{names[0]} is the only member that answers: links need two machines")
    if twice := [name for name in names if names.count(name) > 1]:
        raise HcsimError(f"two members are called {twice[0]}: rename one of them (hcsim run --real --set name=…)")
    if any(told.view.formed for told in replies):
        screen.note("the members work on something meanwhile: this measures what their work leaves")
    machines = {name: _machine(twin, name, told) for name, told in zip(names, replies, strict=True)}
    costs_s = {name: message_cost_s(machine) for name, machine in machines.items()}
    basis, home_name = measured_between(len(names)), _home_of(twin)

    def put(found: Surveyed) -> Fit:
        fit = fitted(found, names, costs_s, twin.scenario.tcp, basis, home_name)
        twin.put_links(fit, machines)
        return fit

    with screen.ProgressLine("probe", 1) as progress:
        found = asyncio.run(survey_cluster(home, cluster, replies, progress.phase, put))
    fit = put(found)
    write_report(report, twin)
    measured_s = statistics.median(found.held_out_s)
    expected_s = predicted_s(twin.scenario, names, found.held_out_bytes)
    if as_json:
        data = {"names": names, "found": found, "predicted_s": expected_s, "measured_s": measured_s}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(data)).decode() + "\n")
        return
    _show_links(found, names)
    for note in fit.notes:
        screen.say(note)
    size = screen.size(found.held_out_bytes)
    screen.say(
        f"an all-reduce of {size}, which the figures do not rest on: predicted {screen.duration(expected_s)}, measured "
        f"{screen.duration(measured_s)} ({expected_s / measured_s - 1:+.1%})"
    )
    screen.note(f"written to {out}")
    if unknown := [name for name, machine in machines.items() if _is_estimate(machine)]:
        screen.note(
            f"not measured yet: {', '.join(unknown)}; run `hcsim probe -o {out.name}` there, into a copy of the file"
        )


def _table_name(name: str) -> str:
    """Return a name that the tables of a scenario can have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("-._") or "node"


def _home_of(twin: TwinFile) -> str:
    return twin.scenario.nodes[0].home if twin.scenario.nodes else "home"


def _machine(twin: TwinFile, name: str, told: StatusReply) -> Machine | str:
    """Return what is known of a member's machine: measured, or from the catalogue, or an estimate."""
    measured = twin.machine(name)
    if measured is not None:
        return measured
    chip = "" if told.facts is None else told.facts.chip.removeprefix("Apple ")
    return chip if chip in CATALOGUE else replace(_UNKNOWN, name=name)


def _is_estimate(machine: Machine | str) -> bool:
    return isinstance(machine, str) or machine.basis.kind != "measured"


def _show_links(found: Surveyed, names: Sequence[str]) -> None:
    """Show each pair alone and both ways, and what more than two machines carry at once."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("from", "to", "alone", "spread", "both ways", "round trip", "p90", "loaded"):
        table.add_column(heading, justify="left" if heading in ("from", "to") else "right")
    both = {(flow.source, flow.target): flow for flow in found.flows if flow.kind == "both ways"}
    calls = {(each.source, each.target): each for each in found.calls}
    for flow in found.flows:
        pair = flow.source, flow.target
        if flow.kind == "alone":
            trips_s = calls[pair].idle_s
            loaded_s = calls[pair].loaded_s or trips_s
            trips = (statistics.median(trips_s), _p90(trips_s), statistics.median(loaded_s))
            table.add_row(
                names[flow.source], names[flow.target], _mbps(flow.rate_Bps), f"{flow.spread:.1%}",
                _mbps(both[pair].rate_Bps), *map(screen.duration, trips),
            )  # fmt: skip
    screen.say("Mb/s of data in messages, and round trips of small messages, idle and while data are sent")
    screen.show(table)
    for step in sorted({flow.step for flow in found.flows if flow.kind in ("two into one", "all")}):
        at_once = [flow for flow in found.flows if flow.step == step]
        flows = ", ".join(f"{names[each.source]} → {names[each.target]} {_mbps(each.rate_Bps)}" for each in at_once)
        screen.say(f"{at_once[0].kind}: {flows}")


def _p90(samples: Sequence[float]) -> float:
    return statistics.quantiles(samples, n=10, method="inclusive")[-1]


def _mbps(rate_Bps: float) -> str:
    return f"{8 * rate_Bps / 1e6:.4g}"


def check_report(report: Path | None) -> None:
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        raise ConfigError(f"--report {report}: give a file in a folder that there is")


def write_report(report: Path | None, twin: TwinFile) -> None:
    if report is not None:
        try:
            write_whole(report, page(twin.scenario).encode())
        except OSError as error:
            raise ConfigError(f"{report}: cannot be written: {error.strerror}") from None
        screen.note(f"shown in {report}")


def _show(machine: Machine) -> None:
    """Show the best rates of each curve."""
    heat = f", {machine.sustained:.0%} of its speed when it is hot" if machine.fanless else ""
    memory = "" if machine.ram_bytes is None else f", {screen.size(machine.ram_bytes)}"
    screen.say(f"{machine.name}: {machine.basis.source}{memory}{heat}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "sizes", "shortest", "at the largest", "spread"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for curve in fastest_curves(machine):
        unit = "GFLOP" if curve.kind in BY_FLOPS else "GB"
        table.add_row(f"{curve.kind} {curve.dtype}", *_curve(curve.points, unit), f"{curve.basis.spread:.0%}")
    for codec in machine.codecs:
        spread = f"{codec.basis.spread:.0%}"
        table.add_row(f"encode {codec.compressor}", *_curve(codec.encode, "GB"), spread)
        table.add_row(f"decode {codec.compressor}", *_curve(codec.decode, "GB"), spread)
    screen.show(table)
    if (costs := machine.messages) is not None:
        screen.say(
            f"a message takes {screen.duration(costs.send_s)} to send, {screen.duration(costs.receive_s)} to receive\n"
            f"one core sends {_gigabytes(costs.send_rate_Bps)} and receives {_gigabytes(costs.receive_rate_Bps)},"
            f" encrypts {_gigabytes(costs.tls_send_rate_Bps)} and decrypts {_gigabytes(costs.tls_receive_rate_Bps)}"
        )


def _gigabytes(rate_Bps: float) -> str:
    return f"{rate_Bps / 1e9:.3g} GB/s"


def _curve(points: tuple[tuple[float, float], ...], unit: str) -> tuple[str, ...]:
    size, size_s = points[-1]
    rate = f"{size / size_s / 1e9:.3g} {unit}/s" if size_s else "–"
    return str(len(points)), screen.duration(points[0][1]), rate


def plain_number(value: object) -> int | float:
    """Return a quantity as a number in its base unit."""
    return int(value) if isinstance(value, int) else float(str(value))
