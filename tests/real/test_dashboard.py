"""The page of `hcsim dashboard`: who may see it, when it collects, and what it says of a cluster that trains."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families as read_text

from hcsim import simulate_training
from hcsim.cli.recorded import RecordedRun
from hcsim.cluster.overview import (
    EventOverview,
    LinkOverview,
    NodeOverview,
    Overview,
    StepTimes,
    TrainingOverview,
)
from hcsim.config import Training
from hcsim.real.dashboard import MOST_VIEWERS, Guard, Recorded, serving_dashboard
from hcsim.real.keys import load_node_key, new_secret, save_secret
from hcsim.real.tls import web_context
from hcsim.runtime.host import Readings
from tests.conftest import free_addresses
from tests.switches import on_switch
from tests.telemetry.test_grafana import expressions

PATIENCE_S = 240.0
"""Nothing here takes so long unless it hangs, however busy the machine."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
Page = tuple[int, str]


class Watched:
    """A source that counts how often it was opened, and whether it is."""

    def __init__(self) -> None:
        self.times = 0
        self.is_open = asyncio.Event()
        self.is_closed = asyncio.Event()

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Callable[[], bytes]]:
        self.times += 1
        self.is_open.set()
        self.is_closed.clear()
        try:
            yield lambda: b'{"times": %d}' % self.times
        finally:
            self.is_open.clear()
            self.is_closed.set()


async def get(url: str, **headers: str) -> Page:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers, ssl=False) as response:
        return response.status, await response.text()


def test_nothing_is_collected_while_nobody_looks() -> None:
    async def main() -> None:
        source = Watched()
        async with serving_dashboard("127.0.0.1:0", source, every_s=0.01) as url:
            assert (await get(url))[0] == 200
            assert source.times == 0, "the page alone needs no data"
            for times in (1, 2):
                async with (
                    aiohttp.ClientSession() as session,
                    session.get(f"{url}events") as one,
                    session.get(f"{url}events") as other,
                ):
                    for each in (one, other):
                        line = await each.content.readline()
                        assert json.loads(line.removeprefix(b"data: ")) == {"times": times}
                    assert source.is_open.is_set()
                async with asyncio.timeout(PATIENCE_S):
                    await source.is_closed.wait()
            assert source.times == 2

    asyncio.run(main())


def test_viewers_are_few() -> None:
    async def main() -> None:
        many = aiohttp.TCPConnector(limit=0)
        async with (
            serving_dashboard("127.0.0.1:0", Watched(), every_s=0.01) as url,
            aiohttp.ClientSession(connector=many) as session,
        ):
            open_ones = [await session.get(f"{url}events") for _ in range(MOST_VIEWERS)]
            assert {each.status for each in open_ones} == {200}
            async with session.get(f"{url}events") as one_too_many:
                assert one_too_many.status == 503
            for each in open_ones:
                each.close()

    asyncio.run(main())


def test_a_page_of_elsewhere_that_calls_itself_by_its_own_name_gets_nothing() -> None:
    async def main() -> None:
        async with serving_dashboard("127.0.0.1:0", Recorded(lambda at_s: b"{}", 1.0)) as url:
            for path in ("", "at?t=0", "events"):
                assert (await get(f"{url}{path}", Host="rebound.example:52419"))[0] == 403
            for name in ("localhost:1", "127.0.0.1", "[::1]:52419"):
                assert (await get(f"{url}at?t=0", Host=name))[0] == 200

    asyncio.run(main())


