"""The figures of a soak, piece by piece, and the table that pieces add up to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from experiments.soak.history import History
from experiments.soak.job import TIMEOUT_S
from experiments.soak.schedule import Planned, is_calm

K = TypeVar("K")
T = TypeVar("T")

MOST_DESCRIPTORS = 100
MOST_MEMORY_MB = 250.0
MOST_LINES = 25
"""Of a member, beside its steps, for each fault."""
LONGEST_STALL_S = 3 * TIMEOUT_S


class Lost(msgspec.Struct, frozen=True):
    """What a fault cost, in seconds; None: it changed nothing."""

    kind: str
    lost_s: float
    """Of a calm run's steps."""
    noticed_s: float | None = None
    """Until a member noticed."""
    agreed_s: float | None = None
    """Until all others had a view without the victim."""
    resumed_s: float | None = None
    """Until their first step in it."""
    returned_s: float | None = None
    """Between the two steps around its return."""


class Held(msgspec.Struct, frozen=True):
    """What members held at the most."""

    descriptors: int
    memory_mb: float
    lines: float
    """Of a member on average, beside its steps."""
    tracebacks: int


class Piece(msgspec.Struct, frozen=True):
    """One run."""

    world: str
    profile: str
    preset: str
    seed: int
    period_s: float
    steps: int
    calm: tuple[int, ...]
    """Steps of each calm period."""
    losses: tuple[Lost, ...]
    stall_s: float
    """The longest time without a step."""
    held: Held | None
    """None in the virtual world."""
    broken: tuple[str, ...] = ()
    """Invariants that did not hold."""

    @property
    def retained(self) -> float:
        """Steps in periods with a fault, relative to calm ones."""
        return 1 - statistics.fmean(loss.lost_s for loss in self.losses) / self.period_s


def losses(history: History, plan: Planned) -> tuple[tuple[int, ...], tuple[Lost, ...]]:
    """The steps of each calm period but the first, and what each fault cost beside their median."""
    length_s = plan.profile.period_s
    ends_s = [plan.origin_s + number * length_s for number in range(plan.count + 1)]
    done = [history.steps(*period) for period in pairwise(ends_s)]
    calm = tuple(steps for number, steps in enumerate(done) if number and is_calm(number))
    usual = statistics.median(calm)
    found = []
    for strike in plan.strikes:
        if strike.number < plan.count:
            change = history.change(strike.victim, *ends_s[strike.number : strike.number + 2])
            found.append(Lost(strike.kind, length_s * (1 - done[strike.number] / usual), *change))
    return calm, tuple(found)


def violations(piece: Piece, digests: Sequence[str | None]) -> Iterator[str]:
    """What does not hold of what has to, `digests` being those of all members' parameters and of the reference."""
    if len(dict.fromkeys(digests)) != 1:
        yield f"parameters differ: {', '.join(str(digest)[:12] for digest in digests)}"
    if piece.stall_s > LONGEST_STALL_S:
        yield f"no step for {piece.stall_s:.1f} s, more than {LONGEST_STALL_S:g} s"
    held = piece.held
    if held is None:
        return
    for what, value, most in (
        ("descriptors", held.descriptors, MOST_DESCRIPTORS),
        ("MB of memory", held.memory_mb, MOST_MEMORY_MB),
        ("lines", held.lines, MOST_LINES * (len(piece.losses) + 1)),
        ("tracebacks", held.tracebacks, 0),
    ):
        if value > most:
            yield f"{value:g} {what}, more than {most:g}"


def keep(piece: Piece, file: Path) -> None:
    """Append it to a file of JSON lines."""
    with file.open("ab") as out:
        out.write(msgspec.json.encode(piece) + b"\n")


def kept(file: Path) -> list[Piece]:
    """All pieces of such a file."""
    return [msgspec.json.decode(line, type=Piece) for line in file.read_bytes().splitlines()]


def table(pieces: Sequence[Piece]) -> Iterator[str]:
    """What pieces add up to: a line for each kind of fault, and one for each world and profile."""
    yield "| world | faults | hours | retained | s lost each | noticed | agreed | resumed | stall of return |"
    yield f"|{'---|' * 9}"
    for (world, profile), of_profile in _grouped(pieces, lambda piece: (piece.world, piece.profile)):
        every = [loss for piece in of_profile for loss in piece.losses]
        hours = sum(piece.period_s * (len(piece.losses) + len(piece.calm)) for piece in of_profile) / 3600
        period_s = of_profile[0].period_s
        yield _row(world, f"**{profile}**, every {period_s:g} s: {len(every)}", f"{hours:.1f}", every, period_s)
        kinds = _grouped(every, lambda loss: loss.kind)
        for kind, of_kind in kinds if len(kinds) > 1 else ():
            yield _row("", f"{kind}: {len(of_kind)}", "", of_kind, period_s)


def summary(pieces: Sequence[Piece]) -> Iterator[str]:
    """The rest, in words."""
    held = [piece.held for piece in pieces if piece.held is not None]
    yield (
        f"{sum(piece.steps for piece in pieces):,} steps, {sum(len(piece.losses) for piece in pieces)} faults, never "
        f"more than {max(piece.stall_s for piece in pieces):.1f} s without a step"
    )
    if held:
        faults = sum(len(piece.losses) for piece in pieces if piece.held is not None)
        yield (
            f"a member held at most {max(each.descriptors for each in held)} descriptors and "
            f"{max(each.memory_mb for each in held):.0f} MB, and wrote {sum(each.lines for each in held) / faults:.1f} "
            f"lines for each fault and {sum(each.tracebacks for each in held)} tracebacks"
        )
    broken = [text for piece in pieces for text in piece.broken]
    yield "; ".join(broken) if broken else "every invariant held"


def _grouped(items: Sequence[T], key: Callable[[T], K]) -> list[tuple[K, list[T]]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [*groups.items()]


def _row(world: str, what: str, hours: str, found: Sequence[Lost], period_s: float) -> str:
    lost_s = statistics.fmean(loss.lost_s for loss in found)
    columns = (
        [loss.noticed_s for loss in found],
        [loss.agreed_s for loss in found],
        [loss.resumed_s for loss in found],
        [loss.returned_s for loss in found],
    )
    shown = " | ".join(_median(column) for column in columns)
    return f"| {world} | {what} | {hours} | {1 - lost_s / period_s:.1%} | {lost_s:.2f} | {shown} |"


def _median(column: Sequence[float | None]) -> str:
    there = [value for value in column if value is not None]
    return f"{statistics.median(there):.2f}" if there else "–"
