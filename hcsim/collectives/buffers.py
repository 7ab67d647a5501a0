"""The buffers of an operation: the caller's arrays, phantoms in their place, and scratch memory.

A `Buffer` gives the parts of an operation one address space, in elements, which is that of the plan. The
executor names ranges of it and does not depend on where they are stored. A phantom has a size and no data, and
can replace any array.

The parts are the caller's own arrays where the plan allows it. A rank that only sends or only receives its own
part needs no memory for the other parts. A rank that combines only its own part sends the rest directly from
the input. `touched` and `written` derive this from the plan.

Data to be combined are received into scratch memory, which is reused: the system takes longer to clear new
memory than it takes to fill it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from hcsim.collectives.algorithms import plan
from hcsim.collectives.arithmetic import Combine, added_as, check, check_carried, combiner, divide
from hcsim.collectives.plan import Send, Shape, offsets
from hcsim.errors import UsageError
from hcsim.runtime.channel import Fold, Payload, Phantom

Array = np.ndarray[Any, np.dtype[Any]]
Data: TypeAlias = Array | Phantom
DataT = TypeVar("DataT", bound=Data)

KEPT_BYTES = 8 * 2**20
"""The amount of scratch memory kept between operations."""
RESERVE_BYTES = 128 * 2**10
"""The initial scratch memory, so that short messages never wait for it, however short the buffer."""
WORTH_FOLDING_BYTES = 128 * 2**10
"""From this size on, adding on receive is worth its setup: it saves reading the received data again."""
WORTH_SPARING = 4096
"""From this number of elements on, examining the plan is faster than copying everything."""
_ARRAYS = (np.ndarray, np.generic)  # made once: every operation asks
_size_bytes = attrgetter("nbytes")


# What callers give.


def length_of(data: Data) -> int:
    if isinstance(data, _ARRAYS):
        return int(data.size)
    if isinstance(data, Phantom):
        return data.nbytes // data.itemsize
    raise _unusable(data)


def _unusable(data: object) -> UsageError:
    kind = type(data).__name__
    return UsageError(f"an operation takes a contiguous numpy array or a Phantom, and this is of type {kind}")


def array_of(data: Data) -> Array:
    """Return the data, which must not be a phantom."""
    assert not isinstance(data, Phantom)
    return data


def writable(data: DataT) -> DataT:
    """Return the data; raise `UsageError` if they are read-only."""
    try:
        is_writable = isinstance(data, Phantom) or data.flags.writeable
    except AttributeError:
        raise _unusable(data) from None
    if not is_writable:
        raise UsageError("the array is read-only, and the result goes into it: pass a copy")
    return data


def contiguous(data: Data) -> Data:
    """Return the data, or a contiguous copy."""
    return data if isinstance(data, Phantom) else np.ascontiguousarray(data)


def flat(array: Array) -> Array:
    """Return a one-dimensional view of the array."""
    if not array.flags.c_contiguous:
        raise UsageError("the array's elements must lie in one piece: pass np.ascontiguousarray(array)")
    return array.reshape(-1)


def empty_like(data: Data, length: int) -> Data:
    return Phantom(length * data.itemsize, data.itemsize) if isinstance(data, Phantom) else np.empty(length, data.dtype)


def output_for(length: int, like: Data, into: Data | None) -> Data:
    """Return memory for `length` elements like `like`: the caller's `into`, flattened, or a new allocation."""
    if into is None:
        return empty_like(like, length)
    if isinstance(into, Phantom) or isinstance(like, Phantom):
        if length_of(into) != length or type(into) is not type(like):
            raise UsageError(f"the result has {length} elements, phantoms as the input is: {into!r} is no place for it")
        return into
    if length_of(into) != length or into.dtype != like.dtype:
        raise UsageError(f"the result is {length} of {like.dtype}, and goes into {into.size} of {into.dtype}")
    return flat(writable(into))


def part_of(data: Data, lo: int, hi: int) -> Data:
    """Return a view of a range of the elements."""
    if isinstance(data, Phantom):
        return Phantom((hi - lo) * data.itemsize, data.itemsize)
    return data.reshape(-1)[lo:hi]


