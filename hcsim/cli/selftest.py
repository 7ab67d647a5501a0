"""`hcsim selftest`: a line for each check as it ends, and a report as JSON."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

import msgspec

from hcsim.cli import screen
from hcsim.errors import ConfigError
from hcsim.selftest.checks import CHECKS
from hcsim.selftest.runner import MachineFacts, Planned, SelftestReport, SelftestResult, run_checks
from hcsim.units import did_you_mean

_SIGNS = {"good": "✓", "warning": "✓", "bad": "✗", "skipped": "–"}
_WIDTH = max(map(len, CHECKS))


def selftest(names: Sequence[str], *, as_json: bool) -> bool:
    """Run the checks of this machine, and show the report. Return whether nothing failed."""
    chosen = _chosen(names)
    tell = screen.note if as_json else screen.say
    report = asyncio.run(_run(chosen, tell))
    failed = sum(result.state == "bad" for result in report.results)
    tell(_summary(report.facts, len(report.results), failed))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    return report.passed


async def _run(names: Sequence[str], tell: Callable[[str], None]) -> SelftestReport:
    results = []
    async for result in run_checks([Planned.of(name) for name in names]):
        tell(_line(result))
        results.append(result)
    return SelftestReport(MachineFacts.here(), tuple(results))


def _line(result: SelftestResult) -> str:
    line = f"{_SIGNS[result.state]} {result.check:<{_WIDTH}} {result.seconds:6.1f} s  {screen.cell(result.found)}"
    return f"{line}\n{'':{_WIDTH + 13}}→ {result.remedy}" if result.remedy else line


def _summary(facts: MachineFacts, count: int, failed: int) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    verdict = f"{failed} of {screen.counted(count, 'check')} failed" if failed else f"all {count} checks passed"
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
