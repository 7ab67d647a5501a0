"""Looks at the other members when a step takes much longer than usual.

A collective gives up after the group's timeout, and that has to be longer than any step that is right: a minute, by
default. Heartbeats live on where only what is computed does not get through. So a member that has waited for several
times the usual time of a step checks the port of every other member (`hcsim.transport.reception`), while the step goes
on. If all answer, the step is only slow, and it looks again after twice the time. If one does not, the view ends, and
what was found says without whom the next one begins (`hcsim.cluster.diagnosis`).

Its own device it does not check: an evaluation or a checkpoint may have it for a while, and that is no sickness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from hcsim.cluster.conductor import Conductor
from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.errors import CollectiveError
from hcsim.training.elastic.recovery import SLOW, Recovery
from hcsim.transport.reception import CHECK_S, check_peer

LEAST_S = 1.0
"""A step may always take so long, or `SLOW` times as long as usual."""
STOOD_STILL_S = 1.0
"""If we come so late to what we were to do, we slept or had no processor, and blame nobody for that time."""


class NotAnswering(CollectiveError):
    """Members did not answer a check; `wrong` says why, by rank."""

    def __init__(
        self, message: str, *, peer: int | None = None, phase: str = "", wrong: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message, peer=peer, phase=phase)
        self.wrong = dict(wrong or {})


async def watch_steps(group: Group, view: View, conductor: Conductor, steps: Recovery) -> None:
    """Fail the group once a step does not end and a member does not answer; never returns before."""
    host, clock = group.host, group.host.clock
    others = [rank for rank in range(group.size) if rank != group.rank]
    since_s, looks = clock.elapsed(), 0
    while True:
        if steps.progress_s is not None and steps.progress_s > since_s:
            since_s, looks = steps.progress_s, 0
        usual_s = steps.step_timer.usual_s
        patience_s = max(LEAST_S, SLOW * (usual_s or 0.0)) * 2**looks
        wait_s = since_s + patience_s - clock.elapsed()
        if usual_s is None or wait_s > 0:
            pause_s = LEAST_S if usual_s is None else wait_s
            due_s = clock.elapsed() + pause_s
            await clock.sleep(pause_s)
            if clock.elapsed() > due_s + STOOD_STILL_S:
                since_s = clock.elapsed()
            continue
        due_s = clock.elapsed() + CHECK_S
        found = await asyncio.gather(*(check_peer(host, each) for each in _addresses(view, conductor, others)))
        if steps.progress_s is not None and steps.progress_s > since_s:
            continue  # it did go on
        if clock.elapsed() > due_s + STOOD_STILL_S:
            since_s = clock.elapsed()
            continue
        wrong = {rank: why for rank, why in zip(others, found, strict=True) if why}
        if wrong:
            text = f"no step for {clock.elapsed() - since_s:.1f} s, and {'; '.join(wrong.values())}"
            group.fail(NotAnswering(text, peer=next(iter(wrong)), phase="checking members", wrong=wrong))
            return
        looks += 1


def _addresses(view: View, conductor: Conductor, ranks: Sequence[int]) -> list[str]:
    """Where these members are called."""
    members, ways = [view.members[rank] for rank in ranks], conductor.ways
    return [member.address if ways is None else ways.address(member) for member in members]
