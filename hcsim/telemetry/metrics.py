"""The figures of one host.

Prometheus' own client keeps its series behind locks and stamps them with the time of day. A host is one thread, its
time is its world's, and there may be hundreds of hosts in one process: so the series are plain numbers here, and
the client writes them down (see `exposition`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TypeVar

from hcsim.errors import UsageError
from hcsim.telemetry.names import DURATIONS_S, TABLE, Kind, Metric


class CounterSeries:
    """See `runtime.metrics.Counter`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        """Count some more."""
        if amount < 0:
            raise UsageError(f"a counter only grows: {amount} cannot be added")
        self.value += amount


class GaugeSeries:
    """See `runtime.metrics.Gauge`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, value: float) -> None:
        """It is now this."""
        self.value = value


class HistogramSeries:
    """See `runtime.metrics.Histogram`."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(DURATIONS_S) + 1)
        """By bound (at most that much), and above them all."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(DURATIONS_S, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)


Series = CounterSeries | GaugeSeries | HistogramSeries
S = TypeVar("S", CounterSeries, GaugeSeries, HistogramSeries)
Labels = tuple[tuple[str, str], ...]
_Key = tuple[str, Labels]

_KINDS: dict[type[Series], Kind] = {
    CounterSeries: Kind.COUNTER,
    GaugeSeries: Kind.GAUGE,
    HistogramSeries: Kind.HISTOGRAM,
}


class HostMetrics:
    """See `runtime.metrics.Metrics`."""

    def __init__(self) -> None:
        self._series: dict[_Key, Series] = {}
        self._collectors: dict[Callable[[], None], None] = {}

    def counter(self, name: str, **labels: str) -> CounterSeries:
        """The counter with these labels; the same one for the same labels."""
        return self._find(CounterSeries, name, labels)

    def gauge(self, name: str, **labels: str) -> GaugeSeries:
        """The gauge with these labels."""
        return self._find(GaugeSeries, name, labels)

    def histogram(self, name: str, **labels: str) -> HistogramSeries:
        """The histogram with these labels."""
        return self._find(HistogramSeries, name, labels)

    def collect(self, tell: Callable[[], None]) -> Callable[[], None]:
        """See `runtime.metrics.Metrics.collect`."""
        self._collectors[tell] = None

        def end() -> None:
            if tell in self._collectors:
                del self._collectors[tell]
                tell()

        return end

    def series(self) -> Iterator[tuple[Metric, Labels, Series]]:
        """All that was recorded, up to date, by name and labels."""
        for tell in list(self._collectors):
            tell()
        for name, labels in sorted(self._series):
            yield TABLE[name], labels, self._series[name, labels]

    def value(self, name: str, **labels: str) -> float:
        """One counter's or gauge's value, up to date; a histogram's number of values. Zero where nothing was
        recorded."""
        metric = _declared(name, tuple(labels))
        wanted = tuple((label, labels[label]) for label in metric.labels)
        for _, found, series in (each for each in self.series() if each[0] is metric):
            if found == wanted:
                return series.count if isinstance(series, HistogramSeries) else series.value
        return 0

    def _find(self, kind: type[S], name: str, labels: dict[str, str]) -> S:
        metric = _declared(name, tuple(labels))
        if metric.kind is not _KINDS[kind]:
            raise UsageError(f"{name} is a {metric.kind.value}, not a {_KINDS[kind].value}")
        key = (name, tuple((label, labels[label]) for label in metric.labels))
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = kind()
        assert isinstance(series, kind)  # one name is of one kind
        return series


def _declared(name: str, labels: tuple[str, ...]) -> Metric:
    metric = TABLE.get(name)
    if metric is None:
        raise UsageError(f"there is no metric {name}: declare it in the table of metrics first")
    if sorted(labels) != sorted(metric.labels):
        said, wanted = (", ".join(names) or "none" for names in (labels, metric.labels))
        raise UsageError(f"the labels of {name} are {wanted}, not {said}")
    return metric
