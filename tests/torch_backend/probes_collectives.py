"""Probes: every collective, by dtype and reduction."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from tests.torch_backend.probing import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    LENGTH,
    MOVED,
    REDUCED,
    blank,
    combined,
    everybody,
    for_each,
    of_rank,
    same,
)

ORDERED = (*FLOATS, *INTEGERS, torch.bool)
OPS = {
    "SUM": REDUCED,
    "AVG": (*FLOATS, *COMPLEX),
    "PRODUCT": ORDERED,
    "MIN": ORDERED,
    "MAX": ORDERED,
    "BAND": (*INTEGERS, torch.bool),
    "BOR": (*INTEGERS, torch.bool),
    "BXOR": (*INTEGERS, torch.bool),
}


def _all_reduce(op: str, dtype: torch.dtype) -> None:
    tensor = of_rank(dist.get_rank(), dtype)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    same(tensor, combined(op, dtype, everybody()))


for _op, _dtypes in OPS.items():
    for_each(f"`all_reduce`, {_op}", _dtypes)(functools.partial(_all_reduce, _op))


@for_each("`all_reduce`, PREMUL_SUM", FLOATS)
def _scaled(dtype: torch.dtype) -> None:
    tensor = of_rank(dist.get_rank(), dtype)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    same(tensor, combined("SUM", dtype, everybody()) * 0.5)


@for_each("`all_reduce_coalesced`", REDUCED)
def _coalesced(dtype: torch.dtype) -> None:
    tensors = [of_rank(dist.get_rank(), dtype), of_rank(dist.get_rank(), dtype, 3)]
    dist.all_reduce_coalesced(tensors)
    for tensor in tensors:
        same(tensor, combined("SUM", dtype, everybody(), tensor.numel()))


@for_each("`reduce`", REDUCED)
def _reduce(dtype: torch.dtype) -> None:
    for root in everybody():
        tensor = of_rank(dist.get_rank(), dtype)
        dist.reduce(tensor, root)
        if dist.get_rank() == root:
            same(tensor, combined("SUM", dtype, everybody()))


@for_each("`reduce_scatter`", REDUCED)
def _reduce_scatter(dtype: torch.dtype) -> None:
    output = blank(dtype)
    dist.reduce_scatter(output, [of_rank(dist.get_rank() + part, dtype) for part in everybody()])
    same(output, combined("SUM", dtype, [rank + dist.get_rank() for rank in everybody()]))


def _reduce_scatter_single(op: str, dtype: torch.dtype) -> None:
    output = blank(dtype)
    source = torch.cat([of_rank(dist.get_rank() + part, dtype) for part in everybody()])
    before = source.clone()
    dist.reduce_scatter_single(output, source, getattr(dist.ReduceOp, op))
    same(output, combined(op, dtype, [rank + dist.get_rank() for rank in everybody()]))
    same(source, before)


for _op in ("SUM", "AVG", "MAX"):
    for_each(f"`reduce_scatter_single`, {_op}", OPS[_op])(functools.partial(_reduce_scatter_single, _op))


@for_each("`broadcast`", MOVED)
def _broadcast(dtype: torch.dtype) -> None:
    for root in everybody():
        tensor = of_rank(root, dtype) if dist.get_rank() == root else blank(dtype)
        dist.broadcast(tensor, root)
        same(tensor, of_rank(root, dtype))


@for_each("`all_gather`", MOVED)
def _all_gather(dtype: torch.dtype) -> None:
    outputs = [blank(dtype) for _ in everybody()]
    dist.all_gather(outputs, of_rank(dist.get_rank(), dtype))
    for rank, output in enumerate(outputs):
        same(output, of_rank(rank, dtype))


@for_each("`all_gather_single`", MOVED)
def _all_gather_single(dtype: torch.dtype) -> None:
    output = blank(dtype, LENGTH * dist.get_world_size())
    dist.all_gather_single(output, of_rank(dist.get_rank(), dtype))
    same(output, torch.cat([of_rank(rank, dtype) for rank in everybody()]))


@for_each("`gather`", MOVED)
def _gather(dtype: torch.dtype) -> None:
    for root in everybody():
        outputs = [blank(dtype) for _ in everybody()] if dist.get_rank() == root else None
        dist.gather(of_rank(dist.get_rank(), dtype), outputs, root)
        for rank, output in enumerate(outputs or ()):
            same(output, of_rank(rank, dtype))


@for_each("`scatter`", MOVED)
def _scatter(dtype: torch.dtype) -> None:
    for root in everybody():
        output = blank(dtype)
        parts = [of_rank(root + rank, dtype) for rank in everybody()] if dist.get_rank() == root else None
        dist.scatter(output, parts, root)
        same(output, of_rank(root + dist.get_rank(), dtype))


@for_each("`all_to_all`", MOVED)
def _all_to_all(dtype: torch.dtype) -> None:
    us = dist.get_rank()
    outputs = [blank(dtype) for _ in everybody()]
    dist.all_to_all(outputs, [of_rank(us + rank, dtype) for rank in everybody()])
    for rank, output in enumerate(outputs):
        same(output, of_rank(us + rank, dtype))


@for_each("`all_to_all_single`", MOVED)
def _all_to_all_single(dtype: torch.dtype) -> None:
    us = dist.get_rank()
    output = blank(dtype, LENGTH * dist.get_world_size())
    dist.all_to_all_single(output, torch.cat([of_rank(us + rank, dtype) for rank in everybody()]))
    same(output, torch.cat([of_rank(us + rank, dtype) for rank in everybody()]))


@for_each("`send`, `recv`", MOVED)
def _send(dtype: torch.dtype) -> None:
    if dist.get_rank() == 0:
        dist.send(of_rank(0, dtype), 1)
    elif dist.get_rank() == 1:
        tensor = blank(dtype)
        assert dist.recv(tensor, 0) == 0
        same(tensor, of_rank(0, dtype))
