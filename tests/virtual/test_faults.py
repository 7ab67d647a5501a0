"""Each fault does what it says, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hcsim.config import AnyFault, ClockJump, Crash, LinkChange, Partition, Pause, Reset, Throttle, parse_scenario
from hcsim.errors import ChannelBroken, DeadlineExceeded, PeerRefused
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import Header
from hcsim.runtime.host import Work
from hcsim.virtual.channel import VirtualChannel
from hcsim.virtual.loop import OWNER
from hcsim.virtual.stream import RTO_S
from hcsim.virtual.world import HostCrashed, World
from tests.virtual.faults.arena import LATENCY_S, SECOND, connected, until, world_with


def transfer_s(*faults: AnyFault, source: str = "a", target: str = "b", size: int = SECOND) -> float:
    """When a transfer that starts at 1 s has arrived."""
    world = world_with(*faults)

    async def main() -> float:
        near, far = await connected(world, source, target)
        await until(1.0)
        await near.send(Header(size), Phantom(size))
        await far.recv(lambda _: None)
        return world.loop.time()

    return world.run(main())


def test_without_faults_a_transfer_takes_its_time():
    assert transfer_s() == pytest.approx(2.0 + LATENCY_S)


# Crash.


def test_a_crashed_host_runs_no_further_line_and_its_program_ends():
    world = world_with(Crash(at_s=1.5, node="a"))
    log: list[tuple[str, float]] = []

    async def program(host: Any) -> str:
        for _ in range(3):
            log.append((host.name, world.loop.time()))
            await host.clock.sleep(1.0)
        return host.name

    crashed, *others = world.run_on_all(program)
    assert isinstance(crashed, HostCrashed)
    assert others == ["b", "c"]
    assert [at_s for name, at_s in log if name == "a"] == [0.0, 1.0]


@pytest.mark.parametrize("clean", [True, False])
def test_after_a_clean_crash_peers_are_told_and_otherwise_hear_nothing(clean):
    world = world_with(Crash(at_s=1.0, node="a", clean=clean))

    async def main() -> float:
        _, far = await connected(world)
        with pytest.raises(ChannelBroken if clean else TimeoutError, match="a crashed" if clean else None):
            async with asyncio.timeout(100.0):
                await far.recv(lambda _: None)
        return world.loop.time()

    assert world.run(main()) == pytest.approx(1.0 + LATENCY_S if clean else 100.0, abs=0.01)


def test_nobody_answers_at_a_crashed_host():
    world = world_with(Crash(at_s=1.0, node="b"))

    async def main() -> None:
        listener = await world.host("b").listen("b:0")
        await until(2.0)
        with pytest.raises(DeadlineExceeded):
            await world.host("a").connect(listener.address, timeout_s=3.0)

    world.run(main())


def test_the_system_of_a_host_whose_program_crashed_refuses_calls():
    world = world_with(Crash(at_s=1.0, node="b", clean=True))

    async def main() -> None:
        listener = await world.host("b").listen("b:0")
        await until(2.0)
        with pytest.raises(PeerRefused):
            await world.host("a").connect(listener.address, timeout_s=0.1)

    world.run(main())


# Pause.


def test_a_paused_host_does_nothing_and_then_goes_on():
    world = world_with(Pause(at_s=1.5, node="a", duration_s=10.0))

    async def program(host: Any) -> list[float]:
        times = []
        for _ in range(3):
            await host.clock.sleep(1.0)
            times.append(world.loop.time())
        return times

    paused, other, _ = world.run_on_all(program)
    assert paused == pytest.approx([1.0, 11.5, 12.5])
    assert other == pytest.approx([1.0, 2.0, 3.0])


def test_what_was_sent_to_a_paused_host_waits_for_it():
    world = world_with(Pause(at_s=0.5, node="b", duration_s=1.0))

    async def receive(far: VirtualChannel) -> float:
        await far.recv(lambda _: None)
        return world.loop.time()

    async def main() -> float:
        near, far = await connected(world)
        receiving = world.host("b").spawn(receive(far), name="receive")
        await until(0.7)
        await near.send(Header(0))
        return await receiving

    assert world.run(main()) == pytest.approx(1.5)


def test_a_pump_hands_frames_over_in_its_hosts_name_and_none_while_it_is_paused():
    world = world_with(Pause(at_s=0.5, node="b", duration_s=1.0))
    landed: list[tuple[int, float, object]] = []

    def note(header: Header, _payload: object) -> None:
        landed.append((header.step, world.loop.time(), OWNER.get()))

    async def main() -> None:
        near, far = await connected(world)
        world.host("b").spawn(far.pump(lambda _: None, note), name="pump")
        for step, at_s in enumerate((0.3, 0.7, 0.8, 1.6, 1.7)):
            await until(at_s)
            await near.send(Header(0, step=step))
        await until(2.0)

    world.run(main())
    assert [step for step, _, _ in landed] == [0, 1, 2, 3, 4]
    assert [at_s for _, at_s, _ in landed] == pytest.approx([0.301, 1.5, 1.5, 1.601, 1.701], abs=1e-5)
    assert {owner for _, _, owner in landed} == {world.host("b")}


# Partition.


@pytest.mark.parametrize(
    ("source", "target", "delayed"),
    [("a", "b", True), ("b", "a", True), ("b", "c", False)],
    ids=["there", "back", "beside"],
)
def test_nothing_passes_between_the_sides_of_a_partition_until_it_heals(source, target, delayed):
    partition = Partition(at_s=1.25, sides=(("a",), ("b",)), duration_s=4.0)
    found_s = transfer_s(partition, source=source, target=target)
    # A quarter is through, the rest follows after healing and TCP's next retransmission.
    expected_s = 5.25 + RTO_S + 0.75 if delayed else 2.0
    assert found_s == pytest.approx(expected_s + LATENCY_S)


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("b", "a")])
def test_a_oneway_partition_holds_what_goes_from_the_first_to_the_second(source, target):
    partition = Partition(at_s=1.25, sides=(("a",), ("b",)), duration_s=4.0, oneway=True)
    found_s = transfer_s(partition, source=source, target=target)
    assert found_s == pytest.approx((5.25 + RTO_S + 0.75 if source == "a" else 2.0) + LATENCY_S)


def test_what_was_in_the_air_when_the_way_closed_is_sent_again():
    found_s = transfer_s(Partition(at_s=1.0005, sides=(("a",), ("b",)), duration_s=1.0), size=0)
    assert found_s == pytest.approx(2.0005 + RTO_S)


def test_partitions_add_up_and_heal_one_by_one():
    found_s = transfer_s(
        Partition(at_s=0.5, sides=(("a",), ("b",)), duration_s=2.0),
        Partition(at_s=0.8, sides=(("a", "c"), ("b",)), duration_s=4.0),
    )
    assert found_s == pytest.approx(4.8 + RTO_S + 1.0 + LATENCY_S)


def test_a_connection_across_a_partition_is_made_after_it_heals():
    world = world_with(Partition(at_s=0.0, sides=(("a",), ("b",)), duration_s=2.5))

    async def main() -> float:
        await until(0.1)
        await connected(world)
        return world.loop.time()

    assert 2.5 < world.run(main()) < 4.0


# Link changes.


def test_a_slower_link_slows_what_is_under_way():
    # Half of it in half a second, the other half at a tenth of the rate.
    change = LinkChange(at_s=1.5, medium="switch", rate_bps=100e6)
    assert transfer_s(change) == pytest.approx(1.5 + 5.0 + LATENCY_S)


def test_a_link_change_ends_after_its_duration():
    change = LinkChange(at_s=1.5, medium="switch", rate_bps=100e6, duration_s=1.0)
    assert transfer_s(change) == pytest.approx(1.5 + 1.0 + 0.4 + LATENCY_S)


@pytest.mark.parametrize(("source", "target", "slowed"), [("a", "b", True), ("b", "a", True), ("b", "c", False)])
def test_a_change_of_one_attachment_concerns_that_node_alone(source, target, slowed):
    change = LinkChange(at_s=0.5, medium="switch", node="a", rate_bps=500e6)
    assert transfer_s(change, source=source, target=target) == pytest.approx((3.0 if slowed else 2.0) + LATENCY_S)


def test_a_longer_latency_holds_from_the_next_message_on():
    assert transfer_s(LinkChange(at_s=0.5, medium="switch", latency_s=0.25)) == pytest.approx(2.25)


def test_loss_delays_some_messages():
    world = world_with(LinkChange(at_s=0.5, medium="switch", loss=0.2))

    async def main() -> list[float]:
        near, far = await connected(world)
        delays = []
        for step in range(100):
            await until(1.0 + step)
            await near.send(Header(0))
            await far.recv(lambda _: None)
            delays.append(world.loop.time() - 1.0 - step)
        return delays

    delays = world.run(main())
    late = [delay for delay in delays if delay > RTO_S]
    assert 8 <= len(late) <= 35  # 20 expected, standard deviation 4
    assert [delay for delay in delays if delay <= RTO_S] == pytest.approx([LATENCY_S] * (100 - len(late)), rel=0.01)


# Reset.


def test_a_reset_breaks_every_connection_between_the_two_and_no_other():
    world = world_with(Reset(at_s=1.0, between=("a", "b"), mid_frame=False))

    async def main() -> None:
        ours = [await connected(world), await connected(world, "b", "a")]
        near, far = await connected(world, "a", "c")
        await until(1.1)
        for pair in ours:
            for end in pair:
                with pytest.raises(ChannelBroken, match="reset"):
                    await end.recv(lambda _: None)
                with pytest.raises(ChannelBroken, match="reset"):
                    await end.send(Header(0))
        await near.send(Header(0, step=5))
        assert (await far.recv(lambda _: None))[0].step == 5

    world.run(main())


def test_a_reset_waits_until_part_of_a_frame_has_arrived():
    world = world_with(Reset(at_s=1.0, between=("a", "b")))

    async def main() -> None:
        near, far = await connected(world)
        await until(3.0)
        await near.send(Header(0, step=5))
        assert (await far.recv(lambda _: None))[0].step == 5
        await near.send(Header(SECOND), Phantom(SECOND))
        with pytest.raises(ChannelBroken, match="reset"):
            await far.recv(lambda _: None)
        assert 3.0 < world.loop.time() < 4.0

    world.run(main())


def test_a_reset_in_the_middle_of_a_frame_delivers_none_of_it():
    world = world_with(Reset(at_s=1.5, between=("a", "b")))

    async def main() -> None:
        near, far = await connected(world)
        await until(1.0)
        await near.send(Header(SECOND), Phantom(SECOND))
        with pytest.raises(ChannelBroken, match="reset"):
            await far.recv(lambda _: None)
        assert world.loop.time() == pytest.approx(1.5)

    world.run(main())


# Clocks and processors.


@pytest.mark.parametrize("by_s", [3600.0, -0.5])
def test_a_clock_jump_moves_one_clock_and_no_timer(by_s):
    world = world_with(ClockJump(at_s=1.0, node="a", by_s=by_s))

    async def program(host: Any) -> tuple[float, float]:
        await host.clock.sleep(2.0)
        return host.clock.now(), world.loop.time()

    jumped, other, _ = world.run_on_all(program)
    assert jumped == pytest.approx((2.0 + by_s, 2.0))
    assert other == pytest.approx((2.0, 2.0))


def test_a_throttled_machine_computes_slower_for_a_while():
    scenario = parse_scenario(
        """
        name = "one"
        [[node]]
        name = "a"
        machine = { name = "slow", peak = "1 GFLOPS", memory = "1 GB/s", efficiency_compute = 1.0, overhead = "0 s" }
        [[fault]]
        kind = "throttle"
        at = "1 s"
        node = "a"
        factor = 0.5
        duration = "10 s"
        """,
        "one",
    )
    world = World(scenario)

    async def program(host: Any) -> list[float]:
        times = []
        for start_s in (0.0, 2.0, 20.0):
            await until(start_s)
            await host.device.run(Work(flops=1e9), lambda: None)
            times.append(world.loop.time() - start_s)
        return times

    assert world.run_on_all(program) == [pytest.approx([1.0, 2.0, 1.0])]


# All of them.


def test_a_fault_can_be_injected_while_the_world_runs():
    world = world_with()

    async def main() -> None:
        _, far = await connected(world)
        world.inject(Reset(at_s=2.0, between=("a", "b"), mid_frame=False))
        with pytest.raises(ChannelBroken):
            await far.recv(lambda _: None)
        assert world.loop.time() == pytest.approx(2.0)

    world.run(main())


def test_every_fault_is_in_the_trace():
    events: list[Any] = []
    faults = (
        Pause(at_s=0.1, node="a", duration_s=0.1),
        Partition(at_s=0.2, sides=(("a",), ("b",)), duration_s=0.1),
        LinkChange(at_s=0.3, medium="switch", latency_s=0.5, duration_s=0.1),
        Reset(at_s=0.4, between=("a", "b"), mid_frame=False),
        ClockJump(at_s=0.5, node="a", by_s=1.0),
        Throttle(at_s=0.6, node="a", factor=0.5, duration_s=0.1),
        Crash(at_s=0.7, node="a"),
    )
    world = World(world_with(*faults).scenario, sink=events.extend)
    world.run(asyncio.sleep(2.0))
    world.trace.digest()
    struck = [event[2] for event in events if event[1] == "fault"]
    assert [name for name in struck if name[0].isupper()] == [type(fault).__name__ for fault in faults]
    assert [name for name in struck if not name[0].isupper()] == ["thaw", "heal", "restore", "recover"]
