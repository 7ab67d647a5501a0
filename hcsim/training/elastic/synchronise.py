"""Synchronisation: the members of a new view come to hold the same state, without losing any step that counts.

1.  All members exchange their trained views and steps. `progress` decides whose state counts.
2.  An update may have been voted on and applied by some members only. A member that applied it had received all
    votes, so all members of that view hold it. If one member of this view has applied it, the others apply it
    now. Otherwise it is dropped; a member that applied it and is absent learns on its return that it does not
    count.
3.  All members exchange the fingerprints of their states. Members with the same progress must agree; if they do
    not, memory has failed somewhere. The others get what they lack from a member that has it, spread over as
    many givers as possible, and from a giver in their own home if there is one.
4.  All members exchange fingerprints again: now all states are equal, and of the new trained view.

A newcomer's state is sent here, while the others wait, and not during their steps. Every step changes all of
it, so an earlier copy would be useless without all later updates, and both would take bandwidth from the
exchanges of those steps. The rest is done earlier: a newcomer loads its program and its data, checks the
members and measures the links before it joins.

If a member fails during synchronisation, the view ends without harm: a member changes only by an update that
counts, or by a state that arrived complete.

The links between the members are measured first, while the network is quiet. Of each pair the one that dials
measures, and only links that it does not know from an earlier view: none after a loss, the newcomer's after a
join. The measurement is optional and ends with the view or when its time is up. If the collectives are to
follow it (`measure = "order"`), all members must hold the same figures, so they exchange them. Unless every
pair has been measured, the collectives ignore them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from hcsim.cluster.probe import Routes
from hcsim.cluster.view import View
from hcsim.collectives.buffers import array_of
from hcsim.collectives.cost import Links
from hcsim.collectives.group import Group
from hcsim.collectives.startup import partners
from hcsim.errors import UNDECODABLE, CollectiveError, ConfigError, Diverged
from hcsim.training.elastic.progress import MemberProgress, intent_digest
from hcsim.training.elastic.transfer import LABEL_MOST_BYTES, Contradiction, TransferRoute, VoteConflict, refuse
from hcsim.training.trainer import difference

_SURVEY_MOST_S = 10.0
"""The time limit of the measurement."""
_SURVEY_SHARE = 0.25
"""The same limit, as a share of the time that the others would wait for this member."""


async def survey(group: Group, view: View, ways: Routes, over: asyncio.Future[str]) -> None:
    """Measure the routes that this member will dial in this view, and dial the best ones."""
    # In this order, as in a tournament, pairs do not wait for each other.
    dialled = [view.members[rank] for rank in partners(group.rank, group.size) if rank < group.rank]
    surveying = group.host.spawn(ways.measure(dialled), name=f"measure the ways of view {view.epoch}")

    def stop(_: object) -> None:
        surveying.cancel()

    over.add_done_callback(stop)
    try:
        with suppress(TimeoutError):
            async with group.host.clock.timeout(min(_SURVEY_MOST_S, _SURVEY_SHARE * group.options.timeout_s)):
                outcome = await asyncio.gather(surveying, return_exceptions=True)
                if isinstance(outcome[0], Exception):
                    raise outcome[0]
    finally:
        surveying.cancel()
        over.remove_done_callback(stop)
    group.dial([ways.address(member) for member in view.members])


async def follow_links(group: Group, view: View, ways: Routes) -> None:
    """Let the view's collectives choose by the measured links, if the measurements are complete."""
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


class Holding(NamedTuple):
    """The state of a member."""

    print: int
    memory: int
    """The fingerprint of its compressor's state; 0 if that is empty."""
    compresses: int
    """Whether the member needs the compressor's state in this view."""
    step: int
    samples: int
    gone: int


def check_alike(view: View, headers: list[MemberProgress], told: list[Holding], right: int) -> None:
    """Raise if members with the same progress hold different states."""
    truth = told[right]
    for rank, each in enumerate(told):
        if (headers[rank].trained, each.step) != (headers[right].trained, truth.step):
            continue
        if each.print != truth.print or each.memory not in (0, truth.memory):
            names = view.members[right].name, view.members[rank].name
            raise Diverged(
                f"{names[0]} and {names[1]} went the same way to step {each.step}, and their models, optimizers or "
                "compressors differ: memory or arithmetic failed on one of them"
            )


def routes_between(view: View, giving: list[bool], taking: list[bool]) -> list[TransferRoute]:
    """Return the routes from givers to takers: the takers are spread over the givers, and a giver of the same home
    is preferred."""
    givers = [rank for rank, gives in enumerate(giving) if gives]
    takers = [rank for rank, takes in enumerate(taking) if takes]
    given = dict.fromkeys(givers, 0)
    routes = []
    for taker in takers:
        home = view.members[taker].home
        giver = min(givers, key=lambda rank: (view.members[rank].home != home, given[rank], rank))
        given[giver] += 1
        routes.append((giver, taker))
    return routes


async def same_intent(group: Group, ours: bytes, digests: list[int], right: int, view: View) -> None:
    """Raise `ConfigError` on a member whose settings differ from those of the authoritative member; the others go
    on."""
    if all(digest == digests[right] for digest in digests):
        return
    sent = np.frombuffer(ours, np.uint8)
    lengths = [int(array_of(each)[0]) for each in await group.all_gather(np.array([sent.size]))]
    for rank, length in enumerate(lengths):
        if not 0 < length <= LABEL_MOST_BYTES:
            refuse(rank, f"its settings would have {length} bytes")
    texts = [array_of(each).tobytes() for each in await group.all_gather(sent, lengths)]
    for member, text, digest in zip(view.members, texts, digests, strict=True):
        if intent_digest(text) != digest:  # changed on the way, perhaps by a member that passed it on: blame nobody
            raise CollectiveError(f"the settings of {member.name} did not arrive as it has them", phase="synchronising")
    if texts[group.rank] != texts[right]:
        names = (view.members[rank].name for rank in (right, group.rank))
        try:
            unlike = difference(texts[right], texts[group.rank], *names)
        except UNDECODABLE as error:
            refuse(right, error)
        raise ConfigError(f"the others train with other settings: {unlike}")
    await group.barrier()  # whoever is wrong has heard it before this ends, as it must
    rank = next(rank for rank, theirs in enumerate(texts) if theirs != texts[right])
    why = f"{view.members[rank].name} was started with other settings"
    raise CollectiveError(why, peer=rank, phase="synchronising")


def check_arrived(told: list[Holding], routes: list[TransferRoute]) -> None:
    """Raise unless all members hold the same state after the transfer along these routes."""
    speaking = {each.memory for each in told if each.compresses}
    if len({(each.print, each.step) for each in told}) == 1 and len(speaking) <= 1:
        return
    held = [(each.print, each.step) for each in told]
    unlike = [(giver, taker) for giver, taker in routes if held[giver] != held[taker]] or routes
    handed = ", ".join(f"rank {giver} to rank {taker}" for giver, taker in unlike)
    text = f"what was handed over did not arrive as it was: {handed}"
    if not routes:
        first = next((rank for rank, each in enumerate(held) if each != held[0]), len(told) - 1)
        text = f"rank 0 and rank {first} hold unlike models or compressors, which they did not say before"
    doubts = tuple(VoteConflict(taker, giver, text) for giver, taker in unlike)
    raise Contradiction(text, phase="synchronising", doubts=doubts)