def parts_by_rank(whole: Data, cuts: tuple[int, ...], like: Data, counts: Sequence[int] | None) -> list[Data]:
    """Return the part of every rank; parts of equal length have the shape of `like`."""
    parts = [part_of(whole, lo, hi) for lo, hi in pairwise(cuts)]
    if counts is None and not isinstance(like, Phantom):
        return [array_of(part).reshape(like.shape) for part in parts]
    return parts


def overlaps(whole: Data, parts: Sequence[Data]) -> bool:
    """Return whether any part shares memory with the whole."""
    arrays = [part for part in parts if not isinstance(part, Phantom)]
    return not isinstance(whole, Phantom) and any(np.may_share_memory(whole, array) for array in arrays)


def copy_into(target: Data, source: Data) -> None:
    """Copy all elements; the lengths and the dtype must be equal."""
    if length_of(target) != length_of(source):
        raise UsageError(f"a part has {length_of(source)} elements where {length_of(target)} are expected")
    if isinstance(target, Phantom) and isinstance(source, Phantom):
        return
    if isinstance(target, Phantom) or isinstance(source, Phantom) or target.dtype != source.dtype:
        raise UsageError(f"a part is {_named(source)} where {_named(target)} is expected")
    if not _is_same(target, source):
        np.copyto(target.reshape(-1), source.reshape(-1))


def _named(data: Data) -> str:
    return "a phantom" if isinstance(data, Phantom) else f"an array of {data.dtype}"


def _is_same(one: Array, other: Array) -> bool:
    """Return whether two arrays of equal length are the same memory."""
    return np.may_share_memory(one, other) and (
        one.flags.c_contiguous and other.flags.c_contiguous and one.ctypes.data == other.ctypes.data
    )


# Buffers.


class Buffer(Protocol):
    """Elements, ranges of which can be sent, received, combined and finished."""

    element_bytes: int
    is_phantom: bool
    kind: str
    """The name of the element type."""
    numbers: str
    """The type code with which a channel may add on receive (see `Fold`); empty if it may not."""
    divisor: int
    """The divisor that `finish` applies."""

    def payload(self, lo: int, hi: int) -> Payload:
        """Return the range for sending."""

    def place(self, lo: int, hi: int) -> memoryview | None:
        """Return the memory of the range for receiving; None if it has no bytes."""

    def fold(self, lo: int, hi: int, room: memoryview) -> Fold | None:
        """Return a `Fold` that adds to the range on receive, or None if that is not possible or not worthwhile."""

    def combine(self, lo: int, hi: int, received: Payload, *, received_left: bool) -> None:
        """Combine the range with the received data, which are the left or the right operand."""

    def finish(self, lo: int, hi: int) -> None:
        """Apply the last step of the reduction to the range."""


_phantom = lru_cache(maxsize=1024)(Phantom)
"""Cached, because simulated ranks send few different sizes."""


class PhantomBuffer:
    """A buffer with a size and no data."""

    __slots__ = ("element_bytes",)
    is_phantom = True
    kind = "phantom"
    numbers = ""
    divisor = 1

    def __init__(self, element_bytes: int = 1) -> None:
        self.element_bytes = element_bytes

    def payload(self, lo: int, hi: int) -> Payload:
        return _phantom((hi - lo) * self.element_bytes)

    def place(self, lo: int, hi: int) -> memoryview | None:
        return None

    def fold(self, lo: int, hi: int, room: memoryview) -> Fold | None:
        return None

    def combine(self, lo: int, hi: int, received: Payload, *, received_left: bool) -> None:
        pass

    def finish(self, lo: int, hi: int) -> None:
        pass


