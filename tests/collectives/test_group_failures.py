"""A collective that cannot succeed fails: on every rank, by name, in time, and without touching data afterwards."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

from hcsim import Group, Options, Phantom, Wire, real_group
from hcsim.collectives.scheduler import IN_FLIGHT
from hcsim.config import Crash, Misbehave, Partition, Pause, Reset
from hcsim.errors import CollectiveError, CollectiveTimeout
from hcsim.virtual.world import HostCrashed

TIMEOUT = Options(timeout_s=2.0)
GRACE_S = 0.5
"""To tell the others and to close the links."""
LARGE = Phantom(100_000_000)
"""Most of a second on a gigabit link."""


async def failure(operation: Awaitable[Any]) -> tuple[CollectiveError, float]:
    """The error that ends the operation, and when it came."""
    with pytest.raises(CollectiveError) as caught:
        await operation
    return caught.value, asyncio.get_running_loop().time()


async def followed_by_a_barrier(group: Group, operation: Awaitable[Any]) -> None:
    """A rank that only sends cannot notice by itself that others failed, and is told within the next operation."""
    await operation
    await group.barrier()


def test_who_cancels_an_operation_before_it_has_begun_tells_the_others(cluster):
    async def program(group: Group) -> str:
        await group.barrier()
        operation = group.all_reduce(np.ones(10))
        if group.rank == 0:
            operation.cancel()
            with pytest.raises(asyncio.CancelledError):
                await operation
            return str((await failure(group.barrier()))[0])
        return str((await failure(operation))[0])

    texts = cluster.run(3, program, options=Options(timeout_s=60.0))
    assert all("all_reduce #1 was cancelled on rank 0" in text for text in texts), texts


@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("queued", [IN_FLIGHT, 70])
def test_a_timeout_before_ones_turn_names_whom_those_before_wait_for(virtual, queued, connected):
    async def program(group: Group) -> CollectiveError | None:
        if connected:
            await group.barrier()
        if group.rank == 1:
            await asyncio.sleep(60)
            return None
        for _ in range(queued):
            group.all_reduce(np.ones(4))
        return (await failure(group.within(0.5).all_reduce(np.ones(4))))[0]

    error = virtual.run(2, program, options=TIMEOUT)[0]
    doing = "receiving from" if connected else "opening a link to"
    assert isinstance(error, CollectiveTimeout)
    assert error.peer == 1
    assert re.fullmatch(rf"waiting for all_reduce #\d+, which is {doing} rank 1 in round 0.*", error.phase)
    assert error.phase in str(error)


@pytest.mark.slow
def test_a_timeout_before_ones_turn_names_whom_nobody_has_reached(cluster):
    """And nobody who is there, though a link to it was the first to be opened."""

    async def program(group: Group) -> CollectiveError | None:
        if group.rank == 2:
            await group.host.clock.sleep(1.5)
            return None
        ones = [np.ones(100, np.float32) for _ in range(IN_FLIGHT + 2)]
        patient = [group.within(8.0).all_reduce(data, algorithm="direct") for data in ones[1:]]
        late = group.within(0.5).all_reduce(ones[0], algorithm="direct")
        found, *_ = await asyncio.gather(late, *patient, return_exceptions=True)
        return found

    assert [error and error.peer for error in cluster.run(3, program)] == [2, 2, None]


@pytest.mark.parametrize("turns", range(20, 32, 2))
def test_whose_words_lie_behind_a_frame_that_nobody_wants_is_heard_out(real, turns):
    """Rank 5 gives up; those who only see others hang up hear from them that it was because of rank 5."""

    async def program(group: Group) -> int | None:
        data = np.ones(9000, np.float32)
        await group.reduce_scatter(data, algorithm="halving")
        task = group.reduce_scatter(data, algorithm="halving")
        if group.rank == 5:
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
        try:
            await task
        except (CollectiveError, asyncio.CancelledError) as error:
            return getattr(error, "peer", 5)
        return 5

    assert real.run(6, program, wire=Wire(segment_bytes=512)) == [5] * 6


@pytest.mark.parametrize("connected", [False, True])
def test_a_timeout_names_the_silent_peer_and_the_phase(virtual, connected):
    async def program(group: Group) -> tuple[CollectiveError, float] | None:
        if connected:
            await group.barrier()
        if group.rank == 2:
            await asyncio.sleep(60)
            return None
        return await failure(group.all_reduce(np.ones(10), algorithm="centralized"))

    root, waiting, _ = virtual.run(3, program, options=TIMEOUT)
    for error, at_s in (root, waiting):
        assert isinstance(error, CollectiveError)
        assert 2.0 <= at_s < 2.0 + GRACE_S
    assert isinstance(root[0], CollectiveTimeout)
    assert isinstance(root[0], TimeoutError)
    assert root[0].peer == 2
    assert "rank 2" in root[0].phase
    assert ("receiving" if connected else "opening") in root[0].phase
    assert "all_reduce" in str(root[0])


def test_the_first_rank_to_time_out_ends_the_operation_everywhere(virtual):
    async def program(group: Group) -> tuple[CollectiveError, float]:
        await group.barrier()
        if group.rank == 3:
            await asyncio.sleep(1.5)  # its own deadline is later
            return await failure(group.all_reduce(LARGE, algorithm="ring"))
        if group.rank == 0:
            await asyncio.sleep(60)
        return await failure(group.all_reduce(LARGE, algorithm="ring"))

    silent, *others = virtual.run(4, program, options=TIMEOUT)
    for error, at_s in others:
        assert at_s < 2.0 + GRACE_S
        assert "rank" in str(error)
    assert "was not started" in str(silent[0])


def test_a_failed_group_repeats_its_error_and_reopens(cluster):
    async def program(group: Group) -> tuple[int, float]:
        if group.rank == 0:
            with pytest.raises(CollectiveError):
                await group.all_reduce(np.ones(3))
        else:
            with pytest.raises(CollectiveError):
                await group.all_reduce(np.ones(4))
        with pytest.raises(CollectiveError, match="was not started"):
            await group.all_reduce(np.ones(3))
        with pytest.raises(CollectiveError, match="was not started"):
            await group.send(np.ones(3), 1 - group.rank)
        async with await group.reopen() as again:
            result = await again.all_reduce(np.full(3, group.rank + 1.0))
            await again.barrier()
            return again.epoch, float(result[0])

    assert cluster.run(2, program) == [(1, 3.0), (1, 3.0)]


def test_a_late_rank_of_the_old_epoch_is_refused_and_can_join_the_new_one(virtual):
    async def program(group: Group) -> float:
        if group.rank == 2:
            await asyncio.sleep(3)
        with pytest.raises(CollectiveError, match="your epoch is 0, ours is 1" if group.rank == 2 else "took longer"):
            await group.all_reduce(np.full(5, 100.0), algorithm="centralized")
        async with await group.reopen() as again:
            # The others have waited here since their deadline, in the new epoch.
            result = await again.all_reduce(np.full(5, group.rank + 1.0), algorithm="centralized")
            return float(result[0])

    assert virtual.run(3, program, options=TIMEOUT) == [6.0, 6.0, 6.0]


def test_a_cancelled_operation_fails_on_the_other_ranks(cluster):
    async def program(group: Group) -> CollectiveError | None:
        await group.barrier()
        if group.rank == 1:
            pending = group.all_reduce(np.ones(10))
            await asyncio.sleep(0)
            pending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pending
            with pytest.raises(CollectiveError, match="cancelled"):
                await group.barrier()
            return None
        return (await failure(followed_by_a_barrier(group, group.all_reduce(np.ones(10)))))[0]

    for rank, error in enumerate(cluster.run(3, program)):
        if rank != 1:
            assert "cancelled on rank 1" in str(error)


MISMATCHES = {
    "lengths": lambda group, odd: group.all_reduce(np.ones(11 if odd else 10)),
    "dtypes": lambda group, odd: group.all_reduce(np.ones(10, np.int32 if odd else np.float32)),
    "reductions": lambda group, odd: group.all_reduce(np.ones(10), "max" if odd else "sum"),
    "algorithms": lambda group, odd: group.all_reduce(np.ones(12), algorithm="centralized" if odd else "tree"),
    "counts": lambda group, odd: group.all_gather(np.ones(4), [4, 4, 5] if odd else [4, 4, 4]),
    "operations": lambda group, odd: group.reduce(np.ones(10)) if odd else group.all_reduce(np.ones(10)),
    "parts": lambda group, odd: group.all_to_all([np.ones(4)] * 3, [3, 4, 4] if odd else None),
    "payloads": lambda group, odd: group.all_reduce(Phantom(40) if odd else np.ones(10, np.float32)),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_disagree_are_told_so(virtual, what):
    async def program(group: Group) -> tuple[CollectiveError, float]:
        return await failure(followed_by_a_barrier(group, MISMATCHES[what](group, group.rank == 1)))

    results = virtual.run(3, program, options=TIMEOUT)
    assert [result for result in results if isinstance(result, BaseException)] == []
    assert any("another operation" in str(error) for error, _ in results)
    for _, at_s in results:
        assert at_s < TIMEOUT.timeout_s


def test_ranks_that_disagree_about_the_root_fail_in_time(virtual):
    async def program(group: Group) -> tuple[CollectiveError, float]:
        return await failure(followed_by_a_barrier(group, group.reduce(np.ones(10), int(group.rank == 1))))

    for _, at_s in virtual.run(3, program, options=TIMEOUT):
        assert at_s < TIMEOUT.timeout_s + GRACE_S


def test_a_message_of_another_length_than_expected_is_refused(cluster):
    async def program(group: Group) -> str:
        if group.rank == 0:
            moving = followed_by_a_barrier(group, group.send(np.ones(10), 1))
        else:
            moving = group.recv(np.ones(9), 0)
        return str((await failure(moving))[0])

    _, receiver = cluster.run(2, program)
    assert "80 bytes" in receiver
    assert "72" in receiver


def test_frames_that_a_message_does_not_have_show_who_sent_them(virtual):
    async def program(group: Group) -> tuple[str, str]:
        if group.rank == 0:
            await group.send(np.ones(9), 1)
            await asyncio.sleep(1)
            await group.send(np.ones(9), 1)
            await failure(group.recv(np.ones(9), 1))
            return "", ""
        await group.recv(np.ones(9), 0)
        error, _ = await failure(group.recv(np.ones(9), 0))
        return str(error), str(group.skipped or error.__cause__)

    fault = Misbehave(0.5, "mac-0", "huge_step")
    _, (said, skipped) = virtual.outcome(2, program, options=TIMEOUT, faults=[fault]).results
    assert "recv #1" in said
    assert "rank 0 sent" in skipped


@pytest.mark.parametrize("tag", [1, 1 << 16])
def test_messages_with_other_tags_show_nothing_about_the_one_that_is_missing(virtual, tag):
    async def program(group: Group) -> object:
        if group.rank == 0:
            await group.send(np.ones(9), 1, tag=tag)
            await failure(group.recv(np.ones(9), 1))
            return None
        error, _ = await failure(group.recv(np.ones(9), 0))
        return group.skipped or error.__cause__

    assert virtual.run(2, program, options=TIMEOUT) == [None, None]


FAULTS = {
    "reset": Reset(at_s=0.3, between=("mac-0", "mac-1")),
    "clean crash": Crash(at_s=0.3, node="mac-1", clean=True),
    "silent crash": Crash(at_s=0.3, node="mac-1"),
}


@pytest.mark.parametrize("algorithm", ["ring", "tree", "centralized", "halving_doubling"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_middle_ends_the_operation_on_all_survivors(virtual, fault, algorithm):
    async def program(group: Group) -> tuple[CollectiveError, float]:
        return await failure(group.all_reduce(LARGE, algorithm=algorithm))

    results = virtual.outcome(4, program, options=TIMEOUT, faults=[FAULTS[fault]]).results
    crashed = [result for result in results if isinstance(result, HostCrashed)]
    errors = [result for result in results if not isinstance(result, HostCrashed)]
    assert len(crashed) == (fault != "reset")
    assert len(errors) + len(crashed) == 4
    noticed_s = 2.0 if fault == "silent crash" else 0.3
    for error, at_s in errors:
        assert error.peer is not None
        assert at_s < noticed_s + GRACE_S
    if fault == "silent crash":
        assert any(isinstance(error, CollectiveTimeout) and error.peer == 1 for error, _ in errors)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "centralized", "halving_doubling", "direct"])
@pytest.mark.parametrize("members", [range(4), (3, 1, 2)])
def test_every_survivor_names_the_rank_that_died_whoever_told_it(virtual, members, algorithm):
    async def program(group: Group) -> CollectiveError:
        if group.rank in (0, 2):
            await group.subgroup([0, 2]).barrier()  # so that rank 0 hears of it in the smaller group's case, too
        part = group.subgroup(members) if group.rank in members else group
        operation = part.all_reduce(LARGE, algorithm=algorithm) if part is not group else group.recv(np.ones(3), 2)
        return (await failure(followed_by_a_barrier(group, operation)))[0]

    results = virtual.outcome(4, program, options=TIMEOUT, faults=[FAULTS["clean crash"]]).results
    assert isinstance(results.pop(1), HostCrashed)
    assert [error.peer for error in results] == [1, 1, 1], results


def test_an_operation_that_was_not_started_says_that_a_peer_told_why(virtual):
    async def program(group: Group) -> CollectiveError:
        await failure(group.all_reduce(LARGE, algorithm="ring"))  # rank 3 has no link to rank 1
        return (await failure(group.barrier()))[0]

    results = virtual.outcome(4, program, options=TIMEOUT, faults=[FAULTS["clean crash"]]).results
    not_started = results[3]
    assert "was not started" in str(not_started)
    assert (not_started.peer, not_started.phase) == (1, "told by a peer")


DIES = """
import asyncio, os, sys
import numpy as np
from hcsim import real_group

