"""Requests of a torch program to its group, serialisable: one call, and the flat arrays that it reads and fills.

`begin` or `perform` carries out a call where the group lives: in the program's own process or, for a program on
a virtual machine, in the simulator's. This module does not use torch.

The data of an all-reduce may be compressed, as a `Compression` in the call says. The compressor's state (the
residuals of error feedback, PowerSGD's warm start) is kept with the group under the call's key, by the names of
the tensors, since the same tensors may come in other calls later, as when torch rebuilds its buckets. A key's
calls belong to steps. A step is committed when a call of a later step comes, or when the state is read; a step
in which a call failed is abandoned.

A compressed all-reduce is a sequence of collectives. To keep those of concurrent calls apart, each call gets
the next of `BUCKETS` buckets of the group. Ranks start calls in the same order, and so agree on it. Bucket 0 is
for uncompressed calls. Ranks check that they agree on the compression in the first call of each key and each
compression.

Encoding works on float32: a tensor of another dtype is converted, and the sum converted back. If a rank's array
has a NaN or an infinity, all ranks get NaNs, and the step is abandoned, so a gradient scaler skips the step on
all ranks.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from hcsim.collectives.buffers import Array, array_of
from hcsim.collectives.group import Group
from hcsim.collectives.scheduler import Handle
from hcsim.compressors.base import Compressor, CompressorStateDict
from hcsim.compressors.feedback import ErrorFeedback
from hcsim.compressors.powersgd import PowerSGD
from hcsim.compressors.registry import make
from hcsim.errors import CollectiveError, NotFinite, UsageError
from hcsim.training.aggregation import OneLevel
from hcsim.training.layout import Bucket, Tensor
from hcsim.training.learner import TimeAccounting

BUCKETS = 8
"""The number of concurrent calls. Each bucket has payload buffers, which its calls reuse."""
ANY_SOURCE = -1
_WITH_DDP = "register hcsim.torch_backend.hooks with DDP"
OWN = "own/"
"""The prefix of state that belongs to one rank alone."""


class Compression(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The compression of an all-reduce."""

    spec: str
    """The spec for `hcsim.compressors.registry.make`: "topk:0.01+ef", "int8"."""
    seed: int = 0
    """The same on all ranks."""
    key: str = ""
    """The key of the compressor's state; without a key no state is kept."""
    step: int = 0
    """The step of the key; it rises from step to step."""
    instance: int = 0
    """The incarnation of the key: a higher one than before starts without state."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and shapes of the tensors in the array; empty if it is one tensor without a name."""


class GroupCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation on one group."""

    operation: str
    op: str = "sum"
    root: int = 0
    """The root of a collective, or the peer of a message (`ANY_SOURCE`: any sender)."""
    tag: int = 0
    counts: tuple[int, ...] = ()
    """The number of elements of each rank's part, if they differ; for an all_to_all, the elements sent to each
    rank."""
    received: tuple[int, ...] = ()
    """For an all_to_all: the elements received from each rank."""
    timeout_s: float | None = None
    """None: the group's timeout."""
    compression: Compression | None = None
    """The compression of an all_reduce that is a sum or a mean; for a memory operation, the compression whose
    state is meant."""


ARRAYS: dict[str, str] = {
    "all_reduce": "x",
    "reduce": "x",
    "broadcast": "x",
    "all_gather": "io",
    "gather": "io",
    "scatter": "oi",
    "reduce_scatter": "io",
    "all_to_all": "io",
    "barrier": "",
    "send": "i",
    "recv": "o",
    "memory_size": "",
    "memory": "o",
    "restore": "i",
}
"""What each operation does with its arrays: reads (i), fills (o), or both (x). Arrays that only the root
has come last and are left out on other ranks."""


def begin(group: Group, call: GroupCall, arrays: Sequence[Array]) -> Handle[Any]:
    """Start the call. The handle is mostly that of the group's own operation, without a task around it.
    `outcome` interprets its result."""
    within = group if call.timeout_s in (None, group.options.timeout_s) else group.within(call.timeout_s)
    match call.operation:
        case "all_reduce" if call.compression is not None:
            work = compressing(group).all_reduce(within, arrays[0], call.op, call.compression)
            return group.host.spawn(work, name="compressed all_reduce")
        case "all_reduce":
            return within.all_reduce(arrays[0], call.op)
        case "reduce":
            return within.reduce(arrays[0], call.root, call.op)
        case "broadcast":
            return within.broadcast(arrays[0], call.root)
        case "all_gather":
            return within.all_gather(arrays[0], call.counts or None, into=arrays[1])
        case "gather":
            return within.gather(arrays[0], call.root, call.counts or None, into=_at_root(arrays))
        case "scatter":
            return within.scatter(_at_root(arrays), arrays[0], call.root)
        case "reduce_scatter":
            return within.reduce_scatter(arrays[0], call.op, call.counts or None, into=arrays[1])
        case "all_to_all":
            cuts = np.cumsum(call.counts)[:-1]
            return within.all_to_all(np.split(arrays[0], cuts), call.received, into=arrays[1])
        case "barrier":
            return within.barrier()
        case "send":
            return within.send(arrays[0], call.root, tag=call.tag)
        case "recv" if call.root == ANY_SOURCE:
            return within.recv_any(arrays[0], tag=call.tag)
        case "recv":
            return within.recv(arrays[0], call.root, tag=call.tag)
        case "memory_size" | "memory" | "restore" if call.compression is not None:
            return group.host.spawn(
                _transfer_state(group, call.operation, call.compression, arrays), name=call.operation
            )
        case unknown:
            raise AssertionError(unknown)


