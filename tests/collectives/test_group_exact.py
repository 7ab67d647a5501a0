"""Every reduction against a plain reference: exact, and the same bytes on every rank.

Values are chosen so that every partial result is exact in the dtype, in whatever order it is
reached. One simulated run goes through many cases, so a test returns the cases that were wrong.
"""

from __future__ import annotations

from functools import cache, reduce
from itertools import product
from typing import Any

import numpy as np
import pytest

from hcsim import Group, Options, Wire
from hcsim.collectives.algorithms import algorithms
from hcsim.collectives.algorithms.hierarchical import CROSS, LOCAL
from hcsim.collectives.arithmetic import DTYPES, OPERATIONS
from hcsim.collectives.plan import offsets, split
from hcsim.errors import UsageError

Array = np.ndarray[Any, np.dtype[Any]]
WORLDS = range(1, 10)
FEW = range(1, 6)
"""Enough for what is about numbers: a reduction is the same code in every world, and larger ones add rounds alone."""
TINY = Wire(segment_bytes=64)
"""Several segments per message, already with a few elements."""
NARROW = Wire(segment_bytes=32)
LEAST = 33
"""So many elements are several of those segments in every dtype."""
INT32 = np.dtype(np.int32)
BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply, **BITWISE}
AND, OR = np.logical_and, np.logical_or
LOGIC = {"sum": OR, "max": OR, "bor": OR, "product": AND, "min": AND, "band": AND, "bxor": np.logical_xor}
COMPLEX = ("sum", "mean", "product")
REDUCTIONS = [
    (dtype, op)
    for dtype, op in product(DTYPES, OPERATIONS)
    if op
    in {"i": UFUNCS.keys() - {"mean"}, "u": UFUNCS.keys() - {"mean"}, "b": LOGIC, "c": COMPLEX}.get(
        dtype.kind, UFUNCS.keys() - BITWISE.keys()
    )
]
REFUSED = [case for case in product(DTYPES, OPERATIONS) if case not in REDUCTIONS]


def values(rank: int, world: int, length: int, dtype: np.dtype[Any], op: str) -> Array:
    """This rank's input: small whole numbers, and in wide integers such as no float of that width can hold."""
    mixed = np.arange(length, dtype=np.int64) * 7 + rank * 3
    if dtype.kind == "b":
        return mixed % 4 < 2
    if dtype.kind == "c":
        if op == "product":  # of unlike primes, so that no part ever becomes zero, whose sign depends on the order
            return np.array([2 + 1j, 3 + 2j, 4 + 1j])[mixed % 3].astype(dtype)
        return ((mixed % 5 - 2 + 1j * (mixed % 7)) * (world if op == "mean" else 1)).astype(dtype)
    if op in BITWISE:
        return (mixed.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(3)).astype(dtype)
    if op == "product":
        return np.array([1, 2, 3 if dtype.kind in "iu" else -1])[mixed % 3].astype(dtype)
    small = mixed % 5 - (0 if dtype.kind == "u" else 2)
    if op == "mean":
        return (small * world).astype(dtype)
    large = {4: 2**24 + 1, 8: 2**53 + 1}.get(dtype.itemsize, 0) if dtype.kind in "iu" else 0
    return (small + large).astype(dtype)


@cache
def reference(world: int, length: int, dtype: np.dtype[Any], op: str) -> Array:
    found = _reference([values(rank, world, length, dtype, op) for rank in range(world)], op)
    found.setflags(write=False)  # whoever asks again gets the same array
    return found


def _reference(inputs: list[Array], op: str) -> Array:
    dtype, world = inputs[0].dtype, len(inputs)
    if dtype.kind in "iub":
        return reduce(LOGIC[op] if dtype.kind == "b" else UFUNCS[op], inputs)
    if dtype.kind == "c":
        total = reduce(UFUNCS[op], [one.astype(np.complex128) for one in inputs])
        return (_divided(total, world) if op == "mean" else total).astype(dtype)
    combined = reduce(UFUNCS[op], [one.astype(np.float64) for one in inputs])
    return (combined / world if op == "mean" else combined).astype(dtype)


