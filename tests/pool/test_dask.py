"""Sweeps on Dask: a scheduler and worker processes on the loopback address, or through something like ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hcsim.pool.identity import unlike

pytest.importorskip("distributed")
pytestmark = pytest.mark.slow

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

[[grid]]
kind = "training"
study = "mine"
tasks = ["convex"]
strategies = ["single", "ddp"]
links = ["1gbe"]
worlds = [2]
seeds = [1]
steps = 6
"""
TABLES = ("cells.csv", "cells.parquet", "curves.csv", "manifest.json")


class DaskCluster:
    """A scheduler and its workers, each a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.start("dask_scheduler", "--port", "0", "--scheduler-file", str(folder / "scheduler.json"))
        self.address = ""

    def start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            f"distributed.cli.{module}",
            "--host",
            "127.0.0.1",
            "--no-dashboard",
            *arguments,
        ]
        log = (self._folder / f"{len(self.processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log, env=environment(ROOT))
        self.processes.append(process)
        return process

    def worker(self, code: Path = ROOT) -> subprocess.Popen[bytes]:
        """Start a worker with one thread, that runs the code in this folder."""
        scheduler = ["--scheduler-file", str(self._folder / "scheduler.json")]
        alone = ["--no-nanny", "--nthreads", "1", "--local-directory", str(self._folder / f"w{len(self.processes)}")]
        started = self.start("dask_worker", *scheduler, *alone)
        return started

    def find(self) -> str:
        import json

        file = self._folder / "scheduler.json"
        for _ in range(600):
            if file.exists() and file.read_text():
                return str(json.loads(file.read_text())["address"])
            time.sleep(0.1)
        raise AssertionError((self._folder / "0.log").read_text())

    def end(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


def environment(code: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(code), "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "30s"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[DaskCluster]:
    folder = tmp_path / "dask"
    folder.mkdir()
    made = DaskCluster(folder)
    try:
        yield made
    finally:
        made.end()


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def run(folder: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "small.toml").write_text(SMALL)
    variables = environment(ROOT)
    if path:
        variables["PATH"] = f"{path}:{variables['PATH']}"
    words = command("experiments.sweep", str(folder / "small.toml"), *arguments)
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=240, check=False)


def tables(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in TABLES]


def test_a_sweep_on_dask_writes_the_tables_of_the_local_one_and_outlives_a_killed_worker(
    cluster: DaskCluster, tmp_path: Path
) -> None:
    address = cluster.find()
    doomed, _ = cluster.worker(), cluster.worker()
    (tmp_path / "small.toml").write_text(SMALL)
    out = tmp_path / "dask-out"
    words = command("experiments.sweep", str(tmp_path / "small.toml"), "--out", str(out), "--dask", address)
    running = subprocess.Popen(words, cwd=tmp_path, env=environment(ROOT), stderr=subprocess.PIPE)
    with running:
        for _ in range(2400):
            if list(out.glob(".cells/*.json")) or running.poll() is not None:
                break
            time.sleep(0.05)
        doomed.send_signal(signal.SIGKILL)
        _, said = running.communicate(timeout=240)
    assert running.returncode == 0, said
    assert run(tmp_path, "--out", str(tmp_path / "local"), "--jobs", "1").returncode == 0
    assert tables(out) == tables(tmp_path / "local")
    refused = run(tmp_path, "--out", str(out), "--dask", address, "--jobs", "2")
    assert refused.returncode == 2
    assert "--jobs" in refused.stderr


def test_a_worker_of_other_software_is_refused_by_a_line_that_names_it(cluster: DaskCluster, tmp_path: Path) -> None:
    address = cluster.find()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(
        textwrap.dedent("""
        import importlib.metadata as metadata
        usual = metadata.version
        metadata.version = lambda name: "1.2.3" if name == "numpy" else usual(name)
        """)
    )
    before = os.environ.get("PYTHONPATH")
    scheduler = ["--scheduler-file", str(tmp_path / "dask" / "scheduler.json"), "--no-nanny", "--nthreads", "1"]
    words = command("distributed.cli.dask_worker", *scheduler, "--host", "127.0.0.1", "--no-dashboard")
    variables = {**environment(ROOT), "PYTHONPATH": f"{tmp_path / 'other'}:{ROOT}"}
    assert os.environ.get("PYTHONPATH") == before
    log = (tmp_path / "other.log").open("wb")
    with log:
        cluster.processes.append(subprocess.Popen(words, cwd=tmp_path, env=variables, stdout=log, stderr=log))
    refused = run(tmp_path, "--out", str(tmp_path / "out"), "--dask", address)
    assert refused.returncode == 2
    assert "error: the worker tcp://127.0.0.1:" in refused.stderr
    assert "has other software: numpy 1.2.3 (here " in refused.stderr
    assert "Traceback" not in refused.stderr


def test_ctrl_c_ends_a_sweep_on_dask_and_the_same_command_goes_on(cluster: DaskCluster, tmp_path: Path) -> None:
    address = cluster.find()
    cluster.worker()
    (tmp_path / "small.toml").write_text(SMALL)
    out = tmp_path / "out"
    arguments = (str(tmp_path / "small.toml"), "--out", str(out), "--dask", address)
    words = command("experiments.sweep", *arguments)
    with subprocess.Popen(words, cwd=tmp_path, env=environment(ROOT), stderr=subprocess.PIPE, text=True) as running:
        for _ in range(2400):
            if list(out.glob(".cells/*.json")) or running.poll() is not None:
                break
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "interrupted: finished cells are kept" in said
    assert "Traceback" not in said
    again = run(tmp_path, "--out", str(out), "--dask", address)
    assert again.returncode == 0
    assert "of 6 cells are finished already" in again.stderr


def test_workers_are_started_through_ssh(tmp_path: Path) -> None:
    """In place of ssh a script that starts the command here, where the tunnels would lead."""
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "ssh"
    fake.write_text(f"""#!/bin/sh
