"""The metrics of one host, and the table of all metrics.

Names follow Prometheus: a counter ends in `_total`, preceded by the unit; other names end in the unit. A label
has few values, known in advance or bounded by the number of peers. A new metric needs a line in the table;
recording under other names or labels is rejected.

Prometheus' client protects its series with locks and uses the wall clock. Here each host is single-threaded,
time is its world's, and one process may have hundreds of hosts. So the series are plain numbers, and the client
only formats them (see `exposition`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TypeVar

import msgspec

from hcsim.errors import UsageError


class MetricKind(Enum):
    """The type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    """Counts of values up to each of several bounds, their number and their sum."""


DURATIONS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Bounds of duration histograms: two for each decade, from a message on a cable to an exchange over the
internet."""


class Metric(msgspec.Struct, frozen=True):
    """One line of the table."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """Seconds or bytes, if the name says so; empty for a ratio, a count or a state."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in ("seconds", "bytes") if stem.endswith(f"_{unit}")), "")


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, help, labels)


def _histogram(name: str, help: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, help, labels)


GROUPS: dict[str, tuple[Metric, ...]] = {
    "Collectives": (
        _counter("hcsim_collectives_total", "Operations that came to their end.", "operation"),
        _counter("hcsim_collective_failures_total", "Operations that ended with an error.", "operation"),
        _counter("hcsim_collective_bytes_total", "Payload that this rank's plans of operations sent.", "operation"),
        _histogram("hcsim_collective_seconds", "From the call of an operation to its result.", "operation"),
        _counter("hcsim_collectives_busy_seconds_total", "Time with at least one operation under way."),
    ),
    "Network": (
        _counter("hcsim_link_sent_bytes_total", "Payload sent to a rank, by where it listens.", "peer"),
        _counter("hcsim_link_received_bytes_total", "Payload received from a rank.", "peer"),
        _counter("hcsim_link_sent_frames_total", "Frames sent to a rank.", "peer"),
        _counter("hcsim_link_received_frames_total", "Frames received from a rank.", "peer"),
        _gauge(
            "hcsim_link_bandwidth_bytes_per_second",
            "Bandwidth to or from a node when it was last measured, by direction: out, in.",
            "node",
            "direction",
        ),
        _counter("hcsim_links_opened_total", "Links to other ranks that were opened."),
        _counter(
            "hcsim_hellos_total", "Callers that said who they are, by our answer: taken, refused, later.", "answer"
        ),
        _counter("hcsim_connects_total", "Calls to others, by outcome: opened, refused, unanswered.", "outcome"),
        _counter("hcsim_accepts_total", "Connections that others opened to us."),
        _gauge("hcsim_channels_open", "Connections at the moment, in both directions."),
    ),
    "Compression": (
        _counter("hcsim_compression_input_bytes_total", "Tensors that were encoded, before.", "compressor"),
        _counter("hcsim_compression_output_bytes_total", "The same, after.", "compressor"),
        _gauge("hcsim_compression_ratio", "Bytes before over bytes after, of the last encoding.", "compressor"),
        _histogram("hcsim_compression_encode_seconds", "Encoding one bucket, waiting included.", "compressor"),
        _histogram("hcsim_compression_decode_seconds", "Decoding one bucket, waiting included.", "compressor"),
    ),
    "Training": (
        _counter("hcsim_training_steps_total", "Steps of training that this rank took part in."),
        _counter("hcsim_training_sent_bytes_total", "What this rank sent for training, headers included."),
        _gauge("hcsim_training_loss", "Loss on this rank's last batch."),
        _histogram(
            "hcsim_training_step_seconds",
            "Of one step: compute, encode, network (an operation was under way), wait (training stood still for an "
            "exchange and its encoding), whole. They overlap.",
            "purpose",
        ),
    ),
    "Peers": (
        _gauge("hcsim_peers_known", "Nodes of our cluster that should be there."),
        _gauge("hcsim_peers_connected", "Nodes that we have a living control channel to."),
        _gauge("hcsim_peers_suspected", "Members that seem to be lost."),
        _counter("hcsim_admission_refusals_total", "Nodes that we did not let in, by reason.", "reason"),
    ),
    "Health": (
        _counter("hcsim_heartbeats_sent_total", "Heartbeats sent to a node.", "node"),
        _counter("hcsim_heartbeats_missed_total", "Heartbeats of a node that did not come in time.", "node"),
        _gauge("hcsim_heartbeat_latency_seconds", "Round trip of heartbeats to a node, smoothed.", "node"),
        _gauge("hcsim_heartbeat_phi", "How suspicious the silence of a node is (-log10 of its probability).", "node"),
        _histogram("hcsim_detection_seconds", "From a member's last sign of life to its suspicion."),
    ),
    "Views and election": (
        _gauge("hcsim_view_epoch", "Epoch of the view that we are in."),
        _gauge("hcsim_view_members", "Members of the view that we are in."),
        _gauge("hcsim_leader", "1 on the node that leads, 0 on the others."),
        _counter(
            "hcsim_view_changes_total",
            "Views that took effect here, by reason: alone (we began one), entered (others took us in), lost, failed "
            "(the same members after a failure), joined, left.",
            "reason",
        ),
        _counter(
            "hcsim_elections_total",
            "Rounds of agreement on a next view that we began, by outcome: decided, given_up, overtaken.",
            "outcome",
        ),
        _counter(
            "hcsim_ballots_total",
            "Answers that we gave in such rounds, our own included: promised, accepted, refused.",
            "answer",
        ),
        _counter("hcsim_evictions_total", "Members that a view after ours left out because they were lost."),
        _counter("hcsim_joins_total", "Nodes that a view after ours took in."),
        _histogram(
            "hcsim_recovery_seconds",
            "From the failure of a view (a member lost, a connection broken) to the next step.",
        ),
    ),
}
"""Metrics by subject, as in the documentation."""

