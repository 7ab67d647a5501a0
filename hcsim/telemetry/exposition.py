"""Metrics in Prometheus' format, and as events of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from hcsim.telemetry.metrics import DURATIONS_S, CounterSeries, HistogramSeries, HostMetrics, Metric, MetricKind, Series
from hcsim.telemetry.trace import Event

_FAMILIES: dict[MetricKind, Callable[..., Family]] = {
    MetricKind.COUNTER: CounterMetricFamily,
    MetricKind.GAUGE: GaugeMetricFamily,
    MetricKind.HISTOGRAM: HistogramMetricFamily,
}


def prometheus_text(hosts: Mapping[str, HostMetrics]) -> str:
    """Format the metrics of several hosts, each with its name in the label `host`; sorted by name, then host."""
    return generate_latest(_registry(_Hosts(hosts))).decode()


def scrape(metrics: HostMetrics, accept: str) -> tuple[bytes, str]:
    """Return the response to a scraper that accepts these formats, and its content type."""
    encode, content_type = choose_encoder(accept)
    return encode(_registry(_Hosts({"": metrics}))), content_type


def events(now_ns: int, host: str, metrics: HostMetrics) -> list[Event]:
    """Return the metrics as events of a trace: `(time, "metric", host, name, labels, value)`. A histogram gives
    its number of values and their sum."""
    found: list[Event] = []
    for metric, labels, series in metrics.series():
        where = (now_ns, "metric", host)
        text = ",".join(f"{label}={value}" for label, value in labels)
        if isinstance(series, HistogramSeries):
            found.append((*where, f"{metric.name}_count", text, series.count))
            found.append((*where, f"{metric.name}_sum", text, series.sum))
        else:
            found.append((*where, metric.name, text, series.value))
    return found


def _registry(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


class _Hosts(Collector):
    """Families of samples. A host without a name gets no `host` label (the scraper adds its own)."""

    def __init__(self, hosts: Mapping[str, HostMetrics]) -> None:
        self._hosts = hosts

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for host in sorted(self._hosts):
            for metric, labels, series in self._hosts[host].series():
                family = families.get(metric.name)
                if family is None:
                    family = families[metric.name] = _family(metric, named=bool(host))
                values = [*([host] if host else []), *(value for _, value in labels)]
                _add(family, values, series)
        yield from (families[name] for name in sorted(families))


def _family(metric: Metric, *, named: bool) -> Family:
    labels = (*(("host",) if named else ()), *metric.labels)
    return _FAMILIES[metric.kind](metric.name, metric.help, labels=labels, unit=metric.unit)


def _add(family: Family, labels: list[str], series: Series) -> None:
    if isinstance(series, HistogramSeries):
        assert isinstance(family, HistogramMetricFamily)
        total, buckets = 0, []
        for bound, count in zip([*map(str, DURATIONS_S), "+Inf"], series.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric(labels, buckets, series.sum)
    elif isinstance(series, CounterSeries):
        assert isinstance(family, CounterMetricFamily)
        family.add_metric(labels, series.value)
    else:
        assert isinstance(family, GaugeMetricFamily)
        family.add_metric(labels, series.value)
