"""What a host promises, in both worlds."""

from __future__ import annotations

import asyncio

import pytest

from hcsim.errors import ChannelBroken, ChannelClosed, ConfigError, PeerRefused
from hcsim.runtime.channel import EMPTY
from hcsim.runtime.frame import Header
from hcsim.runtime.host import Medium, Work
from hcsim.selftest.contracts import ends_of_tasks_are_told, timeouts_end_in_order


def test_a_port_where_nobody_listens_refuses(arena):
    async def body(left, right):
        listener = await right.listen(arena.address(right))
        address = listener.address
        await listener.close()
        with pytest.raises(PeerRefused, match=address):
            await left.connect(address, timeout_s=1.0)

    arena.run(body)


def test_connect_waits_for_a_listener_that_comes_late(arena):
    async def body(left, right):
        first = await right.listen(arena.address(right))
        address = first.address
        await first.close()
        connecting = left.spawn(left.connect(address), name="connect")
        await right.clock.sleep(0.1)
        listener = await right.listen(address)
        server = await listener.accept()
        client = await connecting
        await client.send(Header(0, step=7))
        header, _ = await server.recv(lambda _: None)
        assert header.step == 7
        await client.close()
        await server.close()

    arena.run(body)


def test_a_listener_names_the_port_it_took(arena):
    async def body(left, right):
        one, other = await right.listen(arena.address(right)), await right.listen(arena.address(right))
        ports = [int(listener.address.rpartition(":")[2]) for listener in (one, other)]
        assert 0 not in ports
        assert ports[0] != ports[1]

    arena.run(body)


def test_a_port_is_listened_at_once_and_may_be_again_when_that_is_over(arena):
    async def body(left, right):
        listener = await right.listen(arena.address(right))
        address = listener.address
        with pytest.raises(ConfigError, match="cannot listen"):
            await right.listen(address)
        await listener.close()
        await (await right.listen(address)).close()

    arena.run(body)


def test_a_closed_listener_accepts_no_more_and_its_channels_live_on(arena):
    async def body(left, right):
        listener = await right.listen(arena.address(right))
        client = await left.connect(listener.address)
        server = await listener.accept()
        accepting = right.spawn(listener.accept(), name="accept")
        await right.clock.sleep(0.01)
        await listener.close()
        await listener.close()
        with pytest.raises(ChannelClosed):
            await accepting
        with pytest.raises(ChannelClosed):
            await listener.accept()
        await client.send(Header(0, step=3))
        assert (await server.recv(lambda _: None))[0].step == 3
        await client.close()
        await server.close()

    arena.run(body)


def test_everybody_who_waits_at_a_listener_hears_that_it_closes(arena):
    async def body(left, right):
        listener = await right.listen(arena.address(right))
        waiting = [right.spawn(listener.accept(), name=f"accept {number}") for number in range(3)]
        await right.clock.sleep(0.01)
        await listener.close()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [ChannelClosed] * 3

    arena.run(body)


def test_a_caller_whom_nobody_took_hears_the_end_when_the_listener_closes(arena):
    async def body(left, right):
        listener = await right.listen(arena.address(right))
        caller = await left.connect(listener.address)
        await left.clock.sleep(0.05)
        await listener.close()
        with pytest.raises(ChannelBroken):
            await caller.recv(lambda header: None)
        await caller.close()

    arena.run(body)


def test_both_ends_of_a_channel_name_their_peer(arena):
    async def body(left, right):
        listener = await right.listen(arena.address(right))
        client = await left.connect(listener.address)
        server = await listener.accept()
        assert client.peer
        assert client.peer in listener.address
        assert server.peer
        await client.close()
        await server.close()

    arena.run(body)


def test_a_timeout_ends_its_body_and_only_its_body(arena):
    async def body(left, right):
        with pytest.raises(TimeoutError):
            async with left.clock.timeout(0.01):
                await left.clock.sleep(1000)
        async with left.clock.timeout(None):
            await left.clock.sleep(0)

    arena.run(body)


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_timeout_of_nothing_ends_whatever_waits(arena, seconds):
    async def body(left, right):
        for sleep_s in (1000, 0):
            with pytest.raises(TimeoutError):
                async with left.clock.timeout(seconds):
                    await left.clock.sleep(sleep_s)

    arena.run(body)


def test_timeouts_end_in_the_order_in_which_they_are_due_also_on_a_machine_that_stood_still(arena):
    arena.run(lambda left, right: timeouts_end_in_order(arena, left, right, standstill_s=0.08))


