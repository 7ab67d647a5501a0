"""Probes: groups of some of the ranks, meshes, what torch builds on groups, and how the first group is made."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import init_device_mesh

from tests.torch_backend.probing import CALL_LIMIT, PROBES, Probe, combined, everybody, of_rank, probe, same
from tests.torch_backend.ranks import Meeting

FLOAT = torch.float32


def _sum_in(group: dist.ProcessGroup, members: list[int]) -> None:
    tensor = of_rank(dist.get_rank())
    dist.all_reduce(tensor, group=group)
    same(tensor, combined("SUM", FLOAT, members))


@probe("groups", "only its members call")
def _local_synchronization() -> None:
    # First of all: torch numbers such a group by how many groups this process is in.
    if dist.get_rank() < 2:
        _sum_in(dist.new_group([0, 1], use_local_synchronization=True), [0, 1])


@probe("groups", "new_group")
def _new_group() -> None:
    last = dist.get_world_size() - 1
    group = dist.new_group([0, last])
    if dist.get_rank() in (0, last):
        _sum_in(group, [0, last])
        tensor = of_rank(dist.get_rank())
        dist.broadcast(tensor, last, group=group)
        same(tensor, of_rank(last))
    dist.barrier()


@probe("groups", "by ranks of the group")
def _by_group_rank() -> None:
    group = dist.new_group([1, 0])
    if dist.get_rank() < 2:
        tensor = of_rank(dist.get_rank())
        dist.broadcast(tensor, group_src=1, group=group)
        same(tensor, of_rank(dist.get_global_rank(group, 1)))
        if dist.get_group_rank(group, dist.get_rank()) == 0:
            dist.send(of_rank(4), group_dst=1, group=group)
        else:
            assert dist.recv(tensor, group_src=0, group=group) == dist.get_global_rank(group, 0)
            same(tensor, of_rank(4))


@probe("groups", "of all, beside the first")
def _beside() -> None:
    groups = [dist.new_group() for _ in range(2)]
    tensors = [of_rank(dist.get_rank()) for _ in groups]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    for work, tensor in zip(works, tensors, strict=True):
        work.wait()
        same(tensor, combined("SUM", FLOAT, everybody()))


@probe("groups", "new_subgroups")
def _subgroups() -> None:
    group, _ = dist.new_subgroups_by_enumeration([[rank] for rank in everybody()])
    _sum_in(group, [dist.get_rank()])
    group, _ = dist.new_subgroups(dist.get_world_size())
    _sum_in(group, list(everybody()))


@probe("groups", "destroyed, the rest goes on")
def _destroyed() -> None:
    group = dist.new_group(list(everybody()))
    _sum_in(group, list(everybody()))
    dist.destroy_process_group(group)
    _sum_in(dist.group.WORLD, list(everybody()))
    _sum_in(dist.new_group(list(everybody())), list(everybody()))


@probe("groups", "gloo beside it")
def _other_backend() -> None:
    _sum_in(dist.new_group(backend="gloo"), list(everybody()))
    _sum_in(dist.group.WORLD, list(everybody()))


@probe("groups", "a timeout of their own")
def _timeout() -> None:
    _sum_in(dist.new_group(timeout=timedelta(seconds=20)), list(everybody()))


# Functional collectives.


@probe("functional collectives", "all_reduce")
def _functional_all_reduce() -> None:
    same(
        functional.all_reduce(of_rank(dist.get_rank()), "sum", dist.group.WORLD) + 0,
        combined("SUM", FLOAT, everybody()),
    )
    same(
        functional.all_reduce(of_rank(dist.get_rank()), "avg", dist.group.WORLD) + 0,
        combined("AVG", FLOAT, everybody()),
    )


@probe("functional collectives", "all_gather_tensor")
def _functional_all_gather() -> None:
    whole = functional.all_gather_tensor(of_rank(dist.get_rank()), 0, dist.group.WORLD)
    same(whole + 0, torch.cat([of_rank(rank) for rank in everybody()]))


@probe("functional collectives", "reduce_scatter_tensor")
def _functional_reduce_scatter() -> None:
    part = functional.reduce_scatter_tensor(
        of_rank(dist.get_rank()).repeat(dist.get_world_size()), "sum", 0, dist.group.WORLD
    )
    same(part + 0, combined("SUM", FLOAT, everybody()))


@probe("functional collectives", "all_to_all_single")
def _functional_all_to_all() -> None:
    us, size = dist.get_rank(), dist.get_world_size()
    whole = functional.all_to_all_single(of_rank(us).repeat(size), [5] * size, [5] * size, dist.group.WORLD)
    same(whole + 0, torch.cat([of_rank(rank) for rank in everybody()]))


@probe("functional collectives", "broadcast")
def _functional_broadcast() -> None:
    same(functional.broadcast(of_rank(dist.get_rank()), 1, dist.group.WORLD) + 0, of_rank(1))


@probe("functional collectives", "coalesced")
def _functional_coalesced() -> None:
    us = dist.get_rank()
    sums = functional.all_reduce_coalesced([of_rank(us), of_rank(us, length=3)], "sum", dist.group.WORLD)
    same(sums[1] + 0, combined("SUM", FLOAT, everybody(), 3))
    wholes = functional.all_gather_into_tensor_coalesced([of_rank(us), of_rank(us, length=3)], dist.group.WORLD)
    same(wholes[1] + 0, torch.cat([of_rank(rank, length=3) for rank in everybody()]))
    parts = functional.reduce_scatter_tensor_coalesced(
        [of_rank(us).repeat(dist.get_world_size())], "sum", [0], dist.group.WORLD
    )
    same(parts[0] + 0, combined("SUM", FLOAT, everybody()))


@probe("functional collectives", "permute_tensor")
def _permute() -> None:
    us, size = dist.get_rank(), dist.get_world_size()
    moved = functional.permute_tensor(of_rank(us), [(rank + 1) % size for rank in everybody()], dist.group.WORLD)
    same(moved + 0, of_rank((us - 1) % size))


@probe("functional collectives", "with gradients")
def _functional_autograd() -> None:
    tensor = of_rank(dist.get_rank()).requires_grad_()
    whole = functional.all_gather_tensor_autograd(tensor, 0, dist.group.WORLD)
    (whole * (dist.get_rank() + 1)).sum().backward()
    same(tensor.grad, torch.full((5,), float(sum(rank + 1 for rank in everybody()))))


@probe("`torch.distributed.nn`", "all_reduce")
def _differentiable_all_reduce() -> None:
    tensor = of_rank(dist.get_rank()).requires_grad_()
    (differentiable.all_reduce(tensor) * (dist.get_rank() + 1)).sum().backward()
    same(tensor.grad, torch.full((5,), float(sum(rank + 1 for rank in everybody()))))


@probe("`torch.distributed.nn`", "all_gather")
def _differentiable_all_gather() -> None:
    us = dist.get_rank()
    tensor = of_rank(us).requires_grad_()
    sum((part * (us + 1)).sum() for part in differentiable.all_gather(tensor)).backward()
    same(tensor.grad, torch.full((5,), float(sum(rank + 1 for rank in everybody()))))


@probe("`torch.distributed.nn`", "all_to_all_single")
def _differentiable_all_to_all() -> None:
    tensor = of_rank(dist.get_rank()).repeat(dist.get_world_size()).requires_grad_()
    output = differentiable.all_to_all_single(torch.empty_like(tensor), tensor)
    (output * (dist.get_rank() + 1)).sum().backward()
    same(tensor.grad, torch.cat([torch.full((5,), float(rank + 1)) for rank in everybody()]))


# Meshes.


@probe("`DeviceMesh`", "1-d")
def _mesh() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    _sum_in(mesh.get_group("data"), list(everybody()))


@probe("`DeviceMesh`", "2-d")
def _mesh_of_two() -> None:
    size = dist.get_world_size()
    columns = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size // columns, columns), mesh_dim_names=("data", "model"))
    _sum_in(mesh["data"].get_group(), [rank for rank in everybody() if rank % columns == dist.get_rank() % columns])
    _sum_in(mesh["model"].get_group(), [rank for rank in everybody() if rank // columns == dist.get_rank() // columns])


@probe("`DTensor`", "redistribute")
def _redistribute() -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # two seconds

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(35.0).reshape(5, 7)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    same(rows.full_tensor(), whole)
    columns = rows.redistribute(mesh, [Shard(1)])
    same(columns.to_local(), whole.tensor_split(_splits(7), 1)[dist.get_rank()])
    same(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
    parts = DTensor.from_local(whole * (dist.get_rank() + 1), mesh, [Partial()])
    same(parts.redistribute(mesh, [Replicate()]).to_local(), whole * sum(rank + 1 for rank in everybody()))


def _splits(length: int) -> list[int]:
    """Where torch.chunk cuts."""
    step = -(-length // dist.get_world_size())
    return [min(length, step * (rank + 1)) for rank in everybody()[:-1]]


@probe("`DTensor`", "matmul")
def _matmul() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    left, right = torch.arange(24.0).reshape(2, 12), torch.arange(36.0).reshape(12, 3)
    product = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    same(product.full_tensor(), left @ right)


# How the first group is made.


def _first(us: Meeting, **how: object) -> None:
    dist.init_process_group(us.backend, timeout=CALL_LIMIT, **how)
    try:
        _sum_in(dist.group.WORLD, list(range(us.size)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _from_file(us: Meeting) -> None:
    _first(us, init_method=f"file://{us.file}-first", rank=us.rank, world_size=us.size)


def _from_store(us: Meeting) -> None:
    _first(us, store=dist.FileStore(f"{us.file}-second", us.size), rank=us.rank, world_size=us.size)


def _agreed_port(us: Meeting, name: str) -> int:
    store = dist.FileStore(f"{us.file}-port", us.size)
    if us.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            store.set(name, str(free.getsockname()[1]))
    return int(store.get(name))


def _from_tcp(us: Meeting) -> None:
    _first(us, init_method=f"tcp://127.0.0.1:{_agreed_port(us, 'tcp')}", rank=us.rank, world_size=us.size)


def _from_environment(us: Meeting) -> None:
    said = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _agreed_port(us, "env"), "RANK": us.rank, "WORLD_SIZE": us.size}
    os.environ.update({name: str(value) for name, value in said.items()})
    try:
        _first(us)
    finally:
        for name in said:
            del os.environ[name]


def _by_device(us: Meeting) -> None:
    _first(
        Meeting(us.rank, us.size, f"cpu:{us.backend}", us.file),
        init_method=f"file://{us.file}-third",
        rank=us.rank,
        world_size=us.size,
    )


for _name, _act in {
    "env://": _from_environment,
    "tcp://": _from_tcp,
    "file://": _from_file,
    "a store": _from_store,
    "cpu:backend": _by_device,
}.items():
    PROBES.append(Probe("`init_process_group`", _name, _act, own_groups=True))  # type: ignore[arg-type]
del _name, _act
