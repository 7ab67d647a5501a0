"""Ranks that call unlike collectives in the same place of the order: all learn it, and what each of them did."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hcsim import Group, Options
from hcsim.config import Crash
from hcsim.errors import CollectiveError
from hcsim.virtual.world import HostCrashed

LIMIT_S = 60.0
SOON_S = 1.0
"""Far less than the time limit, and more than telling the others takes."""


def ones(length: int = 12, dtype: type = np.float32) -> np.ndarray[Any, Any]:
    return np.ones(length, dtype)


CALLS: dict[str, Callable[[Group], Any]] = {
    "all_reduce": lambda group: group.all_reduce(ones()),
    "all_reduce of int32": lambda group: group.all_reduce(ones(dtype=np.int32)),
    "all_reduce of more": lambda group: group.all_reduce(ones(24)),
    "all_reduce by max": lambda group: group.all_reduce(ones(), "max"),
    "reduce to 0": lambda group: group.reduce(ones(), 0),
    "reduce to 1": lambda group: group.reduce(ones(), 1),
    "broadcast from 0": lambda group: group.broadcast(ones(), 0),
    "broadcast from 1": lambda group: group.broadcast(ones(), 1),
    "all_gather": lambda group: group.all_gather(ones()),
    "gather to 0": lambda group: group.gather(ones(), 0),
    "gather to 1": lambda group: group.gather(ones(), 1),
    "scatter from 0": lambda group: group.scatter([ones()] * group.size, ones(), 0),
    "scatter from 1": lambda group: group.scatter([ones()] * group.size, ones(), 1),
    "reduce_scatter": lambda group: group.reduce_scatter(ones(12 * group.size)),
    "all_to_all": lambda group: group.all_to_all([ones()] * group.size),
    "barrier": lambda group: group.barrier(),
}


async def failure(group: Group, call: str) -> tuple[str, float]:
    """How the call ends, or, where it only sends, the next one: with which text, and how much later."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def and_the_next() -> None:
        await CALLS[call](group)
        await group.barrier()

    with pytest.raises(CollectiveError) as caught:
        await and_the_next()
    return str(caught.value), loop.time() - began_s


@pytest.mark.parametrize(
    ("usual", "odd"),
    [
        ("all_reduce", "broadcast from 0"),
        ("broadcast from 1", "broadcast from 0"),
        ("barrier", "scatter from 0"),
        ("all_gather", "gather to 1"),
    ],
)
@pytest.mark.parametrize("first", [0, 1, 2])
def test_whoever_gets_a_frame_of_another_operation_tells_all_at_once(virtual, usual, odd, first):
    """Rank 0 does something else than the others; in turn, each of the three is ahead of the rest."""

    async def program(group: Group) -> tuple[str, float]:
        await group.barrier()
        if group.rank != first:
            await asyncio.sleep(0.5)
        return await failure(group, odd if group.rank == 0 else usual)

    results = virtual.run(3, program, options=Options(timeout_s=LIMIT_S))
    for text, seconds in results:
        assert "another operation" in text
        assert odd.split()[0] in text
        assert usual.split()[0] in text
        assert seconds < 0.5 + SOON_S


@pytest.mark.parametrize("odd", [0, 1])
def test_who_comes_last_blames_whoever_does_something_else_than_itself(virtual, odd):
    """Rank 0 is always the first; that the two before us differ does not say which of them is wrong."""

    async def both(group: Group) -> None:
        call = group.gather if group.rank == odd else group.reduce
        await call(ones(), 2, algorithm="centralized")
        await group.barrier()

    async def program(group: Group) -> int | None:
        await group.barrier()
        await asyncio.sleep(0.2 * group.rank)
        with pytest.raises(CollectiveError) as caught:
            await both(group)
        return caught.value.peer

    assert virtual.run(3, program, options=Options(timeout_s=LIMIT_S))[2] == odd


