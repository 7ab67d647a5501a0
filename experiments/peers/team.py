"""All ranks of one library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from experiments.peers.crew import Crew, TeamFailed, free_ports, module, working
from experiments.peers.peer import Command, Job, Peer
from experiments.peers.rank import Ready, Report, Turn

__all__ = ["Team", "TeamFailed", "running"]


class Team:
    """Running ranks of one library."""

    def __init__(self, peer: Peer, crew: Crew) -> None:
        self.peer = peer
        self._crew = crew
        crew.hear(Ready)

    def take(self, turn: Turn) -> list[Report]:
        """Let every rank take this turn. If one fails, all are ended: none may go on and disturb others."""
        return self._crew.take(turn, Report)


@contextmanager
def running(peer: Peer, ranks: int, algorithm: str, dtype: str) -> Iterator[Team]:
    """Start one process per rank, connected to each other; end them all on leaving."""

    def commands(folder: Path) -> list[Command]:
        addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(ranks))
        job = Job(peer.name, addresses, str(folder), algorithm, dtype)
        described = msgspec.json.encode(job).decode()
        return peer.launch([module("experiments.peers.rank", described, str(rank)) for rank in range(ranks)])

    with working(ranks, commands) as crew:
        yield Team(peer, crew)
