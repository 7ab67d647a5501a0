"""Results that go straight into the caller's memory, which may be part of what the caller gave."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from hcsim import Group, Options, Phantom, Wire
from hcsim.calls import GroupCall, perform
from hcsim.collectives.algorithms import algorithms
from hcsim.collectives.buffers import WORTH_SPARING, Array
from hcsim.collectives.plan import offsets, split
from hcsim.errors import UsageError

WORLDS = [1, 2, 3, 4, 5, 7]
TINY = Wire(segment_bytes=64)
GUARD = 3
"""Elements around a result that nobody may touch."""


def mine(rank: int, length: int, seed: int = 0) -> Array:
    return np.random.default_rng([rank, length, seed]).integers(-1000, 1000, length)


def guarded(length: int) -> tuple[Array, Array]:
    """A room between elements that must stay as they are, and all of it."""
    whole = np.full(length + 2 * GUARD, -7777)
    return whole[GUARD : GUARD + length], whole


def is_intact(whole: Array) -> bool:
    return bool((whole[:GUARD] == -7777).all() and (whole[-GUARD:] == -7777).all())


def uneven(world: int) -> list[int]:
    return [(5 * rank) % 7 * 6 for rank in range(world)]


def wrong_cases(results: list[Any]) -> list[str]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [f"rank {rank}: {case}" for rank, cases in enumerate(results) for case in cases]


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_into_one_piece_of_which_our_part_may_be_the_input(virtual, world):
    async def program(group: Group) -> list[str]:
        wrong = []
        for algorithm, counts, aliased in product(algorithms("all_gather"), (None, uneven(world)), (False, True)):
            sizes = counts or [23] * world
            cuts, expected = offsets(sizes), np.concatenate([mine(rank, sizes[rank]) for rank in range(world)])
            into, whole = guarded(cuts[-1])
            data = mine(group.rank, sizes[group.rank])
            if aliased:
                own = into[cuts[group.rank] : cuts[group.rank + 1]]
                own[:] = data
                data = own
            parts = await group.all_gather(data, counts, into=into, algorithm=algorithm)
            shared = all(np.shares_memory(part, into) for part in parts if part.size)
            if not (into == expected).all() or not is_intact(whole) or not shared:
                wrong.append(f"{algorithm} {counts} aliased {aliased}")
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("world", WORLDS)
def test_gather_into_one_piece_and_scatter_out_of_one(virtual, world):
    async def program(group: Group) -> list[str]:
        wrong, rank = [], group.rank
        for algorithm, root, counts in product(algorithms("gather"), range(world), (None, uneven(world))):
            sizes = counts or [23] * world
            into, whole = guarded(sum(sizes)) if rank == root else (None, None)
            data = mine(rank, sizes[rank])
            kept = data.copy()
            await group.gather(data, root, counts, into=into, algorithm=algorithm)
            expected = np.concatenate([mine(peer, sizes[peer]) for peer in range(world)])
            if not (data == kept).all() or (rank == root and not ((into == expected).all() and is_intact(whole))):
                wrong.append(f"gather {algorithm} root {root} {counts}")
        for algorithm, root, aliased in product(algorithms("scatter"), range(world), (False, True)):
            whole = mine(root, 11 * world) if rank == root else None
            into, around = guarded(11)
            if aliased and rank == root:  # somewhere in what it deals out, and not in its own part
                at = 11 * ((root + 1) % world)
                into = whole[at : at + 11]
            await group.scatter(whole, into, root, algorithm=algorithm)
            right = (into == mine(root, 11 * world)[11 * rank : 11 * rank + 11]).all()
            if not right or not is_intact(around):
                wrong.append(f"scatter {algorithm} root {root} aliased {aliased}")
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("from_elements", [0, WORTH_SPARING])
@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_into_a_place_that_may_be_any_part_of_the_input(virtual, monkeypatch, world, from_elements):
    monkeypatch.setattr("hcsim.collectives.buffers.WORTH_SPARING", from_elements)

    async def program(group: Group) -> list[str]:
        wrong, rank = [], group.rank
        for algorithm, counts in product(algorithms("reduce_scatter"), (None, uneven(world), [8] * world)):
            length = sum(counts) if counts else 20 * world + 3
            cuts = offsets(counts) if counts else split(length, world)
            own = slice(cuts[rank], cuts[rank + 1])
            size = own.stop - own.start
            expected = sum(mine(peer, length) for peer in range(world))[own]
            for at in (None, own.start, 0, length - size, max(0, own.start - 1), min(own.start + 1, length - size)):
                data, (into, whole) = mine(rank, length), guarded(size)
                if at is not None:
                    into = data[at : at + size]
                result = await group.reduce_scatter(data, counts=counts, into=into, algorithm=algorithm)
                rest, before = data.copy(), mine(rank, length)
                if at is not None:
                    rest[at : at + size] = before[at : at + size] = 0
                if not (result == expected).all() or not (into == expected).all() or not (rest == before).all():
                    wrong.append(f"{algorithm} {counts} at {at}")
                if at is None and not is_intact(whole):
                    wrong.append(f"{algorithm} {counts} beyond its place")
        return wrong

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


def test_the_mean_of_a_reduce_scatter_goes_into_its_place(cluster):
    async def program(group: Group) -> list[float]:
        into = np.zeros(2)
        await group.reduce_scatter(np.arange(4.0) * (group.rank + 1), "mean", into=into)
        return into.tolist()

    assert cluster.run(2, program) == [[0.0, 1.5], [3.0, 4.5]]


@pytest.mark.parametrize("world", WORLDS)
def test_all_to_all_into_one_piece(virtual, world):
    def size(sender: int, receiver: int) -> int:
        return (3 * sender + 5 * receiver) % 7 * 6

    async def program(group: Group) -> list[str]:
        data = [mine(group.rank, size(group.rank, to), to) for to in range(world)]
        received = [size(sender, group.rank) for sender in range(world)]
        into, whole = guarded(sum(received))
        await group.all_to_all(data, received, into=into)
        expected = np.concatenate([mine(sender, received[sender], group.rank) for sender in range(world)])
        return [] if (into == expected).all() and is_intact(whole) else ["all_to_all"]

    assert wrong_cases(virtual.run(world, program, wire=TINY)) == []


def test_phantoms_have_places_too(virtual):
    async def program(group: Group) -> list[int]:
        gathered = await group.all_gather(Phantom(10), into=Phantom(30))
        reduced = await group.reduce_scatter(Phantom(30), into=Phantom(10))
        exchanged = await group.all_to_all([Phantom(4)] * 3, into=Phantom(12))
        return [sum(part.nbytes for part in gathered), reduced.nbytes, sum(part.nbytes for part in exchanged)]

    assert virtual.run(3, program) == [[30, 10, 12]] * 3


def _shared() -> Array:
    return np.zeros(8)


REFUSED = {
    "too short": lambda g: g.all_gather(np.ones(3), into=np.zeros(5)),
    "of another dtype": lambda g: g.all_gather(np.ones(3), into=np.zeros(6, np.int64)),
    "in pieces": lambda g: g.all_gather(np.ones(3), into=np.zeros(12)[::2]),
    "read-only": lambda g: g.all_gather(np.ones(3), into=np.broadcast_to(0.0, 6)),
    "a phantom for data": lambda g: g.all_gather(np.ones(3), into=Phantom(48)),
    "data for a phantom": lambda g: g.all_gather(Phantom(3), into=np.zeros(6, np.uint8)),
    "for all parts": lambda g: g.reduce_scatter(np.ones(4), into=np.zeros(4)),
    "what is sent": lambda g: (lambda whole: g.all_to_all([whole[:2], whole[2:4]], into=whole[3:7]))(_shared()),
    "of a scatter, from another dtype": lambda g: g.scatter(np.ones(4), np.zeros(2, np.float32), g.rank),
    "of a scatter, from too much": lambda g: g.scatter(np.ones(5), np.zeros(2), g.rank),
    "of a scatter, read-only": lambda g: g.scatter(None, np.broadcast_to(0.0, 2), 1 - g.rank),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_place_that_does_not_fit_is_refused_at_once_and_does_no_harm(virtual, what):
    async def program(group: Group) -> float:
        with pytest.raises(UsageError):
            REFUSED[what](group)
        return float((await group.all_reduce(np.ones(1)))[0])

    assert virtual.run(2, program, options=Options(timeout_s=1.0)) == [2.0, 2.0]


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_a_rank_that_is_not_the_root_takes_no_room_for_the_others_parts(virtual, operation, monkeypatch):
    taken: list[int] = []
    empty = np.empty
    monkeypatch.setattr(
        "hcsim.collectives.buffers.np.empty", lambda length, *of: taken.append(length) or empty(length, *of)
    )

    async def program(group: Group) -> None:
        data = np.ones(1000)
        if operation == "gather":
            await group.gather(data, into=np.zeros(3000) if group.rank == 0 else None, algorithm="centralized")
        else:
            await group.scatter(np.ones(3000) if group.rank == 0 else None, data, algorithm="centralized")

    assert virtual.run(3, program) == [None] * 3
    assert taken == []


def test_calls_of_a_torch_program_fill_the_arrays_they_are_given(cluster):
    async def program(group: Group) -> dict[str, list[int]]:
        rank, found = group.rank, {}
        data = np.arange(3) + 10 * rank

        async def carry_out(name: str, size: int, given: Array, **details: Any) -> None:
            room = np.zeros(size, np.int64)
            arrays = (room, given) if name == "scatter" else (given, room)
            is_left_out = name in ("gather", "scatter") and rank != 1
            await perform(group, GroupCall(operation=name, root=1, timeout_s=9.0, **details), arrays[: 2 - is_left_out])
            found[name] = room.tolist()

        await carry_out("all_gather", 6, data)
        await carry_out("gather", 6, data)
        await carry_out("scatter", 3, np.arange(6) + 100)
        await carry_out("reduce_scatter", 3, np.arange(6) * (rank + 1))
        await carry_out(
            "all_to_all",
            4 if rank == 0 else 2,
            np.arange(3) + 10 * rank,
            counts=(2, 1),
            received=(2, 2) if rank == 0 else (1, 1),
        )
        return found

    first, second = cluster.run(2, program)
    assert first["all_gather"] == second["all_gather"] == second["gather"] == [0, 1, 2, 10, 11, 12]
    assert first["gather"] == [0] * 6
    assert (first["scatter"], second["scatter"]) == ([100, 101, 102], [103, 104, 105])
    assert (first["reduce_scatter"], second["reduce_scatter"]) == ([0, 3, 6], [9, 12, 15])
    assert (first["all_to_all"], second["all_to_all"]) == ([0, 1, 10, 11], [2, 12])
