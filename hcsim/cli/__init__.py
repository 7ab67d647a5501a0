"""The command line. Modules of hcsim are imported only when they are needed, which keeps `hcsim --help` fast."""

from __future__ import annotations

import errno
import os
import sys

from hcsim.cli.errors import FAILED, INTERRUPTED, spell


def main() -> None:
    """The entry point of the console script `hcsim`."""
    spell()
    try:
        from hcsim.cli.app import app
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    try:
        app()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        from hcsim.cli.screen import complain

        complain(f"{error.filename or 'the output'}: cannot be written: {error.strerror}")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (Python would try once more when it ends)
        sys.exit(FAILED)
