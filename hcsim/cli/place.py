"""Where a rank that is started by hand stands among its peers, and how it joins them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from hcsim.cli import screen
from hcsim.collectives.group import Group
from hcsim.collectives.options import Options
from hcsim.collectives.startup import assemble
from hcsim.errors import CollectiveError, ConfigError, HcsimError
from hcsim.launch import real_group
from hcsim.real.tls import TlsFiles
from hcsim.transport.wire import Wire

_GRACE_S = 1.0
"""The wait for a link ends before the operation that needs it does, and its error says more."""


class Place(msgspec.Struct, frozen=True):
    """Where a real rank stands."""

    peers: tuple[str, ...]
    given_rank: int | None
    tls: TlsFiles | None
    insecure: bool
    metrics_at: str | None = None

    @property
    def rank(self) -> int:
        """Which of the peers we are, if that was said."""
        rank, ranks = self.given_rank, len(self.peers)
        if rank is None or not 0 <= rank < ranks:
            given = "it was not given" if rank is None else f"it is {rank}"
            raise ConfigError(f"--rank says which of the {ranks} peers we are, from 0 to {ranks - 1}; {given}")
        return rank


@asynccontextmanager
async def joined(
    place: Place, timeout_s: float, wire: Wire, progress: screen.Progress, device: str = "cpu"
) -> AsyncIterator[Group]:
    """The group of all peers, once they are there; until then it says for whom it waits."""
    absent: list[str] = []

    def missing(ranks: list[int]) -> None:
        absent[:] = [f"rank {rank} at {place.peers[rank]}" for rank in ranks]
        progress.waiting(absent)

    async with real_group(
        place.rank,
        place.peers,
        options=Options(timeout_s=timeout_s),
        wire=wire,
        tls=place.tls,
        insecure=place.insecure,
        device=device,
        metrics_at=place.metrics_at,
        on_refused=progress.news,
    ) as group:
        try:
            await assemble(group, wire.connect_timeout_s + _GRACE_S, missing)
        except CollectiveError as error:
            if isinstance(error.__cause__, ConfigError):  # waiting longer would not have helped
                raise error.__cause__ from None
            raise HcsimError(f"gave up waiting for {', '.join(absent)}: {error}") from None
        yield group


def for_real(group: Group, who: str = "") -> str:
    """That it was, and by what way: who expected another sees why it took as long as it did."""
    return f"for real, {who}over {' and '.join(group.carriers)}" if group.carriers else "for real"