def outcome(call: GroupCall, result: object) -> int:
    """Return the sender of a message from any source, or the size of a memory in bytes; meaningless for other
    operations."""
    return result if isinstance(result, int) else call.root


async def perform(group: Group, call: GroupCall, arrays: Sequence[Array]) -> int:
    """Carry out the call and return its outcome."""
    return outcome(call, await begin(group, call, arrays))


def _at_root(arrays: Sequence[Array]) -> Array | None:
    return arrays[1] if len(arrays) > 1 else None


async def _transfer_state(group: Group, operation: str, of: Compression, arrays: Sequence[Array]) -> int:
    """Read or restore the compressor's state: return its size in bytes, copy its bytes, or load them."""
    if operation == "restore":
        compressing(group).restore(of, arrays[0].tobytes())
        return arrays[0].size
    memory = compressing(group).memory(of)
    if operation == "memory":
        arrays[0][...] = np.frombuffer(memory, np.uint8)
    return len(memory)


def check_compressor(spec: str, *, remembered: bool, instead: str = _WITH_DDP) -> None:
    """Reject an invalid compressor, or one with per-tensor state where tensors cannot be identified; `instead` says
    where they can."""
    compressor = make(spec, seed=0, rank=0)
    if not remembered and isinstance(compressor, ErrorFeedback | PowerSGD):
        raise UsageError(
            f"{spec} remembers each tensor from step to step, and a plain all_reduce does not say which one it is:"
            f" {instead}, which does, or take a compressor that remembers nothing"
        )


class _Kept:
    """A compressor and its current step."""

    def __init__(self, how: Compression, rank: int) -> None:
        self.spec = how.spec
        self.instance = how.instance
        self.compressor = make(how.spec, seed=how.seed, rank=rank)
        self._step = 0
        self._under_way = 0
        self._failed = False

    def enter(self, step: int) -> None:
        if step != self._step:
            self.settle()
            self._step = step
        self._under_way += 1

    def leave(self, *, failed: bool) -> None:
        self._under_way -= 1
        self._failed |= failed

    def settle(self) -> None:
        """End the step: commit it, or abandon it if a call failed."""
        if self._under_way:
            raise UsageError(f"{self._under_way} calls of step {self._step} are still under way: wait for them first")
        end = self.compressor.abandon if self._failed else self.compressor.commit
        end(self._step)
        self._failed = False


class _Turn(NamedTuple):
    """A call's position among the others, the same on all ranks."""

    number: int
    call: int
    first: bool
    """Whether it is the first of its kind."""

    @property
    def bucket(self) -> int:
        return self.number + 1


