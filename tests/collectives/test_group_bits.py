"""The same inputs give the same bits: on all ranks, and in both worlds.

The inputs are random floats, whose sum depends on the order of adding. So equal bits show that the
plan's order was followed, and not the order of arrival.
"""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from hcsim import Group, Options, Wire
from hcsim.collectives.algorithms import algorithms, ring
from hcsim.collectives.arithmetic import DTYPES
from hcsim.real.shm.stream import SWITCH, RingForwarder, SharedStream, rings
from hcsim.real.tcp import TcpStream, receive_sum

Array = np.ndarray[Any, np.dtype[Any]]
FLOATS = [dtype for dtype in DTYPES if dtype.kind not in "iub"]
SMALL = Wire(segment_bytes=256)
PROCESS_GUARD_S = 60


def noise(rank: int, length: int, dtype: np.dtype[Any]) -> Array:
    return _drawn(rank, length, dtype).copy()


@lru_cache(64)
def _drawn(rank: int, length: int, dtype: np.dtype[Any]) -> Array:
    random = np.random.default_rng([rank, length])
    real, imag = random.normal(size=length), random.normal(size=length)
    return (real + 1j * imag if dtype.kind == "c" else real).astype(dtype)


async def reductions(group: Group) -> dict[str, bytes]:
    """The bytes of every all_reduce; everything that is computed is computed twice, in unlike company."""
    found = {}
    for algorithm, dtype in product(algorithms("all_reduce"), FLOATS):
        data, beside = noise(group.rank, 333, dtype), noise(group.rank, 77, dtype)
        pending = group.all_reduce(data, algorithm=algorithm), group.all_reduce(beside, algorithm=algorithm, bucket=1)
        for each in pending:
            await each
        found[f"{algorithm} {dtype}"] = data.tobytes() + beside.tobytes()
        if dtype.kind == "c":
            data = noise(group.rank, 333, dtype)
            found[f"{algorithm} {dtype} product"] = (
                await group.all_reduce(data, "product", algorithm=algorithm)
            ).tobytes()
    return found


async def everything(group: Group) -> str:
    """A digest over what every other operation gives this rank."""
    digest = hashlib.sha256()
    root, world, rank = group.size - 1, group.size, group.rank
    for dtype in FLOATS:
        mine = noise(rank, 100, dtype)
        for algorithm in algorithms("reduce_scatter"):
            digest.update((await group.reduce_scatter(mine, algorithm=algorithm)).tobytes())
        for algorithm in algorithms("reduce"):
            digest.update((await group.reduce(mine.copy(), root, "mean", algorithm=algorithm)).tobytes())
        digest.update((await group.broadcast(mine.copy(), root)).tobytes())
        gathered = await group.all_gather(noise(rank, rank + 1, dtype), range(1, world + 1))
        exchanged = await group.all_to_all([mine] * world)
        for part in (*gathered, *exchanged):
            digest.update(part.tobytes())
    await group.barrier()
    return digest.hexdigest()


def grouped(world: int) -> Options:
    return Options(groups=(tuple(range(world))[::2], tuple(range(world))[1::2]))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_all_ranks_hold_the_same_bits(virtual, world):
    results = virtual.run(world, reductions, options=grouped(world), wire=SMALL)
    for result in results[1:]:
        assert result == results[0]
    exact = sum(noise(rank, 333, np.dtype(np.float64)) for rank in range(world))
    found = np.frombuffer(results[0]["ring float64"])[:333]
    np.testing.assert_allclose(found, exact, atol=1e-12)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("world", [2, 3, 5])
