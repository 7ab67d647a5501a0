"""Tasks on Dask: a scheduler and worker processes on the loopback address, or through something like ssh."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from experiments.study.grid import parse_sweep
from experiments.sweep import Output, sweep
from hcsim.cli.app import app
from hcsim.errors import ConfigError
from hcsim.fuzz.search import TrialPool, answer_trial, judge
from hcsim.pool import Finished, Pool, TaskFunction
from hcsim.pool.identity import unlike
from hcsim.pool.local import LocalPool
from hcsim.pool.open import open_pool

pytest.importorskip("distributed")
psutil = pytest.importorskip("psutil")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # Dask's own
]

ROOT = Path(__file__).parents[2]
SMALL = """
[[grid]]
kind = "all_reduce"
study = "allreduce"
links = ["1gbe"]
worlds = [2]
algorithms = ["ring", "direct"]
sizes = ["1 KiB", "1 MiB"]
repeats = 1
"""
TABLES = ("cells.csv", "cells.parquet", "manifest.json")


class DaskCluster:
    """A scheduler and its workers, each a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "scheduler.json"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start("dask_scheduler", ROOT, "--port", "0")
        self.address = self._found()

    def worker(self, code: Path = ROOT) -> subprocess.Popen[bytes]:
        """Start a worker with one thread, which imports from this folder first."""
        place = str(self._folder / f"worker{len(self._processes)}")
        return self._start("dask_worker", code, "--no-nanny", "--nthreads", "1", "--local-directory", place)

    def end(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _start(self, module: str, code: Path, *options: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", f"distributed.cli.{module}", "--host", "127.0.0.1"]
        words += ["--dashboard-address", "127.0.0.1:0", "--scheduler-file", str(self._file), *options]
        variables = {**os.environ, "PYTHONPATH": f"{code}:{ROOT}"}
        with (self._folder / f"{len(self._processes)}.log").open("wb") as log:
            process = subprocess.Popen(words, cwd=self._folder, stdout=log, stderr=log, env=variables)
        self._processes.append(process)
        return process

    def _found(self) -> str:
        for _ in range(1200):
            if self._file.exists() and self._file.read_text():
                return str(json.loads(self._file.read_text())["address"])
            time.sleep(0.05)
        raise AssertionError((self._folder / "0.log").read_text())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    made = DaskCluster(tmp_path_factory.mktemp("dask"))
    try:
        made.worker()
        yield made
    finally:
        made.end()


class KillingPool:
    """A pool of which a worker is killed when the first task is over."""

    def __init__(self, pool: Pool, doomed: subprocess.Popen[bytes]) -> None:
        self._pool = pool
        self._doomed = doomed
        self.size = pool.size

    def run(self, function: TaskFunction, tasks: Iterator[bytes]) -> Generator[Finished]:
        for each in self._pool.run(function, tasks):
            self._doomed.send_signal(signal.SIGKILL)
            yield each

    def close(self) -> None:
        self._pool.close()


def swept(pool: Pool, out: Path) -> list[bytes]:
    """The tables of a sweep in this pool."""
    with closing(pool):
        asked = parse_sweep(SMALL, "small.toml", quick=False)
        outcome = sweep(asked, Output(out), pool, ["small.toml"], Console(quiet=True))
    assert outcome.failed == 0
    return [(out / name).read_bytes() for name in TABLES]


def test_a_sweep_on_dask_writes_the_same_tables_though_a_worker_is_killed(cluster: DaskCluster, tmp_path: Path) -> None:
    doomed = cluster.worker()
    pool = open_pool(1, cluster.address)
    assert swept(KillingPool(pool, doomed), tmp_path / "dask") == swept(LocalPool(1), tmp_path / "local")


def test_an_interrupted_run_on_dask_leaves_workers_for_the_next(cluster: DaskCluster) -> None:
    with closing(open_pool(1, cluster.address)) as pool:
        run = pool.run(answer_trial, iter([b"1", b"2", b"3"]))
        next(run)
        with pytest.raises(KeyboardInterrupt):
            run.throw(KeyboardInterrupt())
    with closing(open_pool(1, cluster.address)) as again:
        assert {over.task for over in again.run(answer_trial, iter([b"4", b"5"]))} == {b"4", b"5"}


def test_a_task_that_fails_is_over_with_its_error(cluster: DaskCluster) -> None:
    for dask in (None, cluster.address):
        with closing(open_pool(1, dask)) as pool:
            (over,) = pool.run(answer_trial, iter([b"?"]))
        assert (over.task, over.answer) == (b"?", None)
        assert over.error.startswith("DecodeError: ")


def test_a_worker_of_other_software_is_refused_by_a_line_that_names_it(cluster: DaskCluster, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "usual = metadata.version\n"
        'metadata.version = lambda name: "1.2.3" if name == "numpy" else usual(name)\n'
    )
    other = cluster.worker(tmp_path)
    refusal = ""
    try:
        for _ in range(200):  # until it has come
            try:
                open_pool(1, cluster.address).close()
            except ConfigError as error:
                refusal = str(error)
                break
    finally:
        other.kill()
        other.wait()
    assert refusal.startswith("the worker tcp://127.0.0.1:")
    assert " has other software: numpy 1.2.3 (here " in refusal
    assert refusal.count("(here ") == 1


def listeners() -> list[str]:
    """The addresses at which this process and those below it listen."""
    us = psutil.Process()
    connections = (each for process in (us, *us.children(recursive=True)) for each in process.net_connections("tcp"))
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]


def test_workers_are_started_through_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of ssh a script that starts the command here, where the tunnels would lead."""
    ssh, program = tmp_path / "ssh", tmp_path / "my-hcsim"
    ssh.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nwhile [ "$1" != a ]; do shift; done\nshift\nexec sh -c "$*"\n'
    )
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hcsim "$@"\n')
    for file in (ssh, program):
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = len(listeners())
    with TrialPool(1, f"ssh:a={program}") as pool:
        (trial,) = pool.judged(iter([1]))
        listening = listeners()
    assert msgspec.json.encode(trial) == msgspec.json.encode(judge(1))
    assert {*listening} == {"127.0.0.1"}
    assert len(listening) > len(listeners()) == before, "all ends with the pool"
    (call,) = (tmp_path / "calls").read_text().splitlines()
    port, own = call.split()[-2:]
    assert f"-R {port}:127.0.0.1:{port} -L {own}:127.0.0.1:{own} a " in call


@pytest.mark.parametrize(
    ("where", "complaint"),
    [
        ("tcp://127.0.0.1:1", "there is no scheduler that answers (Connection refused)"),
        ("nonsense", "give tcp://host:8786"),
        ("tcp://host:port", "give tcp://host:8786"),
        ("http://127.0.0.1:80", "give tcp://host:8786"),
        ("ssh:a,,b", "'' is not the name of a host"),
        ("ssh:-oProxyCommand=x", "'-oProxyCommand=x' is not the name of a host"),
    ],
)
def test_an_address_of_nobody_is_refused_at_once(where: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_pool(1, where)
    assert str(refused.value).startswith(f"--dask {where}: ")
    assert complaint in str(refused.value)


def test_a_plan_on_dask_is_the_plan_of_this_machine_byte_for_byte(cluster: DaskCluster) -> None:
    asked = ["plan", "M4, M3 Pro on 1gbe", "--params", "10M", "--tokens", "256", "--strategy", "local_sgd:8", "--json"]
    there, here = (
        CliRunner().invoke(app, [*asked, *where]) for where in (("--dask", cluster.address), ("--workers", "2"))
    )
    assert (there.exit_code, there.stdout) == (0, here.stdout)
    assert json.loads(here.stdout)["simulated"] > 1
    both = CliRunner().invoke(app, [*asked, "--dask", cluster.address, "--workers", "2"])
    assert (both.exit_code, "--workers: only without --dask" in both.stderr) == (2, True)


def test_what_is_no_scheduler_is_refused_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answering = threading.Thread(target=lambda: server.accept()[0].close())
        answering.start()
        where = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"--dask {where}: .*\(what listens there is none\)") as refused:
            open_pool(1, where)
        answering.join()
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == ""


def test_all_differences_are_named_with_what_is_here() -> None:
    ours = {"python": "3.11.2", "numpy": "2.4.6", "torch": "2.13.0"}
    theirs = {"python": "3.11.2", "numpy": "1.26.0"}
    assert unlike(ours, theirs) == "numpy 1.26.0 (here 2.4.6), torch none (here 2.13.0)"
    assert unlike(ours, ours) == ""
