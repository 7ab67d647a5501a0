"""How the members of a new view come to hold the same, and lose nothing.

1.  Everybody tells its era and step. Who is right of them, `standing` says.
2.  An update that was voted on and perhaps applied by some: whoever has applied it heard all votes, so everybody who
    was there holds it. If one member of this view has applied it, the others apply it now. Otherwise nobody here
    has, and it is dropped; a member that did and is not here will find, when it comes back, that it does not count.
3.  Everybody tells the fingerprint of what it holds. Members of the same standing must agree: if not, memory has
    failed somewhere. The others take what they lack from one that has it, each from another as far as possible, and
    from their own home if somebody there has it.
4.  Everybody tells its fingerprint again: now all are alike, and are of the new era.

A newcomer's state is sent here, while the others wait, and not beside their steps. Every step changes all of it, so a
copy sent earlier is of no use when it arrives, unless all updates since are sent too; both would take their bandwidth
from the exchanges of the steps that they are to spare. The rest is done earlier: a newcomer loads its program and its
data, checks the members and measures the links before it joins.

Whoever dies on the way ends the view, and nobody is worse off: a member changes only by an update that counts,
or by all of a state that arrived whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hcsim.cluster.view import View
from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.errors import UNDECODABLE, CollectiveError, ConfigError, Diverged
from hcsim.training.agreement import difference
from hcsim.training.elastic.pact import Contradiction, Doubt, gather_echoed
from hcsim.training.elastic.parcel import LABEL_MOST_BYTES, Route, refuse, relay
from hcsim.training.elastic.standing import Header, intent_digest, lineage_digest, most_right
from hcsim.training.elastic.trainee import Trainee
from hcsim.training.recoverable import Tally


async def synchronise(group: Group, view: View, us: Trainee) -> None:
    """Return when all members of the view hold the same."""
    us.meet(group, view)
    headers = [Header.read(each) for each in await gather_echoed(group, np.array(us.header().numbers(), np.int64))]
    right = most_right(headers, lineage_digest(view))
    await same_intent(group, us.intent, [header.intent for header in headers], right, view)
    await us.resolve(headers[right])

    told = await _told(group, us)
    # Of those who are right, one whose compressor remembers something: where homes have speakers, only theirs do.
    of_era = [rank for rank in range(group.size) if headers[rank].era == headers[right].era]
    right = max(of_era, key=lambda r: (told[r].step, told[r].memory != 0, -r))
    _check_alike(view, headers, told, right)
    model = [each.print != told[right].print or each.step != told[right].step for each in told]
    memory = [bool(each.compresses) and each.memory != told[right].memory for each in told]
    outdated = [header.era != headers[right].era for header in headers]
    givers = [
        not (model[rank] or outdated[rank]) and told[rank].memory == told[right].memory for rank in range(group.size)
    ]
    takers = [any(needs) for needs in zip(model, memory, outdated, strict=True)]
    routes = _routes(view, givers, takers)
    giving = {t: us.parcel(model=model[t], memory=memory[t]) for giver, t in routes if giver == group.rank}
    if routes:
        for parcel in await relay(group, routes, giving):
            us.adopt(parcel)
            _check_sizes(view, group.rank, us)

    told = await _told(group, us)
    speaking = {each.memory for each in told if each.compresses}
    if len({(each.print, each.step) for each in told}) != 1 or len(speaking) > 1:
        held = [(each.print, each.step) for each in told]
        unlike = [(giver, taker) for giver, taker in routes if held[giver] != held[taker]] or routes
        handed = ", ".join(f"rank {giver} to rank {taker}" for giver, taker in unlike)
        text = f"what was handed over did not arrive as it was: {handed}"
        if not routes:
            first = next((rank for rank, each in enumerate(held) if each != held[0]), group.size - 1)
            text = f"rank 0 and rank {first} hold unlike models or compressors, which they did not say before"
        doubts = tuple(Doubt(taker, giver, text) for giver, taker in unlike)
        raise Contradiction(text, phase="synchronising", doubts=doubts)
    before = us.era.epoch
    us.regroup(group, view, [Tally(each.samples, each.gone) for each in told])
    us.host.trace("synchronised", view.epoch, us.run.step, before)


class _Told(NamedTuple):
    """What a member holds."""

    print: int
    memory: int
    """Its compressor's fingerprint; 0 where that remembers nothing."""
    compresses: int
    """Whether it will have to know that in this view."""
    step: int
    samples: int
    gone: int


async def _told(group: Group, us: Trainee) -> list[_Told]:
    await group.host.device.touch(us.method.alike.nbytes)
    ours = _Told(
        us.fingerprint(), us.memory_fingerprint(), us.method.compresses(group), us.run.step, *us.method.tally(us.run)
    )
    return [_Told(*map(int, each)) for each in await gather_echoed(group, np.array(ours, np.int64))]


def _check_alike(view: View, headers: list[Header], told: list[_Told], right: int) -> None:
    truth = told[right]
    for rank, each in enumerate(told):
        if (headers[rank].era, each.step) != (headers[right].era, truth.step):
            continue
        if each.print != truth.print or each.memory not in (0, truth.memory):
            names = view.members[right].name, view.members[rank].name
            raise Diverged(
                f"{names[0]} and {names[1]} went the same way to step {each.step}, and their models, optimizers or "
                "compressors differ: memory or arithmetic failed on one of them"
            )


def _routes(view: View, giving: list[bool], taking: list[bool]) -> list[Route]:
    """Who gives to whom: each from another as far as possible, and from its own home if somebody there has it."""
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
    """Whoever was started with other settings than those who are right says so, and leaves the others alone."""
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


def _check_sizes(view: View, rank: int, us: Trainee) -> None:
    if isinstance(us.settings.batch, tuple) and view.nodes[rank] not in us.sizes:
        raise ConfigError(
            f"batch = {list(us.settings.batch)} is for the members that training began with, and we were not among "
            "them: give one figure for all"
        )