def test_a_watched_group_notices_that_two_others_differ_and_blames_neither(virtual):
    async def program(group: Group) -> tuple[str, int | None]:
        await group.barrier()
        if group.rank == 0:  # the others wait for it
            await asyncio.sleep(20 * WATCHED.watch_s)
        with pytest.raises(CollectiveError) as caught:
            await group.broadcast(ones(24 if group.rank == 1 else 12), 0, algorithm="centralized")
        return str(caught.value), caught.value.peer

    outcome = virtual.outcome(3, program, options=WATCHED)
    text, peer = outcome.results[0]
    assert "rank 1 is doing another operation than rank 2" in text or (
        "rank 2 is doing another operation than rank 1" in text
    )
    assert peer is None


def test_a_frame_of_an_operation_that_is_over_is_noticed(virtual):
    async def program(group: Group) -> tuple[str, float]:
        await group.barrier()
        if group.rank == 1:
            await asyncio.sleep(0.5)  # rank 0 has sent its broadcast, and waits in what comes next
        return await failure(group, "broadcast from 0" if group.rank == 0 else "gather to 0")

    for text, seconds in virtual.run(2, program, options=Options(timeout_s=LIMIT_S)):
        assert "another operation" in text
        assert seconds < SOON_S


@pytest.mark.parametrize(("given", "expected"), [(3, "24 bytes, we expect 32"), (4, "its kind, dtype")])
def test_a_message_of_another_kind_is_the_reason_also_where_its_sender_has_left(cluster, given, expected):
    async def program(group: Group) -> str:
        if group.rank == 0:
            await group.send(np.zeros(given, np.float64 if given == 3 else np.int64), 1)
            return ""
        with pytest.raises(CollectiveError) as caught:
            await group.recv(np.zeros(4), 0)
        return str(caught.value)

    assert expected in cluster.run(2, program)[1]


def test_unlike_calls_in_a_subgroup_name_ranks_as_the_whole_group_does(virtual):
    async def program(group: Group) -> str:
        await group.barrier()
        if group.rank == 0:
            return ""
        pair = group.subgroup([1, 2])
        return (await failure(pair, "broadcast from 0" if group.rank == 1 else "all_reduce"))[0]

    _, *texts = virtual.run(3, program, options=Options(timeout_s=LIMIT_S))
    for text in texts:
        assert "rank 1 is doing another operation than rank 2" in text or (
            "rank 2 is doing another operation than rank 1" in text
        )


WATCHED = Options(timeout_s=LIMIT_S, watch_s=0.2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("usual", CALLS)
def test_a_watched_group_never_waits_for_its_time_limit(virtual, usual):
    """Whatever one of three ranks calls instead, and whether or not anything was ever sent between them before."""

    async def program(group: Group, mine: str) -> str:
        try:
            await CALLS[mine](group)
            await group.barrier()
        except CollectiveError as error:
            return str(error)
        return ""  # it has all it needs: the others learn it from those who have not

    for other, odd in itertools.product([call for call in CALLS if call != usual], range(3)):
        outcome = virtual.outcome(
            3,
            lambda group, other=other, odd=odd: program(group, other if group.rank == odd else usual),
            options=WATCHED,
        )
        assert any("another operation" in text for text in outcome.results), (other, odd, outcome.results)
        assert outcome.seconds < 3 * WATCHED.watch_s


def test_who_is_only_late_in_a_watched_group_is_waited_for(virtual):
    async def program(group: Group) -> list[float]:
        results = []
        for number in range(3):
            if group.rank == number:
                await asyncio.sleep(2.0)
            results.append(float((await group.all_reduce(np.full(3, group.rank + 1.0)))[0]))
        return results

    assert virtual.run(3, program, options=WATCHED) == [[6.0, 6.0, 6.0]] * 3


@pytest.mark.parametrize("lost", [0, 2])
def test_a_watched_group_notices_who_is_lost_before_anybody_needed_it(virtual, lost):
    async def program(group: Group) -> tuple[str, float]:
        await asyncio.sleep(0.5)
        return await failure(group, "all_reduce")

    crash = Crash(at_s=0.3, node=f"mac-{lost}", clean=True)
    results = virtual.outcome(3, program, options=WATCHED, faults=[crash]).results
    assert isinstance(results.pop(lost), HostCrashed)
    for text, seconds in results:
        assert f"rank {lost}" in text
        assert seconds < SOON_S
