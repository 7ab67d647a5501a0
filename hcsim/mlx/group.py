"""The calls of `mlx.core.distributed` over hcsim's groups.

A call evaluates its input, carries out the collective at once, and returns the result: unlike MLX's own calls it is
not lazy. All ranks get the same bits, on real machines and in the simulator.

Gradients flow through `all_sum` and `all_gather` as MLX defines it: the gradient of a sum is passed on as it is, that
of a gathered array is this rank's part. The other calls refuse to be differentiated.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import msgspec

from hcsim.calls import GroupCall
from hcsim.collectives.buffers import Array
from hcsim.engine import EngineGroup, GroupSpec, PendingCall, chosen_engine, given_store
from hcsim.errors import ConfigError, HcsimError, UsageError
from hcsim.mlx.arrays import MlxArray, Writable, evaluate, read
from hcsim.runtime.address import address_at, split_address

_NAME = "mlx"
TIMEOUT_S = 600.0
"""How long a call waits for ranks that are alive. A lost rank ends it at once."""


class Group:
    """The processes of a program, or some of them."""

    def __init__(self, line: EngineGroup | None, name: str = _NAME, ranks: tuple[int, ...] = (0,)) -> None:
        """`line` is None for a program that runs alone; `ranks` are the members' ranks in the whole program."""
        self._line = line
        self._name = name
        self._ranks = ranks
        self._splits = 0
        if line is not None:
            atexit.register(self._flush_at_exit)
        self._sending: list[tuple[PendingCall, MlxArray]] = []
        """Messages that nobody may have received yet. The arrays are held, so that their memory stays as it is."""

    def rank(self) -> int:
        return 0 if self._line is None else self._line.rank

    def size(self) -> int:
        return 1 if self._line is None else self._line.size

    def split(self, color: int, key: int = -1) -> Group:
        """Return the group of the ranks that give the same color, in the order of their keys; a negative key stands
        for the rank."""
        mine = [color, key if key >= 0 else self.rank(), self.rank()]
        table = read(all_gather(mx.array([mine], mx.int32), group=self)).reshape(-1, 3).tolist()
        members = [
            rank for _, rank in sorted((their_key, rank) for theirs, their_key, rank in table if theirs == color)
        ]
        self._splits += 1
        ranks = tuple(self._ranks[member] for member in members)
        name = f"{self._name}/{self._splits}.{color}"
        if self._line is None:
            return Group(None, name, ranks)
        place = GroupSpec(name, members.index(self.rank()), len(members), TIMEOUT_S, init().line, ranks)
        return Group(_opened(place), name, ranks)

    @property
    def line(self) -> EngineGroup:
        if self._line is None:
            raise UsageError("a program that runs alone has nobody to send to or to receive from")
        return self._line

    def start(self, call: GroupCall, *arrays: Array) -> PendingCall:
        """Start a call on flat arrays, which belong to it until it ends. Raise the error of a message that could not
        be sent."""
        self._collect([sent[0] for sent in self._sending if sent[0].done()])
        return self.line.start(call, arrays)

    def send(self, array: MlxArray, to: int) -> None:
        """Start to send an array; the receiver may be late, or be sending to us first."""
        pending = self.start(GroupCall(operation="send", root=to), read(array))
        self._sending.append((pending, array))

    def flush(self) -> None:
        """Wait until all messages have been received."""
        self._collect([pending for pending, _ in self._sending])

    def _flush_at_exit(self) -> None:
        try:
            self.flush()
        except (HcsimError, KeyboardInterrupt) as error:
            reason = str(error) or "interrupted"
            print(f"hcsim: what this program sent has not been received: {reason}", file=sys.stderr)

    def _collect(self, ended: list[PendingCall]) -> None:
        self._sending = [sent for sent in self._sending if not any(sent[0] is pending for pending in ended)]
        for pending in ended:
            pending.wait(None)


_world: Group | None = None