async def main():
    async with real_group(1, sys.argv[1:]) as group:
        await group.all_reduce(np.ones(10), algorithm="ring")
        for rank in (0, 2):
            await group.recv(np.ones(1), rank)  # all others have finished
        os._exit(0)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_real_rank_that_is_told_names_the_one_that_died(addresses):
    peers = addresses(4)

    async def on_rank(rank: int) -> CollectiveError:
        async with real_group(rank, peers, options=Options(timeout_s=30.0)) as group:
            await group.all_reduce(np.ones(10), algorithm="ring")  # rank 3 has no link to rank 1
            if rank == 2:
                await group.recv(np.ones(1), 3)
            await group.send(np.ones(1), 2 if rank == 3 else 1)
            return (await failure(group.all_reduce(np.ones(10), algorithm="ring")))[0]

    async def main() -> list[CollectiveError]:
        async with asyncio.timeout(60.0):
            return await asyncio.gather(*map(on_rank, (0, 2, 3)))

    with subprocess.Popen([sys.executable, "-c", DIES, *peers]) as dying:
        errors = asyncio.run(main())
    assert dying.returncode == 0
    assert [error.peer for error in errors] == [1, 1, 1], errors
    assert errors[2].phase == "told by a peer"


@pytest.mark.parametrize("peer", [None, -1, 7, 1 << 40])
def test_where_no_rank_is_to_blame_who_gave_up_is_named(cluster, peer):
    async def program(group: Group) -> int | None:
        await group.barrier()
        if group.rank == 2:
            group.fail("enough", peer)
        return (await failure(group.barrier()))[0].peer

    assert cluster.run(3, program, options=TIMEOUT)[:2] == [2, 2]


