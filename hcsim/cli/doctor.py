"""`hcsim doctor`: show a machine's report, and those of others, as a table or as JSON."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from hcsim.cli import screen
from hcsim.cli.membership import by_seniority, find_members, show_links, show_rows
from hcsim.cli.settings import seconds
from hcsim.cluster.messages import StatusReply
from hcsim.doctor import (
    LOOK_S,
    CheckResult,
    HealthReport,
    ThisSystem,
    ask_by_ssh,
    compare,
    compare_members,
    examine,
    examine_host,
)
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


def doctor_of_cluster(home: Path, cluster: str, peers: Sequence[str], look: str, *, as_json: bool) -> bool:
    """Ask the members of a running cluster, and compare them; return whether nothing is bad."""
    survey = find_members(home, cluster, peers, look)
    between = compare_members(survey, time.time() - time.monotonic())
    members = by_seniority(survey)
    if as_json:
        data = {"members": [_member_data(each) for each in members.values()], "between": between}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(data)).decode() + "\n")
    else:
        headings = ("machine", "system", "chip", "versions")
        show_rows(headings, [_member_row(each) for each in members.values()])
        show_links(members)
        for address, why in survey.failures.items():
            screen.note(f"{address} did not answer: {why}")
        screen.show(_table(between))
        _count(between)
    return all(finding.state != "bad" for finding in between)


def _member_row(told: StatusReply) -> tuple[str, ...]:
    facts, name = told.facts, told.status.us.name
    if facts is None:
        return name, "–", "–", "–"
    return name, facts.system, facts.chip, ", ".join(f"{what} {version}" for what, version in facts.versions.items())


def _member_data(told: StatusReply) -> dict[str, object]:
    return {
        "name": told.status.us.name,
        "node": told.status.us.node,
        "epoch": told.view.epoch,
        "facts": told.facts,
        "heard": told.heard,
        "links": told.links,
        "interfaces": told.interfaces,
    }


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
    _count([*between, *(finding for report in reports.values() for finding in report.findings)])


def _count(findings: Sequence[CheckResult]) -> None:
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
