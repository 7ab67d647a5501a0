"""Probes of torch.distributed: what a backend can do, found by doing it on every rank and comparing the result.

A probe belongs to a row of the table and is one variant of it: a dtype, or a way to call. It raises if the result is
wrong, on any rank. Expected values are computed from what each rank is known to have put in, in plain Python.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from tests.torch_backend.ranks import Meeting

CALL_LIMIT = timedelta(seconds=30)
LENGTH = 5

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
COMPLEX = (torch.complex64, torch.complex128)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
REDUCED = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)
MOVED = (*REDUCED, *NARROW)


class Probe(msgspec.Struct, frozen=True):
    """One thing to try."""

    row: str
    variant: str
    act: Callable[[], None]
    own_groups: bool = False
    """It makes the group of all ranks itself, and is given a `Meeting`."""


PROBES: list[Probe] = []


def probe(row: str, variant: str = "") -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Enter a function as a probe."""

    def enter(act: Callable[[], None]) -> Callable[[], None]:
        PROBES.append(Probe(row, variant, act))
        return act

    return enter


def for_each(row: str, dtypes: Iterable[torch.dtype]) -> Callable[[Callable[[torch.dtype], None]], None]:
    """Enter a function of the dtype as one probe for each of them."""

    def enter(act: Callable[[torch.dtype], None]) -> None:
        PROBES.extend(Probe(row, name_of(dtype), functools.partial(act, dtype)) for dtype in dtypes)

    return enter


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numbers(rank: int, length: int = LENGTH) -> list[int]:
    """What a rank puts in: products of them, over four ranks, fit in a byte."""
    return [(2 * rank + 3 * i) % 3 + 1 for i in range(length)]


def element(number: int, dtype: torch.dtype) -> Any:
    """The number, as something of the dtype's kind."""
    if dtype == torch.bool:
        return number == 2
    return complex(number, number - 2) if dtype in COMPLEX else number


def of_rank(rank: int, dtype: torch.dtype = torch.float32, length: int = LENGTH) -> Tensor:
    """What a rank puts in, as a tensor."""
    elements = [element(number, dtype) for number in numbers(rank, length)]
    return torch.tensor(elements, dtype=torch.complex128 if dtype in COMPLEX else None).to(dtype)


def blank(dtype: torch.dtype = torch.float32, length: int = LENGTH) -> Tensor:
    """Room for a result, filled with what no result has."""
    return torch.full((length,), 0 if dtype == torch.bool else 7).to(dtype)


def everybody(size: int | None = None) -> range:
    return range(dist.get_world_size() if size is None else size)


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": operator.add, "AVG": operator.add, "PRODUCT": operator.mul, "MIN": min, "MAX": max,
    "BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor,
}  # fmt: skip


def combined(op: str, dtype: torch.dtype, ranks: Sequence[int], length: int = LENGTH) -> Tensor:
    """What the reduction of these ranks' tensors has to come to."""
    columns = zip(*([element(n, dtype) for n in numbers(rank, length)] for rank in ranks), strict=True)
    results = [functools.reduce(_COMBINE[op], column) for column in columns]
    if op == "AVG":
        results = [result / len(ranks) for result in results]
    if dtype == torch.bool:
        return torch.tensor([bool(result) for result in results])
    return torch.tensor(results, dtype=torch.complex128 if dtype in COMPLEX else torch.float64).to(dtype)


def same(actual: Tensor, expected: Tensor) -> None:
    """Equal in shape, dtype and every element."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype
    wide = torch.complex128 if actual.is_complex() else torch.float64
    assert torch.equal(actual.to(wide), expected.to(wide)), f"{actual.tolist()}, not {expected.tolist()}"


def try_all(meeting: Meeting, rows: Sequence[str] = ()) -> dict[tuple[str, str], str]:
    """Run the probes on this rank together with the others: what went wrong in each, or nothing."""
    lives = _Lives(meeting)
    found = {}
    for number, trial in enumerate(PROBES):
        if rows and trial.row not in rows:
            continue
        trouble = ""
        try:
            if trial.own_groups:
                lives.end()
                trial.act(meeting)  # type: ignore[call-arg]
            else:
                lives.begin()
                trial.act()
        except Exception as error:
            trouble = f"rank {meeting.rank}: {type(error).__name__}: {error}"
        troubles = lives.exchange(number, trouble)
        found[trial.row, trial.variant] = "; ".join(filter(None, troubles))
        if found[trial.row, trial.variant]:
            lives.end()
    lives.end()
    return found


class _Lives:
    """One process group after the other: what fails may break a group, and the next probe needs a good one."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._count = 0
        announced = dist.FileStore(meeting.file, meeting.size)
        if meeting.rank == 0:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            announced.set("port", str(self._store.port))
        else:
            self._store = dist.TCPStore("127.0.0.1", int(announced.get("port")), wait_for_workers=False)

    def begin(self) -> None:
        if not dist.is_initialized():
            self._count += 1
            store = dist.PrefixStore(f"life {self._count}", self._store)
            us = self._meeting
            dist.init_process_group(us.backend, store=store, rank=us.rank, world_size=us.size, timeout=CALL_LIMIT)

    def end(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def exchange(self, number: int, trouble: str) -> list[str]:
        self._store.set(f"{number}/{self._meeting.rank}", trouble or "-")
        words = [self._store.get(f"{number}/{rank}").decode() for rank in range(self._meeting.size)]
        return ["" if word == "-" else word for word in words]
