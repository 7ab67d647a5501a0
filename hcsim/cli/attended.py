"""A run that somebody else attends to: its job comes over standard input, which stays open until it is to end.

A connection that is cut closes it. One that dies without a word does not, so whoever attends also says something now
and then, and once it has begun to, silence counts as its end. We answer the job with a line of our own, by which it can
tell a machine that was lost from one that was never reached.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

END_OF_JOB = "..."
"""After this line standard input stays open; when it closes, whoever started us has gone or wants us to leave. The same
line is the answer."""
SILENCE_S = 30.0


def read_job() -> tuple[str, bool]:
    """The job from standard input, and whether it is attended: whether it ended with a line that says so."""
    lines: list[str] = []
    for line in sys.stdin or ():  # it may be closed
        if line.rstrip("\n") == END_OF_JOB:
            sys.stdout, sys.stderr = _Unheard(sys.stdout), _Unheard(sys.stderr)
            print(END_OF_JOB, flush=True)
            return "".join(lines), True
        lines.append(line)
    return "".join(lines), False


def when_input_closes(act: Callable[[], None], silence_s: float = SILENCE_S) -> None:
    """Call this once standard input has ended, or has been silent for so long after something came over it."""
    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    silence: asyncio.TimerHandle | None = None

    def ended() -> None:
        loop.remove_reader(descriptor)
        act()

    def readable() -> None:
        nonlocal silence
        if silence is not None:
            silence.cancel()
        if os.read(descriptor, 4096):
            silence = loop.call_later(silence_s, ended)
        else:
            ended()

    with suppress(PermissionError):  # a file: nobody holds it open for us
        loop.add_reader(descriptor, readable)


class _Unheard(io.TextIOBase):
    """What is written where nobody listens any more is lost, and is no reason to stop: we still want to leave well."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # it is read-only in io.TextIOBase, too
        """As it was."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """All of it, as far as the writer knows."""
        with suppress(ConnectionError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """To whoever listens."""
        with suppress(ConnectionError):
            self._stream.flush()

    def isatty(self) -> bool:
        """As it was."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """As it was."""
        return self._stream.fileno()