def init(strict: bool = False, backend: str = "any", *, timeout_s: float = TIMEOUT_S, **_: object) -> Group:
    """Return the group of all ranks, and join it with the first call.

    Ranks are started by `hcsim run`, or by `mlx.launch` with a hostfile of MLX's ring. A program that was started
    otherwise is alone; with `strict` that is an error. The backend's name is of no consequence."""
    global _world
    if _world is None:
        line = _joined(os.environ, timeout_s)
        if line is None:
            if strict:
                raise ConfigError(
                    "this program runs alone: start it with `hcsim run`, or with `mlx.launch` and a hostfile, which"
                    " sets MLX_HOSTFILE and MLX_RANK"
                )
            return Group(None)
        _world = Group(line, _NAME, tuple(range(line.size)))
    return _world


def is_available(backend: str = "any") -> bool:
    """Return True: hcsim's groups take the place of every backend."""
    return True


def all_sum(x: MlxArray, *, group: Group | None = None, stream: object = None) -> MlxArray:
    """Return the sum of the arrays of all ranks."""
    return _differentiable(x, lambda given: _reduced(given, "sum", whole(group)), lambda primal, cotangent: cotangent)


def all_max(x: MlxArray, *, group: Group | None = None, stream: object = None) -> MlxArray:
    return _differentiable(x, lambda given: _reduced(given, "max", whole(group)), _no_gradient("all_max"))


def all_min(x: MlxArray, *, group: Group | None = None, stream: object = None) -> MlxArray:
    return _differentiable(x, lambda given: _reduced(given, "min", whole(group)), _no_gradient("all_min"))


def all_gather(x: MlxArray, *, group: Group | None = None, stream: object = None) -> MlxArray:
    """Return the arrays of all ranks, concatenated along the first axis."""
    among = whole(group)

    def ours(primal: MlxArray, cotangent: MlxArray) -> MlxArray:
        if not primal.ndim:
            return cotangent[among.rank()]
        rows = primal.shape[0]
        return cotangent[among.rank() * rows : (among.rank() + 1) * rows]

    return _differentiable(x, lambda given: _gathered(given, among), ours)


def sum_scatter(x: MlxArray, *, group: Group | None = None, stream: object = None) -> MlxArray:
    """Return this rank's part, along the first axis, of the sum of the arrays of all ranks."""
    return _differentiable(x, lambda given: _scattered(given, whole(group)), _no_gradient("sum_scatter"))


def send(x: MlxArray, dst: int, *, group: Group | None = None, stream: object = None) -> MlxArray:
    """Send the array to another rank, and return it. The call does not wait for the receiver; the program does, at
    its end."""
    among = whole(group)
    to = _peer(dst, among)

    def sent(given: MlxArray) -> MlxArray:
        among.send(given, to)
        return given

    return _differentiable(x, sent, _no_gradient("send"))


def recv(shape: Sequence[int], dtype: Any, src: int, *, group: Group | None = None, stream: object = None) -> MlxArray:
    """Return the array that a rank sends, which must have this shape and type."""
    among = whole(group)
    into = Writable.empty(prod(shape), dtype)
    among.start(GroupCall(operation="recv", root=_peer(src, among)), into.flat).wait(None)
    return into.take(tuple(shape))


def recv_like(x: MlxArray, src: int, *, group: Group | None = None, stream: object = None) -> MlxArray:
    return recv(x.shape, x.dtype, src, group=group)


def _joined(environment: Mapping[str, str], timeout_s: float) -> EngineGroup | None:
    """Join the group that the environment describes; None: there is none."""
    if chosen_engine() is not None or given_store() is not None:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return _opened(GroupSpec(_NAME, rank, size, timeout_s, None, tuple(range(size))))
    if "MLX_HOSTFILE" in environment and "MLX_RANK" in environment:
        return _joined_at(environment["MLX_HOSTFILE"], environment["MLX_RANK"], timeout_s)
    return None


def _opened(place: GroupSpec) -> EngineGroup:
    engine, store = chosen_engine(), given_store()
    if engine is None:
        from hcsim.engine.local import local_engine  # a simulated rank has no real network

        engine = local_engine()
    return engine.open(place, store or _NoStore())


class _NoStore:
    """Stands for the store where nobody meets at one: a simulator, and a part of a group, know all addresses."""

    def set(self, key: str, value: str, /) -> None:
        raise AssertionError(key)

    def get(self, key: str, /) -> bytes:
        raise AssertionError(key)

    def add(self, key: str, amount: int, /) -> int:
        raise AssertionError(key)

    def delete_key(self, key: str, /) -> bool:
        raise AssertionError(key)


