"""What a watcher says of a cluster: who is here, does it work, how fast, and what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from hcsim.cli.watch import drawn, duration_left, sparkline
from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.node import ClusterNode
from hcsim.cluster.overview import EventOverview, NodeOverview, NodeState, Overview, TrainingOverview, watched
from hcsim.cluster.status_client import LOOK_S, ClusterWatch
from hcsim.config import Crash
from hcsim.units import Seconds
from hcsim.virtual.host import VirtualHost
from tests.cluster.nodes import Party

ABC = ("a", "b", "c")


def seen_by_a(party: Party, *moments_s: float, peers: tuple[str, ...] = ()) -> list[Overview]:
    """How the cluster stands at these moments, to somebody who watches it from host a."""
    seen: list[Overview] = []

    async def look(node: ClusterNode) -> None:
        host = party.world.host("a")
        watch = ClusterWatch(host, "", peers, 1.0, 1.0)
        for moment_s in moments_s:
            await host.clock.sleep(moment_s - host.clock.elapsed())
            seen.append(watched("home", watch, host.clock.elapsed(), 0.0))
        await watch.close()

    party.meanwhile["a"] = look
    party.run(moments_s[-1] + 1)
    return seen


def test_all_that_announce_themselves_are_here_and_one_leads() -> None:
    (seen,) = seen_by_a(Party(ABC), 4.0)
    assert [(node.name, node.state) for node in seen.nodes] == [("a", "leads"), ("b", "member"), ("c", "member")]
    assert seen.state == "working"
    assert seen.headline == "Working on 3 machines"
    assert [(link.one, link.other) for link in seen.links] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert [link.latency_s for link in seen.links] == pytest.approx([2e-4] * 3, rel=0.5)
    assert all(node.chip is not None and node.chip.name for node in seen.nodes)


def test_one_address_is_enough_to_see_them_all() -> None:
    party = Party(ABC, discover=False, peers=("a:52415", "b:52415", "c:52415"))
    (seen,) = seen_by_a(party, 6.0, peers=("b:52415",))
    assert [node.state for node in seen.nodes] == ["leads", "member", "member"]


def test_a_machine_that_has_crashed_is_out_with_the_reason_within_the_limit_of_heartbeats() -> None:
    party = Party(ABC, faults=[Crash(Seconds(5.0), "c")])
    before, after, later = seen_by_a(party, 4.5, 5.0 + party.config.beat.timeout_s + 1.0, 30.0)
    assert before.nodes[2].state == "member"
    for seen in (after, later):
        assert [(node.name, node.state) for node in seen.nodes] == [("a", "leads"), ("b", "member"), ("c", "out")]
        assert seen.nodes[2].why
        assert seen.headline == "Working on 2 machines; out: c"
        assert any(event.text.startswith("c does not answer") and event.tone == "bad" for event in seen.events)


def test_what_is_wrong_stands_beside_the_answer() -> None:
    (seen,) = seen_by_a(Party(ABC, faults=[Crash(Seconds(5.0), "c")]), 30.0)
    assert seen.hint.startswith("c: ")
    assert seen.nodes[2].why in seen.hint


class TooFew(Party):
    """Every node waits for one more."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.config = msgspec.structs.replace(self.config, nodes=len(names) + 1)


def test_a_cluster_that_is_too_small_says_how_many_machines_it_needs() -> None:
    (seen,) = seen_by_a(TooFew(("a", "b")), 4.0)
    assert (seen.state, seen.headline) == ("waiting", "Waiting: 2 machines here, 3 are needed")


class Foreign(Party):
    """Nodes of another cluster than the one that is watched."""

    def node(self, host: VirtualHost) -> ClusterNode:
        me = NodeInfo(host.name, 1, host.name, f"{host.name}:52415", f"{host.name}:52416", "another")
        return ClusterNode(host, me, self.config)


def test_nobody_answers() -> None:
    at_once, seen = seen_by_a(Foreign(("a",)), 0.0, LOOK_S + 1.0)
    assert (at_once.state, at_once.headline) == ("waiting", "Looking for the cluster")
    assert (seen.state, seen.nodes) == ("nobody", ())
    assert "name one with --peer" in seen.hint


def test_a_terminal_shows_it_and_nothing_of_a_name_is_taken_for_markup() -> None:
    party = Party(ABC, faults=[Crash(Seconds(5.0), "c")])
    (seen,) = seen_by_a(party, 30.0)
    console = Console(width=160, file=StringIO())
    console.print(drawn(seen))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Working on 2 machines; out: c" in text
    assert "a – b" in text


def many(count: int, *, out: int) -> Overview:
    """A cluster of so many machines, of which some are out, each with a long reason."""
    states: list[NodeState] = ["out" if i >= count - out else "member" for i in range(count)]
    nodes = tuple(
        NodeOverview(f"{i}", f"machine number {i}", state, "it was lost " * 9 if state == "out" else "")
        for i, state in enumerate(states)
    )
    events = tuple(EventOverview(float(i), "a", "something happened " * 9, "plain") for i in range(40))
    return Overview("home", 0.0, "working", "Working", nodes=nodes, events=events)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("count", [3, 64])
def test_a_terminal_shows_what_is_wrong_within_its_size(width: int, count: int) -> None:
    file = StringIO()
    Console(width=width, file=file).print(drawn(many(count, out=2), width, 40))
    lines = file.getvalue().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width
    assert file.getvalue().count("out: it was lost") == 2
    assert ("more" in file.getvalue()) is (count == 64)


@pytest.mark.parametrize(
    ("values", "expected"), [([], ""), ([1.0], "▁"), ([3.0, 2.0, 1.0], "█▅▁"), ([1.0, float("nan"), 2.0], "▁×█")]
)
def test_a_curve_of_characters(values: list[float], expected: str) -> None:
    assert sparkline(values, 10) == expected


@pytest.mark.parametrize("at_s", [1.0, 1e300, float("nan")])
def test_what_other_machines_tell_does_not_reach_the_terminal_as_control_characters(at_s: float) -> None:
    escape = "\x1b]0;title\x07\x1b[2J"
    seen = Overview(
        "home",
        0.0,
        "working",
        f"headline{escape}",
        f"hint{escape}",
        training=TrainingOverview(f"work{escape}", 1, 2, 1, 0.5, 0.0, None, None, None, (), ()),
        events=(EventOverview(at_s, "a", f"said{escape}", "plain"),),
    )
    file = StringIO()
    Console(file=file, width=120).print(drawn(seen))
    assert all(word in file.getvalue() for word in ("headline", "hint", "work", "said"))
    assert "\x1b" not in file.getvalue()
    assert "\x07" not in file.getvalue()


def test_numbers_that_no_member_should_tell_do_not_end_the_watch() -> None:
    assert sparkline([1e308, -1e308, 1.0, float("nan")], 10) == "××▁×"
    assert [duration_left(seconds) for seconds in (float("inf"), float("nan"), 60.0)] == ["–", "–", "60 s"]
