"""The progress line on a terminal: nothing is lost, and nothing is written into anything else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pty = pytest.importorskip("pty")

PROGRAM = """
import sys
from pathlib import Path
from hcsim.cli import screen
from hcsim.training.run import Point
from hcsim.training.task import Score

log = Path(sys.argv[1]).open("w")
line = screen.ProgressLine("step", 3, lambda line: print(line, file=log), clock=lambda: "12:00:00  ")
with line as progress:
    progress.news("at once")
    progress.waiting([f"machine-{i}" for i in range(64)])
    progress.news("one joined")
    screen.note("a note")
    screen.say("a result")
    for step in (1, 2, 3):
        score = Score(0.25) if step == 2 else None
        progress.together(Point(step, 1.0, 0.5, 1000, score, 64, {"compute": 1.0, "encode": 1.0, "wait": 1.0}))
    progress.point(Point(3, 1.0, 0.5, 1000, Score(0.125)))
    with progress.away():
        print("another process's", file=sys.stderr)
        print("lines", file=sys.stderr)
    progress.news("after it")
screen.say("the end")
"""


def on_terminal(log: Path) -> tuple[str, str]:
    """Run the program with errors on a terminal of 80 columns; return what went to standard output and to it."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-c", PROGRAM, str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # EIO: the other end is closed
            while part := os.read(ours, 1 << 16):
                shown += part
        os.close(ours)
        said, _ = process.communicate()
    assert process.returncode == 0, shown
    return said, shown.decode()


def test_results_go_where_they_are_redirected_and_the_log_has_what_it_has_without_a_terminal(tmp_path: Path) -> None:
    log, plain_log = tmp_path / "terminal.log", tmp_path / "plain.log"
    said, shown = on_terminal(log)
    plain = subprocess.run([sys.executable, "-c", PROGRAM, str(plain_log)], capture_output=True, text=True, check=True)
    assert said == plain.stdout == "a result\nthe end\n"
    assert log.read_text() == plain_log.read_text()
    assert "held-out 0.2500" in log.read_text()
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", part) for part in re.split(r"[\r\n]+", shown)]
    whole = {"12:00:00  at once", "12:00:00  one joined", "a note", "another process's", "lines", "12:00:00  after it"}
    assert whole <= set(lines)
    assert max(map(len, lines)) <= 80
    for line in whole:
        assert re.search(rf"(^|\n|\x1b\[2K){re.escape(line)}\r\n", shown), f"something stands before {line!r}"