class ArrayBuffer:
    """Contiguous arrays of one dtype at consecutive addresses, the first at `base`.

    A range that is sent or received lies within one of them."""

    __slots__ = ("_arrays", "_bytes", "_combine", "_starts", "divisor", "dtype", "element_bytes", "kind", "numbers")
    is_phantom = False

    def __init__(
        self,
        arrays: Sequence[Array],
        *,
        base: int = 0,
        combine: Combine | None = None,
        divisor: int = 1,
        numbers: str = "",
    ) -> None:
        self._arrays: list[Array] = []
        self._bytes: list[memoryview] = []
        self._starts: list[int] = []
        for array in arrays:
            row = flat(array)
            self._arrays.append(row)
            self._bytes.append(row.view(np.uint8).data)
            self._starts.append(base)
            base += row.size
        self.dtype = self._arrays[0].dtype
        self.element_bytes = self.dtype.itemsize
        self.kind = _name_of(self.dtype)
        self._combine = combine
        self.divisor = divisor
        self.numbers = numbers

    def payload(self, lo: int, hi: int) -> memoryview:
        which = 0 if len(self._starts) == 1 else bisect_right(self._starts, lo) - 1
        start, size = self._starts[which], self.element_bytes
        return self._bytes[which][(lo - start) * size : (hi - start) * size]

    place = payload

    def fold(self, lo: int, hi: int, room: memoryview) -> Fold | None:
        size_bytes = (hi - lo) * self.element_bytes
        if not self.numbers or size_bytes < WORTH_FOLDING_BYTES:
            return None
        return Fold(self.payload(lo, hi), room, self.numbers)

    def combine(self, lo: int, hi: int, received: Payload, *, received_left: bool) -> None:
        if isinstance(received, Phantom) or self._combine is None:
            raise UsageError("a phantom cannot be combined with data: all ranks use phantoms, or none does")
        mine = self._range(lo, hi)
        theirs = np.frombuffer(received, mine.dtype)
        if received_left:
            self._combine(theirs, mine, mine)
        else:
            self._combine(mine, theirs, mine)

    def finish(self, lo: int, hi: int) -> None:
        if self.divisor != 1:
            divide(self._range(lo, hi), self.divisor)

    def _range(self, lo: int, hi: int) -> Array:
        which = 0 if len(self._starts) == 1 else bisect_right(self._starts, lo) - 1
        start = self._starts[which]
        return self._arrays[which][lo - start : hi - start]


@lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[Any]) -> str:
    """Return one name for equal dtypes, such as int64 and long long. Cached, because numpy takes microseconds."""
    return dtype.name


def reduction_buffer(parts: Sequence[Data], op: str, world: int) -> Buffer:
    """Return a buffer whose ranges are combined with received data."""
    first = parts[0]
    if isinstance(first, Phantom):
        check(op)
        return PhantomBuffer(first.itemsize)
    arrays: Sequence[Any] = parts
    dtype, divisor = first.dtype, world if op == "mean" else 1
    return ArrayBuffer(arrays, combine=combiner(op, dtype), divisor=divisor, numbers=added_as(op, dtype))


def transfer_buffer(parts: Sequence[Data], base: int = 0) -> Buffer:
    """Return a buffer that is only sent and received."""
    arrays = [part for part in parts if not isinstance(part, Phantom)]
    if any(part.itemsize != parts[0].itemsize for part in parts):
        raise UsageError("the parts must all have elements of one size")
    if not arrays:
        return PhantomBuffer(parts[0].itemsize)
    if len(arrays) < len(parts) or any(array.dtype != arrays[0].dtype for array in arrays):
        raise UsageError("the parts must all be arrays of one dtype, or all phantoms")
    check_carried(arrays[0].dtype)
    return ArrayBuffer(arrays, base=base)


# Where the parts lie.


class Span(NamedTuple):
    """A range of the buffer."""

    lo: int
    hi: int

    def around(self, lo: int, hi: int) -> Span:
        """Return the smallest span that also contains this range; an empty range adds nothing."""
        return Span(min(self.lo, lo), max(self.hi, hi)) if lo < hi else self


@lru_cache(maxsize=256)
def touched(operation: str, algorithm: str, rank: int, shape: Shape, own: Span) -> Span:
    """Return the span of everything that the rank's plan sends or receives, and its own part."""
    span = own
    for actions in plan(operation, algorithm, rank, shape).rounds:
        for action in actions:
            span = span.around(action.lo, action.hi)
    return span


@lru_cache(maxsize=256)
def written(operation: str, algorithm: str, rank: int, shape: Shape, own: Span) -> Span:
    """Return the span that the rank's plan changes, its own part, and every message that overlaps it."""
    actions = [action for round_ in plan(operation, algorithm, rank, shape).rounds for action in round_]
    span = own
    for action in actions:
        if not isinstance(action, Send):
            span = span.around(action.lo, action.hi)
    before = None
    while span != before:
        before = span
        for action in actions:
            if action.lo < span.hi and span.lo < action.hi:
                span = span.around(action.lo, action.hi)
    return span


