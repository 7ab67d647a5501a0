"""How a group is used: handles, buckets, subgroups, stripes, phantoms; and what it refuses at once."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable

import numpy as np
import pytest

from hcsim import Group, Options, Phantom, Wire, simulate
from hcsim.config import parse_scenario
from hcsim.errors import UsageError


def test_an_operation_starts_when_it_is_called_and_says_when_it_is_done(cluster):
    async def program(group: Group) -> bool:
        pending = group.all_reduce(np.full(10, group.rank + 1))
        assert not pending.done()
        result = await pending
        assert pending.done()
        return bool((result == 3).all()) and await pending is result

    assert cluster.run(2, program) == [True, True]


def test_several_operations_in_flight_do_not_mix(cluster):
    async def program(group: Group) -> list[int]:
        arrays = [np.full(3000, 10**n, np.int64) for n in range(8)]
        pending = [group.all_reduce(array, algorithm=("ring", "tree")[n % 2]) for n, array in enumerate(arrays)]
        for each in reversed(pending):
            await each
        assert all((array == array[0]).all() for array in arrays)
        return [int(array[0]) for array in arrays]

    assert cluster.run(3, program, wire=Wire(segment_bytes=512)) == [[3 * 10**n for n in range(8)]] * 3


def test_buckets_may_be_started_in_unlike_order(cluster):
    async def program(group: Group) -> list[int]:
        arrays = [np.full(3000, 10**n, np.int64) for n in range(6)]
        order = [(n + 2 * group.rank) % 6 for n in range(6)]
        pending = [group.all_reduce(arrays[n], bucket=n) for n in order]
        for each in pending:
            await each
        return [int(array[0]) for array in arrays]

    assert cluster.run(3, program) == [[3 * 10**n for n in range(6)]] * 3


def test_a_large_bucket_that_comes_early_does_not_stop_the_one_that_is_waited_for(virtual):
    async def program(group: Group) -> bool:
        def start(bucket: int) -> Awaitable[Phantom]:
            return group.broadcast(Phantom(1 << 30), 1, bucket=bucket)

        if group.rank == 1:
            both = start(0), start(1)
            await both[0]
            await both[1]
        else:
            await start(0)
            await start(1)
        return True

    assert virtual.run(2, program) == [True, True]


def test_subgroups_work_beside_each_other_and_the_whole(cluster):
    async def program(group: Group) -> list[float]:
        pair, trio, even = (0, 1), (2, 4, 3), (0, 2, 4)  # 2 and 4 are neighbours in two of them
        mine = [group.subgroup(ranks) for ranks in (pair, trio, even) if group.rank in ranks]
        assert [sub.size for sub in mine] == [len(ranks) for ranks in (pair, trio, even) if group.rank in ranks]
        arrays = [np.full(100, 10.0**group.rank) for _ in range(len(mine) + 1)]
        pending = [sub.all_reduce(array, algorithm="ring") for sub, array in zip((*mine, group), arrays, strict=True)]
        for each in pending:
            await each
        return [float(array[0]) for array in arrays]

    assert cluster.run(5, program) == [
        [11.0, 10101.0, 11111.0],
        [11.0, 11111.0],
        [11100.0, 10101.0, 11111.0],
        [11100.0, 11111.0],
        [11100.0, 10101.0, 11111.0],
    ]


def test_a_subgroup_has_its_own_order_of_ranks_and_its_own_subgroups(cluster):
    async def program(group: Group) -> float:
        turned = group.subgroup([3, 1, 0, 2])
        assert turned.rank == [2, 1, 3, 0][group.rank]
        data = np.array([float(group.rank)])
        await turned.broadcast(data, 0)
        assert data[0] == 3
        half = turned.subgroup([0, 2] if turned.rank in (0, 2) else [1, 3])
        again = turned.subgroup([0, 2] if turned.rank in (0, 2) else [1, 3])
        first, second = np.array([1.0 + group.rank]), np.array([10.0])
        pending = (again.all_reduce(second), half.all_reduce(first)) if group.rank else None
        pending = pending or (half.all_reduce(first), again.all_reduce(second))
        for each in pending:
            await each
        assert second[0] == 20
        return float(first[0])

    assert cluster.run(4, program) == [5.0, 5.0, 5.0, 5.0]


def test_a_group_of_one_needs_nobody(cluster):
    async def program(group: Group) -> list[float]:
        data = np.arange(5.0)
        await group.all_reduce(data, "mean")
        await group.broadcast(data)
        await group.barrier()
        (gathered,) = await group.all_gather(data)
        (exchanged,) = await group.all_to_all([data])
        dealt = await group.scatter([data], np.zeros(5))
        part = await group.reduce_scatter(data)
        assert all((found == data).all() for found in (gathered, exchanged, dealt, part))
        return data.tolist()

    assert cluster.run(1, program) == [[0.0, 1.0, 2.0, 3.0, 4.0]]


@pytest.mark.parametrize("stripes", [1, 3])
def test_striping_changes_nothing_in_the_result(cluster, stripes):
    async def program(group: Group) -> bool:
        data = np.arange(100_000, dtype=np.int64) * (group.rank + 1)
        await group.all_reduce(data, algorithm="ring")
        return bool((data == 6 * np.arange(100_000)).all())

    assert cluster.run(3, program, wire=Wire(stripes=stripes, segment_bytes=4096)) == [True] * 3


def test_stripes_carry_more_where_one_connection_is_bound_by_its_window():
    scenario = parse_scenario(
        """
        name = "long"
        tcp = { window = "64 KiB", slow_start = false }
        medium = [{ kind = "ethernet", name = "line", rate = "10 Gb/s", latency = "20 ms" }]
        node = [{ name = "end", count = 2, machine = "ideal", links = ["line"] }]
        """,
        "long",
    )

    async def program(group: Group) -> float:
        await group.barrier()
        started_s = asyncio.get_running_loop().time()
        data = Phantom(10_000_000)
        await (group.send(data, 1) if group.rank == 0 else group.recv(data, 0))
        return asyncio.get_running_loop().time() - started_s

    seconds = [
        simulate(scenario, program, wire=Wire(stripes=stripes, segment_bytes=32768)).values()[1] for stripes in (1, 4)
    ]
    assert seconds[0] / seconds[1] == pytest.approx(4, rel=0.1)


def test_phantoms_take_the_time_and_the_bytes_of_data(virtual):
    async def program(group: Group, phantom: bool) -> int:
        data = Phantom(1_200_000) if phantom else np.zeros(1_200_000, np.uint8)
        await group.all_reduce(data, algorithm="ring")
        await group.all_gather(data, algorithm="ring")
        return group.bytes_sent

    as_data = virtual.outcome(3, lambda group: program(group, False))
    as_phantoms = virtual.outcome(3, lambda group: program(group, True))
    assert as_phantoms.values() == as_data.values() == [4 * 400_000 + 2 * 1_200_000] * 3
    assert as_phantoms.seconds == as_data.seconds


READ_ONLY = np.frombuffer(bytes(24))
REFUSED = {
    "a root that does not exist": lambda g: g.broadcast(np.ones(3), 2),
    "a negative root": lambda g: g.reduce(np.ones(3), -1),
    "an unknown reduction": lambda g: g.all_reduce(np.ones(3), "average"),
    "an unknown algorithm": lambda g: g.all_reduce(np.ones(3), algorithm="butterfly"),
    "a hierarchy without groups": lambda g: g.all_reduce(np.ones(3), algorithm="hierarchical"),
    "a mean of integers": lambda g: g.all_reduce(np.ones(3, np.int32), "mean"),
    "an order of complex numbers": lambda g: g.reduce_scatter(np.ones(3, np.complex64), "max"),
    "a mean of truth values": lambda g: g.all_reduce(np.ones(3, np.bool_), "mean"),
    "bits of floats": lambda g: g.reduce(np.ones(3), op="bxor"),
    "numbers with extended digits": lambda g: g.all_reduce(np.ones(3, np.longdouble)),
    "an unknown reduction of phantoms": lambda g: g.all_reduce(Phantom(8), "xor"),
    "foreign byte order": lambda g: g.all_reduce(np.ones(3, ">f4")),
    "every second element": lambda g: g.all_reduce(np.ones(6)[::2]),
    "columns first": lambda g: g.broadcast(np.ones((2, 3), order="F")),
    "a strided target": lambda g: g.recv(np.ones(6)[::2], 1 - g.rank),
    "a strided target of a scatter": lambda g: g.scatter([np.ones(3)] * 2, np.zeros(6)[::2], g.rank),
    "a bucket out of range": lambda g: g.barrier(bucket=65536),
    "a negative tag": lambda g: g.send(np.ones(3), 1 - g.rank, tag=-1),
    "a tag of more than 32 bits": lambda g: g.recv(np.ones(3), 1 - g.rank, tag=1 << 32),
    "a message to oneself": lambda g: g.send(np.ones(3), g.rank),
    "a message to nobody": lambda g: g.send(np.ones(3), 2),
    "too few parts": lambda g: g.all_to_all([np.ones(3)]),
    "parts of two dtypes": lambda g: g.all_to_all([np.ones(3), np.ones(3, np.int32)]),
    "a phantom among arrays": lambda g: g.all_to_all([np.ones(3), Phantom(24)]),
    "counts that do not fit": lambda g: g.all_gather(np.ones(3), [2, 2]),
    "too few counts": lambda g: g.all_gather(np.ones(3), [3]),
    "counts that do not add up": lambda g: g.reduce_scatter(np.ones(5), counts=[2, 2]),
    "negative counts": lambda g: g.reduce_scatter(np.ones(5), counts=[-1, 6]),
    "a scatter without parts": lambda g: g.scatter(None, np.ones(3), g.rank),
    "parts of unequal length": lambda g: g.scatter([np.ones(3), np.ones(4)], np.ones(3), g.rank),
    "no counts": lambda g: g.all_gather(np.ones(3), []),
    "no counts of a gather": lambda g: g.gather(np.ones(3), 0, []),
    "no lengths of what comes": lambda g: g.all_to_all([np.ones(3)] * 2, []),
    "counts that are no whole numbers": lambda g: g.all_gather(np.ones(3), [3.0, 3.0]),
    "a root that is no whole number": lambda g: g.broadcast(np.ones(3), 0.5),
    "parts of another dtype": lambda g: g.scatter([np.ones(3, np.int64)] * 2, np.ones(3, np.int32), g.rank),
    "floats for integers": lambda g: g.scatter([np.ones(3)] * 2, np.ones(3, np.int32), g.rank),
    "phantoms for an array": lambda g: g.scatter([Phantom(24, 8)] * 2, np.ones(3), g.rank),
    "parts whose own is of another dtype": lambda g: g.all_to_all([np.ones(3, np.int64), np.ones(3)]),
    "a foreign byte order that is only moved": lambda g: g.broadcast(np.ones(3, ">f4")),
    "times": lambda g: g.all_gather(np.zeros(3, "M8[s]")),
    "objects": lambda g: g.send(np.array([None]), 1 - g.rank),
    "an exchange into what cannot be written": lambda g: g.sendrecv(np.ones(3), 1 - g.rank, READ_ONLY, 1 - g.rank),
    "an exchange with oneself": lambda g: g.sendrecv(np.ones(3), 1 - g.rank, np.ones(3), g.rank),
    "an exchange of objects": lambda g: g.sendrecv(np.array([None]), 1 - g.rank, np.ones(3), 1 - g.rank),
    "no time limit": lambda g: g.within(float("nan")),
    "a time limit in words": lambda g: g.within("3"),
    "no time limit at all": lambda g: Options(timeout_s=None),
    "a watch that never rests": lambda g: Options(watch_s=0),
    "a watch in words": lambda g: Options(watch_s="now and then"),
    "half an arity": lambda g: Options(arity=2.5),
    "an order of one": lambda g: Options(order=3),
    "an order of names": lambda g: Options(order=("mini", "air")),
    "groups of none": lambda g: Options(groups=[1, 2]),
    "a subgroup without us": lambda g: g.subgroup([1 - g.rank]),
    "a subgroup with a rank twice": lambda g: g.subgroup([0, 1, 0]),
    "a subgroup of strangers": lambda g: g.subgroup([0, 1, 2]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_meaning_is_refused_at_once_and_does_no_harm(virtual, what):
    async def program(group: Group) -> float:
        with pytest.raises(UsageError):
            REFUSED[what](group)
        return float((await group.all_reduce(np.ones(1)))[0])

    assert virtual.run(2, program, options=Options(timeout_s=1.0)) == [2.0, 2.0]


NO_DATA = {"a list": [1, 2], "nothing": None, "bytes": b"ab", "a number": 3.0, "a view": memoryview(b"ab")}
GIVEN = {
    "all_reduce": lambda g, data: g.all_reduce(data),
    "reduce": lambda g, data: g.reduce(data),
    "broadcast": lambda g, data: g.broadcast(data),
    "all_gather": lambda g, data: g.all_gather(data),
    "gather": lambda g, data: g.gather(data),
    "scatter into": lambda g, data: g.scatter([np.ones(2)] * 2, data, g.rank),
    "scatter of": lambda g, data: g.scatter([data, data], np.ones(2), g.rank),
    "reduce_scatter": lambda g, data: g.reduce_scatter(data),
    "all_to_all": lambda g, data: g.all_to_all([data, data]),
    "send": lambda g, data: g.send(data, 1 - g.rank),
    "recv": lambda g, data: g.recv(data, 1 - g.rank),
    "recv_any": lambda g, data: g.recv_any(data),
    "sendrecv": lambda g, data: g.sendrecv(np.ones(2), 1 - g.rank, data, 1 - g.rank),
}
ROOM = {
    "all_gather": lambda g, room: g.all_gather(np.ones(1), into=room),
    "gather": lambda g, room: g.gather(np.ones(1), g.rank, into=room),
    "reduce_scatter": lambda g, room: g.reduce_scatter(np.ones(4), into=room),
    "all_to_all": lambda g, room: g.all_to_all([np.ones(1)] * 2, into=room),
}


@pytest.mark.parametrize("data", NO_DATA)
def test_what_is_no_array_is_refused_with_what_is_accepted(virtual, data):
    given = NO_DATA[data]

    async def program(group: Group) -> float:
        calls = [*GIVEN.values(), *(ROOM.values() if given is not None else ())]
        for call in calls:
            with pytest.raises(
                UsageError, match=f"numpy array or a Phantom, and this is of type {type(given).__name__}"
            ):
                call(group, given)
        return float((await group.all_reduce(np.ones(1)))[0])

    assert virtual.run(2, program, options=Options(timeout_s=1.0)) == [2.0, 2.0]


def test_a_number_of_numpys_can_be_sent_like_an_array(virtual):
    async def program(group: Group) -> list[float]:
        return [float(part) for part in await group.all_gather(np.float32(group.rank + 0.5))]

    assert virtual.run(2, program) == [[0.5, 1.5]] * 2


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("length", [100, 100_000])
def test_an_array_is_let_go_when_its_operation_is_over(cluster, algorithm, length):
    async def program(group: Group) -> bool:
        array = np.ones(length, np.float32).view(Weak)
        watched = weakref.ref(array)
        await group.all_reduce(array, algorithm=algorithm)
        del array
        await group.barrier()
        return watched() is None

    assert cluster.run(4, program, wire=Wire(segment_bytes=65536)) == [True] * 4


class Weak(np.ndarray):
    """An array that can be watched."""


@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct", "halving_doubling"])
def test_a_phantom_is_cut_between_elements_as_the_array_is_that_it_stands_for(virtual, algorithm):
    async def program(group: Group) -> tuple[int, int]:
        part, whole = Phantom(4 * 7, 4), Phantom(4 * 7 * group.size, 4)
        for phantom in (True, False):
            before = group.bytes_sent
            await group.all_reduce(Phantom(4 * 1001, 4) if phantom else np.ones(1001, np.float32), algorithm=algorithm)
            await group.reduce_scatter(whole if phantom else np.ones(7 * group.size, np.float32))
            gathered = await group.all_gather(part if phantom else np.ones(7, np.float32))
            if phantom:
                assert gathered == [part] * group.size
                stood_for = group.bytes_sent - before
        return stood_for, group.bytes_sent - before

    for world in (3, 5):
        for phantom_bytes, array_bytes in virtual.run(world, program):
            assert phantom_bytes == array_bytes


def test_numbers_may_be_numpys_and_ranks_that_write_them_otherwise_still_agree(cluster):
    async def program(group: Group) -> list[float]:
        number = np.int64 if group.rank else int
        gathered = await group.all_gather(np.ones(2), np.full(2, 2) if group.rank else [2, 2], bucket=number(1))
        await group.broadcast(np.ones(3), number(0))
        dealt = await group.all_to_all([np.ones(2)] * 2, np.full(2, 2) if group.rank else None)
        own = await group.reduce_scatter(np.ones(4), counts=np.array([1, 3]))
        await group.sendrecv(np.ones(1), number(1 - group.rank), np.zeros(1), number(1 - group.rank), tag=number(7))
        await group.all_reduce(np.ones(3, np.longlong if group.rank else np.int64))
        return [float(part.sum()) for part in (*gathered, *dealt, own)]

    assert cluster.run(2, program) == [[2.0, 2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0, 6.0]]


def test_the_size_of_a_phantom_may_be_numpys(virtual):
    async def program(group: Group) -> int:
        await group.all_reduce(Phantom(np.int64(4096), np.int32(4)))
        return (await group.broadcast(Phantom(np.prod((2, 3))))).nbytes

    assert virtual.run(2, program) == [6, 6]
    with pytest.raises(UsageError, match="whole number of bytes"):
        Phantom(1.5)


def test_a_phantom_has_whole_elements():
    with pytest.raises(UsageError, match="10 bytes, in elements of 4"):
        Phantom(10, 4)
    assert Phantom(8, 4) != Phantom(8)
    assert repr(Phantom(8, 4)) == "Phantom(8, 4)"


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [("ring", Options(order=np.array([2, 0, 1]))), ("hierarchical", Options(groups=[[0, 2], [1]]))],
)
def test_orders_and_groups_may_be_lists_or_numpys(virtual, algorithm, options):
    async def program(group: Group) -> float:
        return float((await group.all_reduce(np.ones(8), algorithm=algorithm))[0])

    assert virtual.run(3, program, options=options) == [3.0] * 3
