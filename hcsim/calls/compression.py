"""All-reduces whose data travel compressed, carried out where the group is, and what is remembered between them.

A `Compression` in a call says how. What a compressor remembers (the residuals of error feedback, PowerSGD's warm
start) is kept beside the group under the call's key, by the names of the tensors: the same tensors may come in other
calls later, as when torch rebuilds its buckets. A key's calls belong to steps. A step counts once a call of a later one
comes, or the memory is asked for; one in which a call failed leaves no trace.

A compressed all-reduce is several collectives, one after the other. So that those of calls in flight together are not
taken for each other's, each call has a bucket of the group to itself, the next one of `BUCKETS`: ranks start calls in
one order, and so agree on it. Bucket 0 is for what is not compressed.

Encoded are float32s: a tensor of another dtype is converted, and the sum converted back. A NaN or an infinity is
refused, and ends the group.
"""

from __future__ import annotations

import asyncio
from math import prod
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from hcsim.collectives.group import Group
from hcsim.collectives.memory import Array
from hcsim.compressors.base import Compressor, State
from hcsim.compressors.feedback import Feedback
from hcsim.compressors.powersgd import PowerSGD
from hcsim.compressors.registry import make
from hcsim.errors import CollectiveError, UsageError
from hcsim.training.aggregation.aggregator import OneLevel
from hcsim.training.layout import Bucket, Tensor
from hcsim.training.learner import Ledger

BUCKETS = 256
OWN = "own/"
"""How the names of what a rank alone remembers begin."""


