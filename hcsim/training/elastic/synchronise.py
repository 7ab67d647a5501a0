"""How the members of a new view come to hold the same, and lose nothing.

1.  Everybody tells its era and step (see `standing`). The greatest is right.
2.  An update that was voted on and perhaps applied by some: whoever has applied it heard all votes, so everybody who
    was there holds it. If one member of this view has applied it, the others apply it now. Otherwise nobody here
    has, and it is dropped; a member that did and is not here will find, when it comes back, that it does not count.
3.  Everybody tells the fingerprint of what it holds. Members of the same standing must agree: if not, memory has
    failed somewhere. The others take what they lack from one that has it, each from another as far as possible, and
    from their own home if somebody there has it.
4.  Everybody tells its fingerprint again: now all are alike, and are of the new era.

Whoever dies on the way ends the view, and nobody is worse off: a member changes only by an update that counts,
or by all of a state that arrived whole.
"""

from __future__ import annotations

import numpy as np

from hcsim.cluster.view import View
from hcsim.collectives.data import array_of
from hcsim.collectives.group import Group
from hcsim.errors import CollectiveError, ConfigError, Diverged
from hcsim.training.agreement import difference
from hcsim.training.elastic.method import Tally
from hcsim.training.elastic.parcel import Route, relay
from hcsim.training.elastic.standing import Header
from hcsim.training.elastic.trainee import Trainee


async def synchronise(group: Group, view: View, us: Trainee) -> None:
    """Return when all members of the view hold the same."""
    us.meet(group, view)
    headers = [Header.read(array_of(each)) for each in await group.all_gather(np.array(us.header(), np.int64))]
    right = max(range(group.size), key=lambda rank: (headers[rank].standing, -rank))
    await same_intent(group, us.intent, [header.intent for header in headers], right)
    await us.resolve(headers[right])

    prints, steps, _ = await _told(group, us)
    _check_alike(view, headers, right, prints, steps)
    lacking = [prints[rank] != prints[right] or steps[rank] != steps[right] for rank in range(group.size)]
    routes = _routes(view, [header.era == headers[right].era for header in headers], lacking)
    giving = {taker: us.parcel(whole=lacking[taker]) for giver, taker in routes if giver == group.rank}
    if routes:
        for parcel in await relay(group, routes, giving):
            us.adopt(parcel)
            _check_sizes(view, group.rank, us)

    prints, steps, tallies = await _told(group, us)
    if any(each != prints[0] for each in prints) or any(step != steps[0] for step in steps):
        raise CollectiveError("what was handed over did not arrive as it was", phase="synchronising")
    us.regroup(group, view, tallies)
    us.host.trace("synchronised", view.epoch, us.run.step)


async def _told(group: Group, us: Trainee) -> tuple[list[int], list[int], list[Tally]]:
    """Everybody's fingerprint, step, and tally."""
    await group.host.device.touch(us.method.alike.nbytes)
    ours = np.array([us.fingerprint(), us.run.step, *us.method.tally(us.run)], np.int64)
    rows = [[int(number) for number in array_of(each)] for each in await group.all_gather(ours)]
    return [row[0] for row in rows], [row[1] for row in rows], [Tally(*row[2:]) for row in rows]


def _check_alike(view: View, headers: list[Header], right: int, prints: list[int], steps: list[int]) -> None:
    for rank, header in enumerate(headers):
        same = (header.era, steps[rank]) == (headers[right].era, steps[right])
        if same and prints[rank] != prints[right]:
            names = view.members[right].name, view.members[rank].name
            raise Diverged(
                f"{names[0]} and {names[1]} went the same way to step {steps[rank]}, and their models or optimizers "
                "differ: memory or arithmetic failed on one of them"
            )


def _routes(view: View, same_era: list[bool], lacking: list[bool]) -> list[Route]:
    """Who gives to whom: to everybody who is not of the newest era, or lacks something of it."""
    givers = [rank for rank in range(len(lacking)) if same_era[rank] and not lacking[rank]]
    takers = [rank for rank in range(len(lacking)) if not same_era[rank] or lacking[rank]]
    given = dict.fromkeys(givers, 0)
    routes = []
    for taker in takers:
        home = view.members[taker].home
        giver = min(givers, key=lambda rank: (view.members[rank].home != home, given[rank], rank))
        given[giver] += 1
        routes.append((giver, taker))
    return routes


async def same_intent(group: Group, ours: bytes, digests: list[int], right: int) -> None:
    """Whoever was started with other settings than those who are right says so, and leaves the others alone."""
    if all(digest == digests[right] for digest in digests):
        return
    text = np.frombuffer(ours, np.uint8)
    lengths = [int(array_of(each)[0]) for each in await group.all_gather(np.array([text.size]))]
    texts = [array_of(each).tobytes() for each in await group.all_gather(text, lengths)]
    if texts[group.rank] != texts[right]:
        raise ConfigError(f"the others train with other settings: {difference(texts[right], texts[group.rank])}")
    await group.barrier()  # whoever is wrong has heard it before this ends, as it must
    unlike = next(rank for rank, theirs in enumerate(texts) if theirs != texts[right])
    raise CollectiveError(f"rank {unlike} was started with other settings", peer=unlike, phase="synchronising")


def _check_sizes(view: View, rank: int, us: Trainee) -> None:
    if isinstance(us.settings.batch, tuple) and view.nodes[rank] not in us.sizes:
        raise ConfigError(
            f"batch = {list(us.settings.batch)} is for the members that training began with, and we were not among "
            "them: give one figure for all"
        )
