"""Scripts on small virtual clusters. Torch is loaded once for all of them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hcsim.config import Scenario
from hcsim.scripts.processes import RankProcesses
from hcsim.scripts.run import ScriptRun, simulate_script
from hcsim.telemetry.trace import Sink


class Told:
    """A run, and what each rank printed."""

    def __init__(self, run: ScriptRun, lines: Sequence[tuple[int, str]]) -> None:
        self.run = run
        self.lines = lines

    def by(self, rank: int) -> list[str]:
        return [line for teller, line in self.lines if teller == rank]

    def value(self, rank: int) -> Any:
        """What a rank printed last, as JSON."""
        return json.loads(self.by(rank)[-1])


Runner = Callable[..., Told]


@pytest.fixture
def run_text(tmp_path: Path, processes: RankProcesses) -> Runner:
    """Runs a script that is given as text, after what all of them import; it may fail."""

    def run(scenario: Scenario, text: str, *arguments: str, sink: Sink | None = None) -> Told:
        script = tmp_path / "script.py"
        script.write_text(PROLOGUE + textwrap.dedent(text), encoding="utf-8")
        lines: list[tuple[int, str]] = []
        begun: dict[int, str] = {}

        def say(rank: int, stream: int, said: str) -> None:
            *whole, begun[rank] = (begun.get(rank, "") + said).split("\n")
            lines.extend((rank, line) for line in whole)

        run = simulate_script(scenario, script, arguments, say=say, sink=sink, processes=processes)
        return Told(run, lines)

    return run


@pytest.fixture
def run_well(run_text: Runner) -> Runner:
    """The same for a script that has to succeed."""

    def run(*args: Any, **kwargs: Any) -> Told:
        told = run_text(*args, **kwargs)
        assert told.run.succeeded, told.lines
        return told

    return run


PROLOGUE = """\
import json, os, sys, time
import torch
import torch.distributed as dist

def tell(value):
    print(json.dumps(value))

"""