class Compression(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an all-reduce is compressed."""

    spec: str
    """As `hcsim.compressors.registry.make` reads it: "topk:0.01+ef", "int8"."""
    seed: int = 0
    """The same on all ranks."""
    key: str = ""
    """What is remembered belongs to this; of a call without a key nothing is."""
    step: int = 0
    """Of the key: rises from one step to the next."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and shapes of the tensors that the array consists of; none: it is one, without a name."""


def check(spec: str, *, remembered: bool) -> None:
    """Refuse what is no compressor, or one that has to remember tensors where there is no telling which is which."""
    compressor = make(spec, seed=0, rank=0)
    if not remembered and isinstance(compressor, Feedback | PowerSGD):
        raise UsageError(
            f"{spec} remembers each tensor from step to step, and a plain all_reduce does not say which one it is:"
            " register hcsim.torch_backend.hooks with DDP, which does, or take a compressor that remembers nothing"
        )


class _Kept:
    """A compressor, and which step it is in."""

    def __init__(self, spec: str, compressor: Compressor) -> None:
        self.spec = spec
        self.compressor = compressor
        self._step = 0
        self._under_way = 0
        self._failed = False

    def enter(self, step: int) -> None:
        """A call of this step begins."""
        if step != self._step:
            self.settle()
            self._step = step
        self._under_way += 1

    def leave(self, *, failed: bool) -> None:
        """It is over."""
        self._under_way -= 1
        self._failed |= failed

    def settle(self) -> None:
        """The step is over: what was learned in it counts, unless something failed."""
        if self._under_way:
            raise UsageError(f"{self._under_way} calls of step {self._step} are still under way: wait for them first")
        end = self.compressor.abandon if self._failed else self.compressor.commit
        end(self._step)
        self._failed = False


class Compressing:
    """The compressed calls of one group."""

    def __init__(self, group: Group) -> None:
        self._rank = group.rank
        self._ledger = Ledger(group.host)
        self._kept: dict[str, _Kept] = {}
        self._plain: dict[tuple[str, int], Compressor] = {}
        self._calls = 0
        self._turns: dict[int, asyncio.Lock] = {}

    async def all_reduce(self, group: Group, array: Array, op: str, how: Compression) -> None:
        """Replace the array by everybody's sum or mean, the same bits on every rank."""
        number = self._calls % BUCKETS
        self._calls += 1
        kept = self._of(how) if how.key else None
        try:
            # No await before this: calls take their turns in the order in which they were started.
            async with self._turns.setdefault(number, asyncio.Lock()):
                await self._exchange(group, array, op, how, number, kept)
        except CollectiveError:
            raise
        except BaseException as error:
            # The others cannot know: they would wait for us.
            group.fail(f"rank {self._rank} could not compress: {error}", self._rank)
            raise

    async def _exchange(
        self, group: Group, array: Array, op: str, how: Compression, number: int, kept: _Kept | None
    ) -> None:
        compressor = kept.compressor if kept is not None else self._memoryless(how)
        flat = array if array.dtype == np.float32 else array.astype(np.float32)
        tensors = _placed(how.tensors or ((f"call {number}", array.shape),), array.size)
        bucket = Bucket(number + 1, (), tensors, 0, array.size)
        weight = 1 / group.size if op == "mean" else 1.0
        step = how.step if kept is not None else self._calls
        done = False
        if kept is not None:
            kept.enter(step)
        try:
            await OneLevel(group, self._ledger, compressor).total(flat, bucket, weight, step)
            done = True
        finally:
            if kept is not None:
                kept.leave(failed=not done)
        if flat is not array:
            array[...] = flat

    def memory(self, key: str) -> bytes:
        """All that is remembered under a key, for `restore`."""
        kept = self._kept.get(key)
        if kept is None:
            return b""
        kept.settle()
        return _packed(kept.spec, kept.compressor.state())

    def restore(self, how: Compression, memory: bytes) -> None:
        """Remember what another object remembered under its key, as far as it is this compressor's."""
        if not memory:
            self._kept.pop(how.key, None)
            return
        spec, state = _unpacked(memory)
        if spec != how.spec:
            raise UsageError(f"what was remembered by {spec} is of no use to {how.spec}")
        self._kept.pop(how.key, None)
        self._of(how).compressor.restore(state)

    def _of(self, how: Compression) -> _Kept:
        kept = self._kept.get(how.key)
        if kept is None:
            compressor = make(how.spec, seed=how.seed, rank=self._rank)
            kept = self._kept[how.key] = _Kept(how.spec, compressor)
        if kept.spec != how.spec:
            raise UsageError(f"{how.key} was compressed by {kept.spec}, and cannot now be by {how.spec}")
        return kept

    def _memoryless(self, how: Compression) -> Compressor:
        made = self._plain.get((how.spec, how.seed))
        if made is None:
            check(how.spec, remembered=False)
            made = self._plain[how.spec, how.seed] = make(how.spec, seed=how.seed, rank=self._rank)
        return made


def without_debts(memory: bytes) -> bytes:
    """A memory less what its rank alone owes: what one that joins begins with."""
    if not memory:
        return memory
    spec, state = _unpacked(memory)
    return _packed(spec, {name: array for name, array in state.items() if not name.startswith(OWN)})


def with_debts_of(memory: bytes, gone: bytes) -> bytes:
    """A memory that also owes what another rank owed, which is gone."""
    if not memory or not gone:
        return memory or gone
    (spec, state), (their_spec, theirs) = _unpacked(memory), _unpacked(gone)
    if spec != their_spec:
        raise UsageError(f"what was remembered by {their_spec} is of no use to {spec}")
    for name, array in theirs.items():
        if name.startswith(OWN):
            state[name] = np.add(state[name], array) if name in state else array
    return _packed(spec, state)


def _packed(spec: str, state: State) -> bytes:
    return msgspec.msgpack.encode((spec, {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in state.items()}))


def _unpacked(memory: bytes) -> tuple[str, State]:
    spec, arrays = msgspec.msgpack.decode(memory, type=tuple[str, dict[str, tuple[str, tuple[int, ...], bytes]]])
    return spec, {name: np.frombuffer(raw, kind).reshape(shape) for name, (kind, shape, raw) in arrays.items()}


def _placed(tensors: tuple[tuple[str, tuple[int, ...]], ...], length: int) -> tuple[Tensor, ...]:
    placed, offset = [], 0
    for name, shape in tensors:
        placed.append(Tensor(name, shape, offset))
        offset += prod(shape)
    if offset != length:
        raise UsageError(f"the tensors of a compressed call have {offset} elements together, its array {length}")
    return tuple(placed)


_by_group: WeakKeyDictionary[Group, Compressing] = WeakKeyDictionary()


def compressing(group: Group) -> Compressing:
    """A group's."""
    found = _by_group.get(group)
    if found is None:
        found = _by_group[group] = Compressing(group)
    return found
