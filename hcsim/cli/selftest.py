"""`hcsim selftest`: a line for each check as it ends, and a report as JSON."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

import msgspec

from hcsim.cli import screen
from hcsim.errors import ConfigError
from hcsim.launch.hosts import read_hosts, without_here
from hcsim.selftest.checks import CHECKS
from hcsim.selftest.runner import (
    ALL_S,
    JoinedReport,
    Planned,
    SelftestFacts,
    SelftestReport,
    SelftestResult,
    run_checks,
)
from hcsim.transport.admission_queue import one_line
from hcsim.units import did_you_mean

_SIGNS = {"good": "✓", "warning": "✓", "bad": "✗", "skipped": "–"}
CONNECT_S = 30.0
"""What another machine has in addition, to be reached and to load."""
_LONGEST = 400
_WIDTH = max(map(len, CHECKS))


def selftest(names: Sequence[str], hosts: Sequence[str], program: str, *, as_json: bool) -> bool:
    """Run the checks of this machine and of others, and show the report. Return whether nothing failed."""
    chosen = _chosen(names)
    there = [host.ssh for host in without_here(read_hosts(hosts))[0]]
    tell = screen.note if as_json else screen.say
    report = asyncio.run(_run(chosen, there, program, [*names], tell))
    for machine in report.machines[:1]:
        failed = sum(result.state == "bad" for result in machine.results)
        tell(_summary(machine.facts, len(machine.results), failed))
    for result in report.between:
        tell(_line(result))
    if as_json:
        data = report.without_names(there) if hosts else report.machines[0]
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(data)).decode() + "\n")
    return report.passed


def take_part() -> bool:
    """Take part in the test of another machine, which has started this one through ssh."""
    from hcsim.selftest.between import be_member

    asyncio.run(be_member())
    return True


async def _run(
    chosen: Sequence[str], hosts: Sequence[str], program: str, names: Sequence[str], tell: Callable[[str], None]
) -> JoinedReport:
    from hcsim.selftest.between import check_between, check_host

    limit_s = ALL_S + CONNECT_S
    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(check_host(host, program, names, tell, limit_s)) for host in hosts]
        results = []
        async for result in run_checks([Planned.of(name) for name in chosen]):
            tell(_line(result))
            results.append(result)
    reports = [SelftestReport(SelftestFacts.here(), tuple(results))]
    between: list[SelftestResult] = []
    reached = []
    for host, found in zip(hosts, (task.result() for task in others), strict=True):
        if isinstance(found, SelftestReport):
            reports.append(found)
            reached.append(host)
        else:
            between.append(found)
    if reached:
        between += await check_between(reached, program)
    return JoinedReport(tuple(reports), tuple(between))


def _line(result: SelftestResult) -> str:
    found = one_line(result.found, _LONGEST)
    line = f"{_SIGNS[result.state]} {result.check:<{_WIDTH}} {result.seconds:6.1f} s  {found}"
    return f"{line}\n{'':{_WIDTH + 13}}→ {result.remedy}" if result.remedy else line


def _summary(facts: SelftestFacts, count: int, failed: int) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    verdict = (
        f"{failed} of {screen.counted(count, 'check')} failed"
        if failed
        else "the check passed"
        if count == 1
        else f"all {count} checks passed"
    )
    return f"{verdict}: {facts.chip}, {facts.system}; {versions}"


def _chosen(names: Sequence[str]) -> list[str]:
    """Return the checks of these names, or of these first words; all, if there are none."""
    chosen: dict[str, None] = {}
    for name in names:
        found = [each for each in CHECKS if name in (each, each.partition(":")[0])]
        if not found:
            hint = did_you_mean(name, [*CHECKS])
            raise ConfigError(f"there is no check {name!r}{hint}; there are {', '.join(CHECKS)}")
        chosen.update(dict.fromkeys(found))
    return [*chosen] if names else [*CHECKS]