class CompressedCalls:
    """The compressed calls of one group."""

    def __init__(self, group: Group) -> None:
        self._rank = group.rank
        self._ledger = TimeAccounting(group.host)
        self._kept: dict[str, _Kept] = {}
        self._plain: dict[tuple[str, int], Compressor] = {}
        self._asked: dict[tuple[str, str, int, int], None] = {}
        """The compressions that have been checked among the ranks, or are about to be."""
        self._calls = 0
        self._turns: dict[int, asyncio.Lock] = {}

    async def all_reduce(self, group: Group, array: Array, op: str, how: Compression) -> None:
        """Replace the array by the sum or mean over all ranks; every rank gets the same bits."""
        number = self._calls % BUCKETS
        self._calls += 1
        turn = _Turn(number, self._calls, self._is_first(how))
        try:
            kept = self._of(how) if how.key else None
            # No await before this: calls take their turns in the order in which they were started.
            async with self._turns.setdefault(number, asyncio.Lock()):
                await self._exchange(group, array, op, how, turn, kept)
        except CollectiveError:
            raise
        except BaseException as error:
            # The others cannot know: they would wait for us.
            group.fail(f"rank {self._rank} could not compress: {error}", self._rank)
            raise

    async def _exchange(
        self, group: Group, array: Array, op: str, how: Compression, turn: _Turn, kept: _Kept | None
    ) -> None:
        if turn.first:
            await _agree(group, how, turn.bucket)
        compressor = kept.compressor if kept is not None else self._memoryless(how)
        flat = array if array.dtype == np.float32 else array.astype(np.float32)
        tensors = _placed(how.tensors or ((f"call {turn.number}", array.shape),), array.size)
        bucket = Bucket(turn.bucket, (), tensors, 0, array.size)
        weight = 1 / group.size if op == "mean" else 1.0
        step = how.step if kept is not None else turn.call
        done = False
        if kept is not None:
            kept.enter(step)
        try:
            await OneLevel(group, self._ledger, compressor).total(flat, bucket, weight, step)
            done = True
        except NotFinite:
            flat.fill(np.nan)
        finally:
            if kept is not None:
                kept.leave(failed=not done)
        if flat is not array:
            array[...] = flat

    def memory(self, how: Compression) -> bytes:
        """Serialise all state under the key, for `restore`."""
        kept = self._kept.get(how.key)
        if kept is None or _is_later(how, kept):
            return b""
        kept.settle()
        return _packed(kept.spec, kept.compressor.state())

    def restore(self, how: Compression, memory: bytes) -> None:
        """Restore the state of another object under the key; reject that of another spec."""
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
        if kept is None or _is_later(how, kept):
            kept = self._kept[how.key] = _Kept(how, self._rank)
        if kept.spec != how.spec:
            raise UsageError(f"{how.key} was compressed by {kept.spec}, and cannot now be by {how.spec}")
        return kept

    def _is_first(self, how: Compression) -> bool:
        """Return whether no earlier call used the same compression, and the same key if it has one.

        This follows from the order of the calls alone, which is the same on all ranks."""
        way = how.key, how.spec, how.seed, how.instance
        first = way not in self._asked
        self._asked[way] = None
        return first

    def _memoryless(self, how: Compression) -> Compressor:
        made = self._plain.get((how.spec, how.seed))
        if made is None:
            check_compressor(how.spec, remembered=False)
            made = self._plain[how.spec, how.seed] = make(how.spec, seed=how.seed, rank=self._rank)
        return made


def _is_later(how: Compression, kept: _Kept) -> bool:
    """Return whether the kept state belongs to an earlier incarnation; reject a call of a past one."""
    if how.instance < kept.instance:
        raise UsageError(
            f"what is called {how.key} has begun anew since: give models that are trained side by side unlike names"
        )
    return how.instance > kept.instance


async def _agree(group: Group, how: Compression, bucket: int) -> None:
    """Raise if ranks use different compressions: their random numbers have to be the same."""
    word = hashlib.sha256(msgspec.json.encode((how.spec, how.seed, how.key, how.tensors))).digest()
    words = [array_of(each).tobytes() for each in await group.all_gather(np.frombuffer(word, np.uint8), bucket=bucket)]
    if unlike := [str(rank) for rank, theirs in enumerate(words) if theirs != words[0]]:
        raise UsageError(
            f"the compressor, its seed or the names of what it compresses ({how.key or how.spec}) are not the same on"
            f" rank 0 and on {', '.join(unlike)}"
        )


def without_debts(memory: bytes) -> bytes:
    """Return a memory without what belongs to its rank alone (residuals): the initial state of a rank that
    joins."""
    if not memory:
        return memory
    spec, state = _unpacked(memory)
    return _packed(spec, {name: array for name, array in state.items() if not name.startswith(OWN)})


def with_debts_of(memory: bytes, gone: bytes) -> bytes:
    """Return a memory to which the residuals of a removed rank are added."""
    if not memory or not gone:
        return memory or gone
    (spec, state), (their_spec, theirs) = _unpacked(memory), _unpacked(gone)
    if spec != their_spec:
        raise UsageError(f"what was remembered by {their_spec} is of no use to {spec}")
    for name, array in theirs.items():
        if name.startswith(OWN):
            state[name] = np.add(state[name], array) if name in state else array
    return _packed(spec, state)


def _packed(spec: str, state: CompressorStateDict) -> bytes:
    return msgspec.msgpack.encode((spec, {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in state.items()}))


def _unpacked(memory: bytes) -> tuple[str, CompressorStateDict]:
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


_by_group: WeakKeyDictionary[Group, CompressedCalls] = WeakKeyDictionary()


def compressing(group: Group) -> CompressedCalls:
    found = _by_group.get(group)
    if found is None:
        found = _by_group[group] = CompressedCalls(group)
    return found
