"""Probes: tensors of unusual shapes and layouts, and parts that are not all alike."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tests.torch_backend.probing import PROBES, Probe, combined, everybody, of_rank, probe, same

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "0-dim": lambda flat: flat[0].clone(),
    "empty": lambda flat: flat[:0].clone(),
    "matrix": lambda flat: flat.reshape(2, 3).clone(),
    "transposed": lambda flat: flat.reshape(3, 2).clone().t(),
    "strided": lambda flat: flat.repeat_interleave(2)[::2],
}


def _ours(shape: str, rank: int) -> Tensor:
    return SHAPES[shape](of_rank(rank, length=6))


def _all_reduce(shape: str) -> None:
    tensor = _ours(shape, dist.get_rank())
    dist.all_reduce(tensor)
    same(tensor, SHAPES[shape](combined("SUM", torch.float32, everybody(), 6)))


def _broadcast(shape: str) -> None:
    tensor = _ours(shape, dist.get_rank())
    dist.broadcast(tensor, 1)
    same(tensor, _ours(shape, 1))


def _all_gather(shape: str) -> None:
    outputs = [torch.zeros_like(_ours(shape, 0)) for _ in everybody()]
    dist.all_gather(outputs, _ours(shape, dist.get_rank()))
    for rank, output in enumerate(outputs):
        same(output, _ours(shape, rank))


def _gather(shape: str) -> None:
    outputs = [torch.zeros_like(_ours(shape, 0)) for _ in everybody()] if dist.get_rank() == 1 else None
    dist.gather(_ours(shape, dist.get_rank()), outputs, 1)
    for rank, output in enumerate(outputs or ()):
        same(output, _ours(shape, rank))


def _scatter(shape: str) -> None:
    output = torch.zeros_like(_ours(shape, 0))
    parts = [_ours(shape, rank) for rank in everybody()] if dist.get_rank() == 0 else None
    dist.scatter(output, parts, 0)
    same(output, _ours(shape, dist.get_rank()))


def _reduce_scatter(shape: str) -> None:
    output = torch.zeros_like(_ours(shape, 0))
    dist.reduce_scatter(output, [_ours(shape, dist.get_rank()) for _ in everybody()])
    same(output, SHAPES[shape](combined("SUM", torch.float32, everybody(), 6)))


def _all_to_all(shape: str) -> None:
    outputs = [torch.zeros_like(_ours(shape, 0)) for _ in everybody()]
    dist.all_to_all(outputs, [_ours(shape, dist.get_rank()) for _ in everybody()])
    for rank, output in enumerate(outputs):
        same(output, _ours(shape, rank))


def _message(shape: str) -> None:
    if dist.get_rank() == 0:
        dist.send(_ours(shape, 0).contiguous(), 1)
    elif dist.get_rank() == 1:
        tensor = torch.zeros_like(_ours(shape, 0)).contiguous()
        dist.recv(tensor, 0)
        same(tensor, _ours(shape, 0))


for _name, _act in {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send": _message,
}.items():
    PROBES += [Probe(f"shapes, `{_name}`", shape, functools.partial(_act, shape)) for shape in SHAPES]


@probe("uneven parts", "all_gather")
def _uneven_gather() -> None:
    outputs = [torch.zeros(rank + 1) for rank in everybody()]
    dist.all_gather(outputs, of_rank(dist.get_rank(), length=dist.get_rank() + 1))
    for rank, output in enumerate(outputs):
        same(output, of_rank(rank, length=rank + 1))


@probe("uneven parts", "reduce_scatter")
def _uneven_reduce_scatter() -> None:
    us = dist.get_rank()
    output = torch.zeros(us + 1)
    dist.reduce_scatter(output, [of_rank(us, length=part + 1) for part in everybody()])
    same(output, combined("SUM", torch.float32, everybody(), us + 1))


@probe("uneven parts", "all_to_all")
def _uneven_all_to_all() -> None:
    us = dist.get_rank()
    outputs = [torch.zeros(rank + us) for rank in everybody()]
    dist.all_to_all(outputs, [of_rank(us, length=rank + us) for rank in everybody()])
    for rank, output in enumerate(outputs):
        same(output, of_rank(rank, length=rank + us))


@probe("uneven parts", "all_to_all_single")
def _uneven_all_to_all_single() -> None:
    us = dist.get_rank()
    rows = [rank + us for rank in everybody()]
    output = torch.zeros(sum(rows), 2)
    source = torch.cat([of_rank(us, length=2 * count).reshape(-1, 2) for count in rows])
    dist.all_to_all_single(output, source, rows, rows)
    same(output, torch.cat([of_rank(rank, length=2 * (rank + us)).reshape(-1, 2) for rank in everybody()]))


@probe("parameters that need a gradient", "broadcast")
def _parameters() -> None:
    weight = torch.nn.Parameter(of_rank(dist.get_rank()))
    dist.broadcast(weight.data, 0)
    with torch.no_grad():
        dist.all_reduce(weight)
    same(weight.data, of_rank(0) * dist.get_world_size())


@probe("sparse `all_reduce`", "coo")
def _sparse() -> None:
    us = dist.get_rank()
    indices = torch.tensor([[us, us + 1]])
    tensor = torch.sparse_coo_tensor(indices, torch.ones(2, 3) * (us + 1), (dist.get_world_size() + 1, 3))
    dist.all_reduce(tensor)
    expected = torch.zeros(dist.get_world_size() + 1, 3)
    for rank in everybody():
        expected[rank : rank + 2] += rank + 1
    same(tensor.to_dense(), expected)


@probe("sparse `all_reduce`", "nothing of ours")
def _sparse_empty() -> None:
    us = dist.get_rank()
    indices, values = (torch.tensor([[2]]), torch.ones(1)) if us == 0 else (torch.zeros(1, 0).long(), torch.ones(0))
    tensor = torch.sparse_coo_tensor(indices, values, (4,))
    dist.all_reduce(tensor)
    same(tensor.to_dense(), torch.tensor([0.0, 0.0, 1.0, 0.0]))
