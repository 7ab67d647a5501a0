"""What holds for all faults: they are read and written, strike in their time, heal, and replay."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from hcsim.config import (
    FAULTS,
    AnyFault,
    BackgroundLoad,
    BlockedPort,
    CablePulled,
    ClockDrift,
    ClockJump,
    Clog,
    CopiedIdentity,
    Crash,
    Datagrams,
    FewDescriptors,
    FlippedBit,
    FullDisk,
    HalfOpen,
    InterfaceChange,
    Leave,
    Lid,
    LinkChange,
    Misbehave,
    MulticastLoss,
    NanGradient,
    OneWayVisibility,
    Partition,
    Pause,
    Reset,
    Restart,
    RouterReboot,
    SlowDisk,
    StaleRecord,
    StaleStep,
    Stranger,
    StuckDevice,
    Throttle,
    WifiGate,
    WrongSize,
    parse_scenario,
    write_faults,
)
from hcsim.errors import ChannelError, ConfigError, DeadlineExceeded
from hcsim.runtime.frame import Header
from hcsim.runtime.host import Service, Work
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World
from tests.virtual.faults.arena import HOME, home

EACH: tuple[tuple[AnyFault, str | None], ...] = (
    (Crash(1.0, "pro"), None),
    (Restart(1.0, "pro", "stale", as_of_s=0.5, slow=0.5, slow_for_s=1.0), "start"),
    (Pause(1.0, "pro", 0.5), "thaw"),
    (Lid(1.0, "pro", 0.5, "dead"), "thaw"),
    (Throttle(1.0, "pro", 0.5, 0.5), "recover"),
    (Partition(1.0, (("studio", "mini"), ("pro",)), 0.5), "heal"),
    (Clog(1.0, ("studio", "mini"), 0.5), "unclog"),
    (HalfOpen(1.0, ("studio", "mini")), None),
    (Reset(1.0, ("studio", "mini"), mid_frame=False), None),
    (LinkChange(1.0, "switch", "studio", 1e6, 0.5, 0.25, 0.5), "restore"),
    (Datagrams(1.0, "switch", 0.5, 0.25, 0.5, 0.25, 0.25), "clear"),
    (WifiGate(1.0, "air", 0.25), "open"),
    (CablePulled(1.0, "studio", "desk", 0.5, "mini"), "restore"),
    (InterfaceChange(1.0, "pro", "switch", "air", 0.5), "restore"),
    (RouterReboot(1.0, "home", 0.5), "restore"),
    (FlippedBit(1.0, ("studio", "mini"), "any"), "flip"),
    (WrongSize(1.0, ("studio", "mini"), 2, True), "resize"),
    (StaleStep(1.0, ("studio", "mini")), "repeat"),
    (NanGradient(1.0, "pro", 2), "spoil"),
    (ClockJump(1.0, "pro", -5.0), None),
    (ClockDrift(1.0, "pro", 1.5, 0.5), "steady"),
    (MulticastLoss(1.0, "pro", 0.5, 0.5, "from"), "clear"),
    (StaleRecord(1.0, "pro", 0.5, "mini:9"), "correct"),
    (OneWayVisibility(1.0, ("pro", "mini"), 0.5), "clear"),
    (CopiedIdentity(1.0, "pro", "mini", 0.5), "start"),
    (StuckDevice(1.0, "pro", 0.5), "unhang"),
    (BlockedPort(1.0, "mini", 1000, "silent", 0.5), "unblock"),
    (Misbehave(1.0, "studio", "duplicate", "mini", 0.5, 0.5), "misbehave"),
    (FullDisk(1.0, "pro", 0.5), "mend"),
    (SlowDisk(1.0, "pro", 0.25, 0.5), "thaw"),
    (FewDescriptors(1.0, "pro", 1, 0.5), "give"),
    (Stranger(1.0, "home", 10.0, "pro", False, "silent", 0.5), "ghost"),
    (Leave(1.0, "pro"), None),
    (BackgroundLoad(1.0, "pro", 0.5, 2, 0.01, 0.5), "rest"),
)
"""One of each kind, and what the trace says when it has healed or found its prey."""


def named(case: Any) -> str:
    return case[0].__struct_config__.tag


async def busy(host: VirtualHost) -> None:
    """Announce, compute, save, and send to the next host ten times a second; whoever has a bad time goes on."""
    names = [node.name for node in home().nodes]
    listener = await host.listen(f"{host.name}:1000")
    await host.lan.advertise(Service(host.name, listener.address))
    gradients = memoryview(bytearray(64)).cast("f")
    after = names[(names.index(host.name) + 1) % len(names)]
    channel = None
    for step in range(40):
        await host.clock.sleep(0.1)
        await host.device.run(Work(), lambda: None, gradients)
        try:
            host.store.save("step", bytes([step]))
            if channel is None:
                channel = await host.connect(f"{after}:1000", timeout_s=0.2)
            await channel.send(Header(8, operation=step), memoryview(b"8 bytes."))
        except (ChannelError, DeadlineExceeded, ConfigError):
            channel = None


def events(*faults: AnyFault) -> tuple[list[Any], str]:
    found: list[Any] = []
    world = World(replace(home(), faults=faults), sink=found.extend)
    world.run_on_all(busy)
    digest = world.trace.digest()
    return [event for event in found if event[1] == "fault"], digest


def test_there_is_an_example_of_every_kind():
    assert [named(case) for case in EACH] == list(FAULTS)


@pytest.mark.parametrize("case", EACH, ids=named)
def test_a_fault_is_written_as_it_is_read(case):
    assert parse_scenario(HOME + write_faults([case[0]]), "home").faults == (case[0],)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("case", EACH, ids=named)
def test_a_fault_strikes_in_its_time_leaves_its_traces_and_replays(case):
    fault, then = case
    seen, digest = events(fault)
    assert seen[0][:3] == (1_000_000_000, "fault", type(fault).__name__)
    assert seen[0][3] == repr(fault)
    assert [event[2] for event in seen[1:2]] == ([] if then is None else [then])
    assert events(fault)[1] == digest != events()[1]


def test_all_of_them_together_replay():
    faults = tuple(replace(fault, at_s=1.0 + 0.05 * number) for number, (fault, _) in enumerate(EACH))
    seen, digest = events(*faults)
    assert [event[2] for event in seen if event[2][0].isupper()] == [type(fault).__name__ for fault in faults]
    assert events(*faults)[1] == digest
