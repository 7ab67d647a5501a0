"""How near `hcsim probe SCRIPT.py` comes: steps of scripts in the simulator against the same scripts alone.

    python -m experiments.compute.scripts --only words,images

Each script of `experiments/fidelity/scripts` is probed, run by itself and run on a virtual machine, each as a person
would do it. The machine should have nothing else to do.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments import asked
from hcsim.errors import HcsimError
from hcsim.real.sockets import free_ports
from hcsim.scripts.environment import environment

FOLDER = Path(__file__).parents[1] / "fidelity" / "scripts"
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path.stem != "loop"}
_ROOT = Path(__file__).parents[2]
_STEP = re.compile(r"([0-9.]+) ms a step")
_ENDLESS = "1000000"
_LONGEST_S = 300.0


class Found(msgspec.Struct, frozen=True):
    """The steps of a script."""

    script: str
    measured_s: float
    spread: float
    """Half of the distance between the longest and the shortest of its runs, relative to their median."""
    predicted_s: float
    held_out_error: float
    """What the probe itself says of the error."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def step_s(script: Path, said: str) -> float:
    """Return the time of a step that the script has printed."""
    found = _STEP.search(said)
    if found is None:
        raise HcsimError(f"{script.name} failed: {said.strip().rpartition(chr(10))[2]}")
    return float(found[1]) / 1e3


def measured(script: Path, steps: int, repeats: int, twin: Path) -> Found:
    """Probe a script, run it, and have it simulated."""
    probed = _said("-m", "hcsim", "probe", str(script), "-o", str(twin), "--device", "cpu", "--json", "--", _ENDLESS)
    alone_s = [step_s(script, _said(str(script), str(steps))) for _ in range(repeats)]
    simulated = _said("-m", "hcsim", "run", str(script), "--scenario", str(twin), "--", str(steps // 4))
    median_s = statistics.median(alone_s)
    held_out = msgspec.json.decode(probed, type=dict[str, float | str])["error"]
    assert isinstance(held_out, float)
    spread = (max(alone_s) - min(alone_s)) / 2 / median_s
    return Found(script.stem, median_s, spread, step_s(script, simulated), held_out)


def _said(*arguments: str) -> str:
    """Run Python as torchrun would, and return what it printed."""
    [port] = free_ports(1)
    variables = environment(0, 1, "127.0.0.1", 1) | {"MASTER_PORT": str(port), "PYTHONPATH": _path()}
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | variables, text=True, capture_output=True,
        timeout=_LONGEST_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise HcsimError(f"{' '.join(arguments)}: {done.stderr.strip().rpartition(chr(10))[2]}")
    return done.stdout


def _path() -> str:
    return os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))


def main(
    only: Annotated[str, typer.Option(help="Only these scripts.")] = ",".join(SCRIPTS),
    steps: Annotated[int, typer.Option(min=8, help="Steps of a run.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each script.")] = 3,
    json_file: Annotated[str | None, typer.Option("--json", help="Write one row per script to this file.")] = None,
) -> None:
    """Predict the steps of scripts from their own kernels, and measure them."""
    chosen = asked.chosen(only, SCRIPTS)
    asked.check_json(json_file)
    with tempfile.TemporaryDirectory(prefix="hcsim-") as folder:
        rows = [measured(SCRIPTS[name], steps, repeats, Path(folder, "twin.toml")) for name in chosen]
    asked.hand_over(json_file, list(map(msgspec.structs.asdict, rows)), lambda: show(rows))


def show(rows: Sequence[Found]) -> None:
    """Print a line for each script, and the median of the errors."""
    table = Table(box=box.SIMPLE)
    for title in ("script", "measured", "spread", "predicted", "error", "said by the probe"):
        table.add_column(title, justify="left" if title == "script" else "right")
    for row in rows:
        table.add_row(row.script, f"{1e3 * row.measured_s:.2f} ms", f"{row.spread:.1%}",
                      f"{1e3 * row.predicted_s:.2f} ms",
                      f"{row.error:+.1%}", f"{row.held_out_error:+.1%}")  # fmt: skip
    console = Console(width=100)
    console.print(table)
    console.print(f"median error {statistics.median(abs(row.error) for row in rows):.1%}")


if __name__ == "__main__":
    asked.run(main)
