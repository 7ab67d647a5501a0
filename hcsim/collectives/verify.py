"""The verifier: proves a set of plans, one per rank, correct by symbolic execution.

A range of a rank's buffer holds a `Value`: which ranks' inputs are combined in it, how far from its own address
each element was in those inputs, and whether it is finished. The proof covers ranges, so it takes as long for a
billion elements as for ten. The operator is only assumed to be associative and commutative; therefore no input
may enter twice.

It checks that every message has a sender and a receiver in the same round, with equal sizes, and is unique;
that no rank waits for ever if sends never block; that nothing undefined is used; that only complete reductions
are finished, once; and that every rank ends with the result of the operation.

The execution itself, `DryRun`, is also used by the cost model. It runs the plans of all ranks concurrently,
without a clock; messages decide which rank can continue. Sends never block, so a rank that waits at the end
waits for ever. The state of a buffer changes at few addresses and is kept as an `IntervalMap`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from hcsim.collectives.plan import Finish, Recv, Reduce, Rounds, Send, Shape, offsets
from hcsim.errors import HcsimError, UsageError

T = TypeVar("T")
MessageKey: TypeAlias = tuple[int, ...]
"""The identity of a message: round, sender, receiver, and further parts."""


class PlanError(HcsimError):
    """A set of plans does not perform its operation; the message says where."""


class Value(NamedTuple):
    """The value of an element x: the combination of the inputs of `ranks` at x + `shift`."""

    ranks: int
    """Bit r is set if the input of rank r is included; 0 means undefined."""
    shift: int = 0
    finished: bool = False

    def __str__(self) -> str:
        moved = f" from {self.shift:+d}" if self.shift else ""
        return f"{'finished ' if self.finished else ''}inputs of ranks {_members(self.ranks)}{moved}"


_Piece: TypeAlias = tuple[int, int, Value]
_UNDEFINED = Value(0)


def verify(operation: str, plans: Sequence[Rounds], shapes: Sequence[Shape]) -> None:
    """Raise `PlanError` unless these plans, of ranks 0, 1, …, perform the operation on these shapes."""
    if len(plans) != len(shapes) or any(shape.world != len(plans) for shape in shapes):
        raise UsageError(f"{len(plans)} plans for {len(shapes)} shapes of {[shape.world for shape in shapes]} ranks")
    states = [_initial(operation, rank, shape) for rank, shape in enumerate(shapes)]
    _check_messages(plans, [state.size for state in states])
    machine = _Machine(plans, states)
    resting = machine.dry_run.run([machine.walk(rank) for rank in range(len(plans))])
    if resting:
        waits = ", ".join(f"rank {dst} in round {s} for rank {src}" for s, src, dst in sorted(resting))
        raise PlanError(f"these wait for each other for ever: {waits}")
    for rank in range(len(plans)):
        for lo, hi, promised in _promised(operation, rank, shapes):
            for a, b, value in states[rank].pieces(lo, hi):
                if value != promised:
                    raise PlanError(f"rank {rank} ends with {value} in [{a}, {b}) instead of {promised}")
        if operation == "barrier" and machine.heard[rank] != (1 << len(plans)) - 1:
            raise PlanError(f"rank {rank} leaves the barrier having heard of {_members(machine.heard[rank])} alone")


def _members(ranks: int) -> list[int]:
    return [rank for rank in range(ranks.bit_length()) if ranks >> rank & 1]


def _initial(operation: str, rank: int, shape: Shape) -> IntervalMap[Value]:
    own = Value(1 << rank)
    if operation == "all_to_all":
        sent, received = offsets(shape.sent), offsets(shape.received)
        state = IntervalMap(sent[-1] + received[-1], _UNDEFINED)
        state.put(0, sent[-1], own)
        at = sent[-1] + received[rank]
        state.put(at, at + shape.sent[rank], own._replace(shift=sent[rank] - at))
        return state
    parts = offsets(shape.counts)
    if operation in ("all_reduce", "reduce"):
        return IntervalMap(shape.length, own)
    if operation == "broadcast":
        return IntervalMap(shape.length, own if rank == shape.root else _UNDEFINED)
    if operation == "reduce_scatter":
        return IntervalMap(parts[-1], own)
    if operation == "scatter":
        return IntervalMap(parts[-1], own if rank == shape.root else _UNDEFINED)
    if operation in ("all_gather", "gather"):
        state = IntervalMap(parts[-1], _UNDEFINED)
        state.put(parts[rank], parts[rank + 1], own)
        return state
    if operation == "barrier":
        return IntervalMap(0, _UNDEFINED)
    raise UsageError(f"there is nothing to prove about {operation!r}")


def _promised(operation: str, rank: int, shapes: Sequence[Shape]) -> list[_Piece]:
    """Return the required final values on this rank, for the ranges that the operation defines."""
    shape, everyone = shapes[rank], (1 << len(shapes)) - 1
    parts, root = offsets(shape.counts), Value(1 << shape.root)
    if operation == "all_reduce" or (operation == "reduce" and rank == shape.root):
        return [(0, shape.length, Value(everyone, finished=True))]
    if operation == "broadcast":
        return [(0, shape.length, root)]
    if operation == "reduce_scatter":
        return [(parts[rank], parts[rank + 1], Value(everyone, finished=True))]
    if operation == "scatter":
        return [(parts[rank], parts[rank + 1], root)]
    if operation == "all_gather" or (operation == "gather" and rank == shape.root):
        return [(parts[peer], parts[peer + 1], Value(1 << peer)) for peer in range(len(shapes))]
    if operation == "all_to_all":
        base, into = sum(shape.sent), offsets(shape.received)
        return [
            (base + into[peer], base + into[peer + 1], Value(1 << peer, offsets(their.sent)[rank] - base - into[peer]))
            for peer, their in enumerate(shapes)
        ]
    return []


def _check_messages(plans: Sequence[Rounds], sizes: Sequence[int]) -> None:
    """Check that every message has both ends, of equal size, and that there is at most one per round and pair."""
    sent: dict[MessageKey, int] = {}
    taken: dict[MessageKey, int] = {}
    for rank, rounds in enumerate(plans):
        for s, actions in enumerate(rounds):
            for action in actions:
                where = f"rank {rank}, round {s}: {action}"
                if not 0 <= action.lo <= action.hi <= sizes[rank]:
                    raise PlanError(f"{where} lies outside the buffer of {sizes[rank]} elements")
                if isinstance(action, Finish):
                    continue
                if action.peer == rank or not 0 <= action.peer < len(plans):
                    raise PlanError(f"{where} names no other rank of {len(plans)}")
                side = sent if isinstance(action, Send) else taken
                pair = (s, rank, action.peer) if side is sent else (s, action.peer, rank)
                if pair in side:
                    raise PlanError(f"{where} is the second message of that round to or from that rank")
                side[pair] = action.hi - action.lo
    for key in sorted({**sent, **taken}):
        if sent.get(key) != taken.get(key):
            raise PlanError(
                f"round {key[0]}, rank {key[1]} to rank {key[2]}: "
                f"{_sized('sent', sent, key)}, {_sized('expected', taken, key)}"
            )


def _sized(verb: str, side: dict[MessageKey, int], key: MessageKey) -> str:
    return f"{side[key]} elements are {verb}" if key in side else f"nothing is {verb}"


class _Machine:
    """The buffers of all ranks, and the effect of actions on them."""

    def __init__(self, plans: Sequence[Rounds], states: Sequence[IntervalMap[Value]]) -> None:
        self.plans = plans
        self.states = states
        self.heard = [1 << rank for rank in range(len(plans))]
        self.dry_run: DryRun[tuple[int, list[_Piece]]] = DryRun()

    def walk(self, rank: int) -> Iterator[MessageKey]:
        """Perform the actions of a rank in order; yield the key of a message that has not arrived."""
        for s, actions in enumerate(self.plans[rank]):
            for action in actions:
                where = f"rank {rank}, round {s}: {action}"
                if isinstance(action, Finish):
                    self._finish(rank, action, where)
                elif isinstance(action, Send):
                    self._send(rank, s, action, where)
                else:
                    key = (s, action.peer, rank)
                    if key not in self.dry_run:
                        yield key
                    self._take(rank, key, action, where)

    def _send(self, rank: int, s: int, action: Send, where: str) -> None:
        pieces = self.states[rank].pieces(action.lo, action.hi)
        for lo, hi, value in pieces:
            if not value.ranks:
                raise PlanError(f"{where} sends [{lo}, {hi}), where nothing has been written yet")
        # A piece travels relative to its message's start; its shift stays relative to its address.
        relative = [(lo - action.lo, hi - action.lo, v._replace(shift=v.shift + action.lo)) for lo, hi, v in pieces]
        self.dry_run.post((s, rank, action.peer), (self.heard[rank], relative))

    def _take(self, rank: int, key: MessageKey, action: Recv | Reduce, where: str) -> None:
        heard, pieces = self.dry_run.take(key)
        self.heard[rank] |= heard
        for start, stop, sent in pieces:
            theirs = sent._replace(shift=sent.shift - action.lo)
            lo, hi = start + action.lo, stop + action.lo
            if isinstance(action, Recv):
                self.states[rank].put(lo, hi, theirs)
                continue
            for a, b, ours in self.states[rank].pieces(lo, hi):
                self.states[rank].put(a, b, _combined(ours, theirs, f"{where} in [{a}, {b})"))

    def _finish(self, rank: int, action: Finish, where: str) -> None:
        everyone = (1 << len(self.plans)) - 1
        for lo, hi, value in self.states[rank].pieces(action.lo, action.hi):
            if value.finished or value.ranks != everyone:
                raise PlanError(f"{where} finishes [{lo}, {hi}), which holds {value}")
            self.states[rank].put(lo, hi, value._replace(finished=True))


def _combined(ours: Value, theirs: Value, where: str) -> Value:
    if not ours.ranks or ours.ranks & theirs.ranks or ours.finished or theirs.finished or ours.shift != theirs.shift:
        raise PlanError(f"{where} combines {ours} with {theirs}")
    return ours._replace(ranks=ours.ranks | theirs.ranks)


class IntervalMap(Generic[T]):
    """A value for every address in [0, size), stored as pieces of equal value."""

    def __init__(self, size: int, value: T) -> None:
        self.size = size
        self._starts = [0]
        self._values = [value]

    def _cut(self, at: int) -> int:
        """Split at this address if necessary; return the index of the piece that starts there."""
        if at == self.size:
            return len(self._starts)
        index = bisect_right(self._starts, at) - 1
        if self._starts[index] == at:
            return index
        self._starts.insert(index + 1, at)
        self._values.insert(index + 1, self._values[index])
        return index + 1

    def values(self, lo: int, hi: int) -> list[T]:
        first = self._cut(lo)
        return self._values[first : self._cut(hi)]

    def pieces(self, lo: int, hi: int) -> list[tuple[int, int, T]]:
        """Return the values in [lo, hi), each with its start and end."""
        first = self._cut(lo)
        last = self._cut(hi)
        stops = [*self._starts[first + 1 : last], hi]
        return list(zip(self._starts[first:last], stops, self._values[first:last], strict=False))

    def put(self, lo: int, hi: int, value: T) -> None:
        """Set all of [lo, hi) to one value."""
        if lo < hi:
            first = self._cut(lo)
            last = self._cut(hi)
            self._starts[first:last] = [lo]
            self._values[first:last] = [value]


class DryRun(Generic[T]):
    """Runs one generator per rank. A generator that yields a key is suspended until that message is posted."""

    def __init__(self) -> None:
        self._posted: dict[MessageKey, T] = {}
        self._resting: dict[MessageKey, int] = {}
        self._ready: deque[int] = deque()

    def __contains__(self, key: MessageKey) -> bool:
        return key in self._posted

    def post(self, key: MessageKey, message: T) -> None:
        """Post a message and resume the rank that waits for it."""
        self._posted[key] = message
        if key in self._resting:
            self._ready.append(self._resting.pop(key))

    def take(self, key: MessageKey) -> T:
        """Remove and return a posted message."""
        return self._posted.pop(key)

    def run(self, walks: Sequence[Iterator[MessageKey]]) -> dict[MessageKey, int]:
        """Run all generators as far as possible; return the rank that still waits for each message."""
        self._ready.extend(range(len(walks)))
        while self._ready:
            rank = self._ready.popleft()
            key = next(walks[rank], None)
            if key is not None:
                self._resting[key] = rank
        return self._resting