def test_of_two_nested_timeouts_the_one_that_is_due_is_the_one_that_raises(arena):
    async def body(left, right):
        async with left.clock.timeout(1000):
            with pytest.raises(TimeoutError):
                async with left.clock.timeout(0.01):
                    await left.clock.sleep(1000)
            await left.clock.sleep(0)
        with pytest.raises(TimeoutError):
            async with left.clock.timeout(0.01), left.clock.timeout(1000):
                await left.clock.sleep(1000)

    arena.run(body)


def test_who_is_cancelled_within_a_timeout_is_cancelled_and_not_late(arena):
    async def body(left, right):
        async def limited(seconds):
            async with left.clock.timeout(seconds):
                await left.clock.sleep(1000)

        task = left.spawn(limited(1000), name="limited")
        await left.clock.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    arena.run(body)


def test_an_error_within_a_timeout_stays_what_it_is_even_if_it_comes_too_late(arena):
    async def body(left, right):
        async def fail_late():
            try:
                await left.clock.sleep(1000)
            finally:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            async with left.clock.timeout(0.01):
                await fail_late()
        await left.clock.sleep(0.02)  # which nothing cancels any more

    arena.run(body)


def test_a_machine_that_is_awake_gathers_no_sleep(arena):
    async def body(left, right):
        before_s = left.clock.asleep()
        await left.clock.sleep(0.3)
        assert left.clock.asleep() - before_s == pytest.approx(0.0, abs=0.2)  # two clocks are read, one after the other

    arena.run(body)


@pytest.mark.parametrize("seconds", [0, -1])
def test_sleeping_for_nothing_lets_ready_tasks_run(arena, seconds):
    async def body(left, right):
        ran = []

        async def note():
            ran.append("other")

        left.spawn(note(), name="other")
        await left.clock.sleep(seconds)
        assert ran == ["other"]

    arena.run(body)


def test_the_device_returns_what_the_function_returns(arena):
    async def body(left, right):
        assert await left.device.run(Work(flops=1e6), lambda: 6 * 7) == 42
        await left.device.touch(1000)
        assert left.device.name

    arena.run(body)


def test_an_error_in_the_function_reaches_the_caller(arena):
    async def body(left, right):
        with pytest.raises(ZeroDivisionError):
            await left.device.run(Work(), lambda: 1 // 0)

    arena.run(body)


def test_the_device_does_one_thing_after_the_other(arena):
    async def body(left, right):
        async with asyncio.TaskGroup() as group:
            order: list[int] = []
            for number in range(10):
                group.create_task(left.device.run(Work(flops=1e9), lambda number=number: order.append(number)))
        assert order == list(range(10))

    arena.run(body)


def test_a_task_carries_its_name_and_its_result(arena):
    async def body(left, right):
        async def answer():
            return 42

        task = left.spawn(answer(), name="deep thought")
        assert "deep thought" in task.get_name()
        assert left.name in task.get_name()
        assert await task == 42

    arena.run(body)


def test_the_end_of_a_task_is_told_before_those_go_on_who_wait_for_it(arena):
    async def body(left, right):
        order = []

        async def work():
            order.append("work")

        async def wait(task):
            await task
            order.append("waiter")

        task = left.spawn(work(), name="work", over=order.append)
        await wait(task)
        assert order == ["work", task, "waiter"]

    arena.run(body)


def test_the_end_of_a_task_is_told_also_if_it_was_cancelled_before_it_began(arena):
    arena.run(lambda left, right: ends_of_tasks_are_told(arena, left, right, begun=False))


def test_random_streams_depend_on_name_and_host_alone(arena):
    async def body(left, right):
        def draws(host, *name):
            stream = host.rng(*name)
            return [stream.random() for _ in range(3)]

        assert draws(left, "jitter", 1) == draws(left, "jitter", 1)
        assert draws(left, "jitter", 1) != draws(left, "jitter", 2)
        assert draws(left, "jitter", 1) != draws(right, "jitter", 1)

    arena.run(body)


def test_the_fastest_interfaces_come_first(arena):
    async def body(left, right):
        found, order = left.interfaces(), list(Medium)
        assert found
        assert [*found] == sorted(found, key=lambda interface: (order.index(interface.medium), interface.name))

    arena.run(body)


def test_tracing_takes_strings_and_numbers(arena):
    async def body(left, right):
        left.trace("note", "text", 1, 2.5)
        right.trace("note")

    arena.run(body)
    notes = [event[1:] for event in arena.traced if event[1] == "note"]
    assert notes == [("note", "left", "text", 1, 2.5), ("note", "right")]


def test_an_empty_payload_is_the_default(arena):
    async def body(left, right):
        client, server = await arena.channels(left, right)
        await client.send(Header(0))
        assert (await server.recv(lambda _: None))[1] == EMPTY

    arena.run(body)
