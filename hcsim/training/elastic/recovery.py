"""How long failures keep members from training, and whether steps still take as long as usual.

A member whose cable, processor or disk has become slow delays every step, and no step fails. So each member compares
the time of a step with the median of earlier ones. A view whose steps have been `SLOW` times as slow as usual for the
time limit of an exchange has failed, and its members look for the one that delays them (see `hcsim.cluster.diagnosis`).
If they find none, the new speed is the usual one from then on.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import deque

from hcsim.errors import CollectiveTimeout
from hcsim.runtime.host import Host
from hcsim.training.run import Observer, Point, Run

SLOW = 4.0
"""A step is slow if it takes so many times as long as usual."""
_USUAL = 16
"""Steps whose median is the usual time."""
_ENOUGH = 5
"""Steps after which a median means something."""


class SlowSteps(CollectiveTimeout):
    """Steps have been slow for too long, although none failed."""


class StepTimer:
    """Compares the time of steps with the usual time."""

    def __init__(self, patience_s: float) -> None:
        self.slow_s = 0.0
        """For how long steps have been slow."""
        self._slow_steps = 0
        self._patience_s = patience_s
        self._usual: deque[float] = deque(maxlen=_USUAL)
        self._last: tuple[int, float] | None = None

    @property
    def usual_s(self) -> float | None:
        """How long a step usually takes; None while that is not known."""
        return statistics.median(self._usual) if len(self._usual) >= _ENOUGH else None

    def began(self) -> None:
        """A view begins: the time since the last step is not that of a step."""
        self._last = None
        self.slow_s, self._slow_steps = 0.0, 0

    def settled(self, step: int, now: float) -> None:
        """So many steps are done; raises `SlowSteps` once they have been slow for too long."""
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
    """An observer in front of another one: measures from the failure of a view to the next step."""

    def __init__(self, host: Host, observer: Observer | None, patience_s: float) -> None:
        self.step_timer = StepTimer(patience_s)
        self._host = host
        self._observer = observer
        self._failed_s: float | None = None
        self.progress_s: float | None = None
        """When the last step was done, or else when the first view began."""

    def began(self) -> None:
        """A view begins."""
        self.step_timer.began()
        if self.progress_s is None:
            self.progress_s = self._host.clock.elapsed()

    def failed(self, over: asyncio.Future[str]) -> None:
        """A view is over."""
        if self._failed_s is None and not over.cancelled():
            self._failed_s = self._host.clock.elapsed()

    def point(self, rank: int, point: Point) -> None:
        """A step is done."""
        self.progress_s = self._host.clock.elapsed()
        if self._failed_s is not None:
            lasted_s = self.progress_s - self._failed_s
            self._host.metrics.histogram("hcsim_recovery_seconds").observe(lasted_s)
            self._failed_s = None
        if self._observer is not None:
            self._observer.point(rank, point)

    def finished(self, run: Run) -> None:
        """Training is done."""
        if self._observer is not None:
            self._observer.finished(run)
