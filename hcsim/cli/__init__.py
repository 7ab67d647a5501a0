"""The command line. Nothing of ours is imported here before it is needed: `hcsim --help` is quick."""

from __future__ import annotations

import errno
import io
import os
import sys

INTERRUPTED = 130
"""The exit status that shells give it."""


def spell() -> None:
    """What a terminal cannot show is spelled: no reason to end a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    """The console script `hcsim`."""
    spell()
    try:
        from hcsim.cli.app import app
        from hcsim.cli.plainly import FAILED
        from hcsim.cli.screen import complain
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    try:
        app()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        complain(f"{error.filename or 'the output'}: cannot be written: {error.strerror}")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (Python would try once more when it ends)
        sys.exit(FAILED)
