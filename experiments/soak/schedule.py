"""What strikes whom and when, drawn from a seed; the same in both worlds.

A schedule is a row of periods. In some nothing happens: how fast training is then is what the others are compared with,
so what else runs on the computer meanwhile weighs alike on both. In every other period one fault strikes at its
beginning, and has healed long before its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from hcsim.config import AnyFault
from hcsim.config.faults import (
    BlockedPort,
    CablePulled,
    FewDescriptors,
    FullDisk,
    LinkChange,
    Partition,
    Pause,
    Restart,
)
from hcsim.rng import stream
from hcsim.units import BitRate, PositiveSeconds, Seconds

CALM_EVERY = 4
"""One period of so many is calm; so are the first two, of which the first does not count."""
WARM_UP = 2
SWITCH = "switch"
SLOW_KBIT = 64
CONNECTIONS = 6
"""As many as a member of four has when nothing happens."""


class Strike(msgspec.Struct, frozen=True):
    """A fault."""

    number: int
    """Of its period."""
    at_s: float
    """Since the first step."""
    kind: str
    victim: str
    other: str
    """The other end, where it is between two."""
    lasts_s: float


class Profile(NamedTuple):
    """How a schedule is drawn."""

    period_s: float
    kinds: tuple[str, ...]
    """Drawn in turn, each as often as the others."""


VIRTUAL: dict[str, Callable[[Strike, Seconds, PositiveSeconds], AnyFault]] = {
    "kill": lambda s, at, lasts: Restart(at, node=s.victim, down_s=Seconds(lasts), clean=True),
    "stop": lambda s, at, lasts: Pause(at, node=s.victim, duration_s=lasts),
    "cable pulled": lambda s, at, lasts: CablePulled(at, node=s.victim, medium=SWITCH, duration_s=lasts),
    "slow cable": lambda s, at, lasts: LinkChange(
        at, medium=SWITCH, node=s.victim, rate_bps=BitRate(SLOW_KBIT * 1e3), duration_s=lasts
    ),
    "silent port": lambda s, at, lasts: BlockedPort(at, node=s.victim, port="gradient", how="silent", duration_s=lasts),
    "partition": lambda s, at, lasts: Partition(at, sides=((s.victim,), (s.other,)), duration_s=lasts),
    "full disk": lambda s, at, lasts: FullDisk(at, node=s.victim, duration_s=lasts),
    "few descriptors": lambda s, at, lasts: FewDescriptors(
        at, node=s.victim, connections=CONNECTIONS, duration_s=lasts
    ),
}
"""Each kind as a fault of a scenario."""

PROFILES = {"kill": Profile(30.0, ("kill",)), "mixed": Profile(25.0, tuple(VIRTUAL))}


class Planned(NamedTuple):
    """A schedule, and how much of it was carried out."""

    profile: Profile
    strikes: Sequence[Strike]
    count: int
    """Periods."""
    origin_s: float
    """When the first one began."""


def is_calm(period: int) -> bool:
    """Whether nothing happens in that period."""
    return period < WARM_UP or (period - WARM_UP) % CALM_EVERY == CALM_EVERY - 1


def strikes(profile: Profile, names: Sequence[str], periods: int, seed: int) -> list[Strike]:
    """The faults of so many periods."""
    draw = stream(seed, "soak", *profile.kinds)
    kinds: list[str] = []
    drawn = []
    for period in range(periods):
        if is_calm(period):
            continue
        if not kinds:
            kinds = draw.sample(profile.kinds, len(profile.kinds))
        victim, other = draw.sample(names, 2)
        lasts_s = draw.uniform(2.0, 5.0) if profile.kinds == ("kill",) else draw.uniform(4.0, 9.0)
        drawn.append(Strike(period, period * profile.period_s, kinds.pop(), victim, other, lasts_s))
    return drawn


def as_fault(strike: Strike, begins_s: float) -> AnyFault:
    """The same in a scenario whose first step is at `begins_s`."""
    at = Seconds(begins_s + strike.at_s)
    return VIRTUAL[strike.kind](strike, at, PositiveSeconds(strike.lasts_s))
