"""What a group's operations come to, in figures.

Small operations are frequent, so this is kept short: two looks at the clock, and plain additions to series that are
looked up once.
"""

from __future__ import annotations

from hcsim.runtime.host import Host
from hcsim.runtime.metrics import Counter, Histogram


class _Operation:
    """The series of one kind of operation, kept: to look them up costs more than to add to them."""

    __slots__ = ("count", "failures", "seconds", "sent_bytes")

    def __init__(self, host: Host, name: str) -> None:
        metrics = host.metrics
        self.count: Counter = metrics.counter("hcsim_collectives_total", operation=name)
        self.failures: Counter = metrics.counter("hcsim_collective_failures_total", operation=name)
        self.sent_bytes: Counter = metrics.counter("hcsim_collective_bytes_total", operation=name)
        self.seconds: Histogram = metrics.histogram("hcsim_collective_seconds", operation=name)


class Meter:
    """Follows operations from their beginning to their end."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._now_s = host.clock.elapsed
        self._busy = host.metrics.counter("hcsim_collectives_busy_seconds_total")
        self._operations: dict[str, _Operation] = {}
        self._under_way = 0
        self._busy_since_s = 0.0

    def begin(self) -> float:
        """An operation is under way; the moment, for `end`."""
        now_s = self._now_s()
        if not self._under_way:
            self._busy_since_s = now_s
        self._under_way += 1
        return now_s

    def end(self, name: str, began_s: float, sent_bytes: int | None) -> None:
        """It is over, and has sent that much; None: it failed."""
        now_s = self._now_s()
        self._under_way -= 1
        if not self._under_way:
            self._busy.value += now_s - self._busy_since_s
        operation = self._operations.get(name)
        if operation is None:
            operation = self._operations[name] = _Operation(self._host, name)
        if sent_bytes is None:
            operation.failures.value += 1
        else:
            operation.count.value += 1
            operation.sent_bytes.value += sent_bytes
            operation.seconds.observe(now_s - began_s)
