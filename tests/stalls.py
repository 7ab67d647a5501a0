"""Runs tests on a machine that stands still now and then, as one does that sleeps or has no processor to give.

    python tests/stalls.py --longest 1.5 -n 6 tests/cluster tests/real

All processes of the run stop at once, for a random while, again and again. Nothing may come of it but time: whoever
takes the others for lost because it stood still itself is found out. Arguments that are not ours are pytest's.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress


def descendants(root: int) -> list[int]:
    """Its processes and theirs, parents first; without those that somebody has stopped already."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    children: dict[int, list[int]] = {}
    stopped: dict[int, bool] = {}
    for line in listing.splitlines():
        pid, parent, state = line.split()[:3]
        children.setdefault(int(parent), []).append(int(pid))
        stopped[int(pid)] = state.startswith("T")
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return [pid for pid in found if not stopped.get(pid, True)]


def tell(pids: Sequence[int], what: signal.Signals) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, what)


def stall(root: int, lasts_s: float) -> None:
    """Stop everything below a process, and itself, for so long."""
    stopping = descendants(root)
    try:
        tell(stopping, signal.SIGSTOP)
        time.sleep(lasts_s)
    finally:
        tell(stopping, signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of when it stops and for how long (default 0)")
    parser.add_argument("--shortest", type=float, default=0.3, help="stop, in seconds (default 0.3)")
    parser.add_argument("--longest", type=float, default=1.0, help="stop, in seconds (default 1)")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two, at most (default 2)")
    ours, theirs = parser.parse_known_args()
    if not 0.0 < ours.shortest <= ours.longest or not ours.every > 0.0:
        parser.error("a stop lasts more than nothing, the longest at least as long as the shortest")
    rng, stops = random.Random(ours.seed), 0
    tests = subprocess.Popen([sys.executable, "-m", "pytest", *theirs])
    try:
        while True:
            try:
                result = tests.wait(rng.uniform(0.1, max(0.1, ours.every)))
                print(f"{stops} stops of {ours.shortest:g} to {ours.longest:g} s, seed {ours.seed}")
                return result
            except subprocess.TimeoutExpired:
                stall(tests.pid, rng.uniform(ours.shortest, ours.longest))
                stops += 1
    except KeyboardInterrupt:
        return tests.wait()  # which has heard it too


if __name__ == "__main__":
    raise SystemExit(main())
