"""Watching nodes that are watched by many, tell too much, tell nonsense, or end between two questions."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from io import StringIO

import msgspec
import pytest
from rich.console import Console

from hcsim.cli.watch import drawn
from hcsim.cluster.control_connections import MOST_WATCHERS
from hcsim.cluster.coordinator import CoordinatedMembership, Coordinator, CoordinatorPolicy
from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.messages import SCHEMA, Details, LinkStatus, Status, StatusReply
from hcsim.cluster.node import ClusterNode
from hcsim.cluster.overview import Overview, watched
from hcsim.cluster.status_client import MOST_NODES, REFUSED_S, ClusterWatch, StatusClient
from hcsim.cluster.view import Member, View
from hcsim.errors import ChannelError
from hcsim.runtime.channel import Channel
from hcsim.runtime.host import Chip, Readings
from hcsim.telemetry.history import LONGEST_MESSAGE, MOST_MESSAGES, HistoryMessage, HistoryStep, RunHistory
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World
from tests.cluster.nodes import Party
from tests.switches import on_switch


class Trainers(Party):
    """Nodes with histories."""

    def node(self, host: VirtualHost) -> ClusterNode:
        self.histories = getattr(self, "histories", {})
        self.histories[host.name] = history = RunHistory("digits by ddp", total_steps=5)
        boot = host.rng("boot").getrandbits(47)
        me = NodeInfo(host.name, boot, host.name, f"{host.name}:52415", f"{host.name}:52416")
        return ClusterNode(host, me, self.config, history=history)


def seen_now(host: VirtualHost, watch: ClusterWatch) -> Overview:
    return watched("home", watch, host.clock.elapsed(), 0.0)


def run(party: Party, look: Callable[[VirtualHost], Awaitable[None]], seconds: float) -> None:
    """Run the nodes, and beside that of host a this."""

    async def beside(node: ClusterNode) -> None:
        await look(party.world.host("a"))

    party.meanwhile["a"] = beside
    party.run(seconds)


def test_one_watcher_too_many_is_told_why_it_sees_nothing_until_another_one_goes() -> None:
    seen: list[Overview] = []

    async def look(host: VirtualHost) -> None:
        await host.clock.sleep(3.0)
        first = [ClusterWatch(host, "", (), 1.0, 1.0) for _ in range(MOST_WATCHERS)]
        await host.clock.sleep(3.0)
        late = ClusterWatch(host, "", (), 1.0, 1.0)
        for _ in range(10):
            await host.clock.sleep(0.7)
            seen.append(seen_now(host, late))
        assert {seen_now(host, each).state for each in first} == {"working"}
        await first[0].close()
        await host.clock.sleep(REFUSED_S + 2.0)
        seen.append(seen_now(host, late))
        for each in (late, *first[1:]):
            await each.close()

    run(Party(("a", "b")), look, 40.0)
    *refused, taken = seen
    assert {each.state for each in refused} == {"nobody"}, "it does not flip between two answers"
    assert all("close one of them" in each.hint for each in refused)
    assert taken.state == "working"


def test_a_node_that_finishes_between_two_questions_is_shown_as_finished() -> None:
    seen: list[Overview] = []
    party = Trainers(("a", "b"))

    async def end(node: ClusterNode) -> None:
        host = party.world.host("b")
        await host.clock.sleep(5.31)
        party.histories["b"].step(HistoryStep(host.clock.elapsed(), 5, 0.5))
        await node.stop("it has finished")

    async def look(host: VirtualHost) -> None:
        watch = ClusterWatch(host, "", (), 1.0, 1.0)
        await host.clock.sleep(12.0)
        seen.append(seen_now(host, watch))
        await watch.close()

    party.meanwhile["b"] = end
    run(party, look, 13.0)
    assert {node.name: node.state for node in seen[0].nodes}["b"] == "done"
    assert seen[0].headline == "Finished: 5 steps"
    assert "b has finished" in [event.text for event in seen[0].events]


@pytest.mark.parametrize("letter", ["x", "ü", "猫", "🐈"])
def test_a_node_with_much_to_say_is_heard_and_says_what_it_left_out(letter: str) -> None:
    seen: list[Overview] = []
    party = Trainers(("a", "b"))

    async def talk(node: ClusterNode) -> None:
        history, host = party.histories["b"], party.world.host("b")
        for i in range(MOST_MESSAGES):
            history.say(host.clock.elapsed(), f"{i} " + letter * LONGEST_MESSAGE)

    async def look(host: VirtualHost) -> None:
        watch = ClusterWatch(host, "", (), 1.0, 1.0)
        await host.clock.sleep(5.0)
        seen.append(seen_now(host, watch))
        await watch.close()

    party.meanwhile["b"] = talk
    run(party, look, 6.0)
    assert [node.state for node in seen[0].nodes] == ["leads", "member"]
    texts = [event.text for event in seen[0].events if event.who == "b"]
    assert any(text.startswith(f"{MOST_MESSAGES - 1} ") for text in texts), "the newest are kept"
    cut = any(text.startswith("too much to tell at once: ") for text in texts)
    assert cut is (len(letter.encode()) > 3)


def hostile(number: float, count: int) -> StatusReply:
    """What no honest node tells: itself at another address each time, and hundreds of others."""
    us = Member("b", 1, "b", "b:52416")
    links = tuple(
        LinkStatus(
            f"n{i}", f"n{i}", f"b:{20_000 + (count * 2000 + i) % 40_000}", "", number, "", ("", ""), number, -1.0
        )
        for i in range(2000)
    )
    status = Status(us, f"b:{10_000 + count}", "0", 1, 1, True)
    steps = [
        HistoryStep(number, -(1 << 62), number),
        *(HistoryStep(float(i), i, number, -3, 1 << 63, *[number] * 4, held_out=number) for i in range(1, 9)),
        HistoryStep(9.0, (1 << 64) - 1, number),
    ]
    details = Details(
        number,
        Chip("M9", -1),
        Readings(-1, number, number, number),
        total_steps=-5,
        needed=-(1 << 63),
        steps=tuple(steps),
        messages=(HistoryMessage(number, "when?"), HistoryMessage(1.0, "then")),
    )
    return StatusReply(status, View("0", 1, (us,), formed=True), links, (), details)


NONSENSE = pytest.mark.parametrize("number", [math.nan, math.inf, 1e308, -1e308])


def beside_a_liar(number: float, ask: Callable[[VirtualHost], Awaitable[None]]) -> None:
    """Run this on host a; host b answers everybody with what no honest node tells."""

    async def lie(host: VirtualHost) -> None:
        async def answer(channel: Channel, count: int) -> None:
            with suppress(ChannelError):
                while True:
                    await SCHEMA.recv(channel)
                    await SCHEMA.send(channel, hostile(number, count))

        listener, count = await host.listen("b:52415"), 0
        while True:
            host.spawn(answer(await listener.accept(), count), name=f"answer {count}")
            count += 1

    async def either(host: VirtualHost) -> None:
        if host.name == "a":
            await ask(host)
        else:
            lying = host.spawn(lie(host), name="lie")
            await host.clock.sleep(60.0)
            lying.cancel()

    World(on_switch(("a", "b"))).run_on_all(either)


def test_a_node_that_tells_of_hundreds_of_others_has_few_of_them_asked() -> None:
    silent: list[int] = []

    async def ask(host: VirtualHost) -> None:
        survey = StatusClient(host, "", 1.0)
        await survey.run(["b:52415"], 0.1)
        assert list(survey.told) == ["b"]
        watch = ClusterWatch(host, "", ["b:52415"], 1.0, 1.0)
        await host.clock.sleep(5.0)
        silent.extend((len(survey.failures), len(watch.silent)))
        await watch.close()

    beside_a_liar(0.001, ask)
    assert len(silent) == 2
    assert all(10 < count <= MOST_NODES for count in silent), silent


@NONSENSE
def test_numbers_that_cannot_be_are_shown_as_unknown(number: float) -> None:
    seen: list[Overview] = []

    async def look(host: VirtualHost) -> None:
        watch = ClusterWatch(host, "", ["b:52415"], 1.0, 1.0)
        await host.clock.sleep(5.0)
        seen.append(seen_now(host, watch))
        await watch.close()

    beside_a_liar(number, look)
    (node,) = (node for node in seen[0].nodes if node.name == "b")
    assert (node.readings, node.chip) == (Readings(), Chip("M9"))
    assert node.step == 8, "of the steps only those are taken that can be"
    assert "when?" not in [event.text for event in seen[0].events]
    file = StringIO()
    Console(width=120, file=file).print(drawn(seen[0], 120, 40))
    assert len(file.getvalue().splitlines()) <= 40
    json.loads(msgspec.json.encode(seen[0]), parse_constant=pytest.fail)


@pytest.mark.parametrize("peers", [(), ("c:52415",)], ids=["announced", "one address"])
def test_members_with_a_coordinator_are_seen(peers: tuple[str, ...]) -> None:
    world, seen, told = World(on_switch(("a", "b", "c"))), list[Overview](), list[StatusClient]()

    async def watch(host: VirtualHost) -> None:
        coordinator = Coordinator(host, CoordinatorPolicy(workers=2))
        listener = await host.listen("a:52417")
        coordinator.open(listener)
        watch = ClusterWatch(host, "", peers, 1.0, 1.0)
        for moment_s in (1.5, 8.0, 20.0):
            await host.clock.sleep(moment_s - host.clock.elapsed())
            seen.append(seen_now(host, watch))
            told.append(StatusClient(host, "", 1.0))
            await told[-1].run(peers, 0.5)
        await watch.close()
        await coordinator.close()
        await listener.close()

    async def work(host: VirtualHost) -> None:
        await host.clock.sleep(4.0 if host.name == "b" else 0.0)
        me = NodeInfo(host.name, 1, host.name, f"{host.name}:52415", f"{host.name}:52416")
        history = RunHistory("digits by ddp", total_steps=5)
        node = CoordinatedMembership(host, me, "a:52417", history=history, announced=not peers)
        await node.start()
        view = await node.view(-1)
        assert view is not None
        history.step(HistoryStep(host.clock.elapsed(), 3, 0.5))
        await host.clock.sleep(12.0 - host.clock.elapsed())
        history.step(HistoryStep(host.clock.elapsed(), 5, 0.4))
        await node.leave()
        await node.stop()

    world.run_on_all(lambda host: watch(host) if host.name == "a" else work(host))
    waiting, working, done = seen
    assert (waiting.state, waiting.headline) == ("waiting", "Waiting: 1 machine here, 2 are needed")
    assert (working.state, working.headline) == ("working", "Working on 2 machines, step 3 of 5")
    assert sorted((node.name, node.state) for node in working.nodes) == [("b", "member"), ("c", "leads")]
    assert (done.state, done.headline) == ("done", "Finished: 5 steps")
    assert [sorted(each.told) for each in told] == [["c"], ["b", "c"], []]


def test_a_coordinated_machine_whose_port_is_taken_works_without_being_seen() -> None:
    world, lines = World(on_switch(("a",))), list[str]()

    async def work(host: VirtualHost) -> None:
        taken = await host.listen("a:52415")
        me = NodeInfo("a", 1, "a", "a:52415", "a:52416")
        node = CoordinatedMembership(host, me, "a:52417", lines.append)
        await node.start()
        await node.stop()
        await taken.close()

    world.run_on_all(work)
    assert [line.partition(":")[0] for line in lines] == ["`hcsim cluster status` does not see this machine"]
