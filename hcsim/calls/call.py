"""What a torch program asks of a group, as data: one call, and the flat arrays that it reads and fills.

A call is carried out, by `begin` or `perform`, where the group is: in the program's own process, or, for a program on a
virtual machine, in the simulator's. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from hcsim.calls.compression import Compression, compressing
from hcsim.collectives.buffers import Array
from hcsim.collectives.group import Group
from hcsim.collectives.scheduler import Handle

ANY_SOURCE = -1


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One operation on one group."""

    operation: str
    """A key of `ARRAYS`."""
    op: str = "sum"
    """The reduction, if it is one."""
    root: int = 0
    """Whose data it is about: the root of a collective, or the other end of a message (`ANY_SOURCE`: whoever sends)."""
    tag: int = 0
    """Of a message."""
    counts: tuple[int, ...] = ()
    """Elements of each rank's part, where they are not all alike; of an all_to_all, what we send to each."""
    received: tuple[int, ...] = ()
    """Of an all_to_all: what we receive from each."""
    timeout_s: float | None = None
    """None: the group's."""
    compression: Compression | None = None
    """Of an all_reduce that is a sum or a mean: how its data travel. Of a memory: whose it is."""


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
"""What each operation does with the arrays it is given: reads it (i), fills it (o), both (x). Those that only the root
has come last and are left out elsewhere."""


def begin(group: Group, call: Call, arrays: Sequence[Array]) -> Handle[Any]:
    """Start it: mostly the group's own operation, with no task around it. `outcome` says what its result means."""
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
            return group.host.spawn(_remember(group, call.operation, call.compression, arrays), name=call.operation)
        case unknown:
            raise AssertionError(unknown)


def outcome(call: Call, result: object) -> int:
    """Who sent, for a message from anybody; how many bytes a memory has; otherwise nothing of interest."""
    return result if isinstance(result, int) else call.root


async def perform(group: Group, call: Call, arrays: Sequence[Array]) -> int:
    """Do it, to its outcome."""
    return outcome(call, await begin(group, call, arrays))


def _at_root(arrays: Sequence[Array]) -> Array | None:
    """What only the root has."""
    return arrays[1] if len(arrays) > 1 else None


async def _remember(group: Group, operation: str, of: Compression, arrays: Sequence[Array]) -> int:
    """What compression remembers, as bytes: their number, the bytes themselves, and back."""
    if operation == "restore":
        compressing(group).restore(of, arrays[0].tobytes())
        return arrays[0].size
    memory = compressing(group).memory(of)
    if operation == "memory":
        arrays[0][...] = np.frombuffer(memory, np.uint8)
    return len(memory)
