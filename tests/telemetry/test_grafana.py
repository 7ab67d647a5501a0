"""The dashboard for Grafana asks for metrics that there are, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hcsim.telemetry.metrics import TABLE, MetricKind

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
SAMPLES = {
    f"{metric.name}{suffix}": metric
    for metric in TABLE.values()
    for suffix in (("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",))
}
OF_A_SCRAPE = ("instance", "job", "le")


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_is_about_metrics_and_labels_of_the_table(expression: str) -> None:
    names = re.findall(r"\bhcsim_\w+", expression)
    assert names
    assert [name for name in names if name not in SAMPLES] == []
    labels = {label for name in names for label in SAMPLES[name].labels}
    used = [label for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(", ")]
    used += re.findall(r"[{,](\w+)=", expression)
    assert [label for label in used if label not in (*labels, *OF_A_SCRAPE)] == []


def test_legends_name_labels_that_there_are() -> None:
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"\bhcsim_\w+", target["expr"])
            labels = {label for name in names for label in SAMPLES[name].labels}
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label in (*labels, *OF_A_SCRAPE), panel["title"]


def test_panels_do_not_cover_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
