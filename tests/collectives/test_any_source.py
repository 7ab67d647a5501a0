"""Receiving from anybody: each message goes to one who asked for it, in order, and nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcsim import Group, Options, Wire, simulate
from hcsim.errors import CollectiveError, CollectiveTimeout, UsageError
from hcsim.runtime.channel import Phantom
from tests.switches import on_switch

TINY = Wire(segment_bytes=64)
ANY = None


def message(sender: int, number: int, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(length, dtype=np.int32) + 1000 * sender + 100_000 * number


@pytest.mark.quick_cases(13)
@pytest.mark.parametrize("receiver", [0, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 100])
@pytest.mark.parametrize("stripes", [1, 3])
def test_every_message_comes_once_and_in_the_order_of_its_sender(cluster, receiver, length, stripes):
    count = 5

    async def program(group: Group) -> list[tuple[int, bytes]]:
        if group.rank != receiver:
            for number in range(count):
                await group.send(message(group.rank, number, length), receiver, tag=7)
            return []
        found = []
        for _ in range(count * (group.size - 1)):
            into = np.zeros(length, np.int32)
            found.append((await group.recv_any(into, tag=7), into.tobytes()))
        return found

    found = cluster.run(4, program, wire=Wire(segment_bytes=64, stripes=stripes))[receiver]
    for sender in {0, 1, 2, 3} - {receiver}:
        from_there = [data for source, data in found if source == sender]
        assert from_there == [message(sender, number, length).tobytes() for number in range(count)]


def test_those_who_wait_together_take_unlike_messages(cluster):
    async def program(group: Group) -> list[tuple[int, int]]:
        if group.rank:
            await group.send(np.array([group.rank * 10]), 0)
            await group.send(np.array([group.rank * 10 + 1]), 0)
            return []
        rooms = [np.zeros(1, np.int64) for _ in range(4)]
        pending = [group.recv_any(room) for room in rooms]
        return [(await each, int(room[0])) for each, room in zip(pending, rooms, strict=True)]

    found = cluster.run(3, program)[0]
    assert [value for source, value in found if source == 1] == [10, 11]
    assert [value for source, value in found if source == 2] == [20, 21]


def test_a_receipt_from_one_rank_beside_one_from_anybody_loses_nothing(cluster):
    async def program(group: Group) -> list[int]:
        if group.rank == 1:
            for number in range(3):
                await group.send(np.array([10 + number]), 0)
        if group.rank == 2:
            await group.send(np.array([20]), 0)
        if group.rank:
            return []
        rooms = [np.zeros(1, np.int64) for _ in range(4)]
        # Whatever comes first, the two from rank 1 find theirs: it sends three, of which one may go to the second.
        pending: list[Any] = [group.recv(rooms[0], 1), group.recv_any(rooms[1]), group.recv(rooms[2], 1)]
        pending.append(group.recv_any(rooms[3]))
        for each in pending:
            await each
        return [int(room[0]) for room in rooms]

    (before, between, after, last), *_ = cluster.run(3, program)
    assert before == 10
    assert {between, after, last} == {11, 12, 20}
    assert after == (12 if between == 11 else 11)


class Event(NamedTuple):
    """Either a message leaves a sender for tag 0 or 1, or the receiver asks for one."""

    sender: int | None
    """None: it is the receiver's."""
    source: int | None
    tag: int


RECEIVER = 1
SENDERS = (0, 2, 3)
events = st.lists(
    st.one_of(
        st.builds(Event, st.sampled_from(SENDERS), st.none(), st.integers(0, 1)),
        st.builds(Event, st.none(), st.sampled_from([ANY, ANY, *SENDERS]), st.integers(0, 1)),
    ),
    max_size=10,
)


