"""All ranks of one backend, here or each on a machine of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from experiments.ddp.rank import Job, Ready
from experiments.peers.crew import Command, Crew, free_ports, module, working

BACKENDS = ("hcsim", "gloo")

Row = dict[str, str | int | float]


class Place(msgspec.Struct, frozen=True):
    """Where ranks run."""

    master: str = "127.0.0.1"
    interface: str = "lo0" if sys.platform == "darwin" else "lo"
    launch: Callable[[int, Command], Command] = lambda _, command: command
    """A rank's command line, there."""


HERE = Place()


@contextmanager
def team(backend: str, ranks: int, place: Place = HERE) -> Iterator[Crew]:
    """Started, connected to each other, and ended on leaving."""

    def commands(folder: Path) -> list[Command]:
        job = Job(backend, ranks, str(folder), place.master, free_ports(1)[0], place.interface)
        described = msgspec.json.encode(job).decode()
        return [place.launch(rank, module("experiments.ddp.rank", described, str(rank))) for rank in range(ranks)]

    with working(ranks, commands) as crew:
        crew.hear(Ready)
        yield crew
