"""`python -m experiments.scripts`: CPU time and memory of a script under `hcsim run`, and of its ranks alone.

Alone is what torchrun would start: as many processes, which find each other over loopback with gloo. CPU time is of
all processes, the simulator's own included. Memory is the peak of what they hold together, shared pages counted once
(the sum of their proportional set sizes, Linux only).
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hcsim.config import shipped_scenarios
from hcsim.config.file import load_scenario

SCRIPT = Path(__file__).with_name("cnn.py")
SAMPLE_S = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.scripts")
    parser.add_argument("--scenario", default="eight-macs-2.5gbe", choices=list(shipped_scenarios()))
    parser.add_argument("--steps", type=_count, default=10)
    asked = parser.parse_args()
    ranks = len(load_scenario(asked.scenario).nodes)
    arguments = ["--steps", str(asked.steps)]
    start = "from hcsim.cli import main; main()"
    simulated = [sys.executable, "-c", start, "run", str(SCRIPT), "--scenario", asked.scenario, "--", *arguments]
    alone_s, alone_bytes = _measured([[sys.executable, str(SCRIPT), *arguments]] * ranks)
    here_s, here_bytes = _measured([simulated])
    print(f"{ranks} ranks, {asked.steps} steps, {asked.scenario}")
    print(f"alone      {alone_s:7.1f} s CPU  {alone_bytes / 2**20:6.0f} MiB")
    print(f"simulated  {here_s:7.1f} s CPU  {here_bytes / 2**20:6.0f} MiB")
    print(f"ratio      {here_s / alone_s:7.2f}        {here_bytes / max(1, alone_bytes):6.2f}")


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps")
    return int(text)


def _measured(commands: Sequence[Sequence[str]]) -> tuple[float, int]:
    """CPU time of all that these commands start, and the most memory that it held at once."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=subprocess.DEVNULL)
        for rank, command in enumerate(commands)
    ]
    peak = _Peak([process.pid for process in started])
    codes = [process.wait() for process in started]
    if any(codes):
        raise SystemExit(f"a process failed: {codes}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak.end()


class _Peak:
    """Watches what processes and their children hold together."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> int:
        self._over.set()
        self._thread.join()
        return self._most

    def _watch(self) -> None:
        while not self._over.is_set():
            self._most = max(self._most, sum(map(_held_bytes, _with_children(self._pids))))
            time.sleep(SAMPLE_S)


def _with_children(pids: Sequence[int]) -> list[int]:
    found = list(pids)
    for pid in found:
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(child) for child in file.read_text().split()]
            except OSError:
                continue  # it has just ended
    return found


def _held_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()
