"""What a group's operations are given: arrays, or phantoms in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from hcsim.collectives.arithmetic import check, combiner, finisher
from hcsim.collectives.memory import Array, ArrayMemory, Memory, PhantomMemory
from hcsim.errors import UsageError
from hcsim.runtime.channel import Phantom

Data: TypeAlias = Array | Phantom
DataT = TypeVar("DataT", bound=Data)


def length_of(data: Data) -> int:
    """How many elements there are; a phantom's are bytes."""
    return data.nbytes if isinstance(data, Phantom) else int(data.size)


def array_of(data: Data) -> Array:
    """The data, where it cannot be a phantom."""
    assert not isinstance(data, Phantom)
    return data


def kind_of(memory: Memory) -> str:
    """What the elements are."""
    return memory.dtype.char if isinstance(memory, ArrayMemory) else "phantom"


def writable(data: DataT) -> DataT:
    """The data, if it can be received into."""
    if not isinstance(data, Phantom) and not data.flags.writeable:
        raise UsageError("the array is read-only, and the result goes into it: pass a copy")
    return data


def reducing(data: Data, op: str, world: int) -> Memory:
    """Memory whose ranges are combined with what is received."""
    if isinstance(data, Phantom):
        check(op)
        return PhantomMemory()
    return ArrayMemory([data], combine=combiner(op, data.dtype), finisher=finisher(op, world))


def moving(parts: Sequence[Data]) -> Memory:
    """Memory that is only sent and received into."""
    arrays = [part for part in parts if not isinstance(part, Phantom)]
    if not arrays:
        return PhantomMemory()
    if len(arrays) < len(parts) or any(array.dtype != arrays[0].dtype for array in arrays):
        raise UsageError("the parts must all be arrays of one dtype, or all phantoms")
    return ArrayMemory(arrays)


def empty_like(data: Data, length: int) -> Data:
    """Room for other elements of the same kind."""
    return Phantom(length) if isinstance(data, Phantom) else np.empty(length, data.dtype)


def part_of(data: Data, lo: int, hi: int) -> Data:
    """Some of the elements, sharing their memory."""
    return Phantom(hi - lo) if isinstance(data, Phantom) else data.reshape(-1)[lo:hi]


def copy_into(target: Data, source: Data) -> None:
    """Copy all elements; the lengths must be the same."""
    if length_of(target) != length_of(source):
        raise UsageError(f"a part has {length_of(source)} elements where {length_of(target)} are expected")
    if not isinstance(target, Phantom) and not isinstance(source, Phantom):
        np.copyto(target.reshape(-1), source.reshape(-1))