def test_beyond_the_loopback_a_token_and_tls_are_needed() -> None:
    async def main() -> None:
        context, fingerprint = web_context("mini")
        assert re.fullmatch(r"([0-9A-F]{2}:){31}[0-9A-F]{2}", fingerprint)
        guard = Guard("the-token", context)
        async with serving_dashboard("127.0.0.1:0", Recorded(lambda at_s: b"{}", 1.0), guard=guard) as url:
            base, _, query = url.partition("?")
            assert (base[:8], query) == ("https://", "token=the-token")
            assert (await get(f"{base}at?t=0&{query}", Host="mini.local"))[0] == 200
            for path in ("", "at?t=0", "events", "?token=", "?token=the-tokem", "events?token=%C3%A9"):
                assert (await get(f"{base}{path}"))[0] == 403
            port = int(base.rstrip("/").rpartition(":")[2])
            served = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
            digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(served)).hexdigest()
            assert fingerprint.replace(":", "").lower() == digest

    asyncio.run(main())


def test_a_recorded_run_is_asked_for_moments_within_it() -> None:
    async def main() -> None:
        async with serving_dashboard("127.0.0.1:0", Recorded(lambda at_s: b"%d" % at_s, 7.0)) as url:
            assert await get(f"{url}at?t=3") == (200, "3")
            assert await get(f"{url}at?t=-3") == (200, "0")
            assert await get(f"{url}at?t=1e9") == (200, "7")
            assert await get(f"{url}at?t=inf") == (200, "7")
            for wrong in ("soon", "nan"):
                assert (await get(f"{url}at?t={wrong}"))[0] == 400
            assert (await get(f"{url}at"))[0] == 400
            assert (await get(f"{url}events"))[0] == 404
            assert 'data-end-s="7.0' in (await get(url))[1]

    asyncio.run(main())


def test_the_page_needs_nothing_from_outside() -> None:
    async def main() -> None:
        async with (
            serving_dashboard("127.0.0.1:0", Watched()) as url,
            aiohttp.ClientSession() as session,
            session.get(url) as response,
        ):
            text, policy = await response.text(), response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert not re.findall(r"""(?:src|href)\s*=\s*["']""", text)
        assert re.findall(r"https?://\S+?(?=\")", text) == ["http://www.w3.org/2000/svg"], "a name, which is not loaded"
        assert "innerHTML" not in text

    asyncio.run(main())


