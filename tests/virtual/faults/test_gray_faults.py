"""Machines that are alive and do not work: a device that hangs, a blocked port, a member that breaks the protocol, a
full or slow disk, too few descriptors, strangers on the network; and faults that never end."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from hcsim.config import (
    AnyFault,
    BlockedPort,
    CablePulled,
    ClockJump,
    Clog,
    Crash,
    Datagrams,
    FewDescriptors,
    FullDisk,
    LinkChange,
    Misbehave,
    Misbehaviour,
    MulticastLoss,
    OneWayVisibility,
    Partition,
    Pause,
    Restart,
    RouterReboot,
    SlowDisk,
    Stranger,
    StuckDevice,
    Throttle,
    parse_scenario,
)
from hcsim.errors import ChannelBroken, ConfigError, DeadlineExceeded, PeerRefused, RemoteProtocolError
from hcsim.runtime.channel import Payload, Phantom
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import Service, Sighting, Work
from hcsim.virtual.channel import VirtualChannel
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import HostCrashed, World
from tests.switches import on_switch
from tests.virtual.faults.arena import HOME, Watcher, announced, connected, home, is_silent, until, world_with

PORT = 1000


async def is_answered(near: VirtualChannel, far: VirtualChannel) -> bool:
    await near.send(Header(0))
    return not await is_silent(far, 1.0)


# A device that hangs.


@pytest.mark.parametrize("machine", ["ideal", "M4"])
def test_a_stuck_device_finishes_no_work_until_it_is_well_and_messages_go_on(machine: str):
    text = HOME.replace('name = "pro"\nmachine = "ideal"', f'name = "pro"\nmachine = "{machine}"')
    world = World(parse_scenario(text, "home"))
    world.inject(StuckDevice(1.0, "pro", 5.0))

    async def main() -> tuple[float, float]:
        near, far = await connected(world, "mini", "pro")
        await until(2.0)
        pro = world.host("pro")
        work = pro.spawn(pro.device.run(Work(flops=1.0), world.loop.time), name="work")
        moved = pro.spawn(pro.device.touch(8), name="touch")
        assert await is_answered(near, far)
        await until(5.9)
        assert not work.done()
        assert not moved.done()
        began_s = await work
        await moved
        return began_s, world.loop.time()

    began_s, ended_s = world.run(main())
    assert began_s == 2.0
    assert 6.0 <= ended_s < 6.01


def test_a_device_is_stuck_after_a_restart_too_and_as_long_as_one_of_two_faults_lasts():
    world = world_with(
        StuckDevice(1.0, "a", 4.0), StuckDevice(2.0, "a", 5.0), Restart(3.0, "a", down_s=0.5), StuckDevice(1.0, "b")
    )

    async def main() -> float:
        await until(4.0)
        a, b = world.host("a"), world.host("b")
        work = a.spawn(a.device.run(Work(), lambda: None), name="work")
        never = b.spawn(b.device.run(Work(), lambda: None), name="work")
        await work
        ended_s = world.loop.time()
        await until(1e6)
        assert not never.done()
        return ended_s

    assert world.run(main()) == pytest.approx(7.0)


# A port that others do not reach.


async def listening(world: World, name: str, port: int = PORT) -> tuple[VirtualChannel, VirtualChannel]:
    """A connection from c to that port, at which the host goes on to listen."""
    listener = await world.host(name).listen(f"{name}:{port}")
    near = await world.host("c").connect(listener.address)
    return near, await listener.accept()


def test_a_closed_port_resets_its_connections_and_refuses_calls_until_it_is_open():
    world = world_with(BlockedPort(1.0, "a", PORT, "closed", 5.0))

    async def main() -> None:
        near, far = await listening(world, "a")
        out, back = await connected(world, "a", "b")
        await until(1.5)
        for channel in (near, far):
            with pytest.raises(ChannelBroken, match="connection reset"):
                await channel.recv(lambda _: None)
        assert await is_answered(out, back)  # what the host calls itself
        other = await connected(world, "c", "a")  # and its other ports
        assert await is_answered(*other)
        with pytest.raises(PeerRefused, match="nobody listens at a:1000"):
            await world.host("c").connect(f"a:{PORT}", timeout_s=2.0)
        await world.host("c").connect(f"a:{PORT}", timeout_s=10.0)
        assert 6.0 <= world.loop.time() < 8.0

    world.run(main())


def test_nothing_passes_through_a_silent_port_and_nobody_is_told():
    world = world_with(BlockedPort(1.0, "a", PORT, "silent", 5.0))

    async def main() -> None:
        near, far = await listening(world, "a")
        away, left = await listening(world, "b")
        await until(1.5)
        await near.send(Header(0, step=1))
        await far.send(Header(0, step=2))
        assert await is_silent(near, 1.0)
        assert await is_silent(far, 1.0)
        assert await is_answered(away, left)
        with pytest.raises(DeadlineExceeded, match="did not answer"):
            await world.host("b").connect(f"a:{PORT}", timeout_s=1.0)
        header, _ = await far.recv(lambda _: None)
        assert (header.step, round(world.loop.time(), 1)) == (1, 6.2)  # at TCP's next attempt
        header, _ = await near.recv(lambda _: None)
        assert header.step == 2

    world.run(main())


@pytest.mark.parametrize("then", [Crash(3.0, "a", clean=True), Restart(3.0, "a", down_s=0.5)])
def test_behind_a_silent_port_the_peer_does_not_learn_that_a_machine_is_gone(then: AnyFault):
    world = world_with(BlockedPort(1.0, "a", PORT, "silent"), then)

    async def main() -> None:
        near, _ = await listening(world, "a")
        await until(2.0)
        await near.send(Header(0))
        assert await is_silent(near, 600.0)

    world.run(main())


def test_a_port_is_named_by_its_number_or_by_what_the_cluster_uses_it_for():
    text = '{}\n[[fault]]\nkind = "blocked_port"\nat = "1 s"\nnode = "pro"\nport = {}\nhow = "closed"\n[cluster]\n{}'
    for port, cluster, closed in (("7", "", 7), ('"gradient"', "", 52416), ('"discovery"', "discovery_port = 9", 9)):
        world = World(parse_scenario(text.format(HOME, port, cluster), "home"))
        world.run(until(2.0))
        assert [number for number in (7, 9, 52415, 52416) if world.wiring.is_closed("pro", number)] == [closed]
    with pytest.raises(ConfigError, match=r'port = "gradients": not known here .*; valid: discovery, gradient'):
        parse_scenario(text.format(HOME, '"gradients"', ""), "home")


# A member that breaks the protocol.


def received(fault: Misbehave, frames: list[tuple[Header, Payload]], target: str = "b") -> list[Any]:
    """Send the frames from a after the fault has struck: what arrives in the two seconds after each."""
    world = world_with(fault)

    async def main() -> list[Any]:
        near, far = await connected(world, "a", target)
        await until(fault.at_s + 0.5)
        arrived: list[Any] = []
        for header, payload in frames:
            await near.send(header, payload)
            try:
                async with asyncio.timeout(2.0):
                    while True:
                        arrived.append(await far.recv(lambda _: None))
            except TimeoutError:
                continue
        assert near.streams[0].outstanding == 0
        return arrived

    return world.run(main())


DATA = np.arange(100, dtype=np.float32).data.cast("B")
FRAME = Header(400, sender=1, epoch=3, operation=7, signature=5, step=2, total=400), DATA


def differing(header: Header) -> dict[str, Any]:
    return {
        name: getattr(header, name)
        for name in Header.__struct_fields__
        if getattr(header, name) != getattr(FRAME[0], name)
    }


@pytest.mark.parametrize(
    ("how", "changed"),
    [
        ("duplicate", [{}, {}]),
        ("other_epoch", [{"epoch": 4}]),
        ("old_epoch", [{"epoch": 2}]),
        ("huge_operation", [{"operation": 2**64 - 1}]),
        ("huge_step", [{"step": 2**32 - 1}]),
        ("giant_total", [{"total": 2**64 - 1}]),
        ("short", [{"length": 396}]),
    ],
)
def test_a_member_that_misbehaves_sends_other_headers(how: Misbehaviour, changed: list[dict[str, Any]]):
    arrived = received(Misbehave(1.0, "a", how), [FRAME, FRAME])
    assert [differing(header) for header, _ in arrived] == 2 * changed
    assert all(bytes(payload) == bytes(DATA)[: header.length] for header, payload in arrived)
    phantoms = received(Misbehave(1.0, "a", how), [(FRAME[0], Phantom(400))])
    assert [(differing(header), payload) for header, payload in phantoms] == [
        (each, Phantom(each.get("length", 400))) for each in changed
    ]


def test_signatures_are_wrong_frames_come_unasked_and_payloads_are_noise():
    [(signed, _)] = received(Misbehave(1.0, "a", "wrong_signature"), [FRAME])
    assert list(differing(signed)) == ["signature"]
    [(unasked, _), (asked, _)] = received(Misbehave(1.0, "a", "unasked"), [FRAME])
    assert (list(differing(unasked)), asked) == (["operation"], FRAME[0])
    [(header, payload)] = received(Misbehave(1.0, "a", "noise"), [FRAME])
    assert header == FRAME[0]
    assert bytes(payload) != bytes(DATA)


@pytest.mark.parametrize(
    ("how", "said"), [("raw_bytes", "a does not speak hcsim"), ("huge_offset", "a sent a segment that ends at byte")]
)
@pytest.mark.parametrize("pumped", [True, False])
def test_what_no_correct_peer_sends_ends_the_channel_as_a_real_one_would(how: Misbehaviour, said: str, pumped: bool):
    world = world_with(Misbehave(1.0, "a", how, "b"))

    async def main() -> list[Header]:
        near, far = await connected(world)
        got: list[Header] = []
        await near.send(*FRAME)
        await until(1.5)
        await near.send(*FRAME)
        if not pumped:
            got.append((await far.recv(lambda _: None))[0])
        taking = far.pump(lambda _: None, lambda header, _: got.append(header)) if pumped else far.recv(lambda _: None)
        with pytest.raises(RemoteProtocolError, match=said):
            await taking
        with pytest.raises(ChannelBroken, match="b closed the connection"):
            await near.recv(lambda _: None)
        return got

    assert world.run(main()) == [FRAME[0]]


def test_a_member_lies_about_epochs_in_messages_about_membership():
    said = {"type": "beat", "number": 3, "status": {"epoch": 8, "size": 3, "views": [{"epoch": 1}]}}
    data = msgspec.msgpack.encode(said)
    garbage = Header(2, Kind.CONTROL), memoryview(b"\xc1\xc1")
    frames = [(Header(len(data), Kind.CONTROL), memoryview(data)), FRAME, garbage]
    (header, payload), data_frame, untouched = received(Misbehave(1.0, "a", "lie"), frames)
    lie = msgspec.msgpack.decode(payload)
    assert header.length == payload.nbytes
    assert lie["status"]["epoch"] - 8 == lie["status"]["views"][0]["epoch"] - 1 > 0
    assert (lie["number"], lie["status"]["size"]) == (3, 3)
    assert data_frame[0] == FRAME[0]
    assert bytes(untouched[1]) == b"\xc1\xc1"


def test_a_share_of_the_frames_to_one_peer_is_wrong_for_a_while():
    fault = Misbehave(1.0, "a", "other_epoch", "b", 0.5, 100.0)
    arrived = [header.epoch for header, _ in received(fault, [FRAME] * 80)]
    assert 15 < arrived[:49].count(4) < 35
    assert arrived[50:] == [3] * 30  # it is over
    assert arrived == [header.epoch for header, _ in received(fault, [FRAME] * 80)]
    assert [header.epoch for header, _ in received(fault, [FRAME] * 10, target="c")] == [3] * 10


@pytest.mark.parametrize("how", get_args(Misbehaviour))
def test_every_misbehaviour_is_read_and_who_it_is_about_has_to_be_there(how: str):
    text = f'{HOME}[[fault]]\nkind = "misbehave"\nat = "1 s"\nnode = "pro"\nhow = "{how}"\n'
    assert parse_scenario(text, "home").faults == (Misbehave(1.0, "pro", how),)
    with pytest.raises(ConfigError, match=r'fault\[0\].to = "prod": there is no such node'):
        parse_scenario(f'{text}to = "prod"', "home")
    with pytest.raises(ConfigError, match=r'fault\[0\].to = "pro": a node sends itself nothing'):
        parse_scenario(f'{text}to = "pro"', "home")


# Disks.


def test_on_a_full_disk_nothing_is_saved_and_what_was_there_stays_also_in_the_next_life():
    world = world_with(FullDisk(1.0, "a", 9.0), Restart(3.0, "a", down_s=1.0))

    async def main() -> None:
        world.host("a").store.save("record", b"old")
        await until(2.0)
        for _ in range(2):
            with pytest.raises(
                ConfigError, match="record, on a virtual disk: cannot be written: No space left on device"
            ):
                world.host("a").store.save("record", b"new")
            assert world.host("a").store.load("record") == b"old"
            await until(5.0)
        world.host("b").store.save("record", b"new")
        await until(11.0)
        world.host("a").store.save("record", b"new")
        assert world.host("a").store.load("record") == b"new"

    world.run(main())


def test_a_process_waits_for_its_slow_disk_and_saves_wait_for_each_other():
    world = world_with(SlowDisk(1.0, "a", 2.0, 10.0))

    async def program(host: VirtualHost) -> list[float]:
        times = []
        for at_s in (2.0, 6.5, 20.0):
            await host.clock.sleep(at_s - world.loop.time())
            host.store.save("one", b"")
            host.store.save("two", b"")
            await asyncio.sleep(0)
            times.append(world.loop.time())
        return times

    assert world.run_on_all(program) == [[6.0, 10.5, 20.0], [2.0, 6.5, 20.0], [2.0, 6.5, 20.0]]


def test_a_world_ends_although_a_machine_that_is_paused_for_good_saves_to_its_slow_disk_then():
    world = world_with(SlowDisk(0.0, "a", 2.0), Pause(1.0, "a"))
    saved = []

    async def program(host: VirtualHost) -> str:
        try:
            await host.clock.sleep(5.0)
        finally:
            host.store.save("record", b"")
            await asyncio.sleep(0.5)
            saved.append(host.name)
        return "done"

    paused, *others = world.run_on_all(program)
    assert "is paused for good" in str(paused)
    assert others == ["done", "done"]
    assert sorted(saved) == ["a", "b", "c"]


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_what_a_device_saves_keeps_the_device_busy_and_the_process_goes_on(factor: float):
    world = world_with(SlowDisk(1.0, "a", 2.0), Throttle(1.0, "a", factor))

    async def main() -> tuple[float, float]:
        await until(2.0)
        a = world.host("a")
        saved = a.spawn(a.device.run(Work(), lambda: a.store.save("one", b"")), name="save")
        slept = a.spawn(a.clock.sleep(0.5), name="sleep")
        await slept
        awake_s = world.loop.time()
        await saved
        return awake_s, world.loop.time()

    assert world.run(main()) == pytest.approx((2.5, 4.0))


# Descriptors.


def test_a_host_without_descriptors_makes_no_connection_and_says_why():
    world = world_with(FewDescriptors(1.0, "a", 2, 19.0))

    async def main() -> None:
        near, _ = await connected(world)
        await connected(world)
        await until(2.0)
        a = world.host("a")
        with pytest.raises(
            DeadlineExceeded, match="b:1 did not answer within 3 s: the connection to b:1 failed: Too many open files"
        ):
            await a.connect("b:1", timeout_s=3.0)
        await near.close()
        await connected(world)
        assert len(a.channels) == 2
        dial = a.spawn(a.connect("b:7", timeout_s=60.0), name="dial")
        await until(19.0)
        listener = await world.host("b").listen("b:7")
        await dial  # the fault is over
        assert world.loop.time() >= 20.0
        await listener.close()

    world.run(main())


def test_who_calls_a_host_without_descriptors_is_connected_and_not_answered_until_one_is_free():
    world = world_with(FewDescriptors(1.0, "a", 1))

    async def main() -> None:
        near, _ = await listening(world, "a")
        await until(2.0)
        b, a = world.host("b"), world.host("a")
        calls = [await b.connect(f"a:{PORT}", timeout_s=1.0) for _ in range(3)]
        await calls[1].send(Header(0))
        assert a.metrics.value("hcsim_accepts_total") == 1
        await calls[0].close()  # it is given up before it is accepted
        await until(3.0)
        await near.close()
        await until(4.0)
        assert a.metrics.value("hcsim_accepts_total") == 2
        assert await is_silent(calls[2], 1.0)

    world.run(main())


def test_attempts_to_connect_need_descriptors_too_and_a_listener_that_closes_resets_who_waits():
    world = world_with(FewDescriptors(1.0, "a", 1), Partition(1.0, (("a",), ("c",))))

    async def main() -> None:
        listener = await world.host("a").listen(f"a:{PORT}")
        await until(2.0)
        a, b = world.host("a"), world.host("b")
        dial = a.spawn(a.connect("c:1", timeout_s=5.0), name="dial")
        await until(2.5)
        waits = await b.connect(f"a:{PORT}", timeout_s=1.0)
        assert await is_silent(waits, 1.0)
        assert a.metrics.value("hcsim_accepts_total") == 0
        await listener.close()
        with pytest.raises(ChannelBroken):
            await waits.recv(lambda _: None)
        with pytest.raises(DeadlineExceeded):
            await dial

    world.run(main())


# Strangers on the network.


class Heard:
    """All that a host sees on its network."""

    def __init__(self, host: VirtualHost) -> None:
        self._host = host
        self.sightings: list[Sighting] = []
        host.spawn(self._browse(), name="browse")

    async def _browse(self) -> None:
        async for sighting in self._host.lan.browse():
            self.sightings.append(sighting)


async def announce_node(world: World, name: str) -> None:
    host = world.host(name)
    properties = {"node": name * 4, "namespace": "ours", "at": f"{name}:52415"}
    await host.spawn(host.lan.advertise(Service(f"{name}-1", f"{name}:52415", properties)), name="advertise")


@pytest.mark.parametrize("knows", [True, False])
def test_a_stranger_announces_nodes_that_do_not_exist(knows: bool):
    world = World(home())
    world.inject(Stranger(1.0, "home", 4.0, knows_namespace=knows, duration_s=9.9))
    pro, ben = Heard(world.host("pro")), Heard(world.host("ben"))

    async def main() -> None:
        await announce_node(world, "mini")
        await until(30.0)

    world.run(main())
    ghosts = [one.service for one in pro.sightings if one.service.name != "mini-1" and not one.gone]
    assert len(ghosts) == len({ghost.properties["node"] for ghost in ghosts}) == 40
    assert {ghost.properties["namespace"] == "ours" for ghost in ghosts} == {knows}
    assert {ghost.properties["at"] == ghost.address for ghost in ghosts} == {True}
    assert [one.service for one in pro.sightings if one.gone] == ghosts  # their records run out
    assert ben.sightings == []  # in another home


@pytest.mark.parametrize(
    ("addresses", "error", "text"),
    [
        ("refuse", PeerRefused, "nobody listens at"),
        ("silent", DeadlineExceeded, "did not answer within 5 s$"),
        ("absent", DeadlineExceeded, "did not answer within 5 s: the connection to .* failed: No route to host"),
    ],
)
def test_calls_to_such_a_node_come_to_nothing(addresses: Any, error: type[Exception], text: str):
    world = World(home())
    world.inject(Stranger(1.0, "home", 1.0, addresses=addresses))
    pro = Heard(world.host("pro"))

    async def main() -> None:
        await until(2.0)
        with pytest.raises(error, match=text):
            await world.host("pro").connect(pro.sightings[0].service.address, timeout_s=5.0)

    world.run(main())


def test_a_machine_whose_name_a_stranger_has_taken_is_announced_under_another_when_it_starts_again():
    world = World(home())
    world.inject(Stranger(2.0, "home", spoofs="mini", duration_s=9.0))
    world.inject(Restart(5.0, "mini", down_s=1.0))
    pro = Heard(world.host("pro"))

    async def main() -> None:
        await announce_node(world, "mini")
        await until(4.0)
        assert [one.service.address for one in pro.sightings] == ["mini:52415", "192.0.2.1:52415"]
        assert pro.sightings[1].service.properties == {
            "node": "mini" * 4,
            "namespace": "ours",
            "at": "192.0.2.1:52415",
        }
        await until(7.0)
        await announce_node(world, "mini")
        await until(7.5)
        own = next(one.service for one in reversed(pro.sightings) if one.service.address == "mini:52415")
        assert own.name.startswith("mini-1-")
        await until(12.0)
        assert pro.sightings[-1].service == own

    world.run(main())


def test_a_stranger_is_in_a_home_and_spoofs_a_node_there():
    text = HOME + '[[fault]]\nkind = "stranger"\nat = "1 s"\nhome = "{}"\n{}'
    with pytest.raises(ConfigError, match="a stranger needs ghosts"):
        parse_scenario(text.format("home", ""), "home")
    with pytest.raises(ConfigError, match=r'fault\[0\].spoofs = "ben": there is no such node in home'):
        parse_scenario(text.format("home", 'spoofs = "ben"'), "home")
    with pytest.raises(ConfigError, match=r'fault\[0\].home = "house": there is no such home'):
        parse_scenario(text.format("house", "ghosts = 5"), "home")


# Clocks.


def test_a_clock_can_be_wrong_from_the_start():
    world = world_with(ClockJump(0.0, "a", -86400.0))

    async def program(host: VirtualHost) -> float:
        return host.clock.now()

    assert world.run_on_all(program) == [-86400.0, 0.0, 0.0]


# Faults that never end.


def test_a_node_that_is_paused_for_good_is_not_waited_for():
    async def program(host: VirtualHost) -> float:
        await host.clock.sleep(5.0)
        return world.loop.time()

    world = world_with(Pause(1.0, "a"))
    paused, *others = world.run_on_all(program)
    assert isinstance(paused, HostCrashed)
    assert str(paused) == "a is paused for good"
    assert others == [5.0, 5.0]
    world = world_with(Pause(1.0, "a"), Restart(3.0, "a", down_s=0.0))
    assert world.run_on_all(program) == [8.0, 5.0, 5.0]


def test_what_is_sent_into_a_clog_that_stays_never_arrives_and_calls_get_no_answer():
    world = world_with(Clog(1.0, ("a", "b")))

    async def main() -> None:
        near, far = await connected(world)
        await until(2.0)
        await near.send(Header(0))
        assert await is_silent(far, 1e5)
        with pytest.raises(DeadlineExceeded):
            await world.host("a").connect("b:1", timeout_s=100.0)
        other = await connected(world, "a", "c")
        assert await is_answered(*other)

    world.run(main())


@pytest.mark.parametrize(
    "fault", [Partition(1.0, (("pro",), ("studio", "mini", "laptop", "ben"))), RouterReboot(1.0, "home"),
              CablePulled(1.0, "pro", "switch")], ids=lambda fault: type(fault).__name__,
)  # fmt: skip
def test_a_way_that_is_gone_for_good_stays_gone(fault: AnyFault):
    world = World(parse_scenario(HOME.replace('["studio", "pro"]', '["mini", "laptop"]'), "home"))
    world.inject(fault)

    async def main() -> None:
        await until(1e5)
        with pytest.raises(DeadlineExceeded):
            await world.host("ben").connect("pro:1", timeout_s=10.0)

    world.run(main())


def test_a_throttle_for_good_is_there_in_the_next_life():
    world = world_with(Throttle(1.0, "a", 0.5), Restart(2.0, "a", down_s=1.0))
    world.run(until(1e5))
    assert world.host("a").device.throttle == 0.5


@pytest.mark.parametrize(
    "fault",
    [MulticastLoss(1.0, "pro", 1.0), OneWayVisibility(1.0, ("pro", "mini")), Datagrams(1.0, "desk", loss=1.0)],
    ids=lambda fault: type(fault).__name__,
)
def test_who_is_not_heard_for_good_is_never_heard(fault: AnyFault):
    world = World(home())
    world.inject(fault)
    mini = Watcher(world.host("mini"))
    world.run(announced(world, "pro", 1e5, 2e5))
    assert mini.seen == []


def test_a_fault_that_never_ends_is_for_good_and_does_nothing_more_by_itself():
    assert Pause(1.0, "a").is_for_good
    assert Pause(1.0, "a").over_s == 1.0
    assert not Pause(1.0, "a", 2.0).is_for_good
    assert not Crash(1.0, "a").is_for_good


# A cable that is very slow for good.


@pytest.mark.parametrize("rate_bps", [30e3, 1e3])
def test_over_a_link_of_a_few_kilobits_all_arrives_in_its_time_and_small_messages_pass(rate_bps: float):
    world = World(on_switch(("a", "b", "c"), [LinkChange(1.0, "switch", "a", rate_bps)], effects="all"))

    async def main() -> tuple[float, list[float]]:
        near, far = await connected(world)
        beats, heard = await connected(world)
        others = await connected(world, "b", "c")
        await until(2.0)
        bulk = asyncio.ensure_future(far.recv(lambda _: None))
        await near.send(Header(20_000), Phantom(20_000))
        late_s = []
        for _ in range(5):
            sent_s = world.loop.time()
            await beats.send(Header(100), Phantom(100))
            await heard.recv(lambda _: None)
            late_s.append(world.loop.time() - sent_s)
            await others[0].send(Header(1_000_000), Phantom(1_000_000))
            await others[1].recv(lambda _: None)
        await bulk
        return world.loop.time() - 2.0, late_s

    took_s, late_s = world.run(main())
    assert took_s == pytest.approx(21_500 * 8 / rate_bps, rel=0.15)  # with the headers of packets
    assert all(late < 3 * 250 * 8 / rate_bps for late in late_s)
