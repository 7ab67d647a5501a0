"""A real cluster on machines of its own: it forms by multicast, trains, and goes on whatever happens to its members.

What the members learn under faults is what they would have learned had the same ones come and gone by agreement.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.namespaces import Process
from tests.real.together import SLOW_KBIT, Together, digest, members, plan, together

pytestmark = pytest.mark.slow

long = pytest.mark.namespaces_long
STEPS = 150
ABC = ("a", "b", "c")


@pytest.fixture
def abc(tmp_path: Path) -> Iterator[Together]:
    with together(tmp_path, "abc") as cluster:
        yield cluster


def by_rank(processes: list[Process]) -> list[Process]:
    """The processes in the order of the newest view of the first of them, once its members train."""
    processes[0].says("training (begins|goes on)")
    order = members(processes[0])
    return sorted(processes, key=lambda process: order.index(process.machine.name))


def begin(cluster: Together, *names: str, steps: int = STEPS, strategy: str = "ddp") -> list[Process]:
    """Train over slow cables, so that there is time for something to happen; returns at the fifth step."""
    cluster.write(len(names), steps, strategy=strategy)
    processes = cluster.start(*names)
    processes[0].says("training begins")
    cluster.lan.slow(SLOW_KBIT)
    ranked = by_rank(processes)
    ranked[0].says("step 5 of")
    return ranked


def finish(cluster: Together, witness: Process, *others: Process) -> list[tuple[int, list[str]]]:
    """Let all come to the end; they must have learned what the witness's members learn without faults."""
    cluster.lan.fast()
    for process in (witness, *others):
        assert process.ends() == 0, process.text
        assert "Traceback" not in process.text
    history = plan(witness)
    assert {digest(process) for process in (witness, *others)} == {cluster.reference(history)}
    return history


def test_machines_find_each_other_train_and_end_with_the_same_parameters(abc: Together) -> None:
    abc.write(3, 40)
    processes = abc.start(*ABC)
    abc.lan.slow(4000)
    ((step, names),) = finish(abc, *processes)
    assert step == 0
    assert sorted(names) == [*ABC]


def test_the_leader_is_killed_in_the_middle_of_a_reduction(abc: Together) -> None:
    leader, *others = begin(abc, *ABC)
    leader.kill()
    second, third = others
    second.says("training goes on")
    history = finish(abc, second, third)
    assert [names for _, names in history[1:]] == [[second.machine.name, third.machine.name]]
    assert 0 < history[1][0] < STEPS


def test_a_process_that_holds_shards_is_killed_and_another_one_leaves_with_its_own(abc: Together) -> None:
    first, second, third = begin(abc, *ABC, strategy="zero3:copies=2")
    second.kill()
    first.says("training goes on")
    seen = len(first.lines)
    third.send(signal.SIGINT)
    assert third.ends() == 0, third.text
    first.says("training goes on", seen)
    history = finish(abc, first)
    assert [names for _, names in history[1:]] == [[first.machine.name, third.machine.name], [first.machine.name]]


def test_who_is_interrupted_leaves_after_its_step_and_the_others_go_on(abc: Together) -> None:
    first, second, third = begin(abc, *ABC)
    second.send(signal.SIGINT)
    assert second.ends() == 0, second.text
    assert "leaving after this step" in second.text
    assert digest(second)
    first.says("training goes on")
    history = finish(abc, first, third)
    assert [names for _, names in history[1:]] == [[first.machine.name, third.machine.name]]
    assert not any("was lost" in line for line in first.lines)


@long
def test_a_member_is_killed(abc: Together) -> None:
    first, second, third = begin(abc, *ABC)
    second.kill()
    first.says("training goes on")
    history = finish(abc, first, third)
    assert [names for _, names in history[1:]] == [[first.machine.name, third.machine.name]]


@long
def test_a_member_that_was_killed_is_started_again(abc: Together) -> None:
    first, second, third = begin(abc, *ABC)
    name = second.machine.name
    second.kill()
    (again,) = abc.start(name)
    again.says("training goes on")
    history = finish(abc, first, third, again)
    assert history[-1][1] == [first.machine.name, third.machine.name, name]


@long
def test_the_leader_is_killed_and_started_again(abc: Together) -> None:
    first, second, third = begin(abc, *ABC)
    name = first.machine.name
    first.kill()
    (again,) = abc.start(name)
    again.says("training goes on")
    history = finish(abc, second, third, again)
    assert history[-1][1] == [second.machine.name, third.machine.name, name]


@long
def test_a_member_that_joins_late_is_taken_in_without_a_failed_step(tmp_path: Path) -> None:
    with together(tmp_path, "abcd") as abcd:
        first, *rest = begin(abcd, *ABC)
        (late,) = abcd.start("d")
        late.says("training goes on")
        history = finish(abcd, first, *rest, late)
        assert history[-1][1] == [*history[0][1], "d"]
        assert not any("was lost" in line for line in first.lines)


@long
@pytest.mark.parametrize("rank", [0, 2])
def test_a_member_that_is_stopped_and_continued_comes_back_as_the_most_junior(abc: Together, rank: int) -> None:
    ranked = begin(abc, *ABC)
    stopped = ranked.pop(rank)
    witness, other = ranked
    stopped.send(signal.SIGSTOP)
    seen = witness.says("was lost")
    seen = witness.says("training goes on", seen)
    stopped.send(signal.SIGCONT)
    witness.says("training goes on", seen)
    history = finish(abc, witness, other, stopped)
    assert history[-1][1] == [witness.machine.name, other.machine.name, stopped.machine.name]


@long
@pytest.mark.parametrize("rank", [0, 2])
def test_a_member_whose_interface_goes_down_comes_back_when_it_is_up(abc: Together, rank: int) -> None:
    ranked = begin(abc, *ABC)
    away = ranked.pop(rank)
    witness, other = ranked
    away.machine.unplug()
    seen = witness.says("was lost")
    seen = witness.says("training goes on", seen)
    away.machine.plug()
    witness.says("training goes on", seen)
    history = finish(abc, witness, other, away)
    assert sorted(history[-1][1]) == [*ABC]


@long
def test_the_smaller_side_of_a_split_waits_and_says_so(abc: Together) -> None:
    first, second, third = begin(abc, *ABC)
    abc.lan.cut_off(first.machine.name)
    seen = second.says("was lost")
    seen = second.says("training goes on", seen)
    first.says("cannot decide alone")
    abc.lan.heal()
    second.says("training goes on", seen)
    history = finish(abc, second, third, first)
    assert history[1][1] == [second.machine.name, third.machine.name]
    assert sorted(history[-1][1]) == [*ABC]
