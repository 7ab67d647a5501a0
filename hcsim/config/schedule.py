"""Random faults, for combinations that no test author would think of.

A schedule is drawn so that a cluster can be required to recover. Everything heals by a given share of the
run, every crashed node comes back, and only a minority comes back without its memory. (A fault that waits
for a frame or a gradient happens to the next one, whenever that is.) Safety can then be checked at every
moment, and liveness at the end. A schedule depends on the seed and on the permitted kinds. It is an
ordinary list of faults, so a failing one can be saved and shortened.

Some kinds are drawn only when they are named, and a share of the faults that could end may last for good. A
caller that asks for such a schedule must know what can be required of the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import TypeAlias, get_args

import msgspec

from hcsim.config.check import check_known
from hcsim.config.faults import (
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
    Misbehaviour,
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
)
from hcsim.config.home import AnyMedium, Thunderbolt, Wifi
from hcsim.config.scenario import Node
from hcsim.errors import UsageError
from hcsim.rng import stream
from hcsim.units import BitRate, PositiveSeconds, PositiveShare, Seconds, Share, SignedSeconds

FEWEST, MOST = 1, 6
"""The least and the largest number of faults in a schedule."""
HEALED_BY = 0.6
"""The share of the run after which no fault is active any more."""
DECIMALS = 3
"""Times are whole milliseconds, for readability."""

FaultGenerator: TypeAlias = Callable[["Draw"], tuple[AnyFault, ...]]
"""A function that draws one fault, or a few that belong together, or none where the scenario offers no target."""


def random_faults(
    seed: int,
    nodes: Sequence[Node],
    media: Sequence[AnyMedium],
    duration_s: float,
    kinds: Sequence[str] | None = None,
    for_good: float = 0.0,
) -> tuple[AnyFault, ...]:
    """Return a schedule for a run of that duration, in the order of time.

    `kinds` defaults to `DEFAULT_KINDS`. A share `for_good` of the faults with a duration lose it, where a fault
    of that kind can last for good."""
    kinds = DEFAULT_KINDS if kinds is None else kinds
    for i, kind in enumerate(kinds):
        check_known(f"kinds[{i}]", kind, FAULTS, "fault")
    if not kinds or len(nodes) < 2 or duration_s < 1:
        raise UsageError("random faults need kinds to choose from, two nodes at least, and a second of time")
    draw = Draw(stream(seed, "schedule"), nodes, media, duration_s)
    faults = draw_faults(draw, kinds, draw.rng.randint(FEWEST, MOST))
    if not faults:
        raise UsageError(f"none of these faults can happen here: {', '.join(kinds)}")
    lasting = stream(seed, "for good")
    faults = [without_end(fault) if lasting.random() < for_good else fault for fault in faults]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def draw_faults(draw: Draw, kinds: Sequence[str], wanted: int) -> list[AnyFault]:
    """Draw the wanted number of faults: a few more where some belong together, fewer where these kinds cannot
    happen. A kind that is named twice is drawn twice as often."""
    faults: list[AnyFault] = []
    for _ in range(100 * MOST):
        if len(faults) >= wanted:
            break
        kind = draw.rng.choice(kinds)
        drawn = (_KINDS if kind in _KINDS else _NAMED_KINDS)[kind](draw)
        if len(faults) + len(drawn) <= wanted or (not faults and drawn):
            faults += drawn
    return faults


def without_end(fault: AnyFault) -> AnyFault:
    """Return the fault without its end, if it can last for good."""
    ends = [field for field in msgspec.structs.fields(fault) if field.name == "duration_s" and field.default is None]
    return msgspec.structs.replace(fault, duration_s=None) if ends else fault


class Draw:
    """Random parts of faults, for a scenario and a run of a given duration."""

    def __init__(self, rng: Random, nodes: Sequence[Node], media: Sequence[AnyMedium], duration_s: float) -> None:
        self.rng = rng
        self.nodes = nodes
        self.names = [node.name for node in nodes]
        self.media = {medium.name: medium for medium in media}
        self.homes = list(dict.fromkeys(m.home for m in media if not isinstance(m, Thunderbolt)))
        self._end_s = HEALED_BY * duration_s
        self._forgetful: dict[str, str] = {}
        """Nodes that come back without their memory, and how."""

    def span(self) -> tuple[Seconds, PositiveSeconds]:
        """Return a start and a duration that end within the healing time; most are short."""
        start_s = self.rng.uniform(0.0, 0.9 * self._end_s)
        lasts_s = (self._end_s - start_s) * self.rng.random() ** 2
        return Seconds(round(start_s, DECIMALS)), PositiveSeconds(max(round(lasts_s, DECIMALS) - 1e-3, 1e-3))

    def node(self) -> str:
        """Return a random node."""
        return self.rng.choice(self.names)

    def pair(self) -> tuple[str, str]:
        """Return two different nodes."""
        a, b = self.rng.sample(self.names, 2)
        return a, b

    def may_forget(self, node: str, how: str) -> bool:
        """Return whether this node may come back without its memory: always the same way, and only a minority of the
        nodes."""
        if node not in self._forgetful and 2 * (len(self._forgetful) + 1) >= len(self.names):
            return False
        return self._forgetful.setdefault(node, how) == how


def _restart(draw: Draw, node: str, at_s: Seconds, down_s: Seconds) -> Restart:
    state = draw.rng.choices(("kept", "lost", "stale"), (12, 3, 1))[0]
    if state == "lost" and draw.may_forget(node, "lost"):
        return Restart(at_s, node, "lost", down_s)
    if state == "stale" and draw.may_forget(node, "stale"):
        return Restart(at_s, node, "stale", down_s, as_of_s=Seconds(round(at_s * draw.rng.random(), DECIMALS)))
    return Restart(at_s, node, down_s=down_s, clean=draw.rng.random() < 0.5)


def _crashes(draw: Draw) -> tuple[AnyFault, ...]:
    node, (at_s, down_s) = draw.node(), draw.span()
    crash = Crash(at_s, node, clean=draw.rng.random() < 0.5)
    return crash, _restart(draw, node, Seconds(round(at_s + down_s, DECIMALS)), Seconds(1e-3))


def _restarts(draw: Draw) -> tuple[AnyFault, ...]:
    node, (at_s, down_s) = draw.node(), draw.span()
    if draw.rng.random() < 0.25:
        half_s = Seconds(round(down_s / 2, DECIMALS))
        return (Restart(at_s, node, down_s=half_s, slow=_share(draw, 0.4), slow_for_s=half_s),) if half_s else ()
    return (_restart(draw, node, at_s, Seconds(down_s)),)


def _leaves(draw: Draw) -> tuple[AnyFault, ...]:
    """Every node that leaves comes back. Half of them were started just before, and leave during their admission,
    which takes longer where the network is slow."""
    node, (at_s, away_s) = draw.node(), draw.span()
    back = Restart(Seconds(round(at_s + away_s, DECIMALS)), node, down_s=Seconds(1e-3))
    if draw.rng.random() < 0.5:
        return Leave(at_s, node), back
    soon_s = Seconds(round(at_s + draw.rng.uniform(0.0, 6.0), DECIMALS))
    again = Restart(Seconds(round(soon_s + away_s, DECIMALS)), node, down_s=Seconds(1e-3))
    slow: tuple[AnyFault, ...] = ()
    if draw.rng.random() < 0.5:
        medium, latency_s = draw.rng.choice(list(draw.media)), Seconds(draw.rng.choice((0.1, 0.3)))
        slow = (LinkChange(at_s, medium, latency_s=latency_s, duration_s=PositiveSeconds(10.0)),)
    return *slow, Restart(at_s, node, down_s=Seconds(1e-3)), Leave(soon_s, node), again


def _copies(draw: Draw) -> tuple[AnyFault, ...]:
    """The copy must finally forget, so that it has a key of its own again."""
    (node, of), (at_s, lasts_s) = draw.pair(), draw.span()
    if not draw.may_forget(node, "lost"):
        return ()
    back_s, down_s = Seconds(round(at_s + lasts_s, DECIMALS)), Seconds(round(lasts_s / 4, DECIMALS))
    return CopiedIdentity(at_s, node, of, Seconds(down_s)), Restart(back_s, node, "lost", Seconds(1e-3))


def _parts(draw: Draw) -> tuple[AnyFault, ...]:
    names = draw.rng.sample(draw.names, len(draw.names))
    cut, (at_s, lasts_s) = draw.rng.randrange(1, len(names)), draw.span()
    return (Partition(at_s, (tuple(names[:cut]), tuple(names[cut:])), lasts_s, oneway=draw.rng.random() < 0.3),)


def _changes(draw: Draw) -> tuple[AnyFault, ...]:
    medium, (at_s, lasts_s) = draw.rng.choice(list(draw.media)), draw.span()
    if draw.rng.random() < 0.5:
        return (LinkChange(at_s, medium, rate_bps=BitRate(draw.rng.choice((1e6, 1e7, 1e8))), duration_s=lasts_s),)
    return (LinkChange(at_s, medium, latency_s=Seconds(draw.rng.choice((0.02, 0.2, 1.0))), duration_s=lasts_s),)


def _datagrams(draw: Draw) -> tuple[AnyFault, ...]:
    medium, (at_s, lasts_s) = draw.rng.choice(list(draw.media)), draw.span()
    shares = [Share(round(draw.rng.uniform(0.1, 0.9), 2)) for _ in range(3)]
    delay_s = Seconds(round(draw.rng.uniform(0.0, 2.0), DECIMALS))
    return (Datagrams(at_s, medium, lasts_s, shares[0], delay_s, shares[1], shares[2]),)


def _gates(draw: Draw) -> tuple[AnyFault, ...]:
    air = [name for name, medium in draw.media.items() if isinstance(medium, Wifi)]
    at_s, lasts_s = draw.span()
    return (WifiGate(at_s, draw.rng.choice(air), PositiveSeconds(min(lasts_s, 0.25))),) if air else ()


def _pulls(draw: Draw) -> tuple[AnyFault, ...]:
    plugs = [
        (node.name, link.medium)
        for node in draw.nodes
        for link in node.links
        if not isinstance(draw.media[link.medium], Wifi)
    ]
    if not plugs:
        return ()
    (node, medium), (at_s, lasts_s) = draw.rng.choice(plugs), draw.span()
    return (CablePulled(at_s, node, medium, lasts_s),)


def _moves(draw: Draw) -> tuple[AnyFault, ...]:
    bridged = {name: medium.home for name, medium in draw.media.items() if not isinstance(medium, Thunderbolt)}
    ways = [
        (node.name, link.medium, other)
        for node in draw.nodes
        for link in node.links
        for other, home in bridged.items()
        if link.medium in bridged and other != link.medium and home == bridged[link.medium]
    ]
    if not ways:
        return ()
    (node, medium, to), (at_s, lasts_s) = draw.rng.choice(ways), draw.span()
    return (InterfaceChange(at_s, node, medium, to, lasts_s),)


def _reboots(draw: Draw) -> tuple[AnyFault, ...]:
    if not draw.homes:
        return ()
    home, (at_s, lasts_s) = draw.rng.choice(draw.homes), draw.span()
    return (RouterReboot(at_s, home, lasts_s),)


def _misbehaves(draw: Draw) -> tuple[AnyFault, ...]:
    (node, to), (at_s, lasts_s) = draw.pair(), draw.span()
    how, share = draw.rng.choice(get_args(Misbehaviour)), draw.rng.choice((1.0, 0.5, 0.1, 0.01))
    return (Misbehave(at_s, node, how, draw.rng.choice((to, None)), PositiveShare(share), lasts_s),)


def _strangers(draw: Draw) -> tuple[AnyFault, ...]:
    homes = [node.home for node in draw.nodes if node.home in draw.homes]
    if not homes:
        return ()
    home, (at_s, lasts_s) = draw.rng.choice(homes), draw.span()
    ghosts = draw.rng.choice((0.0, 1.0, 20.0))
    spoofs = draw.rng.choice([node.name for node in draw.nodes if node.home == home])
    return (
        Stranger(
            at_s,
            home,
            ghosts,
            spoofs if not ghosts or draw.rng.random() < 0.5 else None,
            draw.rng.random() < 0.75,
            draw.rng.choice(("refuse", "silent", "absent")),
            lasts_s,
        ),
    )


def _share(draw: Draw, least: float) -> PositiveShare:
    return PositiveShare(round(draw.rng.uniform(least, 0.99), 2))


def _lasting(make: Callable[[Draw, Seconds, PositiveSeconds], AnyFault]) -> FaultGenerator:
    """Return a kind whose faults only need a random time and duration."""

    def kind(draw: Draw) -> tuple[AnyFault, ...]:
        return (make(draw, *draw.span()),)

    return kind


_KINDS: Mapping[str, FaultGenerator] = {
    "crash": _crashes,
    "restart": _restarts,
    "pause": _lasting(lambda draw, at, lasts: Pause(at, draw.node(), lasts)),
    "lid": _lasting(lambda draw, at, lasts: Lid(at, draw.node(), lasts, draw.rng.choice(("kept", "dead")))),
    "throttle": _lasting(lambda draw, at, lasts: Throttle(at, draw.node(), _share(draw, 0.4), lasts)),
    "partition": _parts,
    "clog": _lasting(lambda draw, at, lasts: Clog(at, draw.pair(), lasts)),
    "half_open": _lasting(lambda draw, at, _: HalfOpen(at, draw.pair())),
    "reset": _lasting(lambda draw, at, _: Reset(at, draw.pair(), mid_frame=draw.rng.random() < 0.5)),
    "link_change": _changes,
    "datagrams": _datagrams,
    "wifi_gate": _gates,
    "cable_pulled": _pulls,
    "interface_change": _moves,
    "router_reboot": _reboots,
    "flipped_bit": _lasting(lambda draw, at, _: FlippedBit(at, draw.pair(), draw.rng.choice(("data", "control")))),
    "wrong_size": _lasting(lambda draw, at, _: WrongSize(at, draw.pair(), longer=draw.rng.random() < 0.5)),
    "stale_step": _lasting(lambda draw, at, _: StaleStep(at, draw.pair())),
    "nan_gradient": _lasting(lambda draw, at, _: NanGradient(at, draw.node(), draw.rng.randint(1, 8))),
    "clock_jump": _lasting(
        lambda draw, at, _: ClockJump(at, draw.node(), SignedSeconds(draw.rng.randint(-3600, 3600)))
    ),
    "clock_drift": _lasting(lambda draw, at, lasts: ClockDrift(at, draw.node(), draw.rng.choice((0.9, 1.1)), lasts)),
    "multicast_loss": _lasting(lambda draw, at, lasts: MulticastLoss(at, draw.node(), _share(draw, 0.2), lasts)),
    "stale_record": _lasting(lambda draw, at, lasts: StaleRecord(at, draw.node(), lasts)),
    "one_way_visibility": _lasting(lambda draw, at, lasts: OneWayVisibility(at, draw.pair(), lasts)),
    "copied_identity": _copies,
}

DEFAULT_KINDS = tuple(_KINDS)
"""The kinds that are drawn when none are named."""

_NAMED_KINDS: Mapping[str, FaultGenerator] = {
    "stuck_device": _lasting(lambda draw, at, lasts: StuckDevice(at, draw.node(), lasts)),
    "blocked_port": _lasting(
        lambda draw, at, lasts: BlockedPort(
            at, draw.node(), draw.rng.choice(("gradient", "discovery")), draw.rng.choice(("closed", "silent")), lasts
        )
    ),
    "misbehave": _misbehaves,
    "full_disk": _lasting(lambda draw, at, lasts: FullDisk(at, draw.node(), lasts)),
    "slow_disk": _lasting(
        lambda draw, at, lasts: SlowDisk(at, draw.node(), PositiveSeconds(draw.rng.choice((0.1, 1.0, 5.0))), lasts)
    ),
    "few_descriptors": _lasting(
        lambda draw, at, lasts: FewDescriptors(at, draw.node(), draw.rng.randint(1, 2 * len(draw.names)), lasts)
    ),
    "stranger": _strangers,
    "leave": _leaves,
    "background_load": _lasting(
        lambda draw, at, lasts: BackgroundLoad(
            at, draw.node(), _share(draw, 0.2), draw.rng.randint(1, 4), duration_s=lasts
        )
    ),
}
"""The kinds that are drawn only when they are named."""
