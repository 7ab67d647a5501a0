from __future__ import annotations

from pathlib import Path

import pytest

from hcsim.config import Basis, KernelCurve, Machine, load_scenario
from hcsim.runtime.host import KernelGroup, Work
from hcsim.runtime.work_time import seconds
from hcsim.twin.file import TwinFile
from hcsim.twin.script import TimedKernel, TimedTurn, check, predicted_s, script_kernels, with_script
from hcsim.units import ByteRate, FlopRate, Seconds

MACHINE = Machine("mine", FlopRate(1e11), ByteRate(1e10), overhead_s=Seconds(1e-3), step_s=Seconds(0.5))
STOPWATCH_S = 20e-6


def provenance(spread: float) -> Basis:
    return Basis("measured", "a test", "2026-11-19", spread)


def kernel(signature: str, lasted_s: float, gap_s: float) -> TimedKernel:
    return TimedKernel(signature, "matmul", 1e6, 1e4, "float32", lasted_s, gap_s + STOPWATCH_S)


def step(load_s: float = 2e-3, scale: float = 1.0) -> list[TimedKernel]:
    """A step whose data are loaded before its first kernel, and whose last two kernels are alike."""
    return [
        kernel("stack", 1e-4, load_s),
        kernel("mm", scale * 3e-4, 5e-5),
        kernel("add", scale * 1e-4, 3e-5),
        kernel("add", scale * 2e-4, 1e-5),
    ]


PLAIN_S = 2e-3 + 7e-4 + 9e-5


def times_of(turns: list[TimedTurn]) -> dict[str, float]:
    return {curve.signature: curve.points[0][1] for curve in script_kernels("train.py", turns, provenance).kernels}


def test_a_kernel_has_its_own_time_and_that_of_the_gap_before_it_without_what_the_stopwatch_adds() -> None:
    times = times_of([TimedTurn([PLAIN_S] * 3, step())] * 3)
    assert times == pytest.approx({"stack": 2.1e-3, "mm": 3.5e-4, "add": 1.7e-4}, rel=1e-3)


def test_a_step_of_the_script_is_its_kernels_alone() -> None:
    own = script_kernels("train.py", [TimedTurn([PLAIN_S] * 3, step())] * 3, provenance)
    machine = with_script(MACHINE, own).running("train.py")
    assert predicted_s(machine, step()) == pytest.approx(PLAIN_S, rel=1e-3)
    work = Work(groups=(KernelGroup("matmul", 1e6, 1e4, signature="mm"),), steps=1)
    assert seconds(machine, work) == pytest.approx(3.5e-4, rel=1e-3)


def test_kernels_that_take_longer_one_by_one_than_the_whole_step_are_shortened_in_proportion() -> None:
    times = times_of([TimedTurn([3.5e-4], step())] * 2)
    assert times == pytest.approx({"stack": 5e-5, "mm": 1.5e-4, "add": 7.5e-5}, rel=1e-3)


def test_a_step_that_took_an_evaluation_with_it_teaches_its_kernels_and_changes_no_others() -> None:
    usual = TimedTurn([PLAIN_S] * 3, step())
    longer = TimedTurn([PLAIN_S] * 3, [*step(), kernel("evaluate", 4e-3, 1e-3)])
    times = times_of([usual, longer, usual])
    assert times["evaluate"] == pytest.approx(5e-3, rel=1e-3)
    assert times["mm"] == pytest.approx(3.5e-4, rel=1e-3)


def test_steps_of_which_no_two_are_alike_are_predicted_in_sum() -> None:
    turns = [
        TimedTurn([PLAIN_S, PLAIN_S + 2 * number * 1e-3], [*step(), kernel(f"of length {number}", number * 1e-3, 0.0)])
        for number in range(1, 9)
    ]
    found = check("train.py", turns, MACHINE)
    assert found.step_s == pytest.approx(PLAIN_S + 5e-3, rel=1e-3)
    assert found.known < 0.6
    whole = with_script(MACHINE, script_kernels("train.py", turns, provenance)).running("train.py")
    predicted = sum(predicted_s(whole, turn.kernels) for turn in turns)
    assert predicted == pytest.approx(sum(sum(turn.plain_s) / 2 for turn in turns), rel=1e-3)


def test_the_check_predicts_the_undisturbed_steps_of_other_turns() -> None:
    quick, slow = TimedTurn([PLAIN_S] * 3, step()), TimedTurn([2 * PLAIN_S] * 3, step())
    found = check("train.py", [quick, slow, quick, slow], MACHINE)
    assert found.step_s == pytest.approx(2 * PLAIN_S)
    assert found.error == pytest.approx(-0.5, rel=1e-2)
    assert (found.kernels, found.distinct, found.known) == (4, 3, 1.0)


def test_an_operation_that_was_not_seen_takes_what_the_machine_says_of_its_kind() -> None:
    curve = KernelCurve("matmul", ((1e6, 7e-3),), "float32")
    machine = Machine("mine", FlopRate(1e11), ByteRate(1e10), kernels=(curve,))
    machine = with_script(machine, script_kernels("train.py", [TimedTurn([PLAIN_S], step())], provenance))
    assert predicted_s(machine.running("train.py"), [kernel("bmm", 1.0, 1.0)]) == pytest.approx(7e-3)
    assert predicted_s(machine.running("other.py"), [kernel("mm", 1.0, 1.0)]) == pytest.approx(7e-3)


def test_a_twin_keeps_one_model_of_each_script(tmp_path: Path) -> None:
    file = tmp_path / "twin.toml"
    first = script_kernels("train.py", [TimedTurn([1.0], step())], provenance)
    again = script_kernels("train.py", [TimedTurn([PLAIN_S], step())], provenance)
    other = script_kernels("other.py", [TimedTurn([PLAIN_S], step())], provenance)
    for script in (first, other, again):
        twin = TwinFile(file)
        twin.put_machine(with_script(twin.machine("mine") or MACHINE, script))
    [machine] = load_scenario(file).machines
    assert machine.scripts == (other, again)
    assert machine.scripts[0].basis == provenance(0.0)
