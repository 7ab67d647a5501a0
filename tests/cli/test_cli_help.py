"""What `--help` shows."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from hcsim.cli.app import app


def sections(text: str) -> dict[str, list[str]]:
    """The options under each heading."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in text.splitlines():
        if re.fullmatch(r"\S.*:", line):
            heading = line[:-1]
        elif option := re.match(r"  (--[a-z-]+)", line):
            found.setdefault(heading, []).append(option[1])
    return found


def test_the_options_of_run_stand_under_headings_that_say_what_they_are_about():
    shown = CliRunner().invoke(app, ["run", "--help"], terminal_width=80)
    assert shown.exit_code == 0
    found = sections(shown.output)
    assert found["Options"] == ["--help"]
    assert "--task" in found["Training"]
    assert "--save" in found["Output"]
    assert max(map(len, found.values())) < 10
    assert max(map(len, shown.output.splitlines())) <= 80
