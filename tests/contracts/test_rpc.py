"""Remote calls, in both worlds and over every carrier."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from hcsim.errors import (
    CallRefused,
    ChannelBroken,
    ChannelClosed,
    ChannelError,
    ConfigError,
    DeadlineExceeded,
    RemoteError,
    RemoteProtocolError,
    UsageError,
)
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.rpc import Endpoint, Limits, Procedure, ProcedureRegistry, RemoteRef, serving_endpoint
from hcsim.transport.rpc.messages import SCHEMA, CallFailure, CallRequest, CancelCall, EncodedValue, ReleaseReference

MIB = 2**20


class Point(msgspec.Struct):
    x: int
    y: int = 0


async def add(left: int, right: int = 10) -> int:
    return left + right


async def mirrored(point: Point) -> Point:
    return Point(point.y, point.x)


def doubled(array: NDArray[np.float32]) -> NDArray[np.float32]:
    return array * 2


def registry(*functions: Any) -> ProcedureRegistry:
    made = ProcedureRegistry()
    for function in functions:
        made.add(function)
    return made


async def ends(arena, left, right, ours=(), theirs=(), limits=None) -> tuple[Endpoint, Endpoint]:
    client, server = await arena.channels(left, right)
    return (
        Endpoint(left, client, registry(*ours), limits),
        Endpoint(right, server, registry(*theirs), limits),
    )


async def closed(*endpoints: Endpoint) -> None:
    for endpoint in endpoints:
        await endpoint.close()


def test_a_call_returns_what_the_function_returns(arena):
    async def body(left, right):
        near, far = await ends(arena, left, right, theirs=(add, mirrored))
        assert await near.call("add", 1, 2) == 3
        assert await near.call(Procedure.of(add), 1) == 11
        assert await near.call(Procedure.of(mirrored), Point(1, 2)) == Point(2, 1)
        await closed(near, far)

    arena.run(body)


def test_rpc_deadlock_two_callers_that_wait_for_each_other_both_get_their_answer(arena):
    async def body(left, right):
        met: dict[str, asyncio.Future[None]] = {
            name: asyncio.get_running_loop().create_future() for name in ("left", "right")
        }

        def meeting(name: str, other: str):
            async def meet() -> str:
                met[name].set_result(None)
                await met[other]  # answers only once the other call has come in as well
                return name

            return meet

        near, far = await ends(arena, left, right, [meeting("left", "right")], [meeting("right", "left")])
        assert await asyncio.gather(near.call("meet"), far.call("meet")) == ["right", "left"]
        await closed(near, far)

    arena.run(body)


def test_rpc_deadlock_calls_within_calls_go_back_and_forth_even_with_one_slot(arena):
    async def countdown(number: int) -> list[int]:
        below = [] if number == 0 else await serving_endpoint().call("countdown", number - 1)
        return [number, *below]

    async def body(left, right):
        near, far = await ends(arena, left, right, [countdown], [countdown], Limits(max_calls=1))
        both = await asyncio.gather(near.call("countdown", 6), far.call("countdown", 5))
        assert both == [list(range(6, -1, -1)), list(range(5, -1, -1))]
        await closed(near, far)

    arena.run(body)


def test_a_cycle_of_calls_without_end_is_refused(arena):
    async def again() -> None:
        await serving_endpoint().call("again")

    async def body(left, right):
        near, far = await ends(arena, left, right, [again], [again])
        with pytest.raises(CallRefused, match="deep"):
            await near.call("again")
        await closed(near, far)

    arena.run(body)


def test_arrays_arrive_as_they_were_sent_whatever_their_shape_and_memory_order(arena):
    rng = np.random.default_rng(1)
    arrays = [
        rng.standard_normal((3, 5)).astype(np.float32),
        np.arange(12, dtype=">i4").reshape(3, 4).T,
        np.array(7.5),
        np.empty((0, 3), np.int64),
        np.array([True, False]),
        rng.standard_normal(300_000),
    ]

    async def same(given: list[np.ndarray], note: str) -> dict[str, list[np.ndarray]]:
        return {note: given}

    async def body(left, right):
        near, far = await ends(arena, left, right, theirs=[same], limits=Limits(segment_bytes=64 * 1024))
        back = (await near.call(Procedure.of(same), arrays, "here"))["here"]
        for sent, got in zip(arrays, back, strict=True):
            assert got.shape == sent.shape
            assert got.dtype == sent.dtype.newbyteorder("=")
            np.testing.assert_array_equal(got, sent)
        await closed(near, far)

    arena.run(body)


def test_a_large_array_does_not_hold_up_a_small_call(arena):
    async def swallow(array: np.ndarray) -> int:
        return array.nbytes

    async def body(left, right):
        near, far = await ends(arena, left, right, theirs=[swallow, add])
        order = []

        async def noted(name, waiting):
            order.append((name, await waiting))

        await asyncio.gather(
            noted("large", near.call("swallow", np.zeros(32 * MIB, np.uint8))), noted("small", near.call("add", 1))
        )
        assert order == [("small", 11), ("large", 32 * MIB)]
        await closed(near, far)

    arena.run(body)


@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("subtract", (), "no function 'subtract'"),
        ("add", ("one",), "int"),
        ("add", (), "missing|at least"),
        ("add", (1, 2, 3), "at most|length"),
        ("mirrored", ({"y": 1},), "x"),
        ("doubled", (np.zeros(2, np.int64),), "float32"),
        ("doubled", (3,), "ndarray"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_by_name_and_the_channel_lives_on(arena, name, args, why):
    async def body(left, right):
        near, far = await ends(arena, left, right, theirs=(add, mirrored, doubled))
        with pytest.raises(CallRefused, match=why) as caught:
            await near.call(name, *args)
        assert name in str(caught.value)
        assert await near.call("add", 1) == 11
        await closed(near, far)

    arena.run(body)


def test_what_is_too_large_is_refused_at_both_ends(arena):
    async def big() -> str:
        return "x" * 5000

    async def wide() -> np.ndarray:
        return np.zeros(20_000, np.uint8)

    async def take(data: Any) -> int:
        return len(data)

    async def body(left, right):
        small = Limits(max_body_bytes=1000, max_array_bytes=10_000)
        client, server = await arena.channels(left, right)
        near, far = Endpoint(left, client), Endpoint(right, server, registry(big, wide, take, add), small)
        for call in (
            near.call("big"),
            near.call("wide"),
            near.call("take", "x" * 5000),
            near.call("take", np.zeros(20_000, np.uint8)),
        ):
            with pytest.raises(CallRefused, match=r"(5\d\d\d|20000) bytes"):
                await call
        with pytest.raises(UsageError, match="5004 bytes"):
            await far.call("take", "x" * 5000)  # its own limits refuse it before it leaves
        assert await near.call("add", 1) == 11
        await closed(near, far)

    arena.run(body)


def test_results_that_nobody_reads_are_bounded(arena):
    async def wide() -> np.ndarray:
        return np.zeros(40 * MIB, np.uint8)

    async def body(left, right):
        client, server = await arena.channels(left, right)
        far = Endpoint(right, server, registry(wide), Limits(max_held_bytes=100 * MIB))
        for number in range(1, 6):  # a peer that asks and does not read
            data = SCHEMA.encode(CallRequest(number, "wide", EncodedValue(b"\x90")))
            await client.send(Header(len(data), Kind.CONTROL), memoryview(data))
        while far.busy or not far.unread_bytes:
            await right.clock.sleep(0.01)
        assert far.unread_bytes <= 100 * MIB
        await far.close()

    arena.run(body)


@pytest.mark.slow
def test_a_peer_that_calls_and_never_reads_loses_its_channel(arena):
    async def talk() -> str:
        return "and so on" * 1000

    async def body(left, right):
        client, server = await arena.channels(left, right)
        far = Endpoint(right, server, registry(talk), Limits(max_calls=1))
        calls = 0
        with suppress(ChannelError):
            while not far.ended.done() and calls < 500_000:
                calls += 1
                data = SCHEMA.encode(CallRequest(calls, "talk", EncodedValue(b"\x90")))
                await client.send(Header(len(data), Kind.CONTROL), memoryview(data))
        assert "does not read our answers" in str(await far.ended)
        await far.close()

    arena.run(body)


@pytest.mark.slow
def test_what_we_have_to_say_ourselves_costs_no_caller_its_channel(arena):
    async def lend(count: int) -> list[RemoteRef[Point]]:
        return [RemoteRef.lend(Point(number)) for number in range(count)]

    async def body(left, right):
        near, far = await ends(arena, left, right, [add], [lend], Limits(max_calls=1))
        held = [await near.call(Procedure.of(lend), 500) for _ in range(6)]
        asking = [asyncio.ensure_future(far.call(Procedure.of(add), 1)) for _ in range(200)]
        held.clear()
        gc.collect()  # each reference is given back in a message of its own
        assert await asyncio.gather(*asking) == [11] * 200
        await closed(near, far)

    arena.run(body)


def test_an_error_that_can_hardly_be_told_is_told_and_the_channel_lives_on(arena):
    class Dumb(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    async def fail(how: str) -> None:
        raise {"name": ValueError("cannot read caf\udce9.bin"), "dumb": Dumb(), "slow": TimeoutError("of its own")}[how]

    async def body(left, right):
        near, far = await ends(arena, left, right, theirs=[fail, add])
        for how, said in (
            ("name", r"ValueError: cannot read caf\\udce9\.bin"),
            ("dumb", "Dumb"),
            ("slow", "TimeoutError"),
        ):
            for deadline_s in (None, 60.0):
                with pytest.raises(RemoteError, match=said):
                    await near.call("fail", how, deadline_s=deadline_s)
        assert await near.call("add", 1) == 11
        await closed(near, far)

    arena.run(body)


def test_a_message_that_cannot_be_encoded_ends_the_channel_with_its_reason(arena):
    async def body(left, right):
        near, far = await ends(arena, left, right, theirs=[add])
        with pytest.raises(ChannelBroken, match=r"could not be sent: .*surrogate"):
            await near.call("add\udce9", 1)
        await closed(near, far)

    arena.run(body)


def test_our_errors_keep_their_class_and_others_come_as_text(arena):
    class Odd(Exception):
        pass

    async def fail(how: str) -> None:
        raise {
            "config": ConfigError("steps = 0"),
            "odd": Odd("a detail"),
            "channel": ChannelBroken("to a third party"),
            "late": DeadlineExceeded("too slow"),
        }[how]

    async def body(left, right):
        near, far = await ends(arena, left, right, theirs=[fail])
        with pytest.raises(ConfigError, match=r"^steps = 0$"):
            await near.call("fail", "config")
        with pytest.raises(DeadlineExceeded, match="too slow"):
            await near.call("fail", "late")
        for how, kind in (("odd", "Odd"), ("channel", "ChannelBroken"), ("missing", "KeyError")):
            with pytest.raises(RemoteError) as caught:
                await near.call("fail", how)
            assert caught.value.kind == kind
            assert "Traceback" not in str(caught.value)
            assert not isinstance(caught.value, ChannelError)
        await closed(near, far)

    arena.run(body)


def test_a_deadline_travels_and_ends_the_work_at_the_other_end(arena):
    ended = []

    async def body(left, right):
        async def dawdle() -> None:
            try:
                await right.clock.sleep(60)
            except asyncio.CancelledError:
                ended.append("dawdle")
                raise

        async def pass_on() -> None:
            await serving_endpoint().call("dawdle_back")

        async def dawdle_back() -> None:
            try:
                await left.clock.sleep(60)
            finally:
                ended.append("dawdle_back")

        near, far = await ends(arena, left, right, [dawdle_back], [dawdle, pass_on])
        with pytest.raises(DeadlineExceeded, match="dawdle"):
            await near.call("dawdle", deadline_s=0.05)
        with pytest.raises(DeadlineExceeded):
            await near.call("pass_on", deadline_s=0.05)  # what it calls in turn has no more time either
        await left.clock.sleep(0.05)
        assert sorted(ended) == ["dawdle", "dawdle_back"]
        assert (near.busy, far.busy) == (0, 0)
        await closed(near, far)

    arena.run(body)


def test_cancelling_the_caller_cancels_the_callee_and_the_channel_lives_on(arena):
    async def body(left, right):
        begun, ended = asyncio.Event(), asyncio.Event()

        async def work(array: np.ndarray) -> np.ndarray:
            begun.set()
            try:
                await right.clock.sleep(60)
            finally:
                ended.set()
            return array

        near, far = await ends(arena, left, right, theirs=[work, add])
        calling = left.spawn(near.call("work", np.zeros(10)), name="call")
        await begun.wait()
        calling.cancel()
        await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await calling
        half = left.spawn(near.call("work", np.zeros(64 * MIB, np.uint8)), name="half sent")
        await left.clock.sleep(0.001)
        half.cancel()
        assert await near.call("add", 1) == 11
        await right.clock.sleep(0.05)
        assert far.busy == 0
        await closed(near, far)

    arena.run(body)


def test_a_function_that_cancels_itself_is_an_error_and_not_a_silence(arena):
    async def give_up() -> None:
        raise asyncio.CancelledError

    async def body(left, right):
        near, far = await ends(arena, left, right, theirs=[give_up])
        with pytest.raises(RemoteError, match="cancelled"):
            await near.call("give_up")
        await closed(near, far)

    arena.run(body)


def test_calls_in_flight_end_with_an_error_that_says_who_closed(arena):
    async def body(left, right):
        async def wait() -> None:
            await right.clock.sleep(1000)

        near, far = await ends(arena, left, right, [], [wait])
        ours, other = (left.spawn(near.call("wait"), name="call") for _ in range(2))
        await left.clock.sleep(0.02)
        await near.close()
        for task in (ours, other):
            with pytest.raises(ChannelClosed, match="wait"):
                await task
        with pytest.raises(ChannelClosed):
            await near.call("wait")
        await far.ended
        await right.clock.sleep(0.01)
        assert far.busy == 0

        near, far = await ends(arena, left, right, [], [wait])
        ours = left.spawn(near.call("wait"), name="call")
        await left.clock.sleep(0.02)
        await far.close()
        with pytest.raises(ChannelBroken, match="wait"):
            await ours
        await closed(near)

    arena.run(body)


def test_more_calls_than_slots_wait_for_their_turn(arena):
    async def body(left, right):
        begun = 0
        four, go_on = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            nonlocal begun
            begun += 1
            if begun == 4:
                four.set()
            await go_on.wait()

        near, far = await ends(arena, left, right, theirs=[work], limits=Limits(max_calls=4))
        calls = [left.spawn(near.call("work"), name="call") for _ in range(40)]
        await four.wait()
        await right.clock.sleep(0.05)
        assert begun == 4
        go_on.set()
        await asyncio.gather(*calls)
        assert begun == 40
        await closed(near, far)

    arena.run(body)


class Counter:
    def __init__(self) -> None:
        self.count = 0


async def lend_counter() -> RemoteRef[Counter]:
    return RemoteRef.lend(Counter())


async def increase(counter: RemoteRef[Counter]) -> int:
    counter.value.count += 1
    return counter.value.count


async def lend_weights(size: int) -> RemoteRef[np.ndarray]:
    return RemoteRef.lend(np.arange(size, dtype=np.float32))


def test_a_reference_is_passed_back_fetched_and_released_when_it_is_dropped(arena):
    async def body(left, right):
        near, far = await ends(arena, left, right, theirs=(lend_counter, increase, lend_weights))
        counter = await near.call(Procedure.of(lend_counter))
        assert not counter.is_ours
        assert [await near.call(Procedure.of(increase), counter) for _ in range(3)] == [1, 2, 3]
        weights = await near.call(Procedure.of(lend_weights), 5)
        np.testing.assert_array_equal(await weights.fetch(), np.arange(5, dtype=np.float32))
        with pytest.raises(CallRefused, match="Counter"):
            await near.call(Procedure.of(increase), weights)
        assert far.lent == 2
        del counter, weights
        gc.collect()
        await left.clock.sleep(0.05)
        assert far.lent == 0
        await closed(near, far)

    arena.run(body)


def test_a_reference_goes_there_and_back_and_is_the_very_object_at_its_owner(arena):
    async def keep(ref: RemoteRef[Counter]) -> RemoteRef[Counter]:
        return ref

    async def body(left, right):
        near, far = await ends(arena, left, right, theirs=[keep])
        mine = RemoteRef.lend(Counter())
        for _ in range(3):
            back = await near.call(Procedure.of(keep), mine)
            assert back is mine
        gc.collect()
        await left.clock.sleep(0.05)
        assert near.lent == 0
        await closed(near, far)

    arena.run(body)


def test_a_foreign_or_released_reference_is_refused(arena):
    async def body(left, right):
        near, far = await ends(arena, left, right, theirs=(lend_counter, increase))
        other, farther = await ends(arena, left, right, theirs=(lend_counter, increase))
        counter = await near.call("lend_counter")
        with pytest.raises(UsageError, match="another channel"):
            await other.call("increase", counter)
        guessed = await other.call("lend_counter")
        guessed.number = 7
        with pytest.raises(CallRefused, match="7"):
            await other.call("increase", guessed)
        await near.close()
        with pytest.raises(ChannelError):
            await counter.fetch()
        await far.ended
        assert far.lent == 0
        await closed(far, other, farther)

    arena.run(body)


def test_a_reference_in_an_answer_that_nobody_waits_for_is_released(arena):
    async def body(left, right):
        async def slowly() -> RemoteRef[Counter]:
            with suppress(asyncio.CancelledError):  # it answers all the same
                await right.clock.sleep(60)
            return RemoteRef.lend(Counter())

        near, far = await ends(arena, left, right, theirs=[slowly])
        with pytest.raises(DeadlineExceeded):
            async with left.clock.timeout(1):
                await near.call("slowly", deadline_s=0.02)
        await left.clock.sleep(0.1)
        gc.collect()
        await left.clock.sleep(0.05)
        assert far.lent == 0
        await closed(near, far)

    arena.run(body)


@pytest.mark.parametrize(
    "frames",
    [
        [(Header(3, Kind.CONTROL), b"abc")],
        [(Header(0, Kind.HELLO), b"")],
        [(Header(4, operation=1, total=4), b"data")],
        [(Header(0, Kind.CONTROL), SCHEMA.encode(CancelCall(5)))],
        [(Header(0, Kind.CONTROL), SCHEMA.encode(ReleaseReference(5, 1)))],
        [(Header(0, Kind.CONTROL), SCHEMA.encode(CallFailure(5, "UsageError", "no")))],
        [(Header(0, Kind.CONTROL), SCHEMA.encode(CallRequest(1, "add", EncodedValue(b"\x90")))) for _ in range(2)],
    ],
)
def test_what_no_correct_peer_sends_ends_the_channel(arena, frames):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        far = Endpoint(right, server, registry(add))
        for header, data in frames:
            await client.send(msgspec.structs.replace(header, length=len(data)), memoryview(data))
        assert isinstance(await far.ended, RemoteProtocolError)
        await far.close()

    arena.run(body)


def test_functions_that_cannot_be_called_from_afar_are_found_when_they_are_registered():
    async def by_name(*, key: int) -> None: ...

    async def unknown(value) -> None: ...

    async def silent(value: int): ...

    async def odd(value: asyncio.Future[int] | Counter) -> None: ...

    for function in (by_name, unknown, silent, odd):
        with pytest.raises(UsageError, match=function.__name__):
            registry(function)
    with pytest.raises(UsageError, match="already"):
        registry(add, add)
