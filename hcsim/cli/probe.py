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
from hcsim.cli.probe_hosts import probe_hosts
from hcsim.cluster.messages import StatusReply
from hcsim.config import CATALOGUE, Ethernet, Wifi
from hcsim.config.machine import BY_FLOPS, Basis, Machine
from hcsim.errors import ConfigError, HcsimError
from hcsim.files import write_whole
from hcsim.real.hardware import best_torch_device, check_torch_device
from hcsim.real.interfaces import host_name, leads_out, list_interfaces
from hcsim.twin.file import TwinFile
from hcsim.twin.home import Fit, fitted, predicted_s
from hcsim.twin.links import Sending, Surveyed
from hcsim.twin.machine import SHORTEST_HEAT_S, measure_machine, measured_between
from hcsim.twin.meeting import survey_cluster
from hcsim.twin.page import fastest_curves, page
from hcsim.twin.quality import FEWEST_LOST, Survey, message_cost_s, percentile
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
    _check_minutes(minutes)
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


def probe_others(out: Path, hosts: Sequence[str], device: str, minutes: float, program: str) -> None:
    """Have other machines measure themselves, and put them into the twin."""
    _check_minutes(minutes)
    check_torch_device(device)
    probe_hosts(TwinFile(out), hosts, device, minutes, program)


def _check_minutes(minutes: float) -> None:
    if 0 < 60 * minutes < SHORTEST_HEAT_S:
        raise ConfigError(f"--minutes {minutes:g}: a machine grows hot in {SHORTEST_HEAT_S / 60:g} min at least")


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
    basis, homes = measured_between(len(names)), {node.name: node.home for node in twin.scenario.nodes}

    def put(found: Surveyed) -> Fit:
        fit = fitted(Survey(found, names, costs_s, twin.scenario.tcp, basis), homes)
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
    _show_media(fit)
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
            f"not measured yet: {', '.join(unknown)}; run `hcsim probe -o {out.name}` there, into a copy of the file, "
            f"or here with --hosts {','.join(unknown)}"
        )


def _table_name(name: str) -> str:
    """Return a name that the tables of a scenario can have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("-._") or "node"


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
    rates, trips = (Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)) for _ in range(2))
    _columns(rates, "alone", "spread", "both ways", "lost, half", "lost, full")
    _columns(trips, "median", "p90", "p99", "half", "full, p90")
    both = {(flow.source, flow.target): flow for flow in found.flows if flow.kind == "both ways"}
    idle = {(each.source, each.target): each.idle_s for each in found.calls}
    full, half = ({(each.source, each.target): each for each in found.sendings_of(kind)} for kind in ("alone", "paced"))
    for flow in found.flows:
        pair = flow.source, flow.target
        if flow.kind == "alone":
            ends = names[flow.source], names[flow.target]
            rates.add_row(
                *ends, _mbps(flow.rate_Bps), f"{flow.spread:.1%}", _mbps(both[pair].rate_Bps),
                _lost(half[pair]), _lost(full[pair]),
            )  # fmt: skip
            seconds = [percentile(idle[pair], percent) for percent in (50, 90, 99)]
            seconds += [
                percentile(half[pair].trips_s or idle[pair], 50),
                percentile(full[pair].trips_s or idle[pair], 90),
            ]
            trips.add_row(*ends, *map(screen.duration, seconds))
    screen.say("Mb/s of data in messages, and the share of segments lost by a flow at half and at full rate")
    screen.show(rates)
    screen.say("round trips of small messages, idle and while data are sent at half and at full rate")
    screen.show(trips)
    for step in sorted({flow.step for flow in found.flows if flow.kind in ("two into one", "all")}):
        at_once = [flow for flow in found.flows if flow.step == step]
        flows = ", ".join(f"{names[each.source]} → {names[each.target]} {_mbps(each.rate_Bps)}" for each in at_once)
        screen.say(f"{at_once[0].kind}: {flows}")


def _columns(table: Table, *headings: str) -> None:
    for heading in ("from", "to", *headings):
        table.add_column(heading, justify="left" if heading in ("from", "to") else "right")


def _lost(sending: Sending) -> str:
    """Return the share of segments that were lost; where few were, what it is below (95 %)."""
    if not sending.segments:
        return "–"
    few = sending.lost < FEWEST_LOST
    return f"{'< ' if few else ''}{(3 if few else sending.lost) / sending.segments:.1g}".replace("e-0", "e-")


def _show_media(fit: Fit) -> None:
    """Show what followed for each medium and line."""
    for medium in fit.media:
        if isinstance(medium, Ethernet | Wifi):
            told = [f"latency {screen.duration(medium.latency_s)}", f"jitter {screen.duration(medium.jitter_s)}"]
            told.append(f"loss {medium.loss:.2g}")
            if isinstance(medium, Ethernet) and medium.queue_bytes:
                told.append(_queued("queue", medium.queue_bytes, medium.queue_basis))
            screen.say(f"{medium.name} in {medium.home}: {', '.join(told)}")
    for line in fit.wan:
        told = [f"up {_mbps(line.up_bps / 8)}, down {_mbps(line.down_bps / 8)} Mb/s"]
        told += [f"latency {screen.duration(line.latency_s)}", f"jitter {screen.duration(line.jitter_s)}"]
        told.append(f"loss {line.loss:.2g}")
        if line.buffer_bytes:
            told.append(_queued("buffer", line.buffer_bytes, line.buffer_basis))
        screen.say(f"line of {line.home}: {', '.join(told)}")


def _queued(what: str, size_bytes: int, basis: Basis | None) -> str:
    at_least = "at least " if basis is not None and basis.kind == "estimated" else ""
    return f"{what} {at_least}{screen.size(size_bytes)}"


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
