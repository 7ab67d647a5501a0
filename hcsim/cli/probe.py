"""`hcsim probe`: measure this machine, and write what was found into a twin."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rich import box
from rich.table import Table

from hcsim.cli import screen
from hcsim.config.machine import BY_FLOPS, Machine
from hcsim.errors import ConfigError
from hcsim.real.hardware import best_torch_device, check_torch_device
from hcsim.real.interfaces import host_name, leads_out, list_interfaces
from hcsim.twin.file import TwinFile
from hcsim.twin.machine import SHORTEST_HEAT_S, measure_machine


def probe(out: Path, device: str, minutes: float, *, as_json: bool) -> None:
    """Measure this machine and put it into the twin, part by part."""
    if 0 < 60 * minutes < SHORTEST_HEAT_S:
        raise ConfigError(f"--minutes {minutes:g}: a machine grows hot in {SHORTEST_HEAT_S / 60:g} min at least")
    check_torch_device(device)
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
    if as_json:
        data = msgspec.json.encode(machine, enc_hook=_plain_number)
        sys.stdout.write(msgspec.json.format(data).decode() + "\n")
    else:
        _show(machine)
        screen.note(f"written to {out}: try `hcsim run {out} --task digits --steps 20`")


def _show(machine: Machine) -> None:
    """Show the best rates of each curve."""
    heat = f", {machine.sustained:.0%} of its speed when it is hot" if machine.fanless else ""
    memory = "" if machine.ram_bytes is None else f", {screen.size(machine.ram_bytes)}"
    screen.say(f"{machine.name}: {machine.basis.source}{memory}{heat}")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "sizes", "shortest", "at the largest", "spread"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for curve in machine.kernels:
        unit = "GFLOP" if curve.kind in BY_FLOPS else "GB"
        intensity = f" at {curve.intensity:.3g} FLOP/B" if curve.intensity else ""
        table.add_row(
            f"{curve.kind} {curve.dtype}{intensity}", *_curve(curve.points, unit), f"{curve.basis.spread:.0%}"
        )
    for codec in machine.codecs:
        spread = f"{codec.basis.spread:.0%}"
        table.add_row(f"encode {codec.compressor}", *_curve(codec.encode, "GB"), spread)
        table.add_row(f"decode {codec.compressor}", *_curve(codec.decode, "GB"), spread)
    screen.show(table)


def _curve(points: tuple[tuple[float, float], ...], unit: str) -> tuple[str, ...]:
    size, size_s = points[-1]
    rate = f"{size / size_s / 1e9:.3g} {unit}/s" if size_s else "–"
    return str(len(points)), screen.duration(points[0][1]), rate


def _plain_number(value: object) -> int | float:
    """Return a quantity as a number in its base unit."""
    return int(value) if isinstance(value, int) else float(str(value))