def matching(history: list[Event], found: list[int]) -> list[tuple[int, int]]:
    """Brute force: what each of the receiver's questions gets (sender and number), one event after the other.

    Where several messages wait for a question from anybody, all are right, and the one that was found is taken."""
    there: dict[tuple[int, int], deque[int]] = {(s, tag): deque() for s in SENDERS for tag in (0, 1)}
    sent = dict.fromkeys(there, 0)
    asked: list[tuple[int | None, int]] = []
    got: dict[int, tuple[int, int]] = {}
    for sender, source, tag in history:
        if sender is None:
            asked.append((source, tag))
            candidates = [s for s in SENDERS if source in (ANY, s) and there[s, tag]]
            # Who asked earlier for the same has not got it, so there is none that it could take.
            if candidates:
                which = len(asked) - 1
                chosen = found[which] if found[which] in candidates else candidates[0]
                got[which] = chosen, there[chosen, tag].popleft()
            continue
        number, sent[sender, tag] = sent[sender, tag], sent[sender, tag] + 1
        for which, (wanted, of) in enumerate(asked):
            if which not in got and of == tag and wanted in (ANY, sender):
                got[which] = sender, number
                break
        else:
            there[sender, tag].append(number)
    return [got[which] for which in range(len(asked))]


def completed(history: list[Event]) -> list[Event]:
    """With as many more messages as it takes for every question to be answered."""
    asked = sum(event.sender is None for event in history)
    return [*history, *(Event(s, None, tag) for _ in range(asked) for s in SENDERS for tag in (0, 1))]