async def in_browser(recorded: Recorded, folder: Path) -> str:
    """Return what a browser makes of the page of a recorded run."""
    async with serving_dashboard("127.0.0.1:0", recorded) as url, asyncio.timeout(PATIENCE_S):
        options = ["--headless=new", "--disable-gpu", f"--user-data-dir={folder}", "--virtual-time-budget=5000"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await asyncio.create_subprocess_exec(
            str(CHROMIUM), *options, "--dump-dom", url,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return (await browser.communicate())[0].decode()
        finally:
            if browser.returncode is None:
                browser.kill()
                await browser.wait()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_a_recorded_run(tmp_path: Path) -> None:
    run = RecordedRun("digits.jsonl")
    simulate_training(on_switch(("studio", "mini")), Training(task="slopes", steps=5), sink=run.listen)
    run.take(0.0, "said", "mini", ["<b>this</b> was lost"])

    recorded = Recorded(lambda at_s: msgspec.json.encode(run.at(at_s)), run.end_s)
    shown = asyncio.run(in_browser(recorded, tmp_path))
    assert "<title>Finished: 5 steps – hcsim</title>" in shown
    assert 'id="headline">Finished: 5 steps<' in shown
    assert shown.count('class="state done">has finished<') == 2
    assert '<span class="bad">&lt;b&gt;this&lt;/b&gt; was lost</span>' in shown, "what others say is no markup"
    assert re.search(r'<polyline class="curve" points="[\d., ]+"', shown)
    assert 'id="lost" role="status" hidden=""' in shown


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("number", [math.nan, math.inf, 1e308, -1e308])
def test_a_browser_shows_numbers_that_cannot_be_as_unknown(number: float, tmp_path: Path) -> None:
    curve = tuple((step, number if step % 2 else -number) for step in range(1, 9))
    times = StepTimes(number, number, number, number)
    a, b = (NodeOverview(name, name, "member", readings=Readings(-1, number, number), phases=times) for name in "ab")
    links = (LinkOverview("a", "b", ("", ""), (), number, number, number),)
    training = TrainingOverview("digits", -7, 9, 2, number, number, number, number, number, curve, curve)
    events = (EventOverview(number, "a", "the last message", "plain"),)
    seen = Overview("home", number, "working", "Working", nodes=(a, b), links=links, training=training, events=events)
    shown = asyncio.run(in_browser(Recorded(lambda at_s: msgspec.json.encode(seen), 1.0), tmp_path))
    assert ">the last message<" in shown, "the last thing that is drawn"
    assert not re.findall(r".{0,60}(?:NaN|Infinity|Invalid|undefined)", shown.partition("<script>")[0])


class Cluster(NamedTuple):
    """Processes of one cluster on the loopback, by name, and what serves their page."""

    nodes: dict[str, subprocess.Popen[str]]
    url: str
    metrics: dict[str, str]
    """Where the metrics of each node are served."""

    def sees(self, expected: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Follow the page's data until it is as expected."""
        seen: dict[str, Any] = {}
        until_s = time.monotonic() + PATIENCE_S
        with urlopen(f"{self.url}events", timeout=PATIENCE_S) as stream:
            for line in stream:
                if line.startswith(b"data: "):
                    seen = json.loads(line.removeprefix(b"data: "))
                    if expected(seen):
                        return seen
                if time.monotonic() > until_s:
                    break
        raise AssertionError(f"this was the last: {seen}")


def states(seen: dict[str, Any]) -> dict[str, str]:
    return {node["name"]: node["state"] for node in seen["nodes"]}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Three members that train until they are stopped, and a page."""
    secret, names = new_secret(), ("a", "b", "c")
    ports = [int(address.rpartition(":")[2]) for address in free_addresses(9)]
    control, data, metrics = (dict(zip(names, ports[i::3], strict=True)) for i in range(3))
    started: list[subprocess.Popen[str]] = []

    def start(home: Path, *words: str, out: int | None = subprocess.DEVNULL) -> subprocess.Popen[str]:
        environment = {**os.environ, "HCSIM_HOME": str(home)}
        command = ["nice", sys.executable, "-m", "hcsim", *words]
        started.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.DEVNULL, text=True))
        return started[-1]

    nodes = {}
    try:
        for name in names:
            home, job = tmp_path / name, tmp_path / f"{name}.toml"
            load_node_key(home)
            save_secret(home, "home", secret)
            peers = json.dumps([f"127.0.0.1:{other}" for other in control.values()])
            job.write_text(
                f"""
                name = "loopback"
                [cluster]
                nodes = 3
                preset = "low_latency"
                discover = false
                peers = {peers}
                discovery_port = {control[name]}
                gradient_port = {data[name]}
                [training]
                task = "convex"
                compressor = "int8+ef"
                steps = 1000000
                """
            )
            this = (
                "--set",
                f"name={name}",
                "--set",
                "at=127.0.0.1",
                "--set",
                "device=cpu",
                "--set",
                f"metrics={metrics[name]}",
            )
            nodes[name] = start(home, "run", "--real", str(job), *this)
        peer = ("--peer", f"127.0.0.1:{control['a']}")
        page = start(tmp_path / "a", "dashboard", "--listen", "127.0.0.1:0", *peer, out=subprocess.PIPE)
        assert page.stdout is not None
        where = {name: f"127.0.0.1:{port}" for name, port in metrics.items()}
        yield Cluster(nodes, page.stdout.readline().split()[-1], where)
    finally:
        for each in started:
            each.send_signal(signal.SIGKILL)
            each.wait()
            if each.stdout is not None:
                each.stdout.close()


@pytest.mark.slow
def test_the_page_says_who_trains_and_who_was_killed(cluster: Cluster) -> None:
    at_work = {"leads", "member"}
    seen = cluster.sees(
        lambda seen: [*map(at_work.__contains__, states(seen).values())] == [True] * 3 and seen["training"] is not None
    )
    assert sorted(states(seen)) == ["a", "b", "c"]
    assert sorted(states(seen).values()) == ["leads", "member", "member"]
    assert seen["headline"].startswith("Working on 3 machines, step ")
    assert seen["training"]["title"] == "convex by ddp, compressor int8+ef"
    assert seen["training"]["steps"] == 1_000_000
    assert all(node["chip"]["memory_bytes"] > node["readings"]["free_bytes"] > 0 for node in seen["nodes"])
    assert any("training begins" in event["text"] for event in seen["events"])
    seen = cluster.sees(
        lambda seen: seen["training"]["samples_per_s"] and all(each["there_bps"] for each in seen["links"])
    )
    assert len(seen["links"]) == 3
    assert {end for link in seen["links"] for end in link["ends"]} == {"127.0.0.1"}

    before = seen["training"]["step"]
    cluster.nodes["c"].send_signal(signal.SIGKILL)
    seen = cluster.sees(lambda seen: states(seen)["c"] not in at_work)
    seen = cluster.sees(lambda seen: states(seen)["c"] == "out" and seen["training"]["step"] > before)
    assert sorted(states(seen).values()) == ["leads", "member", "out"]
    assert "out: c" in seen["headline"]
    assert next(node["why"] for node in seen["nodes"] if node["name"] == "c")
    told = [event["text"] for event in seen["events"] if event["tone"] == "bad"]
    assert any(text.startswith("c does not answer") or "c was lost" in text for text in told), seen["events"]


def after_a_loss(cluster: Cluster) -> None:
    """Wait until the members have trained, have lost one, and go on."""
    cluster.sees(lambda seen: seen["training"] is not None and seen["training"]["step"] > 2)
    cluster.nodes["c"].send_signal(signal.SIGKILL)
    seen = cluster.sees(lambda seen: states(seen).get("c") == "out")
    step = seen["training"]["step"]
    cluster.sees(lambda seen: seen["training"]["step"] > step + 2)


@pytest.mark.slow
def test_a_real_run_exports_every_metric_that_grafana_is_to_show(cluster: Cluster) -> None:
    after_a_loss(cluster)
    text = ""
    for name in ("a", "b"):
        with urlopen(f"http://{cluster.metrics[name]}/metrics", timeout=PATIENCE_S) as page:
            text += page.read().decode()
    exported = {sample.name for family in read_text(text) for sample in family.samples}
    asked = {name for expression in expressions() for name in re.findall(r"\bhcsim_\w+", expression)}
    assert asked - exported == set()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_itself_answers_what_grafana_asks(cluster: Cluster, tmp_path: Path) -> None:
    (address,) = free_addresses(1)
    targets = json.dumps([*cluster.metrics.values()])
    config = tmp_path / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: hcsim, static_configs: [{{targets: {targets}}}]}}]\n"
    )
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with subprocess.Popen(
        ["nice", *command, f"--web.listen-address={address}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as prometheus:
        try:
            after_a_loss(cluster)
            unanswered = expressions()
            until_s = time.monotonic() + PATIENCE_S
            while unanswered and time.monotonic() < until_s:
                unanswered = [each for each in unanswered if not answer(address, each)]
                time.sleep(1.0)
        finally:
            prometheus.kill()
    assert unanswered == []


def answer(address: str, expression: str) -> list[Any]:
    """What Prometheus finds; nothing while it is not up yet."""
    query = urlencode({"query": expression.replace("$instance", ".*")})
    try:
        with urlopen(f"http://{address}/api/v1/query?{query}", timeout=PATIENCE_S) as reply:
            found = json.load(reply)
    except HTTPError as error:
        if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        return []
    except URLError:
        return []
    assert found["status"] == "success"
    result: list[Any] = found["data"]["result"]
    return result
