"""Announcements that are lost, late, doubled, overtaken, out of date or seen by one side only; a copied disk."""

from __future__ import annotations

from typing import Any

import pytest

from hcsim.config import (
    AnyFault,
    CopiedIdentity,
    Crash,
    Datagrams,
    MulticastLoss,
    OneWayVisibility,
    Restart,
    StaleRecord,
)
from hcsim.runtime.host import Service
from hcsim.virtual.world import World
from tests.virtual.faults.arena import LATENCY_S, Watcher, connected, until, world_with

Seen = list[tuple[float, str, bool]]


def seen_by(*faults: AnyFault, announcements: int = 200) -> tuple[World, dict[str, Seen]]:
    """Host a announces a new address each half second, from 1 s on, so that none is repeated; what b and c see."""
    world = world_with(*faults)
    watchers = {name: Watcher(world.host(name)) for name in ("b", "c")}

    async def main() -> None:
        for number in range(announcements):
            await until(1.0 + number / 2)
            await world.host("a").lan.advertise(Service("a", f"a:{number}"))
        await until(announcements / 2 + 5.0)

    world.run(main())
    return world, {name: watcher.seen for name, watcher in watchers.items()}


def addresses(seen: Seen) -> list[int]:
    return [int(address.partition(":")[2]) for _, address, _ in seen]


def test_without_faults_each_announcement_is_heard_once():
    _, seen = seen_by(announcements=20)
    assert addresses(seen["b"]) == addresses(seen["c"]) == list(range(20))


def test_datagrams_are_lost():
    _, seen = seen_by(Datagrams(at_s=0.5, medium="switch", duration_s=50.25, loss=0.3))
    early, late = ([number for number in addresses(seen["b"]) if (number < 100) == first] for first in (True, False))
    assert 50 <= len(early) <= 85  # 70 expected, standard deviation 4.6
    assert early != [number for number in addresses(seen["c"]) if number < 100]  # each copy has its own fate
    assert late == list(range(100, 200))


def test_datagrams_are_late():
    _, seen = seen_by(Datagrams(at_s=0.5, medium="switch", duration_s=1.25, delay_s=0.25), announcements=5)
    assert [at_s for at_s, _, _ in seen["b"]] == [1.25, 1.75, 2.0, 2.5, 3.0]


def test_datagrams_come_twice_and_an_old_one_can_be_heard_again():
    _, seen = seen_by(Datagrams(at_s=0.5, medium="switch", duration_s=100.0, duplicate=1.0), announcements=50)
    heard = addresses(seen["b"])
    assert set(heard) == set(range(50))
    assert any(heard.count(number) > 1 for number in range(50))


def test_datagrams_overtake_each_other():
    _, seen = seen_by(Datagrams(at_s=0.5, medium="switch", duration_s=100.0, reorder=0.5), announcements=50)
    heard = addresses(seen["b"])
    assert set(heard) == set(range(50))
    assert heard != sorted(heard)


def test_faults_of_datagrams_touch_no_connection_and_end():
    world = world_with(Datagrams(at_s=0.0, medium="switch", duration_s=2.0, loss=1.0))
    watcher = Watcher(world.host("b"))

    async def main() -> None:
        await until(1.0)
        await world.host("a").lan.advertise(Service("a", "a:1"))
        await connected(world)
        assert world.loop.time() == pytest.approx(1.0 + 2 * LATENCY_S)
        await until(5.0)

    world.run(main())
    assert watcher.seen == [(2.0, "a:1", False)]  # the repetition


@pytest.mark.parametrize(("direction", "deaf"), [("both", True), ("to", True), ("from", False)])
def test_multicast_to_or_from_a_node_is_lost(direction, deaf):
    lost = MulticastLoss(at_s=0.5, node="b", share=1.0, duration_s=5.25, direction=direction)
    _, seen = seen_by(lost, announcements=20)
    assert addresses(seen["c"]) == list(range(20))
    assert addresses(seen["b"]) == list(range(10 if deaf else 0, 20))


