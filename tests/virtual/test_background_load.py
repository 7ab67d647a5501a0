"""Other programs of a machine's owner use its cores: ideally shared, or in time slices."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hcsim.config import (
    AnyFault,
    BackgroundLoad,
    Crash,
    Machine,
    MessageCosts,
    Node,
    Processor,
    Restart,
    Scenario,
    parse_scenario,
    write_scenario,
)
from hcsim.errors import ConfigError
from hcsim.runtime.host import Work
from hcsim.units import ByteRate, FlopRate, Seconds
from hcsim.virtual.environment import NS
from hcsim.virtual.faults.load import Program
from hcsim.virtual.loop import VirtualLoop
from hcsim.virtual.processor import Cores
from hcsim.virtual.time_slices import TimeSlicedCores
from hcsim.virtual.world import World
from tests.switches import on_switch
from tests.virtual.faults.arena import until

SLICE_S, TICK_S = 0.0014, 0.004
"""Of Linux 6.18 on two cores."""
TEN_SECONDS = Work(flops=10.0)


def machine(*, shares: bool = True) -> Machine:
    """A machine that computes one FLOP in a second."""
    return Machine(
        "plain", FlopRate(1.0), ByteRate(math.inf), efficiency_compute=1.0, overhead_s=Seconds(0),
        shares_processor=shares, messages=MessageCosts(Seconds(0.01), Seconds(0.01)),
    )  # fmt: skip


def computed_s(*faults: AnyFault, processor: Processor | None = None, shares: bool = True, seed: int = 1) -> float:
    """Return how long ten seconds of computing take."""
    node = Node("a", machine(shares=shares), processor=processor.name if processor else "")
    world = World(Scenario("one", (node,), seed=seed, processors=(processor,) if processor else (), faults=faults))

    async def main() -> float:
        host = world.host("a")
        await host.device.run(TEN_SECONDS, lambda: None)
        return world.env.now_ns / NS

    return world.run(main())


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_computing_beside_a_program_takes_longer_by_its_share(share: float) -> None:
    """In a period T it works for s·T, which takes 2·s·T, and we get s·T of it, and all of the other (1 - s)·T."""
    load = BackgroundLoad(0.0, "a", share, period_s=0.01)
    assert computed_s(load) == pytest.approx(10.0 * (1 + share), rel=0.01)


@pytest.mark.parametrize("programs", [1, 3])
def test_programs_that_always_work_have_an_equal_share_each(programs: int) -> None:
    assert computed_s(BackgroundLoad(0.0, "a", programs=programs)) == pytest.approx(10.0 * (programs + 1))


@pytest.mark.parametrize(("programs", "times"), [(1, 1.0), (2, 1.5), (3, 2.0)])
def test_programs_take_nothing_where_there_is_a_core_for_each(programs: int, times: float) -> None:
    both = Processor("both", 2)
    assert computed_s(BackgroundLoad(0.0, "a", programs=programs), processor=both) == pytest.approx(10.0 * times)


def test_a_load_ends_and_others_add_to_it() -> None:
    """For 2 s half of the core is ours, for 3 s a third, and then all of it."""
    loads = BackgroundLoad(1.0, "a", duration_s=5.0), BackgroundLoad(3.0, "a", duration_s=3.0)
    assert computed_s(*loads) == pytest.approx(1.0 + 2.0 + 3.0 + (10.0 - 1.0 - 2.0 / 2 - 3.0 / 3))


def test_a_device_apart_from_the_processor_computes_on() -> None:
    assert computed_s(BackgroundLoad(0.0, "a", programs=4), shares=False) == 10.0


def test_a_load_is_the_machines_and_outlives_a_crash() -> None:
    """The program begins anew at 2 s, on a core that is still shared."""
    world = World(
        Scenario("one", (Node("a", machine()),), faults=(BackgroundLoad(0.0, "a"), Restart(1.0, "a", down_s=1.0)))
    )
    ended: list[float] = []

    async def compute(host: object) -> None:
        await world.host("a").device.run(TEN_SECONDS, lambda: None)
        ended.append(world.env.now_ns / NS)

    world.run_on_all(compute)
    assert ended == [pytest.approx(2.0 + 20.0)]


def test_a_load_on_a_machine_that_crashes_for_good_leaves_the_others_alone() -> None:
    vm = Processor("vm")
    nodes = tuple(Node(name, machine(), processor="vm") for name in "ab")
    load, crash = BackgroundLoad(0.0, "a", duration_s=2.0), Crash(1.0, "a")
    world = World(Scenario("two", nodes, processors=(vm,), faults=(load, crash)))

    async def main() -> float:
        await world.host("b").device.run(TEN_SECONDS, lambda: None)
        return world.env.now_ns / NS

    assert world.run(main()) == pytest.approx(2.0 + 9.0)


def test_loads_differ_by_the_seed_alone() -> None:
    load = BackgroundLoad(0.0, "a", 0.5, period_s=1.0)
    assert computed_s(load, seed=1) == computed_s(load, seed=1)
    assert computed_s(load, seed=1) != computed_s(load, seed=2)


def test_messages_wait_for_the_processor() -> None:
    """10 ms at the sender and 10 ms at the receiver, whose core is shared."""

    def arrived_s(*faults: AnyFault) -> float:
        scenario = on_switch(("a", "b"))
        nodes = tuple(replace(node, machine=machine()) for node in scenario.nodes)
        world = World(replace(scenario, nodes=nodes, faults=faults))
        done = world.transfer("a", "b", 100)

        async def main() -> float:
            while not done.processed:
                await until(world.env.now_ns / NS + 0.001)
            return world.env.now_ns / NS

        return world.run(main())

    assert arrived_s(BackgroundLoad(0.0, "b")) - arrived_s() == pytest.approx(0.01, abs=0.0015)


def test_a_load_is_written_to_a_file_with_its_scheduler() -> None:
    loaded = Scenario(
        "one", (Node("a", "ideal", processor="core"),),
        processors=(Processor("core", 1, Seconds(SLICE_S), Seconds(TICK_S)),),
        faults=(BackgroundLoad(1.0, "a", 0.5, 2, 0.04, 3.0),),
    )  # fmt: skip
    again = parse_scenario(write_scenario(loaded), "one")
    assert (again.processors, again.faults) == (loaded.processors, loaded.faults)


@pytest.mark.parametrize("share", ["0", "1.5", '"half"'])
def test_an_impossible_share_is_refused(share: str) -> None:
    text = 'name = "one"\nnode = [{ name = "a", machine = "ideal" }]\n[[fault]]\nkind = "background_load"\nat = "0 s"'
    with pytest.raises(ConfigError, match=r"fault\[0\]\.share"):
        parse_scenario(f'{text}\nnode = "a"\nshare = {share}\n', "one")


# Time slices.


class Desk:
    """One core or several, and programs on them."""

    def __init__(self, *, cores: int = 1, slice_s: float = SLICE_S) -> None:
        self.env = VirtualLoop().env
        processor = Processor("cores", cores, Seconds(slice_s), Seconds(TICK_S))
        self.cores: Cores = TimeSlicedCores(self.env, processor) if slice_s else Cores(cores)

    def busy(self) -> None:
        """Put a program there that always works."""
        Program(self.env, self.cores).work(1e6)

    def times_s(self, sleep_s: float, work_s: float, count: int) -> list[float]:
        """Return how long the work of a program takes that sleeps and works by turns."""
        program, found = Program(self.env, self.cores), []

        def life() -> object:
            for _ in range(count):
                yield self.env.timeout(round(sleep_s * NS))
                began_ns = self.env.now_ns
                yield program.work(work_s)
                found.append((self.env.now_ns - began_ns) / NS)

        self.env.run(until=self.env.process(life()))
        return found


def test_programs_that_always_work_take_turns_of_whole_ticks() -> None:
    desk = Desk()
    desk.busy()
    (took_s,) = desk.times_s(0.0, 1.0, 1)
    assert took_s == pytest.approx(2.0, abs=1.001 * TICK_S)


def test_a_program_that_seldom_works_waits_for_nobody() -> None:
    """In ideal shares its work would take twice as long."""
    desk, ideal = Desk(), Desk(slice_s=0.0)
    desk.busy()
    ideal.busy()
    assert max(desk.times_s(0.003, 0.0003, 100)) == pytest.approx(0.0003)
    assert max(ideal.times_s(0.003, 0.0003, 100)) == pytest.approx(0.0006)


def test_a_program_that_hardly_sleeps_waits_as_long_as_a_slice() -> None:
    """It has had more than its share: the other one keeps the core until its deadline, which is seen at a tick."""
    desk = Desk()
    desk.busy()
    times_s = desk.times_s(0.0001, 0.002, 400)
    assert sum(times_s) / len(times_s) == pytest.approx(0.004, rel=0.1)
    assert max(times_s) > 0.002 + SLICE_S


def test_programs_that_have_a_core_each_do_not_take_turns() -> None:
    desk = Desk(cores=2)
    desk.busy()
    assert desk.times_s(0.001, 1.0, 3) == pytest.approx([1.0] * 3)


def test_work_that_follows_at_once_does_not_give_the_core_away() -> None:
    """A program goes from one piece of work to the next without sleep: no other one gets in between."""
    desk = Desk()
    desk.busy()
    times_s = desk.times_s(0.0, 0.0001, 10)
    assert sum(times_s[:10]) == pytest.approx(0.001)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(0.0003, 0.02), min_size=1, max_size=5), st.integers(1, 3), st.floats(0.0005, 0.005)
)  # fmt: skip
def test_cores_are_never_idle_and_nobody_is_far_behind(works_s: list[float], cores: int, slice_s: float) -> None:
    """Programs that always work get the same, but for what a turn and its lag are; together all that there is."""
    desk = Desk(cores=cores, slice_s=slice_s)
    done_s = [0.0] * len(works_s)

    def life(number: int) -> object:
        program = Program(desk.env, desk.cores)
        while True:
            yield program.work(works_s[number])
            done_s[number] += works_s[number]

    for number in range(len(works_s)):
        desk.env.process(life(number))
    desk.env.run(until=2 * NS)
    each_s = 2.0 * min(1.0, cores / len(works_s))
    turn_s = len(works_s) * (slice_s + TICK_S)
    for number, work_s in enumerate(works_s):
        assert done_s[number] == pytest.approx(each_s, abs=work_s + turn_s + 2 * slice_s)