@pytest.mark.parametrize(
    "fault",
    [
        Pause(at_s=0.01, node="mac-1", duration_s=1.0),
        Partition(at_s=0.01, sides=(("mac-0",), ("mac-1", "mac-2")), duration_s=1.0),
        Partition(at_s=0.01, sides=(("mac-0",), ("mac-1",)), duration_s=1.0, oneway=True),
    ],
    ids=["pause", "partition", "oneway"],
)
def test_a_fault_that_heals_in_time_only_delays(virtual, fault):
    async def program(group: Group) -> bool:
        data = np.arange(1_000_000, dtype=np.int64) + group.rank
        await group.all_reduce(data, algorithm="ring")
        return bool((data == 3 * np.arange(1_000_000) + 3).all())

    outcome = virtual.outcome(3, program, options=TIMEOUT, faults=[fault])
    assert outcome.results == [True, True, True]
    assert outcome.seconds > 1.0


def test_who_leaves_early_is_named_to_those_who_wait(cluster):
    async def program(group: Group) -> CollectiveError | None:
        await group.barrier()
        if group.rank == 1:
            return None
        return (await failure(group.all_reduce(np.ones(100))))[0]

    waiting, gone = cluster.run(2, program)
    assert gone is None
    assert "rank 1 has left the group" in str(waiting)
    assert waiting.peer == 1


