"""The asyncio loop on SimPy: order, time, owners, deadlock, and life beside SimPy processes."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import math
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hcsim.errors import Deadlock, UsageError
from hcsim.virtual.loop import OWNER, VirtualLoop

Log = list[Any]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return VirtualLoop().run_to_end(main)


class Machine:
    def __init__(self, name: str) -> None:
        self.name = name

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(OWNER.set, self)
        return asyncio.get_running_loop().create_task(coroutine, name=name, context=context)


def the_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


# Order and time.


def test_twelve_timers_for_one_instant_run_in_the_order_they_were_set() -> None:
    async def main() -> Log:
        log: Log = []
        for i in range(12):
            the_loop().call_later(1.0, log.append, i)
        await asyncio.sleep(1.0)
        return log

    assert run(main()) == list(range(12))


def test_float_integer_and_absolute_deadlines_share_one_order() -> None:
    async def main() -> Log:
        log: Log = []
        loop = the_loop()
        loop.env.call_at(300_000_000, log.append, "ns")
        loop.call_later(0.3, log.append, "later")
        loop.call_at(0.1 + 0.2, log.append, "at")
        loop.env.call_at(299_999_999, log.append, "earlier")
        await asyncio.sleep(1)
        return log

    assert run(main()) == ["earlier", "ns", "later", "at"]


def test_ten_sleeps_of_a_tenth_are_exactly_one_second() -> None:
    async def main() -> int:
        for _ in range(10):
            await asyncio.sleep(0.1)
        return the_loop().env.now_ns

    assert run(main()) == 1_000_000_000


@pytest.mark.parametrize("delay_s", [1e-12, 4e-10, 1.5e-9])
def test_a_fraction_of_a_nanosecond_is_rounded_up(delay_s: float) -> None:
    async def main() -> int:
        await asyncio.sleep(delay_s)
        return the_loop().env.now_ns

    assert run(main()) == math.ceil(delay_s * 1e9)


def test_a_deadline_that_has_passed_is_now() -> None:
    async def main() -> int:
        await asyncio.sleep(5)
        done = the_loop().create_future()
        the_loop().call_at(1.0, done.set_result, None)
        await done
        return the_loop().env.now_ns

    assert run(main()) == 5_000_000_000


def test_the_end_of_an_instant_comes_after_all_else_in_it() -> None:
    async def main() -> Log:
        log: Log = []
        loop = the_loop()
        loop.env.call_at_instant_end(lambda: log.append(("end", loop.env.now_ns)))
        loop.env.timeout(0).callbacks.append(lambda event: log.append("simpy"))
        loop.env.call_at(0, loop.call_soon, log.append, "timer")
        loop.env.call_at(1, log.append, "next instant")
        loop.call_soon(log.append, "ready")
        await asyncio.sleep(1)
        return log

    assert run(main()) == ["ready", "simpy", "timer", ("end", 0), "next instant"]


def test_the_timer_hook_sees_each_timer_that_fires_and_no_cancelled_one() -> None:
    async def main() -> Log:
        numbers: Log = []
        loop = the_loop()
        loop.env.on_timer = numbers.append
        loop.call_later(1, int)  # the first timer
        loop.call_later(1, int).cancel()  # the second
        await asyncio.sleep(2)  # the third
        return numbers

    assert run(main()) == [1, 3]


# The same programs on the standard loop.


async def _timeouts(unit_s: float, log: Log) -> None:
    try:
        async with asyncio.timeout(unit_s):
            await asyncio.sleep(50 * unit_s)
    except TimeoutError:
        log.append("timed out")
    async with asyncio.timeout(50 * unit_s):
        log.append(await asyncio.wait_for(asyncio.sleep(unit_s, "in time"), 50 * unit_s))
    async with asyncio.timeout(-1) as expired:
        log.append(expired.expired())
        try:
            await asyncio.sleep(unit_s)
        except asyncio.CancelledError:
            log.append("cancelled at once")


async def _group(unit_s: float, log: Log) -> None:
    async def fail() -> None:
        await asyncio.sleep(unit_s)
        raise ValueError("first")

    async def wait(name: str) -> None:
        try:
            await asyncio.sleep(100 * unit_s)
        finally:
            log.append(f"{name} ends")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(wait("a"))  # one only: the standard loop's order would be that of addresses
            group.create_task(fail(), name="fail")
    except* ValueError as errors:
        log.append(repr(errors.exceptions))


async def _queue(unit_s: float, log: Log) -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(2)

    async def produce() -> None:
        for i in range(6):
            await queue.put(i)
            log.append(f"put {i}")

    async def consume(name: str) -> None:
        while True:
            log.append(f"{name} got {await queue.get()}")
            queue.task_done()

    consumers = [asyncio.create_task(consume(name)) for name in "xy"]
    await produce()
    await queue.join()
    for consumer in consumers:
        consumer.cancel()
    log.append(await asyncio.gather(*consumers, return_exceptions=True) and "consumers cancelled")


async def _locks(unit_s: float, log: Log) -> None:
    lock, started, slots = asyncio.Lock(), asyncio.Event(), asyncio.Semaphore(2)

    async def enter(name: str) -> None:
        await started.wait()
        async with slots:
            log.append(f"{name} has a slot")
            async with lock:
                log.append(f"{name} has the lock")
                await asyncio.sleep(unit_s)

    tasks = [asyncio.create_task(enter(name)) for name in "abcd"]
    await asyncio.sleep(unit_s)
    tasks[1].cancel()
    started.set()
    log.append([isinstance(result, BaseException) for result in await asyncio.gather(*tasks, return_exceptions=True)])


async def _cancellation(unit_s: float, log: Log) -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(100 * unit_s)
        except asyncio.CancelledError:
            log.append("asked to end")
            await asyncio.sleep(unit_s)
        return "ended in its own time"

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    task.cancel()
    log.append(await task)
    inner = asyncio.create_task(asyncio.sleep(2 * unit_s, "shielded"))
    try:
        await asyncio.wait_for(asyncio.shield(inner), unit_s)
    except TimeoutError:
        log.append(inner.cancelled())
    log.append(await inner)
    handle = asyncio.get_running_loop().call_soon(log.append, "never")
    handle.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize("program", [_timeouts, _group, _queue, _locks, _cancellation])
def test_a_program_does_the_same_on_both_loops(program: Callable[[float, Log], Coroutine[Any, Any, None]]) -> None:
    virtual: Log = []
    real: Log = []
    ends: list[str] = []
    for log, runner in ((virtual, run), (real, asyncio.run)):
        try:
            runner(program(0.005, log))
        except BaseException as error:
            ends.append(repr(error))
    assert virtual == real
    assert virtual
    assert len(ends) in (0, 2)
    assert len(dict.fromkeys(ends)) <= 1


def test_a_task_group_cancels_in_the_same_order_every_time() -> None:
    async def main(log: Log) -> None:
        async def wait(i: int) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                log.append(i)

        async with asyncio.timeout(1), asyncio.TaskGroup() as group:
            for i in range(50):
                group.create_task(wait(i))

    kept: Log = []
    orders: Log = []
    for attempt in range(5):
        orders.append([])
        kept.extend([None] * size for size in range(attempt * 97))  # so that addresses differ
        with pytest.raises(TimeoutError):
            run(main(orders[-1]))
    assert sorted(orders[0]) == list(range(50))
    assert all(order == orders[0] for order in orders)


@given(st.lists(st.tuples(st.sampled_from(["world", "task", "simpy"]), st.integers(0, 3)), max_size=30))
def test_timers_run_by_deadline_and_then_in_the_order_in_which_they_were_set_whoever_set_them(
    timers: list[tuple[str, int]],
) -> None:
    """Each timer sets a further one, of its own kind."""
    loop = VirtualLoop()
    expected: list[tuple[int, int]] = []
    ran: list[tuple[int, int]] = []

    def set_one(kind: str, delay_ns: int, further: bool) -> None:
        entry = (loop.env.now_ns + delay_ns, len(expected))
        expected.append(entry)

        def runs() -> None:
            assert loop.env.now_ns == entry[0]
            ran.append(entry)
            if further:
                set_one(kind, delay_ns, False)

        if kind == "world":
            loop.env.call_at(entry[0], runs)
        elif kind == "task":
            loop.call_later(delay_ns / 1e9, runs)
        else:
            loop.env.timeout(delay_ns).callbacks.append(lambda _: runs())

    async def main() -> None:
        for kind, delay_ns in timers:
            set_one(kind, delay_ns, True)
        await asyncio.sleep(10e-9)

    loop.run_to_end(main())
    assert len(ran) == len(expected) == 2 * len(timers)
    place_of = {entry: place for place, entry in enumerate(ran)}
    settled = [entry for entry in sorted(expected) if entry[1] < len(timers)]
    assert sorted(settled, key=place_of.__getitem__) == settled


# Cancelled timers.


def test_cancelled_timers_do_not_fill_the_memory() -> None:
    async def main() -> int:
        tracemalloc.start()
        try:
            for _ in range(5_000):
                async with asyncio.timeout(60):
                    await asyncio.sleep(1e-5)
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert run(main()) < 5_000 * 40


def test_a_cancelled_timer_does_not_keep_the_world_alive() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        loop.call_later(3600, print).cancel()
        await loop.create_future()

    with pytest.raises(Deadlock):
        loop.run_to_end(main())
    assert loop.env.now_ns == 0


def test_to_wait_for_ever_is_no_reason_to_go_on() -> None:
    async def main() -> None:
        await asyncio.sleep(math.inf)

    with pytest.raises(Deadlock, match=r"await asyncio\.sleep\(math\.inf\)"):
        run(main())


def test_many_cancelled_timers_leave_the_others_in_order() -> None:
    async def main() -> Log:
        log: Log = []
        timers = [the_loop().call_later(1 + i % 7, log.append, i) for i in range(1000)]
        for i, timer in enumerate(timers):
            if i % 10:
                timer.cancel()
        await asyncio.sleep(10)
        return log

    assert run(main()) == sorted(range(0, 1000, 10), key=lambda i: (i % 7, i))


# Deadlock.


class Pipe:
    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    def __repr__(self) -> str:
        return f"Pipe({self.name} at 0x7f00deadbeef)"

    async def recv(self) -> int:
        return await self.queue.get()


def _deadlock_text() -> str:
    async def main() -> None:
        loop = the_loop()
        loop.create_task(Pipe("studio→mini").recv(), name="reader")
        Machine("mini").spawn(asyncio.Event().wait(), "waiter")
        paused, crashed = Machine("air"), Machine("dead")
        paused.spawn(Pipe("b").recv(), "paused")
        crashed.spawn(Pipe("c").recv(), "gone")
        await asyncio.sleep(1)
        loop.freeze(paused)
        loop.discard(crashed)
        await loop.create_future()

    with pytest.raises(Deadlock) as caught:
        run(main())
    return str(caught.value)


def test_a_deadlock_names_every_waiting_task_and_what_it_waits_for() -> None:
    first, main, reader, waiter, paused = _deadlock_text().splitlines()
    assert first == "nothing is left to do, and 4 tasks still wait:"
    assert main.startswith("  task-1: _deadlock_text.<locals>.main (test_loop.py:")
    assert "reader: Pipe.recv (test_loop.py:" in reader
    assert reader.endswith("on Pipe(studio→mini): return await self.queue.get()")
    assert waiter.startswith("  waiter of mini: Event.wait (locks.py:")
    assert paused.startswith("  paused of air, frozen: Pipe.recv")


def test_a_deadlock_of_one_is_told_of_one() -> None:
    async def main() -> None:
        await the_loop().create_future()

    with pytest.raises(Deadlock, match="nothing is left to do, and 1 task still waits:"):
        run(main())


def test_a_deadlock_is_described_with_the_same_words_every_time() -> None:
    text = _deadlock_text()
    assert "0x" not in text
    assert text == _deadlock_text()


def test_a_future_that_nobody_will_complete_is_a_deadlock_too() -> None:
    loop = VirtualLoop()
    with pytest.raises(Deadlock, match="no task waits"):
        loop.run_until_complete(loop.create_future())
    loop.close()


# Owners.


def test_a_frozen_host_stands_still_and_then_catches_up_in_order() -> None:
    async def main() -> Log:
        log: Log = []
        loop = the_loop()

        async def beat(name: str, period_s: float) -> None:
            while True:
                await asyncio.sleep(period_s)
                log.append((name, loop.env.now_ns // 10**9))

        a, b = Machine("a"), Machine("b")
        for machine in (a, b):
            machine.spawn(beat(f"{machine.name}1", 2), "one")
            machine.spawn(beat(f"{machine.name}2", 3), "two")
        loop.call_at(1, loop.freeze, a)
        loop.call_at(5, loop.thaw, a)
        await asyncio.sleep(7.5)
        return log

    log = run(main())
    assert [entry for entry in log if entry[0][0] == "a"] == [("a1", 5), ("a2", 5), ("a1", 7)]
    assert [entry for entry in log if entry[0][0] == "b"] == [("b1", 2), ("b2", 3), ("b1", 4), ("b2", 6), ("b1", 6)]


def test_a_thaw_within_the_instant_keeps_the_order() -> None:
    async def main() -> Log:
        log: Log = []
        loop = the_loop()
        machine = Machine("a")
        context = contextvars.copy_context()
        context.run(OWNER.set, machine)
        loop.freeze(machine)
        loop.call_soon(log.append, 1, context=context)
        loop.call_soon(loop.thaw, machine)
        loop.call_soon(log.append, 2, context=context)
        await asyncio.sleep(1)
        return log

    assert run(main()) == [1, 2]


@pytest.mark.slow
def test_a_crashed_host_runs_no_further_line_not_even_finally() -> None:
    log: Log = []

    async def work(done: asyncio.Future[None]) -> None:
        try:
            await done
            log.append("went on")
        finally:
            log.append("finally")

    async def sleep() -> None:
        try:
            await asyncio.sleep(2)
        finally:
            log.append("finally")

    async def main() -> Log:
        loop = the_loop()
        machine = Machine("a")
        done = loop.create_future()
        machine.spawn(work(done), "work")
        machine.spawn(sleep(), "sleep").cancel()
        machine.spawn(sleep(), "sleep")
        await asyncio.sleep(1)
        before = list(log)
        machine.spawn(sleep(), "never starts")
        loop.discard(machine)
        done.set_result(None)
        loop.thaw(machine)  # it was paused when it crashed, and the pause ends
        await asyncio.sleep(10)
        gc.collect()
        assert log == before
        return before

    assert run(main()) == []
    gc.collect()
    assert log == ["finally", "finally"]  # torn down with the world, in an orderly way


def test_the_timers_of_a_crashed_host_do_not_keep_the_world_alive() -> None:
    loop = VirtualLoop()

    async def main() -> None:
        machine = Machine("a")
        machine.spawn(asyncio.sleep(3600), "sleeper")
        await asyncio.sleep(1)
        loop.discard(machine)
        await loop.create_future()

    with pytest.raises(Deadlock, match="1 task still"):
        loop.run_to_end(main())
    assert loop.env.now_ns == 1_000_000_000


def test_the_network_goes_on_when_the_host_that_sent_has_crashed() -> None:
    async def main() -> Log:
        log: Log = []
        machine = Machine("a")

        async def send() -> None:
            the_loop().env.call_at(5, log.append, "delivered")

        await machine.spawn(send(), "send")
        the_loop().discard(machine)
        await asyncio.sleep(1)
        return log

    assert run(main()) == ["delivered"]


def test_the_world_itself_cannot_be_frozen() -> None:
    with pytest.raises(UsageError):
        VirtualLoop().freeze(None)


# Beside SimPy.


def test_processes_and_coroutines_take_turns_in_time() -> None:
    loop = VirtualLoop()
    env = loop.env
    log: Log = []

    def process() -> Generator[simpy.Event, Any, Any]:
        for _ in range(3):
            yield env.timeout(2)
            log.append(("process", env.now))

    async def main() -> None:
        for _ in range(4):
            await asyncio.sleep(1.5e-9)
            log.append(("coroutine", env.now))

    env.process(process())
    loop.run_to_end(main())
    # Each schedules its next event as it goes on, and at 2, 4 and 6 ns both are due.
    expected = [(who, t) for t in (2, 4, 6) for who in ("coroutine", "process")]
    assert log == [*expected, ("coroutine", 8)]


def test_a_process_completes_a_future_and_calls_back() -> None:
    async def main() -> Log:
        loop = the_loop()
        log: Log = []
        future = loop.create_future()

        def process() -> Generator[simpy.Event, Any, Any]:
            yield loop.env.timeout(7)
            loop.call_soon(log.append, loop.env.now_ns)
            future.set_result("from simpy")
            yield loop.env.timeout(0)
            log.append("process goes on")

        loop.env.process(process())
        log.append(await future)
        return [*log, loop.env.now_ns]

    assert run(main()) == [7, "from simpy", 7]


def test_a_coroutine_awaits_processes_and_events() -> None:
    async def main() -> Log:
        loop = the_loop()
        env = loop.env

        def compute() -> Generator[simpy.Event, Any, Any]:
            yield env.timeout(5)
            return "result"

        process = env.process(compute())
        results = [await loop.event(process), loop.env.now_ns, await loop.event(process)]
        failing = env.event()
        loop.call_later(1e-9, failing.fail, ValueError("cable"))
        with pytest.raises(ValueError, match="cable"):
            await loop.event(failing)
        return results

    assert run(main()) == ["result", 5, "result"]


@pytest.mark.parametrize("kind", ["store", "tank", "desk"])
def test_what_was_granted_to_a_wait_in_the_instant_of_its_cancelling_goes_back(kind: str) -> None:
    async def main() -> object:
        loop = the_loop()
        store, tank, desk = simpy.Store(loop.env), simpy.Container(loop.env), simpy.Resource(loop.env)
        first = desk.request()
        wanted = {"store": store.get, "tank": lambda: tank.get(2), "desk": desk.request}[kind]()
        given = {"store": lambda: store.put("it"), "tank": lambda: tank.put(5), "desk": lambda: desk.release(first)}[
            kind
        ]
        wait = loop.event(wanted)

        def give() -> Generator[simpy.Event, Any, Any]:
            yield given()
            assert wanted.triggered
            wait.cancel()
            yield loop.env.timeout(1)

        await loop.event(loop.env.process(give()))
        return {"store": store.items, "tank": tank.level, "desk": desk.count}[kind]

    assert run(main()) == {"store": ["it"], "tank": 5, "desk": 0}[kind]


def test_what_goes_back_to_a_store_comes_first_and_a_release_stays_one() -> None:
    async def main() -> list[Any]:
        loop = the_loop()
        store, desk = simpy.Store(loop.env), simpy.Resource(loop.env)
        for item in "abc":
            store.put(item)
        held = desk.request()

        def cancel(event: simpy.Event) -> None:
            assert event.triggered
            loop.event(event).cancel()

        cancel(store.get())
        cancel(desk.release(held))
        await asyncio.sleep(1)
        return [await loop.event(store.get()) for _ in range(3)] + [desk.count]

    assert run(main()) == ["a", "b", "c", 0]


def test_a_cancelled_wait_takes_nothing_from_a_store() -> None:
    async def main() -> Any:
        loop = the_loop()
        store = simpy.Store(loop.env)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.event(store.get()), 1)
        store.put("message")
        return await loop.event(store.get())

    assert run(main()) == "message"


def test_a_failed_process_ends_the_run() -> None:
    loop = VirtualLoop()

    def process() -> Generator[simpy.Event, Any, Any]:
        yield loop.env.timeout(1)
        raise ValueError("broken model")

    loop.env.process(process())
    with pytest.raises(ValueError, match="broken model"):
        loop.run_to_end(asyncio.sleep(1))


def test_time_that_is_not_whole_nanoseconds_is_refused() -> None:
    with pytest.raises(UsageError, match="whole nanoseconds"):
        VirtualLoop().env.timeout(0.5)


# Errors and the end.


def test_a_task_error_comes_out_with_its_own_identity() -> None:
    error = ValueError("mine")

    async def main() -> None:
        await asyncio.sleep(1)
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        run(main())
    assert caught.value is error


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_comes_out_and_the_tasks_still_end(kind: type[BaseException]) -> None:
    log: Log = []

    async def wait() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            log.append("ended")

    async def interrupt() -> None:
        raise kind

    async def main() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(1)
        await interrupt()
        await task

    with pytest.raises(kind):
        run(main())
    assert log == ["ended"]


def test_a_failing_callback_goes_to_the_handler_and_the_run_goes_on() -> None:
    seen: Log = []

    def fail() -> None:
        raise ValueError("callback")

    async def main() -> str:
        loop = the_loop()
        loop.set_exception_handler(lambda loop, context: seen.append(repr(context["exception"])))
        loop.call_soon(fail)
        loop.call_later(1, fail)
        await asyncio.sleep(2)
        return "went on"

    assert run(main()) == "went on"
    assert seen == ["ValueError('callback')"] * 2


def test_without_a_handler_the_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        the_loop().call_soon(int, "x")
        await asyncio.sleep(1)

    run(main())
    assert "a callback failed" in caplog.text
    assert "invalid literal" in caplog.text


def test_a_failing_callback_of_the_world_ends_the_run() -> None:
    async def main() -> None:
        the_loop().env.call_at(5, int, "x")
        await asyncio.sleep(1)

    with pytest.raises(ValueError, match="invalid literal"):
        run(main())


def test_async_generators_are_closed_at_the_end_in_the_order_they_were_started() -> None:
    log: Log = []
    kept: list[AsyncIterator[int]] = []

    async def count(name: str) -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(1)
            log.append(name)

    async def main() -> None:
        for name in "abc":
            kept.append(count(name))
            await anext(kept[-1])
        async for _ in count("dropped"):
            break
        await asyncio.sleep(2)
        assert log == ["dropped"]

    run(main())
    assert log == ["dropped", "a", "b", "c"]


def test_tasks_that_are_left_over_are_cancelled_with_those_they_start() -> None:
    log: Log = []

    async def outlive(generation: int) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            log.append(generation)
            if generation < 2:
                the_loop().create_task(outlive(generation + 1))
                await asyncio.sleep(0)

    async def main() -> None:
        the_loop().create_task(outlive(0))
        await asyncio.sleep(1)

    run(main())
    assert log == [0, 1, 2]


def test_what_will_not_be_cancelled_is_told_beside_the_first_error() -> None:
    async def stubborn(forever: asyncio.Future[None], wait: Callable[[Any], Awaitable[Any]]) -> None:
        try:
            await forever
        except asyncio.CancelledError:
            await wait(forever.get_loop().create_future())

    async def main(error: Exception | None) -> None:
        the_loop().create_task(stubborn(the_loop().create_future(), asyncio.shield), name="stubborn")
        await asyncio.sleep(1)
        if error is not None:
            raise error

    for error, kind in ((None, Deadlock), (ValueError("first"), ValueError)):
        loop = VirtualLoop()
        loop.set_exception_handler(lambda loop, context: None)  # the stubborn task is destroyed while it waits
        with pytest.raises(kind) as caught:
            loop.run_to_end(main(error))
        assert "stubborn" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


def test_a_loop_does_not_run_inside_a_loop() -> None:
    async def main() -> None:
        inner = asyncio.sleep(1)
        for loop in (VirtualLoop(), the_loop()):
            with pytest.raises(RuntimeError, match="inside a running"):
                loop.run_until_complete(inner)
        inner.close()
        with pytest.raises(RuntimeError, match="cannot be closed"):
            the_loop().close()
        assert the_loop().is_running()

    run(main())


def test_a_closed_loop_refuses_work() -> None:
    loop = VirtualLoop()
    loop.close()
    assert loop.is_closed()
    for use in (loop.call_soon, lambda f: loop.call_later(1, f)):
        with pytest.raises(RuntimeError, match="closed"):
            use(print)


def test_what_the_virtual_world_lacks_is_said() -> None:
    async def main() -> None:
        for use in (lambda: asyncio.to_thread(print), lambda: asyncio.open_connection("127.0.0.1", 1)):
            with pytest.raises(NotImplementedError, match="virtual world has no"):
                await use()

    run(main())


def test_the_standard_runner_drives_it_too() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(asyncio.sleep(3600, "done")) == "done"


# Random programs.

Step = tuple[str, int]
steps = st.tuples(st.sampled_from(["sleep", "put", "get", "later"]), st.integers(0, 5))


def _execute(programs: list[list[Step]]) -> Log:
    loop = VirtualLoop()
    log: Log = []
    fired: list[int] = []
    deadlines: dict[int, tuple[int, int]] = {}
    numbers = itertools.count()

    def note(deadline_ns: int, number: int) -> None:
        log.append((loop.env.now_ns, "timer", number))
        deadlines[number] = (deadline_ns, number)
        fired.append(number)

    async def work(who: int, program: list[Step], queue: asyncio.Queue[int]) -> None:
        for action, amount in program:
            if action == "sleep":
                await asyncio.sleep(amount * 1e-9)
            elif action == "put":
                queue.put_nowait(amount)
            elif action == "get":
                try:
                    async with asyncio.timeout(2e-9):
                        item = await queue.get()
                    log.append((loop.env.now_ns, who, item))
                except TimeoutError:
                    log.append((loop.env.now_ns, who, "nothing"))
            else:
                loop.env.call_at(loop.env.now_ns + amount, note, loop.env.now_ns + amount, next(numbers))
            log.append((loop.env.now_ns, who, action))

    async def main() -> None:
        queue: asyncio.Queue[int] = asyncio.Queue()
        await asyncio.gather(*(work(who, program, queue) for who, program in enumerate(programs)))
        await asyncio.sleep(1)

    loop.run_to_end(main())
    times = [entry[0] for entry in log]
    assert times == sorted(times)
    assert [deadlines[number] for number in fired] == sorted(deadlines.values())
    return log


@settings(max_examples=60)
@given(st.lists(st.lists(steps, max_size=8), min_size=1, max_size=5))
def test_a_random_program_is_deterministic_and_ordered(programs: list[list[Step]]) -> None:
    assert _execute(programs) == _execute(programs)


def test_in_debug_mode_a_future_says_where_it_was_made() -> None:
    loop = VirtualLoop()
    for debug in (False, True, False):
        loop.set_debug(debug)
        assert loop.get_debug() is debug
        assert ("created at" in repr(loop.create_future())) is debug
    loop.close()
