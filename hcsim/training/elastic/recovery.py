"""Recovery time after failures, and detection of slow steps.

A member whose cable, processor or disk has become slow delays every step, and no step fails. So each member
compares the time of a step with the median of earlier ones. A view whose steps have been `SLOW` times as slow
as usual for the time limit of an exchange has failed, and its members look for the straggler (see
`hcsim.cluster.diagnosis`). If they find none, the new speed is the usual one from then on.

`watch_steps` checks the other members when a step takes much longer than usual. A collective gives up only
after the group's timeout, which has to be longer than any correct step: a minute by default. Heartbeats do not
notice a failure that affects only the data. So a member that has waited for several times the usual time of a
step checks the port of every other member (`hcsim.transport.groups`), while the step goes on. If all answer,
the step is only slow, and the check is repeated after twice the time. If one does not answer, the view ends,
and the findings decide which member the next view excludes (`hcsim.cluster.diagnosis`).

A member does not check its own device: an evaluation or a checkpoint may occupy it for a while without any
fault.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from hcsim.cluster.membership_source import MembershipSource
from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.errors import CollectiveError, CollectiveTimeout
from hcsim.runtime.host import Host
from hcsim.training.run import Observer, Point, Run
from hcsim.transport.groups import CHECK_S, CheckedPeer, check_peer

SLOW = 4.0
"""A step is slow if it takes this many times the usual time."""
_USUAL = 16
"""The number of steps whose median is the usual time."""
_ENOUGH = 5
"""The number of steps after which the median is used."""


class SlowSteps(CollectiveTimeout):
    """Steps have been slow for too long, although none failed."""


class StepTimer:
    """Compares the time of steps with the usual time."""

    def __init__(self, patience_s: float) -> None:
        self.slow_s = 0.0
        """The time for which steps have been slow."""
        self._slow_steps = 0
        self._patience_s = patience_s
        self._usual: deque[float] = deque(maxlen=_USUAL)
        self._last: tuple[int, float] | None = None

    @property
    def usual_s(self) -> float | None:
        """Return the usual time of a step, or None while it is unknown."""
        return statistics.median(self._usual) if len(self._usual) >= _ENOUGH else None

    def began(self) -> None:
        """Begin a view: the time since the last step is not the time of a step."""
        self._last = None
        self.slow_s, self._slow_steps = 0.0, 0

    def settled(self, step: int, now: float) -> None:
        """Record that `step` steps are done; raise `SlowSteps` once they have been slow for too long."""
        last, self._last = self._last, (step, now)
        if last is None or step <= last[0]:
            return
        lasted_s = now - last[1]
        step_s = lasted_s / (step - last[0])
        usual_s = self.usual_s or step_s
        if step_s <= SLOW * usual_s:
            self.slow_s, self._slow_steps = 0.0, 0
            self._usual.append(step_s)
            return
        self.slow_s += lasted_s
        self._slow_steps += 1
        if self.slow_s >= self._patience_s and self._slow_steps > 1:  # one may have had a reason, such as an evaluation
            self._usual.clear()
            raise SlowSteps(f"for {self.slow_s:.3g} s a step has taken {step_s:.3g} s instead of {usual_s:.3g} s")


class Recovery:
    """An observer that wraps another one and measures the time from the failure of a view to the next step."""

    def __init__(self, host: Host, observer: Observer | None, patience_s: float) -> None:
        self.step_timer = StepTimer(patience_s)
        self._host = host
        self._observer = observer
        self._failed_s: float | None = None
        self.progress_s: float | None = None
        """The time of the last step, or of the start of the first view."""

    def began(self) -> None:
        self.step_timer.began()
        if self.progress_s is None:
            self.progress_s = self._host.clock.elapsed()

    def failed(self, over: asyncio.Future[str]) -> None:
        if self._failed_s is None and not over.cancelled():
            self._failed_s = self._host.clock.elapsed()

    def point(self, rank: int, point: Point) -> None:
        self.progress_s = self._host.clock.elapsed()
        if self._failed_s is not None:
            lasted_s = self.progress_s - self._failed_s
            self._host.metrics.histogram("hcsim_recovery_seconds").observe(lasted_s)
            self._failed_s = None
        if self._observer is not None:
            self._observer.point(rank, point)

    def finished(self, run: Run) -> None:
        if self._observer is not None:
            self._observer.finished(run)


LEAST_S = 1.0
"""A step may always take this long, or `SLOW` times the usual time."""
STOOD_STILL_S = 1.0
"""If this process wakes this late, it slept or had no processor, and blames no peer for that time."""


class NotAnswering(CollectiveError):
    """Members did not answer a check; `wrong` holds the reasons by rank."""

    def __init__(
        self, message: str, *, peer: int | None = None, phase: str = "", wrong: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(message, peer=peer, phase=phase)
        self.wrong = dict(wrong or {})


async def watch_steps(group: Group, view: View, source: MembershipSource, steps: Recovery) -> None:
    """Fail the group once a step does not end and a member does not answer; never return before."""
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
        found = await asyncio.gather(*(check_peer(host, each) for each in _peers(view, source, others)))
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


def _peers(view: View, source: MembershipSource, ranks: Sequence[int]) -> list[CheckedPeer]:
    members, ways = [view.members[rank] for rank in ranks], source.ways
    return [
        CheckedPeer(
            member.address if ways is None else ways.address(member), node=member.node if source.identified else ""
        )
        for member in members
    ]
