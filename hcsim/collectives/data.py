"""What a group's operations are given: arrays, or phantoms in their place."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import index
from typing import Any, SupportsIndex, TypeAlias, TypeVar

import numpy as np

from hcsim.collectives.arithmetic import added_as, check, check_carried, combiner
from hcsim.collectives.memory import Array, ArrayMemory, Memory, PhantomMemory, flat
from hcsim.errors import UsageError
from hcsim.runtime.channel import Phantom

Data: TypeAlias = Array | Phantom
DataT = TypeVar("DataT", bound=Data)
_ARRAYS = (np.ndarray, np.generic)  # made once: every operation asks


def length_of(data: Data) -> int:
    """How many elements there are."""
    if isinstance(data, _ARRAYS):
        return int(data.size)
    if isinstance(data, Phantom):
        return data.nbytes // data.itemsize
    raise _unusable(data)


def _unusable(data: object) -> UsageError:
    kind = type(data).__name__
    return UsageError(f"an operation takes a contiguous numpy array or a Phantom, and this is of type {kind}")


def element_bytes_of(data: Data) -> int:
    """How large an element is."""
    return data.itemsize


def array_of(data: Data) -> Array:
    """The data, where it cannot be a phantom."""
    assert not isinstance(data, Phantom)
    return data


def kind_of(memory: Memory) -> str:
    """What the elements are."""
    return _name_of(memory.dtype) if isinstance(memory, ArrayMemory) else "phantom"


@lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[Any]) -> str:
    """The same for dtypes that are equal, as int64 and long long are; numpy takes microseconds to make it up."""
    return dtype.name


def whole_number(what: str, number: SupportsIndex) -> int:
    """A number that may be numpy's, as the plain one that ranks compare and traces hold."""
    try:
        return index(number)
    except TypeError:
        raise UsageError(f"{what} is a whole number, not {number!r}") from None


def writable(data: DataT) -> DataT:
    """The data, if it can be received into."""
    try:
        is_writable = isinstance(data, Phantom) or data.flags.writeable
    except AttributeError:
        raise _unusable(data) from None
    if not is_writable:
        raise UsageError("the array is read-only, and the result goes into it: pass a copy")
    return data


def reducing(parts: Sequence[Data], op: str, world: int) -> Memory:
    """Memory whose ranges are combined with what is received."""
    if isinstance(parts[0], Phantom):
        check(op)
        return PhantomMemory(parts[0].itemsize)
    arrays = [array_of(part) for part in parts]
    dtype, divisor = arrays[0].dtype, world if op == "mean" else 1
    return ArrayMemory(arrays, combine=combiner(op, dtype), divisor=divisor, numbers=added_as(op, dtype))


def moving(parts: Sequence[Data], base: int = 0) -> Memory:
    """Memory that is only sent and received into."""
    arrays = [part for part in parts if not isinstance(part, Phantom)]
    if any(part.itemsize != parts[0].itemsize for part in parts):
        raise UsageError("the parts must all have elements of one size")
    if not arrays:
        return PhantomMemory(parts[0].itemsize)
    if len(arrays) < len(parts) or any(array.dtype != arrays[0].dtype for array in arrays):
        raise UsageError("the parts must all be arrays of one dtype, or all phantoms")
    check_carried(arrays[0].dtype)
    return ArrayMemory(arrays, base=base)


def empty_like(data: Data, length: int) -> Data:
    """Room for other elements of the same kind."""
    return Phantom(length * data.itemsize, data.itemsize) if isinstance(data, Phantom) else np.empty(length, data.dtype)


def room_for(length: int, like: Data, into: Data | None) -> Data:
    """Room for that many elements of that kind: what is given for it, flat, or else new."""
    if into is None:
        return empty_like(like, length)
    if isinstance(into, Phantom) or isinstance(like, Phantom):
        if length_of(into) != length or type(into) is not type(like):
            raise UsageError(f"the result has {length} elements, phantoms as the input is: {into!r} is no place for it")
        return into
    if length_of(into) != length or into.dtype != like.dtype:
        raise UsageError(f"the result is {length} of {like.dtype}, and goes into {into.size} of {into.dtype}")
    return flat(writable(into))


def in_one_piece(data: Data) -> Data:
    """The data, or a copy of them whose elements lie in one piece."""
    return data if isinstance(data, Phantom) else np.ascontiguousarray(data)


def part_of(data: Data, lo: int, hi: int) -> Data:
    """Some of the elements, sharing their memory."""
    if isinstance(data, Phantom):
        return Phantom((hi - lo) * data.itemsize, data.itemsize)
    return data.reshape(-1)[lo:hi]


def overlaps(whole: Data, parts: Sequence[Data]) -> bool:
    """Whether some of the parts' elements are also the whole's."""
    arrays = [part for part in parts if not isinstance(part, Phantom)]
    return not isinstance(whole, Phantom) and any(np.may_share_memory(whole, array) for array in arrays)


def copy_into(target: Data, source: Data) -> None:
    """Copy all elements; the lengths and the kind must be the same."""
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
    """Whether these, which have the same length, are the same elements."""
    return np.may_share_memory(one, other) and (
        one.flags.c_contiguous and other.flags.c_contiguous and one.ctypes.data == other.ctypes.data
    )
