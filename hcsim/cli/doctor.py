"""`hcsim doctor`: show a machine's report, and those of others, as a table or as JSON."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from functools import partial

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from hcsim.cli import screen
from hcsim.cli.settings import seconds
from hcsim.doctor import LOOK_S, CheckResult, HealthReport, ThisSystem, ask_by_ssh, compare, examine, examine_host
from hcsim.launch.hosts import read_hosts, without_here
from hcsim.real.hardware import check_torch_device

_LOOK_WITH_OTHERS = "8 s"
"""Machines start their checks seconds apart, and each has to be announced while the others look."""
_COLOURS = {"good": "green", "warning": "yellow", "bad": "bold red", "skipped": "dim"}


def doctor(hosts: Sequence[str], device: str, look: str | None, program: str, *, as_json: bool) -> bool:
    """Examine this machine and, through ssh, others; return whether nothing is bad."""
    check_torch_device(device)
    look = look or (_LOOK_WITH_OTHERS if hosts else f"{LOOK_S:g} s")
    hosts = [host.ssh for host in without_here(read_hosts(hosts))[0]]
    reports, between = asyncio.run(_examine_all(hosts, device, look, program))
    if as_json:
        data = {"machines": reports, "between": between} if hosts else reports["here"]
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(data)).decode() + "\n")
    else:
        _show(reports, between)
    return all(report.healthy for report in reports.values()) and all(each.state != "bad" for each in between)


async def _examine_all(
    hosts: Sequence[str], device: str, look: str, program: str
) -> tuple[dict[str, HealthReport], list[CheckResult]]:
    ask = partial(ask_by_ssh, program=program, look=look)
    others = asyncio.gather(*(examine_host(host, ask) for host in hosts))
    reports = {"here": await examine(ThisSystem(), device, seconds("--look", look), others)}
    between: list[CheckResult] = []
    for host, (report, findings) in zip(hosts, await others, strict=True):
        if report is not None:
            reports[host] = report
        for finding in findings:
            check = host if finding.check == host else f"{host}: {finding.check}"
            between.append(msgspec.structs.replace(finding, check=check))
    return reports, between + compare(reports)


def _show(reports: dict[str, HealthReport], between: Sequence[CheckResult]) -> None:
    for host, report in reports.items():
        facts = report.facts
        versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
        screen.say(f"{facts.name}{'' if host == 'here' else f' ({host})'}: {facts.chip}, {facts.system}; {versions}")
        screen.show(_table(report.findings))
    if between:
        screen.say("Between the machines:")
        screen.show(_table(between))
    findings = [*between, *(finding for report in reports.values() for finding in report.findings)]
    count = {state: sum(finding.state == state for finding in findings) for state in ("bad", "warning")}
    if count["bad"]:
        screen.say(f"{screen.counted(count['bad'], 'problem')}, {screen.counted(count['warning'], 'warning')}")
    elif count["warning"]:
        screen.say(f"it works; {screen.counted(count['warning'], 'warning')}")
    else:
        screen.say("all is well")


def _table(findings: Sequence[CheckResult]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        said = Text(screen.cell(finding.found))
        if finding.remedy:
            said.append("\n→ " + finding.remedy)
        table.add_row(Text(finding.state, style=_COLOURS[finding.state]), screen.cell(finding.check), said)
    return table
