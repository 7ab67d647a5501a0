"""Runs each check in a process of its own, within a time limit, and makes a report without names of people.

A check that hangs, or that ends its process, costs one line of the report. All processes that a check has started end
with it: they are in one process group, which is killed.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import platform
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from hcsim.doctor import CheckResult
from hcsim.real.hardware import installed_versions, system_name, this_chip
from hcsim.real.interfaces import host_name, list_interfaces
from hcsim.runtime.host import MachineFacts, Medium

ALL_S = 300.0
"""The time limit of all checks together."""
_IDLE = "let the machine do less meanwhile, and name the checks to be tried again: hcsim selftest CHECK …"
_LONGEST = 400


class SelftestResult(CheckResult, frozen=True, omit_defaults=True, kw_only=True):
    """One line of the report."""

    seconds: float


class SelftestFacts(MachineFacts, frozen=True):
    """What a reader of the report has to know of the machine."""

    memory_bytes: int | None
    processors: int | None
    interfaces: tuple[str, ...]
    """Their media, without names and addresses."""

    @classmethod
    def here(cls) -> SelftestFacts:
        """Return those of this machine."""
        chip = this_chip()
        media = tuple(each.medium.value for each in list_interfaces() if each.medium is not Medium.LOOPBACK)
        return cls(
            system_name(),
            chip.name,
            installed_versions(),
            chip.memory_bytes,
            os.cpu_count(),
            media,
        )


class SelftestReport(msgspec.Struct, frozen=True):
    """What `hcsim selftest --json` prints of one machine."""

    facts: SelftestFacts
    results: tuple[SelftestResult, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is bad."""
        return all(result.state != "bad" for result in self.results)


class Planned(msgspec.Struct, frozen=True):
    """A check to be run."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    remedy: str

    @classmethod
    def of(cls, name: str) -> Planned:
        """Return the check of that name."""
        from hcsim.selftest.checks import CHECKS

        check = CHECKS[name]
        return cls(name, (sys.executable, "-m", "hcsim.selftest", name), check.limit_s, check.remedy)


async def run_checks(planned: Sequence[Planned], all_s: float = ALL_S) -> AsyncIterator[SelftestResult]:
    """Run the checks one after the other, and yield each result."""
    until_s = time.monotonic() + all_s
    for each in planned:
        limit_s = min(each.limit_s, until_s - time.monotonic())
        if limit_s <= 0:
            found = f"not begun: {all_s:g} s were over{_load()}"
            yield SelftestResult(each.name, "bad", found, _IDLE, seconds=0.0)
            continue
        began_s = time.monotonic()
        result = await _run(each, limit_s)
        remedy = (result.remedy or each.remedy) if result.state == "bad" else ""
        took_s = round(time.monotonic() - began_s, 2)
        yield SelftestResult(each.name, result.state, anonymous(result.found)[:_LONGEST], remedy, seconds=took_s)


async def _run(planned: Planned, limit_s: float) -> CheckResult:
    """Return the result that the check's process prints, or what became of the process instead."""
    process = await asyncio.create_subprocess_exec(
        *planned.command, start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(limit_s):
            output, errors = await process.communicate()
    except TimeoutError:
        load = _load()
        return CheckResult(planned.name, "bad", f"did not end within {limit_s:.3g} s{load}", _IDLE if load else "")
    finally:
        with suppress(ProcessLookupError, PermissionError):  # macOS forbids it for a group of processes that have ended
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    last = (output.decode(errors="replace").strip().splitlines() or [""])[-1]
    try:
        return msgspec.json.decode(last, type=CheckResult)
    except (ValueError, msgspec.MsgspecError):
        said = (errors.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        return CheckResult(planned.name, "bad", f"its process {_ended(process.returncode or 0)}: {said}")


def _load() -> str:
    """Return how busy the machine is, if it has more to do than processors."""
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    return f", with {load:.0f} programs that wanted its {processors} processors" if load > processors else ""


def _ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def anonymous(text: str) -> str:
    """Return the text without the names of this machine and of its user."""
    text = text.replace(str(Path.home()), "~")
    names = {host_name(): "HOST", platform.node(): "HOST"}
    with suppress(OSError, KeyError):  # no such user
        names[getpass.getuser()] = "USER"
    for name, stands_for in names.items():
        if len(name) > 2 and name not in ("root", "localhost"):
            text = re.sub(rf"\b{re.escape(name)}\b", stands_for, text)
    return text


class JoinedReport(msgspec.Struct, frozen=True):
    """What `hcsim selftest --hosts --json` prints: this machine's report first, then those of the others."""

    machines: tuple[SelftestReport, ...]
    between: tuple[SelftestResult, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is bad."""
        return all(each.passed for each in self.machines) and all(each.state != "bad" for each in self.between)

    def without_names(self, hosts: Sequence[str]) -> JoinedReport:
        """Return the report with numbers in place of these names."""

        def unnamed(result: SelftestResult) -> SelftestResult:
            check, found, remedy = result.check, result.found, result.remedy
            for number, host in enumerate(hosts, 2):
                check, found, remedy = (
                    re.sub(rf"(?<![\w.@-]){re.escape(host)}(?![\w.-])", f"machine {number}", text)
                    for text in (check, found, remedy)
                )
            return msgspec.structs.replace(result, check=check, found=anonymous(found), remedy=remedy)

        return JoinedReport(self.machines, tuple(map(unnamed, self.between)))
