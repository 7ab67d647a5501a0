"""What may be recorded, and how it adds up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hcsim.errors import UsageError
from hcsim.telemetry.metrics import DURATIONS_S, TABLE, HostMetrics, MetricKind, markdown

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("metric", TABLE.values(), ids=TABLE)
def test_names_follow_the_conventions(metric) -> None:
    assert re.fullmatch(r"hcsim(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
    assert metric.kind is not MetricKind.HISTOGRAM or metric.unit == "seconds"
    assert not {"host", "le", "instance", "job"} & {*metric.labels}
    assert metric.help.endswith(".")


def test_the_document_is_the_table() -> None:
    assert markdown() in (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")


def test_every_name_in_the_code_is_in_the_table() -> None:
    table = ROOT / "hcsim" / "telemetry" / "metrics.py"
    sources = [path for path in sorted((ROOT / "hcsim").rglob("*.py")) if path != table]
    used = {name for path in sources for name in re.findall(r'"(hcsim_[a-z_]+)"', path.read_text(encoding="utf-8"))}
    assert used
    assert used <= {*TABLE}


def test_what_is_not_declared_is_refused() -> None:
    metrics = HostMetrics()
    with pytest.raises(UsageError, match="no metric hcsim_nonsense_total"):
        metrics.counter("hcsim_nonsense_total")
    with pytest.raises(UsageError, match="labels of hcsim_collectives_total are operation, not none"):
        metrics.counter("hcsim_collectives_total")
    with pytest.raises(UsageError, match="not operation, colour"):
        metrics.counter("hcsim_collectives_total", operation="reduce", colour="red")
    with pytest.raises(UsageError, match="hcsim_leader is a gauge, not a counter"):
        metrics.counter("hcsim_leader")
    with pytest.raises(UsageError, match="only grows"):
        metrics.counter("hcsim_joins_total").add(-1)


def test_the_same_labels_are_the_same_series() -> None:
    metrics = HostMetrics()
    metrics.counter("hcsim_collectives_total", operation="reduce").add()
    metrics.counter("hcsim_collectives_total", operation="reduce").add(2)
    metrics.counter("hcsim_collectives_total", operation="gather").add(5)
    assert metrics.value("hcsim_collectives_total", operation="reduce") == 3
    assert metrics.value("hcsim_collectives_total", operation="gather") == 5
    assert metrics.value("hcsim_collectives_total", operation="scatter") == 0


def test_a_value_falls_under_the_first_bound_that_is_not_below_it() -> None:
    histogram = HostMetrics().histogram("hcsim_recovery_seconds")
    for value in (DURATIONS_S[0], DURATIONS_S[0] * 1.01, DURATIONS_S[-1], DURATIONS_S[-1] + 1):
        histogram.observe(value)
    assert histogram.counts == [1, 1, *[0] * (len(DURATIONS_S) - 3), 1, 1]
    assert histogram.count == 4


def test_a_collector_is_asked_whenever_somebody_looks_and_a_last_time_at_its_end() -> None:
    metrics = HostMetrics()
    asked: list[int] = []
    end = metrics.collect(lambda: asked.append(len(asked)))
    list(metrics.series())
    metrics.value("hcsim_leader")
    end()
    end()
    list(metrics.series())
    assert asked == [0, 1, 2]
