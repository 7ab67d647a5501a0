"""Ranks that are forked, as on Linux, and ranks that are started afresh, as on macOS: both work on both systems."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hcsim.config import Crash
from hcsim.scripts.environment import RankSpec
from hcsim.scripts.ipc import IpcClosed
from hcsim.scripts.processes import RankProcess, RankProcesses
from hcsim.scripts.run import ScriptRun, simulate_script
from hcsim.workers import ONE_THREAD
from tests.switches import on_switch

TWO = ("mac-0", "mac-1")

THREADS = """
import json, os
print(json.dumps(dict(os.environ)))
"""
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
data = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(data)
print(data.unique().tolist())
"""


@pytest.fixture(scope="module", params=["fork", "spawn"])
def started(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    with RankProcesses(request.param) as processes:
        yield processes


def run(processes: RankProcesses, folder: Path, text: str, ranks: int, *faults: Crash) -> tuple[ScriptRun, list[str]]:
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    said: list[str] = []
    scenario = on_switch(TWO[:ranks], faults)
    done = simulate_script(scenario, script, say=lambda rank, stream, text: said.append(text), processes=processes)
    return done, "".join(said).splitlines()


def heard_to_the_end(process: RankProcess) -> None:
    with suppress(IpcClosed):
        while True:
            process.connection.receive()


def begun(processes: RankProcesses, script: Path) -> RankProcess:
    return processes.start(RankSpec(0, 1, "mac-0", str(script), (), 1.0, seed=0))


@pytest.mark.slow
def test_ranks_that_have_ended_do_not_end_those_that_are_started_later(started: RankProcesses, tmp_path: Path) -> None:
    """A process that has ended keeps its status for the simulator, which may come to it only after others started."""
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)", encoding="utf-8")
    ranks = []
    for _ in range(3):
        ranks.append(begun(started, script))
        heard_to_the_end(ranks[-1])
    assert [started.end(each, at_once=False) for each in ranks] == [7, 7, 7]


@pytest.mark.slow
def test_ranks_work_together(started: RankProcesses, tmp_path: Path) -> None:
    done, said = run(started, tmp_path, SUM, 2)
    assert done.succeeded
    assert said == ["[3.0]"] * 2


@pytest.mark.slow
def test_a_rank_computes_in_one_thread_whatever_library_it_uses(started: RankProcesses, tmp_path: Path) -> None:
    done, said = run(started, tmp_path, THREADS, 1)
    assert done.succeeded
    assert json.loads(said[0]).items() >= ONE_THREAD.items()


@pytest.mark.slow
def test_a_machine_that_crashes_takes_its_rank_with_it(started: RankProcesses, tmp_path: Path) -> None:
    forever = "import time\nwhile True: time.sleep(1)"
    done, _ = run(started, tmp_path, forever, 1, Crash(0.5, "mac-0"))
    assert done.ranks[0].code is None
    killed, _ = run(started, tmp_path, f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})", 1)
    assert killed.ranks[0].code == -signal.SIGKILL
    assert "SIGKILL" in killed.ranks[0].error
