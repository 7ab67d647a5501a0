"""Probes: ways to call. Asynchronous works and futures, messages, several calls in one, objects, barriers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.torch_backend.probing import CALL_LIMIT, PROBES, Probe, blank, combined, everybody, of_rank, probe, same

FLOAT = torch.float32


def _total() -> Tensor:
    return combined("SUM", FLOAT, everybody())


def _asynchronous(name: str) -> tuple[Any, Callable[[], None]]:
    """A collective that has begun, and a look at its result."""
    us, size = dist.get_rank(), dist.get_world_size()
    ours, target, whole = of_rank(us), blank(), blank(length=5 * size)
    parts = [blank() for _ in everybody()]
    everything = torch.cat([of_rank(rank) for rank in everybody()])
    match name:
        case "all_reduce":
            return dist.all_reduce(ours, async_op=True), lambda: same(ours, _total())
        case "broadcast":
            return dist.broadcast(ours, 1, async_op=True), lambda: same(ours, of_rank(1))
        case "reduce":
            return dist.reduce(ours, us * 0, async_op=True), lambda: same(ours, _total()) if us == 0 else None
        case "all_gather":
            return dist.all_gather(parts, ours, async_op=True), lambda: same(torch.cat(parts), everything)
        case "all_gather_single":
            return dist.all_gather_single(whole, ours, async_op=True), lambda: same(whole, everything)
        case "reduce_scatter_single":
            work = dist.reduce_scatter_single(target, ours.repeat(size), async_op=True)
            return work, lambda: same(target, _total())
        case "all_to_all_single":
            return dist.all_to_all_single(whole, ours.repeat(size), async_op=True), lambda: same(whole, everything)
        case "barrier":
            return dist.barrier(async_op=True), lambda: None
        case unknown:
            raise AssertionError(unknown)


ASYNCHRONOUS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "reduce_scatter_single",
    "all_to_all_single", "barrier",
)  # fmt: skip


def _waited(name: str) -> None:
    work, look = _asynchronous(name)
    assert work.wait()
    look()


def _future(name: str) -> None:
    work, look = _asynchronous(name)
    work.get_future().wait()
    look()


PROBES += [Probe("`async_op`, `wait`", name, functools.partial(_waited, name)) for name in ASYNCHRONOUS]
PROBES += [Probe("`async_op`, `get_future`", name, functools.partial(_future, name)) for name in ASYNCHRONOUS]


@probe("futures", "then")
def _then() -> None:
    future = (
        dist.all_reduce(of_rank(dist.get_rank()), async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    )
    same(future.wait(), _total() * 2)


@probe("futures", "a collective in a callback")
def _nested() -> None:
    def again(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        tensor = done.value()[0]
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    future = dist.all_reduce(of_rank(dist.get_rank()), async_op=True).get_future().then(again)
    same(future.wait(), _total() * dist.get_world_size())


@probe("futures", "collect_all")
def _collected() -> None:
    tensors = [of_rank(dist.get_rank()) for _ in range(4)]
    torch.futures.collect_all([dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]).wait()
    for tensor in tensors:
        same(tensor, _total())


@probe("many calls at once", "all_reduce")
def _many() -> None:
    tensors = [of_rank(dist.get_rank(), length=1 + i) for i in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for tensor in tensors:
        same(tensor, combined("SUM", FLOAT, everybody(), tensor.numel()))


# Messages.


@probe("messages", "tags in another order")
def _tags() -> None:
    if dist.get_rank() == 0:
        works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (7, 70_000, 8)]
        for work in works:
            work.wait()
    elif dist.get_rank() == 1:
        for tag in (8, 7, 70_000):
            tensor = torch.zeros(1)
            dist.recv(tensor, 0, tag=tag)
            assert tensor.item() == tag


@probe("messages", "from anybody")
def _any_source() -> None:
    if dist.get_rank() > 0:
        dist.send(of_rank(dist.get_rank()), 0, tag=3)
        return
    seen = []
    for _ in everybody()[1:]:
        tensor = blank()
        seen.append(dist.recv(tensor, tag=3))
        same(tensor, of_rank(seen[-1]))
    assert sorted(seen) == list(everybody()[1:])


@probe("messages", "isend, irecv")
def _ring() -> None:
    us, size = dist.get_rank(), dist.get_world_size()
    tensor = blank()
    receiving = dist.irecv(tensor, (us - 1) % size)
    sending = dist.isend(of_rank(us), (us + 1) % size)
    sending.wait()
    receiving.wait()
    same(tensor, of_rank((us - 1) % size))


@probe("messages", "batch_isend_irecv")
def _batch() -> None:
    us, size = dist.get_rank(), dist.get_world_size()
    received = {peer: blank() for peer in everybody() if peer != us}
    operations = [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in received.items()]
    operations += [dist.P2POp(dist.isend, of_rank(us), (us + step) % size) for step in range(1, size)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for peer, tensor in received.items():
        same(tensor, of_rank(peer))


@probe("messages", "large, both ways")
def _large() -> None:
    us = dist.get_rank()
    if us > 1:
        return
    tensor = torch.zeros(1_000_000)
    works = [dist.isend(torch.full((1_000_000,), float(us)), 1 - us), dist.irecv(tensor, 1 - us)]
    for work in works:
        work.wait()
    assert torch.all(tensor == 1 - us)


# Several calls in one.


@probe("`_coalescing_manager`", "all_reduce")
def _coalesced_all_reduce() -> None:
    tensors = [of_rank(dist.get_rank(), length=length) for length in (5, 3)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        same(tensor, combined("SUM", FLOAT, everybody(), tensor.numel()))


@probe("`_coalescing_manager`", "asynchronous")
def _coalesced_asynchronous() -> None:
    tensors = [of_rank(dist.get_rank(), length=length) for length in (5, 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in tensors:
        same(tensor, combined("SUM", FLOAT, everybody(), tensor.numel()))


@probe("`_coalescing_manager`", "all_gather_single")
def _coalesced_all_gather() -> None:
    outputs = [blank(length=5 * dist.get_world_size()) for _ in range(2)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.all_gather_single(output, of_rank(dist.get_rank()))
    for output in outputs:
        same(output, torch.cat([of_rank(rank) for rank in everybody()]))


@probe("`_coalescing_manager`", "reduce_scatter_single")
def _coalesced_reduce_scatter() -> None:
    outputs = [blank() for _ in range(2)]
    with dist._coalescing_manager():
        for output in outputs:
            dist.reduce_scatter_single(output, of_rank(dist.get_rank()).repeat(dist.get_world_size()))
    for output in outputs:
        same(output, _total())


@probe("`_coalescing_manager`", "with a device")
def _coalesced_by_device() -> None:
    tensors = [of_rank(dist.get_rank()) for _ in range(2)]
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(tensors[0], 0)
        dist.broadcast(tensors[1], 1)
    same(tensors[0], of_rank(0))
    same(tensors[1], of_rank(1))


@probe("`all_gather_coalesced`")
def _all_gather_coalesced() -> None:
    outputs = [[blank(), blank(length=3)] for _ in everybody()]
    us = dist.get_rank()
    dist.all_gather_coalesced(outputs, [of_rank(us), of_rank(us, length=3)])
    for rank, (first, second) in enumerate(outputs):
        same(first, of_rank(rank))
        same(second, of_rank(rank, length=3))


# Objects.


def _thing(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "x" * (10 + rank), "none": None}


@probe("objects", "all_gather_object")
def _all_gather_object() -> None:
    things = [None for _ in everybody()]
    dist.all_gather_object(things, _thing(dist.get_rank()))
    assert things == [_thing(rank) for rank in everybody()]


@probe("objects", "gather_object")
def _gather_object() -> None:
    things = [None for _ in everybody()] if dist.get_rank() == 1 else None
    dist.gather_object(_thing(dist.get_rank()), things, 1)
    assert things is None or things == [_thing(rank) for rank in everybody()]


@probe("objects", "broadcast_object_list")
def _broadcast_object_list() -> None:
    things = [_thing(1), "two"] if dist.get_rank() == 1 else [None, None]
    dist.broadcast_object_list(things, 1)
    assert things == [_thing(1), "two"]


@probe("objects", "scatter_object_list")
def _scatter_object_list() -> None:
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [_thing(rank) for rank in everybody()] if dist.get_rank() == 0 else None, 0)
    assert mine == [_thing(dist.get_rank())]


@probe("objects", "send_object_list")
def _send_object_list() -> None:
    if dist.get_rank() == 0:
        dist.send_object_list([_thing(0), 3], 1)
    elif dist.get_rank() == 1:
        things = [None, None]
        dist.recv_object_list(things, 0)
        assert things == [_thing(0), 3]


# Barriers.


@probe("`barrier`")
def _barrier() -> None:
    dist.barrier()


@probe("`monitored_barrier`", "of the group")
def _monitored_by_group() -> None:
    dist.group.WORLD.monitored_barrier(CALL_LIMIT, wait_all_ranks=True)


@probe("`monitored_barrier`", "of torch.distributed")
def _monitored() -> None:
    dist.monitored_barrier(timeout=CALL_LIMIT)


@probe("timeouts", "of wait")
def _wait_with_timeout() -> None:
    tensor = of_rank(dist.get_rank())
    assert dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=20))
    same(tensor, _total())