while [ "$1" != a ] && [ "$1" != b ]; do shift; done
echo "$1" >> {tmp_path}/hosts
shift
exec sh -c "$*"
""")
    fake.chmod(0o755)
    program = tmp_path / "bin" / "my-hcsim"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hcsim "$@"\n')
    program.chmod(0o755)
    where = f"ssh:a={program},b={program}"
    ran = run(tmp_path, "--out", str(tmp_path / "out"), "--dask", where, path=str(tmp_path / "bin"))
    assert ran.returncode == 0, ran.stderr
    assert sorted((tmp_path / "hosts").read_text().split()) == ["a", "b"]
    assert run(tmp_path, "--out", str(tmp_path / "local"), "--jobs", "1").returncode == 0
    assert tables(tmp_path / "out") == tables(tmp_path / "local")


def test_fault_seeds_on_dask_come_to_what_they_come_to_here(cluster: DaskCluster, tmp_path: Path) -> None:
    from hcsim.fuzz.search import TrialPool

    address = cluster.find()
    cluster.worker()
    with TrialPool(1) as here:
        expected = list(here.judged(iter([1, 2])))
    code = f"""
        import msgspec, sys
        from hcsim.fuzz.search import TrialPool
        if __name__ == "__main__":
            with TrialPool(1, "{address}") as there:
                trials = sorted(there.judged(iter([1, 2])), key=lambda trial: trial.seed)
            sys.stdout.buffer.write(msgspec.json.encode(trials))
        """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    ran = subprocess.run(words, cwd=tmp_path, env=environment(ROOT), capture_output=True, timeout=240, check=True)
    import msgspec

    assert ran.stdout == msgspec.json.encode(expected)


def test_an_address_where_nobody_is_is_refused(tmp_path: Path) -> None:
    for where, complaint in (
        ("tcp://127.0.0.1:1", "there is no scheduler that answers"),
        ("nonsense", "there is no scheduler that answers"),
        ("ssh:a,,b", "'' is not the name of a host"),
        ("ssh:-oProxyCommand=x", "is not the name of a host"),
    ):
        refused = run(tmp_path, "--out", str(tmp_path / "out"), "--dask", where)
        assert refused.returncode == 2, refused.stderr
        assert complaint in refused.stderr
        assert "Traceback" not in refused.stderr


def test_all_differences_are_named_with_what_is_here() -> None:
    ours = {"python": "3.11.2", "numpy": "2.4.6", "torch": "2.13.0"}
    theirs = {"python": "3.11.2", "numpy": "1.26.0"}
    assert unlike(ours, theirs) == "numpy 1.26.0 (here 2.4.6), torch none (here 2.13.0)"
    assert unlike(ours, ours) == ""


def test_closing_a_pool_that_did_nothing_does_nothing() -> None:
    from hcsim.pool import open_pool

    with closing(open_pool(2)) as pool:
        assert pool.size == 2