def test_who_leaves_is_named_to_those_who_send_to_it(cluster):
    async def program(group: Group) -> CollectiveError | None:
        await group.barrier()
        if group.rank == 1:
            return None
        return (await failure(group.send(np.ones(4_000_000), 1)))[0]

    sending, gone = cluster.run(2, program)
    assert gone is None
    assert "rank 1 has left the group" in str(sending)
    assert sending.peer == 1


def test_who_has_what_it_needs_may_leave_while_others_go_on(cluster):
    async def program(group: Group) -> float:
        await group.barrier()
        data = np.full(10, group.rank + 1.0)
        if group.rank == 2:
            await group.send(data, 0)
            return 0.0
        if group.rank == 0:
            await group.recv(data, 2)
        pair = group.subgroup([0, 1])
        return float((await pair.all_reduce(data))[0])

    assert cluster.run(3, program) == [5.0, 5.0, 0.0]


def test_closing_ends_our_own_operations(cluster):
    async def program(group: Group) -> bool:
        await group.barrier()
        if group.rank == 0:
            pending = group.recv(np.ones(3), 1)
            await asyncio.sleep(0)
            await group.close()
            with pytest.raises(CollectiveError, match="closed"):
                await pending
        with pytest.raises(CollectiveError):
            await group.barrier()
        return True

    assert cluster.run(2, program) == [True, True]


