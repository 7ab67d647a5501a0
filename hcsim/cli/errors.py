"""How a command ends: its exit status, and what a person is told of errors."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
"""The exit status that shells use for an interrupted program."""


def spell() -> None:
    """Replace characters that the terminal cannot encode by escapes, so that they do not end a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def errors_told() -> Iterator[None]:
    """Report errors of hcsim in one line and exit with a status. A programming error keeps its traceback."""
    import typer

    from hcsim.errors import ConfigError, HcsimError, UsageError

    try:
        yield
        return
    except (ConfigError, UsageError) as error:
        status, words = BAD_INPUT, str(error)
    except HcsimError as error:
        status, words = FAILED, str(error)
    except MemoryError as error:
        status, words = FAILED, f"there is not enough memory for this: {error}".removesuffix(" for this: ")
    except KeyboardInterrupt:
        status, words = INTERRUPTED, ""
    except BrokenPipeError:
        from hcsim.cli.screen import UNREAD

        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (Python would try once more when it ends)
        raise typer.Exit(UNREAD) from None
    from hcsim.cli.screen import complain, note

    if words:
        complain(words)
    else:
        note("interrupted")
    raise typer.Exit(status)
