"""What the members of a view find out about the links between them, before they use them.

While a view begins its network is quiet, so this is the moment. Of each pair the one that dials measures, and only what
it does not know from an earlier view: after a loss nothing, after a join the newcomer's links. It is a help and no
condition: it ends with the view, or when its time is up, and what is not known by then is left as it is.

Where the collectives are to follow the figures (`measure = "order"`), all members must hold the same ones: everybody
tells what it knows. Unless there is something about every pair, all go on as if nothing had been measured.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np

from hcsim.cluster.view import View
from hcsim.cluster.ways import Ways
from hcsim.collectives.buffers import array_of
from hcsim.collectives.cost import Links
from hcsim.collectives.group import Group
from hcsim.collectives.startup import partners

MOST_S = 10.0
"""How long measuring may take."""
SHARE = 0.25
"""The same, as a share of what the others would wait for us."""


async def survey(group: Group, view: View, ways: Ways, over: asyncio.Future[str]) -> None:
    """Measure the ways that we will dial in this view, and dial the best ones."""
    # In this order, as in a tournament, pairs do not wait for each other.
    dialled = [view.members[rank] for rank in partners(group.rank, group.size) if rank < group.rank]
    surveying = group.host.spawn(ways.measure(dialled), name=f"measure the ways of view {view.epoch}")

    def stop(_: object) -> None:
        surveying.cancel()

    over.add_done_callback(stop)
    try:
        with suppress(TimeoutError):
            async with group.host.clock.timeout(min(MOST_S, SHARE * group.options.timeout_s)):
                outcome = await asyncio.gather(surveying, return_exceptions=True)
                if isinstance(outcome[0], Exception):
                    raise outcome[0]
    finally:
        surveying.cancel()
        over.remove_done_callback(stop)
    group.dial([ways.address(member) for member in view.members])


async def follow_links(group: Group, view: View, ways: Ways) -> None:
    """Have the view's collectives choose by what was measured of all its links, if that is complete."""
    n = group.size
    known = np.zeros((n, 3))
    for rank in range(group.rank):
        line = ways.dialled(view.members[rank])
        if line is not None:
            known[rank] = line.latency_s, line.there_Bps, line.back_Bps
    told = [np.asarray(array_of(each)).reshape(n, 3) for each in await group.all_gather(known.reshape(-1))]
    latency_s, bandwidth_Bps = np.zeros((n, n)), np.zeros((n, n))
    for high in range(n):
        for low in range(high):
            latency_s[high, low] = latency_s[low, high] = told[high][low, 0]
            bandwidth_Bps[high, low], bandwidth_Bps[low, high] = told[high][low, 1:]
    complete = n > 1 and bool((bandwidth_Bps + np.eye(n) > 0).all() and np.isfinite(bandwidth_Bps).all())
    if complete:
        # That all of them share a machine is not asked: a cluster's sums shall not depend on where its members run.
        group.follow(Links(_rows(latency_s), _rows(bandwidth_Bps)))
    order = ",".join(view.members[rank].name for rank in group.options.order)
    group.host.trace("follows links", view.epoch, order if complete else "unknown")


def _rows(matrix: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(value) for value in row) for row in matrix)
