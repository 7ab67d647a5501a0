"""The command line. Nothing is imported here before it is needed: `hcsim --help` is quick."""

from __future__ import annotations


def main() -> None:
    """The console script `hcsim`."""
    from hcsim.cli.app import app

    app()