TABLE: dict[str, Metric] = {metric.name: metric for metrics in GROUPS.values() for metric in metrics}


def markdown() -> str:
    lines = []
    for subject, metrics in GROUPS.items():
        lines += [f"## {subject}", "", "| name | kind | labels | |", "|---|---|---|---|"]
        for metric in metrics:
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            lines.append(f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |")
        lines.append("")
    return "\n".join(lines)


class CounterSeries:
    """See `runtime.host.Counter`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def add(self, amount: float = 1) -> None:
        if amount < 0:
            raise UsageError(f"a counter only grows: {amount} cannot be added")
        self.value += amount


class GaugeSeries:
    """See `runtime.host.Gauge`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def set(self, value: float) -> None:
        self.value = value


class HistogramSeries:
    """See `runtime.host.Histogram`."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(DURATIONS_S) + 1)
        """Counts by upper bound, and a last one for larger values."""
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(DURATIONS_S, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


Series = CounterSeries | GaugeSeries | HistogramSeries
S = TypeVar("S", CounterSeries, GaugeSeries, HistogramSeries)
Labels = tuple[tuple[str, str], ...]
_Key = tuple[str, Labels]

_KINDS: dict[type[Series], MetricKind] = {
    CounterSeries: MetricKind.COUNTER,
    GaugeSeries: MetricKind.GAUGE,
    HistogramSeries: MetricKind.HISTOGRAM,
}


class HostMetrics:
    """See `runtime.host.Metrics`."""

    def __init__(self) -> None:
        self._series: dict[_Key, Series] = {}
        self._collectors: dict[Callable[[], None], None] = {}

    def counter(self, name: str, **labels: str) -> CounterSeries:
        return self._find(CounterSeries, name, labels)

    def gauge(self, name: str, **labels: str) -> GaugeSeries:
        return self._find(GaugeSeries, name, labels)

    def histogram(self, name: str, **labels: str) -> HistogramSeries:
        return self._find(HistogramSeries, name, labels)

    def collect(self, tell: Callable[[], None]) -> Callable[[], None]:
        self._collectors[tell] = None

        def end() -> None:
            if tell in self._collectors:
                del self._collectors[tell]
                tell()

        return end

    def series(self) -> Iterator[tuple[Metric, Labels, Series]]:
        """Yield all recorded series, up to date, by name and labels."""
        for tell in list(self._collectors):
            tell()
        for name, labels in sorted(self._series):
            yield TABLE[name], labels, self._series[name, labels]

    def value(self, name: str, **labels: str) -> float:
        """Return the up-to-date value of a counter or gauge, or a histogram's number of values. Zero if nothing was
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