def _divided(total: Array, world: int) -> Array:
    return (total.view(np.float64) / world).view(np.complex128)


def lengths(world: int) -> list[int]:
    """None, one, fewer than ranks, as many, uneven, and enough for several segments per chunk."""
    return sorted({0, 1, world - 1, world, 2 * world + 1, 40 * world + 3})


def halves(world: int) -> tuple[tuple[int, ...], ...]:
    """Two groups of unequal size, each led by its last rank."""
    cut = max(1, world // 3)
    groups = (tuple(range(cut))[::-1], tuple(range(cut, world))[::-1])
    return tuple(group for group in groups if group)


def differs(found: Array, expected: Array) -> bool:
    return found.dtype != expected.dtype or found.tobytes() != expected.tobytes()


def wrong_cases(results: list[list[str]]) -> list[str]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [f"rank {rank}: {case}" for rank, cases in enumerate(results) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("world", FEW)
def test_all_reduce_of_every_dtype_and_reduction(virtual, world):
    length = max(4 * world + 3, LEAST)

    async def program(group: Group) -> list[str]:
        wrong = []
        for algorithm, (dtype, op) in product(algorithms("all_reduce"), REDUCTIONS):
            data = values(group.rank, world, length, dtype, op)
            result = await group.all_reduce(data, op, algorithm=algorithm)
            if result is not data or differs(result, reference(world, length, dtype, op)):
                wrong.append(f"{algorithm} {dtype} {op}")
        return wrong

    results = virtual.run(world, program, options=Options(groups=halves(world)), wire=NARROW)
    assert wrong_cases(results) == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_of_every_length(virtual, world):
    async def program(group: Group) -> list[str]:
        wrong = []
        for algorithm, length in product(algorithms("all_reduce"), lengths(world)):
            result = await group.all_reduce(values(group.rank, world, length, INT32, "sum"), algorithm=algorithm)
            if differs(result, reference(world, length, INT32, "sum")):
                wrong.append(f"{algorithm} {length}")
        return wrong

    assert wrong_cases(virtual.run(world, program, options=Options(groups=halves(world)), wire=TINY)) == []


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("cross", CROSS)
def test_hierarchical_all_reduce_of_every_kind(virtual, local, cross):
    groups = ((4,), (6, 0, 2), (1, 5), (3, 7, 8))

    async def program(group: Group) -> list[str]:
        result = await group.all_reduce(values(group.rank, 9, 50, INT32, "sum"), algorithm="hierarchical")
        return ["sum"] if differs(result, reference(9, 50, INT32, "sum")) else []

    options = Options(groups=groups, local=local, cross=cross)
    assert wrong_cases(virtual.run(9, program, options=options, wire=TINY)) == []


@pytest.mark.parametrize("arity", [2, 3, 5])
@pytest.mark.parametrize("order", [(3, 1, 4, 0, 5, 2), (5, 4, 3, 2, 1, 0)])
def test_trees_of_any_arity_and_rings_of_any_order(virtual, arity, order):
    async def program(group: Group) -> list[str]:
        wrong = []
        for operation, algorithm in product(["all_reduce", "reduce"], ["ring", "tree"]):
            data = values(group.rank, 6, 50, INT32, "sum")
            result = await getattr(group, operation)(data, algorithm=algorithm)
            if (operation == "all_reduce" or group.rank == 0) and differs(result, reference(6, 50, INT32, "sum")):
                wrong.append(f"{operation} {algorithm}")
        return wrong

    assert wrong_cases(virtual.run(6, program, options=Options(arity=arity, order=order), wire=TINY)) == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_to_every_root_leaves_the_others_as_they_were(virtual, world):
    async def program(group: Group) -> list[str]:
        wrong = []
        for algorithm, root, length in product(algorithms("reduce"), range(world), (0, world - 1, 20 * world + 3)):
            data = values(group.rank, world, length, INT32, "sum")
            expected = reference(world, length, INT32, "sum") if group.rank == root else data.copy()
            result = await group.reduce(data, root, algorithm=algorithm)
            if result is not data or differs(result, expected):
                wrong.append(f"{algorithm} root {root} length {length}")
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


@pytest.mark.slow
@pytest.mark.parametrize("world", FEW)
def test_reduce_and_reduce_scatter_of_every_dtype_and_reduction(virtual, world):
    length, root = max(3 * world + 1, LEAST), world - 1
    cuts = split(length, world)

    async def program(group: Group) -> list[str]:
        wrong = []
        own = slice(cuts[group.rank], cuts[group.rank + 1])
        for dtype, op in REDUCTIONS:
            expected = reference(world, length, dtype, op)
            for algorithm in algorithms("reduce"):
                data = values(group.rank, world, length, dtype, op)
                result = await group.reduce(data, root, op, algorithm=algorithm)
                if group.rank == root and differs(result, expected):
                    wrong.append(f"reduce {algorithm} {dtype} {op}")
            for algorithm in algorithms("reduce_scatter"):
                data = values(group.rank, world, length, dtype, op)
                if differs(await group.reduce_scatter(data, op, algorithm=algorithm), expected[own]):
                    wrong.append(f"reduce_scatter {algorithm} {dtype} {op}")
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=NARROW)) == []


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_into_equal_and_unequal_parts(virtual, world):
    uneven = [(5 * rank) % 7 * 6 for rank in range(world)]

    async def program(group: Group) -> list[str]:
        wrong = []
        for algorithm, counts in product(algorithms("reduce_scatter"), [None, uneven, [0] * (world - 1) + [9]]):
            length = sum(counts) if counts else 20 * world + 3
            cuts = offsets(counts) if counts else split(length, world)
            data = values(group.rank, world, length, INT32, "sum")
            kept = data.copy()
            result = await group.reduce_scatter(data, counts=counts, algorithm=algorithm)
            expected = reference(world, length, INT32, "sum")[cuts[group.rank] : cuts[group.rank + 1]]
            if differs(result, expected) or differs(data, kept):
                wrong.append(f"{algorithm} {counts}")
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


