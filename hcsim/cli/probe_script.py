"""`hcsim probe SCRIPT.py` and `hcsim probe --task`: measure the kernels of a torch training script, or the parts of a
task, in its own steps, and write them into a twin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hcsim.cli import screen
from hcsim.cli.probe import check_report, write_report
from hcsim.config.machine import Basis, Machine
from hcsim.errors import ConfigError, HcsimError
from hcsim.real.hardware import best_torch_device, check_torch_device
from hcsim.real.interfaces import host_name, leads_out, list_interfaces
from hcsim.training.tasks import TASKS
from hcsim.twin.file import TwinFile
from hcsim.twin.machine import measured_now, rough_machine
from hcsim.twin.script import ScriptCheck, check, script_kernels, time_script, with_script
from hcsim.twin.tasks import measure_task

_USUAL_MINUTES = 5.0


class ScriptRequest(msgspec.Struct, frozen=True):
    """The script, and how it is run."""

    script: Path
    arguments: Sequence[str]
    device: str
    minutes: float | None
    """The longest time that it may take."""


def probe_script(out: Path, request: ScriptRequest, report: Path | None, *, as_json: bool) -> None:
    """Run the script for some steps, and put its kernels into the twin."""
    script, arguments, device, minutes = msgspec.structs.astuple(request)
    if script.suffix != ".py":
        raise ConfigError(f"{script}: a script's name ends with .py")
    if minutes == 0:
        raise ConfigError("--minutes 0: a script needs time to take steps")
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such script")
    check_torch_device(device)
    check_report(report)
    twin, name = TwinFile(out), host_name()
    with screen.ProgressLine("probe", 1) as progress:
        progress.news(f"steps of {script.name}")
        with progress.away():
            times = time_script(script, arguments, device, 60 * (minutes or _USUAL_MINUTES))
        if device not in ("auto", times.device):
            raise HcsimError(f"{script.name} computes on {times.device}, which it chooses itself, and not on {device}")
        progress.phase("products and sums")
        known = twin.machine(name)
        machine = known or rough_machine(name, times.device)
    found = check(script.name, times.turns, machine)
    machine = with_script(machine, script_kernels(script.name, times.turns, _basis(times.device, arguments)))
    twin.put_machine(machine, [each for each in list_interfaces() if leads_out(each)])
    write_report(report, twin)
    if as_json:
        data = {"script": script.name, "device": times.device, "error": found.error, **msgspec.structs.asdict(found)}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(data)).decode() + "\n")
        return
    _show(script.name, times.device, found, ended=times.ended)
    _show_next(out, script, known)


def probe_task(out: Path, task: str, device: str, *, as_json: bool) -> None:
    """Take steps of a task, and put the times of their parts into the twin."""
    check_torch_device(device)
    TASKS.named(task)
    device = best_torch_device() if device == "auto" else device
    twin, name = TwinFile(out), host_name()
    with screen.ProgressLine("probe", 1) as progress:
        progress.phase(f"steps of {task}")
        found = measure_task(task, device, measured_now(device))
        progress.phase("products and sums")
        machine = twin.machine(name) or rough_machine(name, device)
    others = tuple(each for each in machine.tasks if each.name != task)
    twin.put_machine(replace(machine, tasks=(*others, found)), [each for each in list_interfaces() if leads_out(each)])
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found)).decode() + "\n")
        return
    for curve in found.kernels:
        sizes = len(curve.points) > 1
        times = (
            screen.duration(each_s) + (f" ({samples:g} samples)" if sizes else "") for samples, each_s in curve.points
        )
        screen.say(f"{curve.signature}: {', '.join(times)}")
    screen.note(f"written to {out}: try `hcsim run {out} --task {task}`")


def _basis(device: str, arguments: Sequence[str]) -> Callable[[float], Basis]:
    """Return what makes the provenance of a script's kernels from their spread."""

    def basis(spread: float) -> Basis:
        found = measured_now(device)(spread)
        return replace(found, source=" ".join([f"{found.source}, given", *arguments]) if arguments else found.source)

    return basis


def _show(name: str, device: str, found: ScriptCheck, *, ended: bool) -> None:
    if ended:
        screen.note(f"{name} ended before enough steps were timed: with more of them the figures are better")
    screen.say(f"{name} on {device}: {found.kernels} kernels in a step, {found.distinct} of them different")
    screen.say(
        f"steps that were not timed kernel by kernel: predicted {screen.duration(found.predicted_s)}, measured"
        f" {screen.duration(found.step_s)} ({found.error:+.1%}), spread {found.spread:.1%};"
        f" {found.known:.0%} of their time is in known kernels"
    )


def _show_next(out: Path, script: Path, known: Machine | None) -> None:
    screen.note(f"written to {out}: try `hcsim run {script} --scenario {out}`")
    missing = [
        what
        for what, there in (("other kernels", known and known.kernels), ("messages", known and known.messages))
        if not there
    ]
    if missing:
        screen.note(f"not measured yet: {' and '.join(missing)}; `hcsim probe -o {out}` does that")