def test_a_failure_is_told_to_who_waits_and_to_nobody_else(cluster, caplog):
    async def program(group: Group) -> None:
        await group.barrier()
        pending = group.all_reduce(np.ones(4_000_000), algorithm="ring")
        if group.rank == 0:
            await asyncio.sleep(0.001)
            pending.cancel()
        with pytest.raises((CollectiveError, asyncio.CancelledError)):
            await pending

    assert cluster.run(3, program) == [None] * 3
    gc.collect()  # futures complain when they are collected
    assert caplog.records == []


async def until_partly_received(data: np.ndarray[Any, Any]) -> None:
    while not data[0]:  # noqa: ASYNC110 (bytes in memory set no event)
        await asyncio.sleep(0)
    assert not data[-1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", ["cancelled", "closed", "failed beside another"])
def test_nothing_is_written_into_an_array_once_its_operation_has_ended(real, how):
    async def program(group: Group) -> bool:
        await group.barrier()
        data = np.full(64 << 20, group.rank, np.uint8)
        if group.rank == 1:
            with pytest.raises(CollectiveError):
                await followed_by_a_barrier(group, group.broadcast(data, 1))
            return True
        beside = group.recv(np.ones(1), 1)
        pending = group.broadcast(data, 1)
        await until_partly_received(data)
        if how == "cancelled":
            pending.cancel()
        elif how == "closed":
            await group.close()
        else:
            beside.cancel()
        with pytest.raises((CollectiveError, asyncio.CancelledError)):
            await pending
        kept = data.copy()
        with pytest.raises((CollectiveError, asyncio.CancelledError)):
            await beside
        await group.close()
        return bool((data == kept).all())

    # One segment is large, so that the operation ends in the middle of it.
    assert real.run(2, program, wire=Wire(segment_bytes=16 << 20)) == [True, True]


def test_who_still_waits_for_a_link_hears_that_another_peer_has_given_up(cluster):
    """Rank 0's word that it gives up comes behind a message that rank 1 has not asked for yet."""

    async def program(group: Group) -> str:
        if group.rank == 2:
            await asyncio.sleep(0.5)
            return ""
        await group.subgroup([0, 1]).barrier()
        if group.rank == 0:
            await group.send(np.ones(3), 1)
            group.fail("rank 0 has had enough", 0)
            return ""
        error, _ = await failure(group.recv(np.ones(3), 2))
        return str(error)

    assert "had enough" in cluster.run(3, program, options=TIMEOUT)[1]


def test_who_calls_only_after_the_group_has_failed_hears_why(addresses):
    """Rank 3 gives up while rank 0 still waits for rank 1, which would look for rank 0 until its patience ends."""
    peers = addresses(4)

    async def on_rank(rank: int) -> str:
        if rank == 1:
            await asyncio.wait_for(given_up.wait(), 20)
            await asyncio.sleep(0.5)
        options, wire = Options(timeout_s=20.0, watch_s=0.2), Wire(connect_timeout_s=20.0)
        async with real_group(rank, peers, options=options, wire=wire) as group:
            if rank == 3:
                group.fail("rank 3 has had enough", 3)
                given_up.set()
            return str((await failure(group.barrier()))[0])

    async def main() -> list[str]:
        return await asyncio.gather(*map(on_rank, range(4)))

    given_up = asyncio.Event()
    texts = asyncio.run(main())
    assert all("rank 3 has had enough" in text for text in texts), texts