@pytest.mark.parametrize(("dtype", "op"), REFUSED, ids=[f"{op}-{dtype}" for dtype, op in REFUSED])
def test_a_reduction_that_a_dtype_does_not_have_is_refused(virtual, dtype, op):
    async def program(group: Group) -> str:
        with pytest.raises(UsageError) as refused:
            group.all_reduce(np.ones(3, dtype), op)
        return str(refused.value)

    (text,) = virtual.run(1, program)
    assert op in text
    assert dtype.name in text


def test_infinities_stay_where_they_are_in_the_mean_of_complex_numbers(cluster):
    async def program(group: Group) -> Array:
        return await group.all_reduce(np.array([complex(np.inf, 2.0), complex(3.0, -np.inf)], np.complex64), "mean")

    for result in cluster.run(3, program):
        assert result.tolist() == [complex(np.inf, 2.0), complex(3.0, -np.inf)]


def test_a_reduction_keeps_its_array_and_shape(cluster):
    async def program(group: Group) -> bool:
        data = np.full((3, 4, 5), group.rank + 1, np.float64)
        result = await group.all_reduce(data)
        return result is data and data.shape == (3, 4, 5) and bool((data == 6).all())

    assert cluster.run(3, program) == [True, True, True]


def test_infinities_and_nans_are_data(cluster):
    async def program(group: Group) -> Array:
        data = np.array([[np.inf, np.nan, 65504.0], [-np.inf, 1.0, 65504.0]], np.float16)[group.rank]
        return await group.all_reduce(data)

    for result in cluster.run(2, program):
        np.testing.assert_array_equal(result, np.array([np.nan, np.nan, np.inf], np.float16))
