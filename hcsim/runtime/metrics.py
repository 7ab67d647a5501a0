"""What a host counts, for whoever looks on.

Components ask for a series once and keep it; to record is then an addition. What is counted anyway (a link's bytes) is
not counted again: a collector tells it when somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Counter(Protocol):
    """A number that only grows."""

    value: float
    """May be added to directly where a call would cost too much."""

    def add(self, amount: float = 1) -> None:
        """Count some more."""


class Gauge(Protocol):
    """A number that holds at the moment."""

    value: float

    def set(self, value: float) -> None:
        """It is now this."""


class Histogram(Protocol):
    """Values, by size."""

    def observe(self, value: float) -> None:
        """One more value."""


class Metrics(Protocol):
    """A host's figures. Names and labels are those of the table of metrics; others are a `UsageError`."""

    def counter(self, name: str, **labels: str) -> Counter:
        """The counter with these labels; the same one for the same labels."""

    def gauge(self, name: str, **labels: str) -> Gauge:
        """The gauge with these labels."""

    def histogram(self, name: str, **labels: str) -> Histogram:
        """The histogram with these labels."""

    def collect(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Have `tell` called whenever somebody looks, to bring its series up to date. Call what comes back to end that:
        `tell` is then called a last time."""
