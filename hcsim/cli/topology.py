"""`hcsim topology`: what a scenario's machines measure."""

from __future__ import annotations

from pathlib import Path

from hcsim.cli import options, screen
from hcsim.cluster.picture import draw, table
from hcsim.errors import ConfigError
from hcsim.launch import measure_topology

_FORMATS = (".png", ".svg", ".pdf")


def show_topology(name: str, picture: Path | None) -> None:
    """Measure, print the table, and draw."""
    if picture is not None and picture.suffix not in _FORMATS:
        raise ConfigError(f"--picture {picture}: give a file that ends in {', '.join(_FORMATS)}")
    scenario = options.scenario(name, None, {}, needed=True)
    assert scenario is not None  # it was needed
    found = measure_topology(scenario)
    screen.say(table(found))
    if picture is not None:
        try:
            draw(found, picture)
        except OSError as error:
            raise ConfigError(f"{picture}: cannot be written: {error.strerror}") from None
        screen.note(f"drawn in {picture}")
