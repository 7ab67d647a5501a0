"""A run that somebody else attends to: its job comes over standard input, which stays open until it is to end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import suppress

END_OF_JOB = "..."
"""After this line standard input stays open; when it closes, whoever started us has gone or wants us to leave."""


def read_job() -> tuple[str, bool]:
    """The job from standard input, and whether it is attended: whether it ended with a line that says so."""
    lines: list[str] = []
    for line in sys.stdin:
        if line.rstrip("\n") == END_OF_JOB:
            return "".join(lines), True
        lines.append(line)
    return "".join(lines), False


def when_input_closes(act: Callable[[], None]) -> None:
    """Call this once standard input has ended; what still comes over it is not for us."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def readable() -> None:
        if not os.read(descriptor, 4096):
            loop.remove_reader(descriptor)
            act()

    with suppress(PermissionError):  # a file: nobody holds it open for us
        loop.add_reader(descriptor, readable)