def test_both_worlds_give_the_same_bits(virtual, real, world):
    options = grouped(world)
    assert virtual.run(world, reductions, options=options, wire=SMALL) == real.run(
        world, reductions, options=options, wire=SMALL
    )
    assert virtual.run(world, everything, wire=SMALL) == real.run(world, everything, wire=SMALL)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("segment_bytes", [2**18, 2**22])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_large_sums_that_are_added_on_the_way_have_the_same_bits(virtual, real, monkeypatch, world, segment_bytes):
    """In order and in lanes; what a real channel adds as it comes, the virtual one leaves to be added."""
    monkeypatch.setattr(ring, "CHUNK", 2**16)

    async def program(group: Group) -> dict[str, bytes]:
        found = {}
        halves, floats = FLOATS[:2], FLOATS[2:4]
        cases = *product(algorithms("all_reduce"), floats), *product(("ring", "halving_doubling"), halves)
        for algorithm, dtype in cases:
            data = noise(group.rank, 400_003, dtype)
            await group.all_reduce(data, "mean", algorithm=algorithm)
            found[f"{algorithm} {dtype}"] = hashlib.sha256(data.tobytes()).digest()
        part = await group.reduce_scatter(noise(group.rank, 400_003, np.dtype(np.float32)), algorithm="ring")
        return found | {"part": hashlib.sha256(part).digest() if group.rank == 0 else b""}

    wire, options = Wire(segment_bytes=segment_bytes), grouped(world)
    simulated = virtual.run(world, program, wire=wire, options=options)
    for stream in SharedStream, TcpStream:
        received = []
        with monkeypatch.context() as patch:
            patch.setenv(SWITCH, str(int(stream is SharedStream)))
            patch.setattr(stream, "add", lambda *a, add=stream.add, to=received: to.append(add(*a)) or to[-1])
            assert real.run(world, program, wire=wire, options=options) == simulated
        assert sum(received) > 0 or receive_sum is None or rings is None


@pytest.mark.slow
@pytest.mark.skipif(rings is None, reason="there was no C compiler when hcsim was installed")
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_what_a_ring_passes_on_without_a_stop_has_the_same_bits_and_is_counted(virtual, real, monkeypatch, world):
    """Several operations at once, so that one finds the next rank's channel busy with another."""
    passed = []
    forward = RingForwarder.forward
    monkeypatch.setattr(ring, "CHUNK", 2**14)
    monkeypatch.setattr(RingForwarder, "forward", lambda *a: forward(*a[:-1], lambda done: passed.append(a[-1](done))))
    monkeypatch.setenv(SWITCH, "1")

    async def program(group: Group) -> tuple[list[bytes], int]:
        given = [
            (noise(group.rank, world * 40_000 + 1, dtype), op)
            for dtype, op in product((*FLOATS, np.dtype(np.int64)), ("sum", "mean", "max"))
            if (dtype.kind, op) not in (("c", "max"), ("i", "mean"))
        ]
        await asyncio.gather(
            *(
                group.all_reduce(data, op, algorithm=("ring", "chunked_ring")[n % 2], bucket=n % 3)
                for n, (data, op) in enumerate(given)
            )
        )
        parts = await group.all_gather(noise(group.rank, 50_000, np.dtype(np.float64)), algorithm="ring")
        dealt = await group.broadcast(noise(group.rank, 400_000, np.dtype(np.float32)), world - 1, algorithm="ring")
        results = [data for data, _ in given] + [*parts, dealt]
        return [hashlib.sha256(result.tobytes()).digest() for result in results], group.bytes_sent

    simulated = virtual.run(world, program)
    assert real.run(world, program) == simulated
    assert len(passed) > 10 * world


@pytest.mark.slow
def test_the_order_of_adding_shows_in_the_bits(virtual):
    """Otherwise the tests above would pass whatever the order."""
    found = virtual.run(5, reductions, options=grouped(5), wire=SMALL)[0]
    assert len({found[f"{algorithm} float32"] for algorithm in algorithms("all_reduce")}) > 2


_RANK = """
import asyncio, hashlib, sys
import numpy as np
from hcsim import Wire, real_group

async def main(rank, peers):
    async with real_group(rank, peers, wire=Wire(segment_bytes=4096)) as group:
        data = np.random.default_rng(rank).normal(size=20001).astype(np.float32)
        await group.all_reduce(data, algorithm="ring")
        await group.barrier()
        print(hashlib.sha256(data.tobytes()).hexdigest())

asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
"""


@pytest.mark.slow
def test_separate_processes_give_the_bits_of_the_virtual_world(virtual, addresses):
    async def program(group: Group) -> str:
        data = np.random.default_rng(group.rank).normal(size=20001).astype(np.float32)
        await group.all_reduce(data, algorithm="ring")
        return hashlib.sha256(data.tobytes()).hexdigest()

    peers = addresses(3)
    ranks = [
        subprocess.Popen([sys.executable, "-c", _RANK, str(rank), *peers], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        digests = [process.communicate(timeout=PROCESS_GUARD_S)[0].strip() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert digests == virtual.run(3, program, wire=Wire(segment_bytes=4096))
