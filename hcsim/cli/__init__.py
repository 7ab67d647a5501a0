"""The command line. Nothing of ours is imported here before it is needed: `hcsim --help` is quick."""

from __future__ import annotations

import errno
import os
import sys


def main() -> None:
    """The console script `hcsim`."""
    from hcsim.cli.app import app
    from hcsim.cli.plainly import FAILED
    from hcsim.cli.screen import complain

    try:
        app()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        complain(f"{error.filename or 'the output'}: cannot be written: {error.strerror}")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (Python would try once more when it ends)
        sys.exit(FAILED)
