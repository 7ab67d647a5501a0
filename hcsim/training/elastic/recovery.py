"""How long failures keep members from training."""

from __future__ import annotations

import asyncio

from hcsim.runtime.host import Host
from hcsim.training.run import Observer, Point, Run


class Recovery:
    """An observer in front of another one: measures from the failure of a view to the next step."""

    def __init__(self, host: Host, observer: Observer | None) -> None:
        self._host = host
        self._observer = observer
        self._failed_s: float | None = None
        self.progress_s: float | None = None
        """When the last step was done, or else when the first view began."""

    def began(self) -> None:
        """A view begins."""
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
