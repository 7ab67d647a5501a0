"""What a run leaves in its hosts' figures, held against what the run knows of itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as read_text
from typer.testing import CliRunner

from hcsim import Group, Options, Phantom, real_group, simulate, simulate_training
from hcsim.cli.app import app
from hcsim.config import Crash, Training
from hcsim.errors import CollectiveError, ConfigError
from hcsim.real.http import serving_metrics
from hcsim.telemetry.metrics import HistogramSeries, HostMetrics
from hcsim.telemetry.trace import Event
from hcsim.units import Seconds
from tests.conftest import free_addresses
from tests.switches import on_switch
from tests.training.clusters import quiet_cluster

MACS = ("mac-0", "mac-1", "mac-2")


def total(metrics: HostMetrics, name: str) -> float:
    """Over all labels; of a histogram, the sum of its values."""
    found = [series for metric, _, series in metrics.series() if metric.name == name]
    return sum(series.sum if isinstance(series, HistogramSeries) else series.value for series in found)


async def three_operations(group: Group) -> tuple[int, int, float]:
    started_s = group.host.clock.elapsed()
    await group.all_reduce(np.ones(5000, np.float32), algorithm="ring")
    await group.all_reduce(Phantom(9_000_000), algorithm="ring")
    await group.broadcast(np.zeros(10, np.uint8))
    return group.bytes_sent, group.wire_bytes, group.host.clock.elapsed() - started_s


def test_collectives_and_links_count_what_was_sent() -> None:
    outcome = simulate(on_switch(MACS), three_operations)
    for metrics, (sent_bytes, _, lasted_s) in zip(outcome.metrics.values(), outcome.values(), strict=True):
        assert metrics.value("hcsim_collectives_total", operation="all_reduce") == 2
        assert metrics.value("hcsim_collectives_total", operation="broadcast") == 1
        assert metrics.value("hcsim_collective_seconds", operation="all_reduce") == 2
        assert total(metrics, "hcsim_collective_failures_total") == 0
        assert total(metrics, "hcsim_collective_bytes_total") == sent_bytes
        assert total(metrics, "hcsim_link_sent_bytes_total") == sent_bytes
        assert total(metrics, "hcsim_collective_seconds") == pytest.approx(lasted_s)
        assert total(metrics, "hcsim_collectives_busy_seconds_total") == pytest.approx(lasted_s)
    everybody = list(outcome.metrics.values())
    for what in ("bytes", "frames"):
        sent = sum(total(metrics, f"hcsim_link_sent_{what}_total") for metrics in everybody)
        assert sent == sum(total(metrics, f"hcsim_link_received_{what}_total") for metrics in everybody) > 0
    opened = sum(metrics.value("hcsim_connects_total", outcome="opened") for metrics in everybody)
    assert opened == sum(total(metrics, "hcsim_accepts_total") for metrics in everybody)
    assert opened == sum(metrics.value("hcsim_hellos_total", answer="taken") for metrics in everybody)
    assert 2 * opened == sum(total(metrics, "hcsim_links_opened_total") for metrics in everybody)
    assert [metrics.value("hcsim_channels_open") for metrics in everybody] == [0, 0, 0]


def test_operations_that_run_side_by_side_are_busy_once() -> None:
    async def program(group: Group) -> float:
        await group.barrier()
        before_s = group.host.metrics.counter("hcsim_collectives_busy_seconds_total").value
        started_s = group.host.clock.elapsed()
        await asyncio.gather(*(group.all_reduce(Phantom(4_000_000), bucket=bucket) for bucket in range(3)))
        busy_s = group.host.metrics.counter("hcsim_collectives_busy_seconds_total").value - before_s
        assert busy_s == pytest.approx(group.host.clock.elapsed() - started_s)
        return busy_s

    outcome = simulate(on_switch(MACS), program)
    for metrics, busy_s in zip(outcome.metrics.values(), outcome.values(), strict=True):
        assert total(metrics, "hcsim_collective_seconds") > 2 * busy_s


def test_a_lost_rank_is_a_failure_on_those_that_wait_for_it() -> None:
    async def program(group: Group) -> None:
        while True:
            await group.all_reduce(Phantom(4_000_000))

    outcome = simulate(on_switch(MACS, [Crash(Seconds(0.5), "mac-2")]), program, options=Options(timeout_s=2.0))
    for name, result in zip(MACS[:2], outcome.results, strict=False):
        assert isinstance(result, CollectiveError)
        assert outcome.metrics[name].value("hcsim_collective_failures_total", operation="all_reduce") == 1
        assert outcome.metrics[name].value("hcsim_collectives_total", operation="all_reduce") > 1


def test_the_links_of_an_earlier_life_still_count() -> None:
    async def program(group: Group) -> int:
        await group.all_reduce(Phantom(3000))
        sent_bytes = group.bytes_sent
        async with await group.reopen() as again:
            await again.all_reduce(Phantom(3000))
            return sent_bytes + again.bytes_sent

    outcome = simulate(on_switch(MACS), program)
    for metrics, sent_bytes in zip(outcome.metrics.values(), outcome.values(), strict=True):
        assert total(metrics, "hcsim_link_sent_bytes_total") == sent_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("compressor", "ratio"), [("topk:0.01+ef", 47.4), ("int8", 3.9), ("none", 1.0), ("zstd", 1.8)])
def test_training_tells_its_steps_its_bytes_and_where_the_time_went(compressor: str, ratio: float) -> None:
    settings = Training(task="digits", compressor=compressor, steps=3)
    outcome = simulate_training(quiet_cluster(2), settings)
    for metrics, report in zip(outcome.metrics.values(), outcome.values(), strict=True):
        assert metrics.value("hcsim_training_steps_total") == report.steps == 3
        assert metrics.value("hcsim_training_loss") == report.points[-1].loss
        assert metrics.value("hcsim_training_sent_bytes_total") == report.sent_bytes
        spent_s = {
            dict(labels)["purpose"]: series.sum
            for metric, labels, series in metrics.series()
            if metric.name == "hcsim_training_step_seconds" and isinstance(series, HistogramSeries)
        }
        assert spent_s["whole"] == pytest.approx(report.duration_s)
        assert spent_s["compute"] == pytest.approx(report.spent_s["compute"])
        assert spent_s["encode"] == pytest.approx(report.spent_s["encode"])
        assert spent_s["wait"] == pytest.approx(report.spent_s["exchange"])
        assert 0 < spent_s["network"] <= spent_s["whole"]
        coding_s = total(metrics, "hcsim_compression_encode_seconds") + total(
            metrics, "hcsim_compression_decode_seconds"
        )
        assert coding_s == pytest.approx(report.spent_s["encode"])
        before, after = (total(metrics, f"hcsim_compression_{way}put_bytes_total") for way in ("in", "out"))
        assert before / after == pytest.approx(ratio, rel=0.1)


def test_the_trace_ends_with_the_figures_and_its_digest_does_not_depend_on_who_looks() -> None:
    events: list[Event] = []
    watched = simulate(on_switch(MACS), three_operations, sink=events.extend)
    assert simulate(on_switch(MACS), three_operations).trace_sha256 == watched.trace_sha256
    figures = [event for event in events if event[1] == "metric"]
    assert events[-len(figures) :] == figures
    assert (*figures[0][:1], "metric", "mac-0", "hcsim_collectives_total", "operation=all_reduce", 2) in figures


@pytest.mark.slow
def test_the_command_line_writes_the_same_figures_every_time(tmp_path: Path) -> None:
    texts = []
    for number in range(2):
        file = tmp_path / f"{number}.prom"
        result = CliRunner().invoke(app, ["run", "mixed-home", "--set", "size=1 MiB", "--set", f"metrics={file}"])
        assert result.exit_code == 0, result.output
        texts.append(file.read_text(encoding="utf-8"))
    assert texts[0] == texts[1]
    families = {family.name: family for family in read_text(texts[0])}
    hosts = {sample.labels["host"] for sample in families["hcsim_collectives"].samples}
    assert hosts == {"studio-1", "studio-2", "mini", "laptop"}
    refused = CliRunner().invoke(app, ["run", "mixed-home", "--set", f"metrics={tmp_path / 'no' / 'where'}"])
    assert refused.exit_code == 2
    assert "cannot be written" in refused.output


def test_a_trace_file_has_the_figures_in_its_last_lines(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    assert CliRunner().invoke(app, ["run", "two-macs-wifi", "--trace", str(file)]).exit_code == 0
    last = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    assert last[1] == "metric"


def test_prometheus_finds_a_real_rank_and_two_cannot_have_one_port() -> None:
    [address] = free_addresses(1)
    peers = free_addresses(2)

    async def rank(number: int, metrics_at: str | None) -> str:
        async with real_group(number, peers, metrics_at=metrics_at) as group:
            await group.all_reduce(np.ones(1000, np.float32), algorithm="ring")
            text = await asyncio.to_thread(_get, f"http://{address}/metrics") if metrics_at else ""
            if metrics_at:
                with pytest.raises(ConfigError, match=f"cannot be served at {address}"):
                    async with serving_metrics(HostMetrics(), address):
                        pass
            await group.barrier()
            return text

    async def both() -> list[str]:
        return await asyncio.gather(rank(0, address), rank(1, None))

    families = {family.name: family for family in read_text(asyncio.run(both())[0])}
    [sample] = families["hcsim_link_sent_bytes"].samples
    assert (sample.labels, sample.value) == ({"peer": peers[1]}, 4000)
    assert [sample.value for sample in families["hcsim_channels_open"].samples] == [1]


def _get(url: str) -> str:
    with urlopen(Request(url), timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return str(answer.read().decode())


@pytest.mark.parametrize("port", ["x", "1.2.3.4", "70000"])
def test_a_place_for_metrics_that_is_none_is_refused(port: str) -> None:
    arguments = ["rank", "--peers", "localhost", "--rank", "0", "--set", f"metrics={port}"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"--set metrics={port}: give a port, or host:port" in result.output
