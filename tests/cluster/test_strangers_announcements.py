"""What announcements of a stranger on the local network may cost a node, and that they change nothing that is known."""

from __future__ import annotations

import asyncio

import pytest

from hcsim.cluster.discovery import (
    DIAL_BURST,
    DIALS_PER_S,
    MOST_CANDIDATES,
    MOST_DIALS,
    MOST_HOSTS,
    MOST_LINES,
    Announcement,
    Candidate,
    DialQueue,
    Discovery,
    place_of,
)
from hcsim.config import Cluster, Restart
from hcsim.errors import ChannelBroken, DeadlineExceeded, WrongPeer
from hcsim.runtime.address import hosts_of
from hcsim.runtime.clock import TokenBucket
from hcsim.runtime.host import Service, Sighting
from hcsim.units import PositiveSeconds, Seconds
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World
from tests.cluster.nodes import Party
from tests.switches import on_switch

NAMESPACE = "ours"
ABC = ("a", "b", "c")


def record(node: str, address: str, namespace: str = NAMESPACE, name: str = "") -> Service:
    return Announcement(node, name or node, namespace, 1, address).service()


class Alone:
    """One node's discovery, whose dials a test answers."""

    def __init__(self, answers: dict[str, str], **changes: object) -> None:
        self.world = World(on_switch(["a", "stranger"]))
        self.config = Cluster(**changes)  # type: ignore[arg-type]
        self.answers = answers
        """The node at an address; no node is at any other, which takes the whole timeout to find out."""
        self.dials: list[tuple[float, str]] = []
        self.open = self.most_open = self.most_tasks = 0
        self.here: dict[str, None] = {}
        self.told: list[str] = []

    async def dial(self, address: str, timeout_s: float, node: str) -> str:
        clock = self.world.host("a").clock
        self.dials.append((clock.elapsed(), address))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            if address not in self.answers:
                await clock.sleep(timeout_s)
                raise DeadlineExceeded(f"{address} did not answer")
            await clock.sleep(0.01)
            if node and self.answers[address] != node:
                raise WrongPeer(f"another node answers at {address}", address, self.answers[address])
            self.here[self.answers[address]] = None
            return self.answers[address]
        finally:
            self.open -= 1

    def run(self, seconds: float, announced: list[tuple[float, Sighting]]) -> Discovery:
        async def body(host: VirtualHost) -> Discovery:
            us = Announcement("a", "a", NAMESPACE, 1, "a:52415")
            discovery = Discovery(host, self.config, us, self.dial, self.here.__contains__, self.told.append)
            running = host.spawn(discovery.run(), name="discovery")
            await host.clock.sleep(0.5)
            began_s = host.clock.elapsed()
            for at_s, sighting in announced:
                await host.clock.sleep(at_s + began_s - host.clock.elapsed())
                host.lan.hear(sighting)
                self.most_tasks = max(self.most_tasks, len(asyncio.all_tasks()))
            await host.clock.sleep(seconds + began_s - host.clock.elapsed())
            running.cancel()
            await discovery.goodbye()
            return discovery

        return self.world.run(body(self.world.host("a")))


def ghosts(rate: float, seconds: float) -> list[tuple[float, Sighting]]:
    return [
        (number / rate, Sighting(record(f"ghost{number}", f"10.{number // 250 % 250}.{number % 250}.1:9")))
        for number in range(int(rate * seconds))
    ]


@pytest.mark.slow
def test_a_flood_of_ghosts_costs_a_bounded_number_of_dials_tasks_and_lines() -> None:
    alone = Alone({})
    discovery = alone.run(20.0, ghosts(200, 20.0))
    assert alone.most_open <= MOST_DIALS
    assert len(alone.dials) <= DIAL_BURST + DIALS_PER_S * 21
    assert alone.most_tasks <= MOST_DIALS + 6
    assert len(discovery.known) <= MOST_CANDIDATES
    assert len(alone.told) <= MOST_LINES + 1
    assert any("not all of them are tried" in what for what in alone.told)


class HereUntil(dict[str, None]):
    """Nodes that answered, until some time."""

    def __init__(self, alone: Alone, until_s: float) -> None:
        super().__init__()
        self._clock, self._until_s = alone.world.host("a").clock, until_s

    def __contains__(self, node: object) -> bool:
        return super().__contains__(node) and self._clock.elapsed() < self._until_s


def test_known_nodes_are_dialled_at_once_during_a_flood() -> None:
    alone = Alone({"b:1": "b"}, peers=("b:1",), peer_timeout_s=PositiveSeconds(3))
    alone.here = HereUntil(alone, 5.0)
    alone.run(10.0, ghosts(100, 10.0))
    known = [at_s for at_s, address in alone.dials if address == "b:1"]
    assert known[0] < 0.1
    assert 6.0 <= known[1] < 6.1  # every 3 s it is looked after