def test_a_share_of_multicast_is_lost():
    _, seen = seen_by(MulticastLoss(at_s=0.5, node="b", share=0.5, duration_s=300.0))
    assert 75 <= len(seen["b"]) <= 125  # 100 expected, standard deviation 7
    assert addresses(seen["c"]) == list(range(200))


def test_taking_one_fault_out_changes_no_draw_of_another():
    loss = MulticastLoss(at_s=0.5, node="b", share=0.5, duration_s=300.0)
    other = MulticastLoss(at_s=0.5, node="c", share=0.5, duration_s=300.0)
    assert seen_by(loss)[1]["b"] == seen_by(loss, other)[1]["b"] == seen_by(other, loss)[1]["b"]


def test_one_sees_the_other_and_is_not_seen():
    world = world_with(OneWayVisibility(at_s=0.5, between=("a", "b"), duration_s=10.0))

    async def main() -> dict[str, Seen]:
        await until(1.0)
        for name in ("a", "b", "c"):
            await world.host(name).lan.advertise(Service(name, f"{name}:1"))
        await until(3.0)
        watchers = {name: Watcher(world.host(name)) for name in ("a", "b", "c")}  # who asks is answered
        await until(9.0)
        return {name: [address for _, address, _ in watcher.seen] for name, watcher in watchers.items()}

    seen = world.run(main())
    assert sorted(seen["a"]) == sorted(seen["c"]) == ["a:1", "b:1", "c:1"]
    assert sorted(seen["b"]) == ["b:1", "c:1"]


def record_seen(*faults: AnyFault, withdraw: bool = False) -> Seen:
    """Host a moves its service from a:1 to a:2 at 2 s, and may withdraw it at 4 s; what b sees."""
    world = world_with(*faults)
    watcher = Watcher(world.host("b"))

    async def main() -> None:
        lan = world.host("a").lan
        await lan.advertise(Service("a", "a:1"))
        await until(2.0)
        await lan.advertise(Service("a", "a:2"))
        await until(4.0)
        if withdraw:
            await lan.withdraw("a")
        await until(30.0)

    world.run(main())
    return watcher.seen


BEFORE = [(0.0, "a:1", False), (2.0, "a:2", False)]


def test_a_record_of_a_node_that_moved_comes_back_with_its_old_address_and_is_corrected():
    stale = StaleRecord(at_s=10.0, node="a", duration_s=5.0)
    assert record_seen(stale) == [*BEFORE, (10.0, "a:1", False), (15.0, "a:2", False)]


def test_a_record_of_a_node_that_said_goodbye_comes_back_and_runs_out():
    stale = StaleRecord(at_s=10.0, node="a", duration_s=5.0, address="c:9")
    seen = record_seen(stale, withdraw=True)
    assert seen == [*BEFORE, (4.0, "a:2", True), (10.0, "c:9", False), (15.0, "c:9", True)]


def test_a_record_of_a_node_that_is_gone_stays_in_view_and_comes_back_from_an_earlier_life():
    assert record_seen(Crash(at_s=5.0, node="a")) == BEFORE
    seen = record_seen(
        Restart(at_s=5.0, node="a"), Crash(at_s=8.0, node="a"), StaleRecord(at_s=10.0, node="a", duration_s=5.0)
    )
    assert seen == [*BEFORE, (10.0, "a:1", False), (15.0, "a:1", True)]


@pytest.mark.parametrize(("at_s", "down_s"), [(2.0, 0.5), (0.0, 0.0)], ids=["later", "from the start"])
def test_a_node_that_starts_from_a_copy_has_the_others_key(at_s, down_s):
    world = world_with(CopiedIdentity(at_s=at_s, node="b", of="a", down_s=down_s))

    async def program(host: Any) -> tuple[bytes | None, float]:
        started_s = world.loop.time()
        if host.store.load("node_key") is None:
            host.store.save("node_key", host.name.encode())
        await host.clock.sleep(3.0)
        host.store.save("mine", host.name.encode())
        return host.store.load("node_key"), started_s

    assert world.run_on_all(program) == [(b"a", 0.0), (b"a", at_s + down_s), (b"c", 0.0)]
    assert world.host("a").store.load("mine") == b"a"  # a copy, not the same disk