def _joined_at(hostfile: str, given_rank: str, timeout_s: float) -> EngineGroup:
    """Join the ranks of a hostfile: for each rank a list of its addresses, which share a port here."""
    from hcsim.engine.local import local_engine

    addresses = read_hostfile(hostfile)
    if not given_rank.isdecimal() or int(given_rank) >= len(addresses):
        raise ConfigError(f"MLX_RANK={given_rank}: {hostfile} has the ranks 0 to {len(addresses) - 1}")
    rank, size = int(given_rank), len(addresses)
    others = [host for hosts, _ in addresses[:rank] + addresses[rank + 1 :] for host in hosts]
    local = local_engine(addresses[rank][0], others)
    place = GroupSpec(_NAME, rank, size, timeout_s, None, tuple(range(size)))
    return local.open_at(place, tuple(address_at(hosts, port) for hosts, port in addresses))


def read_hostfile(hostfile: str) -> list[tuple[list[str], int]]:
    """Read the hosts and the port of each rank."""
    try:
        found = [
            [split_address(address) for address in each]
            for each in msgspec.json.decode(Path(hostfile).read_bytes(), type=list[list[str]])
        ]
        return [([host for host, _ in each], each[0][1]) for each in found]
    except (OSError, msgspec.DecodeError, ConfigError, IndexError) as error:
        raise ConfigError(
            f'{hostfile}: a hostfile is a list of lists of addresses, as [["10.0.0.1:5000"], …]: {error}'
        ) from None


def whole(group: Group | None) -> Group:
    if group is not None and not isinstance(group, Group):
        raise UsageError(f"a group of hcsim.mlx is needed here, from hcsim.mlx.init(), not {type(group).__name__}")
    return init() if group is None else group


def _peer(rank: int, group: Group) -> int:
    if not 0 <= rank < group.size() or rank == group.rank():
        raise UsageError(f"rank {group.rank()} of {group.size()} cannot exchange messages with rank {rank}")
    return rank


def _reduced(x: MlxArray, op: str, group: Group) -> MlxArray:
    if group.size() == 1:
        return x
    total = Writable.copy(x)
    group.start(GroupCall(operation="all_reduce", op=op), total.flat).wait(None)
    return total.take(x.shape)


def _gathered(x: MlxArray, group: Group) -> MlxArray:
    if group.size() == 1:
        return x
    shape = (group.size(), *x.shape[1:]) if not x.ndim else (group.size() * x.shape[0], *x.shape[1:])
    into = Writable.empty(group.size() * x.size, x.dtype)
    group.start(GroupCall(operation="all_gather"), read(x), into.flat).wait(None)
    return into.take(shape)


def _scattered(x: MlxArray, group: Group) -> MlxArray:
    size = group.size()
    if not x.ndim or x.shape[0] % size:
        raise UsageError(f"an array of shape {x.shape} cannot be cut into {size} equal parts along its first axis")
    if size == 1:
        return x
    into = Writable.empty(x.size // size, x.dtype)
    group.start(GroupCall(operation="reduce_scatter"), read(x), into.flat).wait(None)
    return into.take((x.shape[0] // size, *x.shape[1:]))


def _differentiable(
    x: MlxArray, call: Callable[[MlxArray], MlxArray], pull_back: Callable[[MlxArray, MlxArray], MlxArray]
) -> MlxArray:
    """Return the result of the call, through which gradients flow as `pull_back(x, cotangent)` says."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def carried_out(given: MlxArray) -> MlxArray:
        evaluate(given)
        return call(given)

    @carried_out.vjp  # type: ignore[untyped-decorator]
    def back(primal: MlxArray, cotangent: MlxArray, _: MlxArray) -> MlxArray:
        return pull_back(primal, cotangent)

    return carried_out(x)


def _no_gradient(name: str) -> Callable[[MlxArray, MlxArray], MlxArray]:
    def refuse(primal: MlxArray, cotangent: MlxArray) -> NoReturn:
        raise UsageError(f"{name} has no gradient: pass its input through mx.stop_gradient, or call it outside mx.grad")

    return refuse
