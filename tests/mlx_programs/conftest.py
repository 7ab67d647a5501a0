"""MLX programs on real ranks, one process each on loopback, and on a virtual cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hcsim.scripts.processes import RankProcesses
from hcsim.scripts.run import simulate_script
from tests.conftest import free_addresses
from tests.switches import on_switch

LIMIT_S = 120
PROLOGUE = """\
import json, os, signal
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import hcsim.mlx as dist
from mlx.utils import tree_flatten, tree_map

def tell(value):
    print(json.dumps(value))

"""


class Rank:
    """How a process ended, and what it printed."""

    def __init__(self, code: int, output: str, errors: str, calls: int = 0) -> None:
        """`calls` are those of a simulated rank."""
        self.code = code
        self.calls = calls
        self.output = output
        self.errors = errors

    @property
    def value(self) -> Any:
        assert self.code == 0, self.errors
        return json.loads(self.output.splitlines()[-1])


OnRanks = Callable[..., list[Rank]]
InWorld = Callable[..., list[Any]]


def written(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(PROLOGUE + textwrap.dedent(text), encoding="utf-8")
    return script


@pytest.fixture
def on_ranks(tmp_path: Path) -> OnRanks:
    """Runs a script on real ranks, as `mlx.launch` starts them."""

    def run(size: int, script: str | Path, *arguments: str) -> list[Rank]:
        path = script if isinstance(script, Path) else written(tmp_path, script)
        hosts = tmp_path / "hosts.json"
        hosts.write_text(json.dumps([[address] for address in free_addresses(size)]))
        with ExitStack() as stack:
            processes = []
            for rank in range(size):
                process = subprocess.Popen(
                    [sys.executable, str(path), *arguments],
                    env={**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                stack.callback(process.kill)
                processes.append(stack.enter_context(process))
            outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
            return [Rank(process.returncode, *said) for process, said in zip(processes, outputs, strict=True)]

    return run


@pytest.fixture
def simulated(tmp_path: Path, processes: RankProcesses) -> Callable[..., list[Rank]]:
    """Runs a script on the machines of a virtual cluster."""

    def run(size: int, script: str | Path, *arguments: str) -> list[Rank]:
        path = script if isinstance(script, Path) else written(tmp_path, script)
        said: dict[tuple[int, int], str] = {}

        def say(rank: int, stream: int, text: str) -> None:
            said[rank, stream] = said.get((rank, stream), "") + text

        names = [f"mac-{number}" for number in range(size)]
        run = simulate_script(on_switch(names), path, arguments, say=say, processes=processes)
        return [
            Rank(each.code or 0, said.get((rank, 1), ""), said.get((rank, 2), ""), each.calls)
            for rank, each in enumerate(run.ranks)
        ]

    return run


@pytest.fixture(params=["virtual", pytest.param("real", marks=pytest.mark.slow)])
def in_world(request: pytest.FixtureRequest) -> InWorld:
    """Runs a script in either world, and returns what its ranks told last."""
    run = request.getfixturevalue("simulated" if request.param == "virtual" else "on_ranks")

    def values(size: int, script: str, *arguments: str) -> list[Any]:
        return [rank.value for rank in run(size, script, *arguments)]

    return values


def alike(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)
