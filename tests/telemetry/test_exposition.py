"""What Prometheus gets, read back by its own parser."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from hcsim.telemetry.exposition import prometheus_text, scrape
from hcsim.telemetry.metrics import DURATIONS_S, TABLE, HostMetrics, MetricKind


def everything() -> HostMetrics:
    """One series of every metric."""
    metrics = HostMetrics()
    for metric in TABLE.values():
        labels = {label: f'{label} "1"' for label in metric.labels}
        if metric.kind is MetricKind.COUNTER:
            metrics.counter(metric.name, **labels).add(3)
        elif metric.kind is MetricKind.GAUGE:
            metrics.gauge(metric.name, **labels).set(2.5)
        else:
            metrics.histogram(metric.name, **labels).observe(0.02)
    return metrics


def test_every_metric_comes_back_with_its_kind_its_help_and_its_value() -> None:
    families = {family.name: family for family in read_text(prometheus_text({"mini": everything()}))}
    for metric in TABLE.values():
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind.value, metric.help)
        labels = {"host": "mini", **{label: f'{label} "1"' for label in metric.labels}}
        values = {sample.name: sample.value for sample in family.samples if sample.labels == labels}
        if metric.kind is MetricKind.HISTOGRAM:
            assert values == {f"{metric.name}_count": 1, f"{metric.name}_sum": 0.02}
        else:
            assert values == {metric.name: 3 if metric.kind is MetricKind.COUNTER else 2.5}


def test_buckets_are_cumulative() -> None:
    metrics = HostMetrics()
    for value in (0.0002, 0.02, 0.02, 1000.0):
        metrics.histogram("hcsim_recovery_seconds").observe(value)
    [family] = read_text(prometheus_text({"mini": metrics}))
    found = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert found == {
        **{str(bound): sum(value <= bound for value in (0.0002, 0.02, 0.02)) for bound in DURATIONS_S},
        "+Inf": 4,
    }


def test_families_are_in_the_order_of_their_names() -> None:
    lines = prometheus_text({"mini": everything()}).splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert names == sorted(TABLE)


def test_hosts_stand_side_by_side_in_one_family() -> None:
    hosts = {name: HostMetrics() for name in ("studio", "mini")}
    for number, metrics in enumerate(hosts.values()):
        metrics.gauge("hcsim_leader").set(number)
    [family] = read_text(prometheus_text(hosts))
    assert [(sample.labels["host"], sample.value) for sample in family.samples] == [("mini", 1), ("studio", 0)]


def test_a_scraper_gets_the_format_that_it_accepts() -> None:
    plain, plain_type = scrape(everything(), "text/plain")
    assert plain_type.startswith("text/plain")
    assert len(list(read_text(plain.decode()))) == len(TABLE)
    modern, modern_type = scrape(everything(), "application/openmetrics-text; version=1.0.0")
    assert modern_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in read_openmetrics(modern.decode())}
    assert families["hcsim_link_sent_bytes"].unit == "bytes"
    assert families["hcsim_recovery_seconds"].unit == "seconds"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (of Prometheus) is not installed")
def test_promtool_has_nothing_to_complain_about() -> None:
    text = prometheus_text({"mini": everything()})
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=240)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