def test_a_newcomer_is_found_though_ghosts_fill_all_places_of_their_host() -> None:
    alone = Alone({"10.1.1.1:1": "b"})
    flood = [(n / 200, Sighting(record(f"ghost{n}", f"10.9.9.9:{1 + n}"))) for n in range(2000)]
    flood.insert(1000, (5.0, Sighting(record("b", "10.1.1.1:1"))))
    alone.run(11.0, flood)
    assert "b" in alone.here
    assert min(at_s for at_s, address in alone.dials if address == "10.1.1.1:1") < 5.5 + 2.0


def test_an_announcement_does_not_displace_the_address_of_a_node_that_proved_its_id() -> None:
    alone = Alone({"b:1": "b"}, peer_timeout_s=PositiveSeconds(5))
    forged = record("b", "10.6.6.6:1", name="forged")
    truth = record("b", "b:1")

    alone.here = HereUntil(alone, 2.0)
    alone.run(9.0, [(0.0, Sighting(truth)), (1.0, Sighting(truth, gone=True)), (1.1, Sighting(forged))])
    later = [address for at_s, address in alone.dials if at_s > 2.0]
    assert "b:1" in later  # forged records have not made us forget it
    assert "10.6.6.6:1" in later  # it may have moved


def test_of_one_machine_s_many_announced_hosts_few_are_dialled() -> None:
    at = "|".join(f"10.0.0.{number}" for number in range(30)) + ":1"
    assert len(hosts_of(place_of(Service("x", "10.0.0.1:1", {"at": at})))[0]) == MOST_HOSTS


def test_a_cluster_that_is_besieged_takes_in_a_member_that_was_started_anew() -> None:
    party = Party(ABC, [Restart(at_s=Seconds(3), node="b", state="lost", down_s=PositiveSeconds(1))])

    async def flood(_: object) -> None:
        host = party.world.host("c")
        for number in range(1000):
            await host.clock.sleep(0.008)
            about = ABC[number % 3] if number % 2 else f"ghost{number}"
            service = record(about, f"10.0.{number // 250}.{number % 250}:9", namespace="", name=f"forged{number}")
            for victim in ABC:
                party.world.host(victim).lan.hear(Sighting(service, gone=number % 7 == 0))

    party.meanwhile = {"c": flood}
    party.run(14)
    assert {view.nodes for view in (party.views[name][-1] for name in ABC)} == {("a", "c", "b")}
    assert len(party.told) < 100


def test_a_cluster_with_another_secret_is_named_once_for_each_machine() -> None:
    alone = Alone({})
    other = [Sighting(record(f"n{n}", f"10.0.0.{n}:1", namespace="theirs")) for n in range(30)]
    again = [Sighting(record(f"n{n}", f"10.0.0.{n}:2", namespace="theirs")) for n in range(30)]
    alone.run(5.0, [(0.0, each) for each in (*other, *again)])
    assert alone.dials == []
    assert [what for what in alone.told if "10.0.0.3:1, belongs to another cluster" in what] != []
    assert len(alone.told) == MOST_LINES


def test_candidates_that_claim_to_be_known_come_first_and_are_not_crowded_out() -> None:
    candidates = DialQueue({"known": 1}.__contains__)
    for number in range(MOST_CANDIDATES):
        assert candidates.add(Candidate(f"ghost{number}", f"10.0.0.{number}:1"))
    assert not candidates.add(Candidate("one more", "10.0.1.1:1"))
    assert candidates.add(Candidate("known", "10.0.1.2:1"))
    assert candidates.next(lambda node: False) == Candidate("known", "10.0.1.2:1")
    assert len(candidates.nodes) == MOST_CANDIDATES


@pytest.mark.parametrize("now_s", [0.0, 1e6])
def test_a_token_bucket_allows_its_burst_and_then_its_rate(now_s: float) -> None:
    bucket = TokenBucket(2.0, 3)
    assert [bucket.take(now_s) for _ in range(5)] == [True, True, True, False, False]
    assert bucket.wait_s(now_s) == 0.5
    assert [bucket.take(now_s + 0.25 * step) for step in range(1, 5)] == [False, True, False, True]


def test_a_refusal_of_a_candidate_is_no_reason_to_dial_it_for_ever() -> None:
    alone = Alone({}, max_retries=2)

    async def refused(address: str, timeout_s: float, node: str) -> str:
        alone.dials.append((0.0, address))
        raise ChannelBroken(f"{address} hung up", address)

    alone.dial = refused  # type: ignore[method-assign]
    alone.run(20.0, [(0.0, Sighting(record("b", "b:1")))])
    assert len(alone.dials) == 2
