"""Nodes that were started with options that all must have alike, and do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise

import msgspec
import pytest

from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.view import unlike
from hcsim.config import Cluster, Training
from hcsim.errors import ConfigError
from hcsim.node import ClusterJob, train_as_member
from hcsim.training.run import Observer, Point, Report, Run
from hcsim.transport.groups import Wire
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World
from tests.switches import on_switch

USUAL, SMALL = Wire(), Wire(segment_bytes=1 << 20)
STEPS = 150
LIMIT_S = 60.0
"""Of virtual time: whoever waits then would wait for ever."""


def trained(
    plans: Mapping[str, ClusterJob],
    late_s: Mapping[str, float],
    observe: Callable[[VirtualHost], Observer | None] = lambda host: None,
) -> tuple[dict[str, Report | BaseException], dict[str, list[str]]]:
    """What came of each host, and what it said."""
    world = World(on_switch([*plans], rate="2 Mb/s"))
    told: dict[str, list[str]] = {name: [] for name in plans}

    async def on_host(host: VirtualHost) -> Report:
        await host.clock.sleep(late_s.get(host.name, 0.0))
        me = NodeInfo(host.name, 1, host.name, f"{host.name}:52415", f"{host.name}:52416")
        async with asyncio.timeout_at(LIMIT_S):
            return await train_as_member(
                host, me, plans[host.name], observer=observe(host), tell=told[host.name].append, durable=False
            )

    return dict(zip(plans, world.run_on_all(on_host), strict=True)), told


def plan(nodes: int, wire: Wire = USUAL, **changes: object) -> ClusterJob:
    cluster = Cluster(nodes=nodes, preset="low_latency", **changes)  # type: ignore[arg-type]
    patient = msgspec.structs.replace(wire, connect_timeout_s=10 * LIMIT_S)  # nobody waits so long
    return ClusterJob(cluster, Training(task="convex", steps=STEPS), 7, patient)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (plan(2, SMALL), r"wire.segment is left out on . and 1048576 B here"),
        (plan(2, Wire(stripes=3)), r"wire.stripes is left out on . and 3 here"),
        (plan(2, quorum="majority"), r"quorum is left out on . and majority here"),
    ],
    ids=["segment", "stripes", "quorum"],
)
def test_a_late_one_with_other_options_ends_at_once_and_the_others_train_to_the_end(
    other: ClusterJob, words: str
) -> None:
    results, told = trained({"a": plan(2), "b": other, "c": plan(2)}, {"b": 2.0})
    with pytest.raises(ConfigError, match=f"leads, and was started otherwise: {words}. Start all nodes alike"):
        raise results["b"]  # type: ignore[misc]
    first, second = results["a"], results["c"]
    assert isinstance(first, Report)
    assert isinstance(second, Report)
    assert first.steps == second.steps == STEPS
    assert first.sha256 == second.sha256
    assert not [line for lines in told.values() for line in lines if "refused us" in line]


def test_where_none_has_begun_those_end_that_differ_from_the_leader_who_says_why() -> None:
    results, told = trained({"a": plan(3), "b": plan(3, SMALL)}, {})  # a third would be needed
    ((loser, error),) = [(name, each) for name, each in results.items() if isinstance(each, ConfigError)]
    assert "wire.segment" in str(error)
    assert [line for lines in told.values() for line in lines if line.startswith(f"{loser} was started otherwise")]


def test_differences_are_named_with_both_values() -> None:
    assert unlike({"wire.stripes": "2"}, {"wire.stripes": "2"}, "mini") == ""
    assert unlike({"wire.stripes": "2"}, {"quorum": "any"}, "mini") == (
        "quorum is left out on mini and any here, wire.stripes is 2 on mini and left out here"
    )


def test_the_leader_does_not_wait_for_one_that_cannot_take_part() -> None:
    results, told = trained({"a": plan(2), "b": plan(2, SMALL)}, {})
    assert sorted(type(each).__name__ for each in results.values()) == ["ConfigError", "Report"]
    assert [line for lines in told.values() for line in lines if "was started otherwise; " in line]


@pytest.mark.slow
def test_one_that_ends_with_an_error_as_a_view_begins_hardly_holds_up_the_others() -> None:
    steps_s: dict[str, list[float]] = {"a": [], "b": []}

    class Watch:
        """Notes when a host's steps were done."""

        def __init__(self, host: VirtualHost) -> None:
            self._host = host

        def point(self, rank: int, point: Point) -> None:
            steps_s.setdefault(self._host.name, []).append(self._host.clock.elapsed())

        def finished(self, run: Run) -> None:
            pass

    late = msgspec.structs.replace(plan(2), training=Training(task="convex", steps=STEPS, lr=0.01))
    results, _ = trained({"a": plan(2), "b": plan(2), "c": late}, {"c": 2.0}, Watch)
    with pytest.raises(ConfigError, match="the others train with other settings"):
        raise results["c"]  # type: ignore[misc]
    for name in ("a", "b"):
        assert len(steps_s[name]) == STEPS
        assert max(after - before for before, after in pairwise(steps_s[name])) < 1.0