def scatter_input(data: Sequence[Data] | Data | None, into: Data, cuts: tuple[int, ...]) -> Data:
    """Return all parts that the root of a scatter sends, contiguously."""
    ranks = len(cuts) - 1
    if isinstance(data, np.ndarray) and not isinstance(into, Phantom):
        if data.size != cuts[-1] or data.dtype != into.dtype:
            raise UsageError(
                f"the root of a scatter has {cuts[-1]} of {into.dtype} for all, not {data.size} of {data.dtype}"
            )
        return contiguous(data)
    if data is None or isinstance(data, np.ndarray | Phantom) or len(data) != ranks:
        raise UsageError(f"the root of a scatter has one part for each of the {ranks} ranks")
    whole = empty_like(into, cuts[-1])
    for part, (lo, hi) in zip(data, pairwise(cuts), strict=True):
        copy_into(part_of(whole, lo, hi), part)
    return whole


def part_buffer(operation: str, algorithm: str, rank: int, shape: Shape, part: Data) -> tuple[Buffer, Data]:
    """Return a buffer for the span that the rank's plan touches, and the place of the rank's own part in it.

    The buffer is `part` itself if the plan touches nothing else."""
    own = _own(rank, shape)
    reach = touched(operation, algorithm, rank, shape, own)
    if reach == own:
        return transfer_buffer([part], base=own.lo), part
    room = empty_like(part, reach.hi - reach.lo)
    return transfer_buffer([room], base=reach.lo), part_of(room, own.lo - reach.lo, own.hi - reach.lo)


def reduce_scatter_buffer(
    data: Data, into: Data | None, op: str, algorithm: str, rank: int, shape: Shape
) -> tuple[Buffer, Data]:
    """Return a buffer for a reduction that keeps the input unchanged, and the place of the rank's own part."""
    own = _own(rank, shape)
    if isinstance(data, Phantom):
        return reduction_buffer([data], op, shape.world), part_of(data, *own)
    row = data.reshape(-1)
    changed = Span(0, row.size)
    if row.size >= WORTH_SPARING:
        changed = written("reduce_scatter", algorithm, rank, shape, own)
    if changed == own and into is not None and _may_be_written(array_of(into), row, own):
        work = array_of(into)
    else:
        work = np.empty(changed.hi - changed.lo, row.dtype)
    copy_into(work, row[changed.lo : changed.hi])
    pieces = [piece for piece in (row[: changed.lo], work, row[changed.hi :]) if piece.size]
    buffer = reduction_buffer(pieces or [work], op, shape.world)
    return buffer, part_of(work, own.lo - changed.lo, own.hi - changed.lo)


def _own(rank: int, shape: Shape) -> Span:
    cuts = offsets(shape.counts)
    return Span(cuts[rank], cuts[rank + 1])


def _may_be_written(into: Array, row: Array, own: Span) -> bool:
    """Return whether writing to `into` leaves everything still to be sent unchanged."""
    return not (np.may_share_memory(into, row[: own.lo]) or np.may_share_memory(into, row[own.hi :]))


# Scratch memory.


class ScratchPool:
    """A pool of scratch memory for received data."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        """In ascending order of size."""
        self._fresh = True

    @property
    def kept_bytes(self) -> int:
        """How much is kept for what comes next."""
        return sum(map(_size_bytes, self._free))

    def take(self, size_bytes: int) -> memoryview:
        """Return memory of at least this size. If none is free, the smaller pieces are replaced by a new one."""
        if self._fresh:  # not before: phantoms need none
            self._fresh = False
            self._free = [np.zeros(RESERVE_BYTES // 2, np.uint8).data for _ in range(2)]
        fitting = bisect_left(self._free, size_bytes, key=_size_bytes)
        if fitting < len(self._free):
            return self._free.pop(fitting)
        self._free.clear()
        return np.empty(size_bytes, np.uint8).data

    def give_back(self, room: memoryview) -> None:
        """Return memory that is no longer written to."""
        insort(self._free, room, key=_size_bytes)
        while self.kept_bytes > KEPT_BYTES:
            self._free.pop(0)