@pytest.mark.slow
@settings(max_examples=40)
@given(history=events, length=st.sampled_from([1, 40]), phantom=st.booleans())
def test_messages_go_to_whoever_asked_first_whatever_the_order_of_events(history, length, phantom):
    history = completed(history)

    async def program(group: Group) -> list[tuple[int, int]]:
        await group.barrier()
        clock, pending, rooms, sources, sent = group.host.clock, [], [], [], {}
        for sender, source, tag in history:
            await clock.sleep(1.0)
            if sender == group.rank:
                number = sent[tag] = sent.get(tag, -1) + 1
                data = Phantom(4 * length) if phantom else message(sender, number, length)
                pending.append(group.send(data, RECEIVER, tag=tag))
            elif sender is None and group.rank == RECEIVER:
                room = Phantom(4 * length) if phantom else np.zeros(length, np.int32)
                rooms.append(room)
                sources.append(source)
                is_any = source is ANY
                pending.append(group.recv_any(room, tag=tag) if is_any else group.recv(room, source, tag=tag))
        results = [await each for each in pending]
        await group.barrier()
        if group.rank != RECEIVER:
            return []
        senders = [result if source is ANY else source for result, source in zip(results, sources, strict=True)]
        if phantom:
            return [(sender, -1) for sender in senders]
        for room, sender in zip(rooms, senders, strict=True):
            assert (room == message(sender, int(room[0]) // 100_000, length)).all()
        return [(sender, int(room[0]) // 100_000) for sender, room in zip(senders, rooms, strict=True)]

    scenario = on_switch([f"mac-{rank}" for rank in range(4)], ())
    found = simulate(scenario, program, wire=TINY).values()[RECEIVER]
    expected = matching(history, [sender for sender, _ in found])
    assert found == ([(sender, -1) for sender, _ in expected] if phantom else expected)


def test_what_waits_already_is_taken_by_rank_and_the_same_in_every_run(virtual):
    async def program(group: Group) -> list[int]:
        if group.rank != 2:
            await group.sendrecv(np.zeros(1), 2, np.zeros(1), 2, tag=1)
            await group.host.clock.sleep(4.0 - group.rank)  # the highest rank is the first
            await group.send(np.zeros(3), 2)
            return []
        links = [group.sendrecv(np.zeros(1), peer, np.zeros(1), peer, tag=1) for peer in (0, 1, 3)]
        for link in links:  # so that what they send is there before anybody asks for it
            await link
        await group.host.clock.sleep(5.0)
        return [await group.recv_any(np.zeros(3)) for _ in range(3)]

    first, again = (virtual.outcome(4, program) for _ in range(2))
    assert first.values()[2] == [0, 1, 3]
    assert first.values() == again.values()
    assert first.seconds == again.seconds


def test_a_subgroup_names_the_sender_by_its_own_ranks(cluster):
    async def program(group: Group) -> list[int]:
        if group.rank == 1:
            return []
        turned = group.subgroup([3, 0, 2])
        if turned.rank != 1:
            await turned.send(np.array([turned.rank]), 1)
            return []
        return sorted([await turned.recv_any(np.zeros(1, np.int64)) for _ in range(2)])

    assert cluster.run(4, program) == [[0, 2], [], [], []]


def test_one_who_never_sends_is_no_hindrance_and_one_who_left_neither(cluster):
    async def program(group: Group) -> int:
        if group.rank == 0:
            await group.barrier()
            return -1  # leaves in an orderly way
        if group.rank == 1:
            await group.barrier()
            into = np.zeros(2)
            return await group.recv_any(into)
        await group.barrier()
        if group.rank == 2:
            await group.host.clock.sleep(0.3)
            await group.send(np.ones(2), 1)
        else:
            await group.host.clock.sleep(0.6)
        return -1

    assert cluster.run(4, program, options=Options(timeout_s=10.0)) == [-1, 2, -1, -1]


def test_when_all_have_left_nobody_is_waited_for(cluster):
    async def program(group: Group) -> str:
        await group.barrier()
        if group.rank != 1:
            return ""
        with pytest.raises(CollectiveError, match="nobody is left who could send") as failure:
            await group.recv_any(np.zeros(1))
        return str(failure.value)

    text = cluster.run(3, program, options=Options(timeout_s=20.0))[1]
    assert "rank 0 has left" in text
    assert "rank 2 has left" in text


def test_a_deadline_ends_it_and_the_group(virtual):
    async def program(group: Group) -> tuple[float, str]:
        loop = asyncio.get_running_loop()
        await group.barrier()
        began_s = loop.time()
        if group.rank == 1:
            before, first = group.recv(np.zeros(1), 0), group.within(5.0).recv_any(np.zeros(1))
            after = group.recv(np.zeros(1), 2)
            with pytest.raises(CollectiveTimeout, match="any rank"):
                await first
            for each in (before, after):
                with pytest.raises(CollectiveError):
                    await each
        else:
            await group.host.clock.sleep(20.0)
        return loop.time() - began_s, str(group.error)

    results = virtual.run(3, program, options=Options(timeout_s=60.0))
    assert results[1][0] == pytest.approx(5.0, abs=0.5)
    assert all("longer than 5 s" in reason for _, reason in results)


@pytest.mark.parametrize("how", ["another fails", "one is cancelled"])
def test_the_failure_of_any_member_ends_it_at_once(cluster, how):
    async def program(group: Group) -> str:
        await group.barrier()
        if group.rank == 2 and how == "another fails":
            group.fail("out of paper")
            return "out of paper"
        pending = group.recv_any(np.zeros(1))
        if group.rank == 1 and how == "one is cancelled":
            await group.host.clock.sleep(0.1)
            pending.cancel()
        with pytest.raises((CollectiveError, asyncio.CancelledError)):
            await pending
        return str(group.error)

    reason = "out of paper" if how == "another fails" else "recv_any #0 was cancelled on rank 1"
    results = cluster.run(3, program, options=Options(timeout_s=20.0))
    assert all(reason in text for text in results), results


def test_a_message_of_another_length_is_refused(cluster):
    async def program(group: Group) -> str:
        if group.rank == 0:
            await group.send(np.zeros(4), 1)
            with pytest.raises(CollectiveError):
                await group.barrier()
            return ""
        with pytest.raises(CollectiveError) as failure:
            await group.recv_any(np.zeros(3))
        return str(failure.value)

    assert "32 bytes, we expect 24" in cluster.run(2, program)[1]


def test_nobody_sends_in_a_group_of_one(virtual):
    async def program(group: Group) -> None:
        with pytest.raises(UsageError, match="nobody"):
            group.recv_any(np.zeros(1))

    assert virtual.run(1, program) == [None]
