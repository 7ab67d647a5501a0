"""What a training step comes to, in figures."""

from __future__ import annotations

from typing import Protocol

from hcsim.runtime.host import Host
from hcsim.training.learner import Ledger

_LABELS = {"compute": "compute", "encode": "encode", "exchange": "wait"}
"""The ledger's purposes, as the metrics call them: what is booked as exchange is time in which training stood still."""


class Reached(Protocol):
    """How far training had come after a step."""

    @property
    def time_s(self) -> float:
        """Since the start."""

    @property
    def loss(self) -> float:
        """On the last batch."""

    @property
    def sent_bytes(self) -> int:
        """Since the start."""


class StepMeter:
    """Tells a host's metrics what each step took."""

    def __init__(self, host: Host, ledger: Ledger) -> None:
        metrics = host.metrics
        self._spent_s = ledger.seconds
        self._busy = metrics.counter("hcsim_collectives_busy_seconds_total")
        self._steps = metrics.counter("hcsim_training_steps_total")
        self._sent = metrics.counter("hcsim_training_sent_bytes_total")
        self._loss = metrics.gauge("hcsim_training_loss")
        self._seconds = {
            purpose: metrics.histogram("hcsim_training_step_seconds", purpose=purpose)
            for purpose in (*_LABELS.values(), "network", "whole")
        }
        self._before = self._now(0.0)
        self._sent_before = 0

    def lap(self, time_s: float) -> dict[str, float]:
        """Seconds by purpose since the step before."""
        now, before = self._now(time_s), self._before
        self._before = now
        return {purpose: now[purpose] - before[purpose] for purpose in now}

    def note(self, reached: Reached, spent_s: dict[str, float]) -> None:
        """A step is done."""
        for purpose, series in self._seconds.items():
            series.observe(spent_s[purpose])
        # Not by its number: that goes on while this node is away, and back where training does.
        self._steps.add(1)
        self._sent.add(max(0, reached.sent_bytes - self._sent_before))
        self._loss.set(reached.loss)
        self._sent_before = reached.sent_bytes

    def _now(self, time_s: float) -> dict[str, float]:
        spent_s = {label: self._spent_s[purpose] for purpose, label in _LABELS.items()}
        return {**spent_s, "network": self._busy.value, "whole": time_s}
