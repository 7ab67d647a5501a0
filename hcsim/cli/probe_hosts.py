"""`hcsim probe --hosts`: other machines measure themselves, and what they found comes into the twin here."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from hcsim.cli import screen
from hcsim.config import Machine, parse_scenario
from hcsim.doctor import why_no_report
from hcsim.errors import ConfigError, HcsimError
from hcsim.launch.hosts import read_hosts, without_here
from hcsim.real.hardware import best_torch_device
from hcsim.real.interfaces import host_name, leads_out, list_interfaces
from hcsim.real.ssh import start_ssh
from hcsim.runtime.host import Interface
from hcsim.twin.file import TwinFile
from hcsim.twin.machine import measure_machine

_LIMIT_S = 1800.0
"""How long a machine may take, besides the time that it is kept busy for its heat."""

Ask: TypeAlias = Callable[[str], Awaitable[tuple[int, str]]]
"""Has a host measure itself; returns its exit status and output."""


class ProbedMachine(msgspec.Struct, frozen=True):
    """What a machine prints after it has measured itself."""

    twin: str
    """A scenario with this machine alone."""
    interfaces: tuple[Interface, ...] = ()


def print_probed(device: str, minutes: float) -> None:
    """Measure this machine for another one, which has started this program through ssh."""
    device = best_torch_device() if device == "auto" else device
    interfaces = tuple(each for each in list_interfaces() if leads_out(each))
    with tempfile.TemporaryDirectory(prefix="hcsim-") as folder:
        twin = TwinFile(Path(folder) / "twin.toml")
        for machine in measure_machine(host_name(), device, None, 60 * minutes, lambda what: None):
            twin.put_machine(machine, interfaces)
        text = twin.path.read_text(encoding="utf-8")
    sys.stdout.write(msgspec.json.encode(ProbedMachine(text, interfaces)).decode() + "\n")


def probe_hosts(twin: TwinFile, hosts: Sequence[str], device: str, minutes: float, program: str) -> None:
    """Have other machines measure themselves, all at once, and put what they found into the twin.

    Those that succeed are kept, whichever fail; then raise `HcsimError`, which names the others."""
    names = [host.ssh for host in without_here(read_hosts(hosts))[0]]
    if not names:
        raise ConfigError("--hosts: there is no machine but this one")
    screen.note(f"measuring {', '.join(names)}, which takes some minutes")
    command = (program, "probe", "--member", "--device", device, "--minutes", f"{minutes:g}")
    limit_s = _LIMIT_S + 60 * minutes

    async def ask(host: str) -> tuple[int, str]:
        return await _ask_by_ssh(host, command)

    put_machines(twin, names, ask, limit_s)


def put_machines(twin: TwinFile, hosts: Sequence[str], ask: Ask, limit_s: float) -> None:
    """Ask the hosts, and put each answer into the twin as it comes."""
    failures: dict[str, str] = {}
    owners: dict[str, str] = {}

    async def put(host: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                status, output = await ask(host)
            machine, interfaces = _read(host, status, output)
            if machine.name in owners:
                twice = f"{owners[machine.name]} and {host} are both called {machine.name}"
                raise HcsimError(f"{twice}: rename one of them")
        except TimeoutError:
            failures[host] = f"{host} has not ended within {limit_s / 60:g} min"
        except HcsimError as error:
            failures[host] = str(error)
        else:
            owners[machine.name] = host
            twin.put_machine(machine, interfaces)
            screen.note(f"{host}: {machine.name} is measured and written to {twin.path}")

    async def put_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for host in hosts:
                tasks.create_task(put(host))

    asyncio.run(put_all())
    if failures:
        several = f"{len(failures)} of {len(hosts)} machines are not measured:" if len(failures) > 1 else ""
        raise HcsimError("\n  ".join(filter(None, (several, *(failures[host] for host in hosts if host in failures)))))


def _read(host: str, status: int, output: str) -> tuple[Machine, tuple[Interface, ...]]:
    """Return the machine that a host has printed; raise `HcsimError` if it has not."""
    try:
        probed = msgspec.json.decode(output[output.index("{") : output.rindex("}") + 1], type=ProbedMachine)
        [machine] = parse_scenario(probed.twin, host).machines
    except ConfigError as error:
        raise HcsimError(f"{host} measured what cannot be read here: {error}; is its hcsim another version?") from None
    except (ValueError, msgspec.MsgspecError):
        why = why_no_report(host, status, output)
        raise HcsimError(f"{host}: {why.found}; {why.remedy}") from None
    return machine, probed.interfaces


async def _ask_by_ssh(host: str, command: Sequence[str]) -> tuple[int, str]:
    process = await start_ssh(host, command, stdin=asyncio.subprocess.DEVNULL)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, output.decode(errors="replace")
