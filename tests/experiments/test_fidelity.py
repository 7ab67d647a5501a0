"""The lab: its cells, what it keeps, and a cell in both worlds, which fails when the model drifts."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from experiments.fidelity.__main__ import PARTS
from experiments.fidelity.bands import Calibration, Residuals, banded, residuals, with_band
from experiments.fidelity.calibration import fitted
from experiments.fidelity.cells import KB, MB, Cell, TrainingCell, collectives
from experiments.fidelity.homes import MEDIA, WIRED, Network
from experiments.fidelity.loaded import SHARE, Which, loaded_computing, scenario_of
from experiments.fidelity.record import Record
from experiments.fidelity.repeats import bound, deviations, repeated, run_name, runs_of
from experiments.fidelity.report import classes, row, share_inside
from experiments.fidelity.scheduler import Scheduler, Wakes
from experiments.fidelity.worlds import Timing, measure, predicted, simulated
from hcsim.config import CATALOGUE, Machine
from hcsim.errors import ConfigError
from hcsim.units import ByteRate, FlopRate, Seconds
from tests.real.namespaces import obstacle

DRIFT = 0.1
IDEAL = CATALOGUE.named("ideal")
CELL = Cell("100mb", 2, "all_reduce", "ring", 4 * MB)


def timing(median_s: float, sha256: str = "") -> Timing:
    return Timing(median_s, 0.9 * median_s, 1.1 * median_s, 5, "ring", sha256)


def test_a_third_of_the_cells_of_each_medium_calibrates() -> None:
    for medium in MEDIA:
        cells = collectives(medium)
        assert 0.2 < sum(cell.calibrates for cell in cells) / len(cells) < 0.45


def test_every_cell_has_a_name_of_its_own() -> None:
    names = [cell.name for part in PARTS.values() for cell in part()]
    assert len(set(names)) == len(names)


def test_what_was_measured_is_there_after_an_interruption(tmp_path: Path) -> None:
    file = tmp_path / "measured.csv"
    Record(file).add(CELL.name, timing(0.25))
    Record(file).add(Cell("1gb", 4, "broadcast", "tree", 64 * KB).name, timing(0.5))
    found = Record(file).timings
    assert list(found) == ["100mb/2/all_reduce/ring/4MB", "1gb/4/broadcast/tree/64KB"]
    assert found[CELL.name] == timing(0.25)


def test_a_damaged_record_names_its_file(tmp_path: Path) -> None:
    file = tmp_path / "measured.csv"
    file.write_text("cell,median_s\na,b\n")
    with pytest.raises(ConfigError, match=r"measured\.csv.*remove it"):
        Record(file)


def test_calibration_finds_the_network_that_the_cells_were_measured_in() -> None:
    truth = Network(latency_s=300e-6, rate_factor=0.9)
    cells = [Cell("100mb", 2, "all_reduce", "ring", size) for size in (4 * KB, 64 * KB, 1 * MB)]
    measured = {cell.name: predicted(cell, truth, IDEAL) for cell in cells}
    found = fitted(cells, measured, IDEAL)
    assert found.latency_s == pytest.approx(truth.latency_s, rel=0.05)
    assert found.rate_factor == pytest.approx(truth.rate_factor, rel=0.01)


def test_errors_are_those_of_cells_that_did_not_calibrate() -> None:
    cells = [cell for cell in collectives("1gb") if cell.kind == "1 MB"]
    rows = [row(cell, timing(1.0), timing(2.0 if cell.calibrates else 1.1)) for cell in cells]
    (found,) = classes(rows)
    assert found.cells == sum(not cell.calibrates for cell in cells) < len(cells)
    assert found.median_error == pytest.approx(0.1)
    assert found.spread == pytest.approx(0.1)


def test_what_calibrates_is_counted_by_the_size_of_its_messages() -> None:
    truth = Network(latency_s=300e-6, rate_factor=0.9)
    short, long = (Cell("100mb", 2, "all_reduce", "ring", size) for size in (64 * KB, 1 * MB))
    exact = {cell.name: predicted(cell, truth, IDEAL) for cell in (short, long)}
    slower = exact | {long.name: replace(exact[long.name], median_s=1.2 * exact[long.name].median_s)}
    found = Calibration.of([short, long], slower, truth, IDEAL)
    assert (*found.short, *found.long) == pytest.approx((1.0, 1.2), rel=0.02)


def test_residuals_hold_eight_of_ten_ratios_of_the_media_of_a_group() -> None:
    ratios = [0.9 + 0.01 * number for number in range(10)]
    calibrations = {"a": Calibration([], ratios), "b": Calibration([], [each + 0.1 for each in ratios]),
                    "c": Calibration([], [1.0] * 4)}  # fmt: skip
    found = residuals([["a", "b"], ["c"]], calibrations)
    assert found["a"] == found["b"]
    assert found["a"].long == pytest.approx((0.91, 1.08))  # the second of twenty from either end
    assert found["c"] == Residuals()  # four say nothing


def test_a_band_has_the_residuals_of_cells_like_it_and_independent_ones_add_up() -> None:
    network = Residuals(short=(0.5, 2.0), long=(0.9, 1.1))
    found = banded(CELL, timing(1.0), network)
    assert (found.p10_s, found.p90_s) == pytest.approx((0.9, 1.1))
    short = banded(Cell("100mb", 2, "all_reduce", "ring", 64 * KB), timing(1.0), network)
    assert (short.p10_s, short.p90_s) == pytest.approx((0.5, 2.0))
    both = with_band(timing(1.0), (0.9, 1.1), (0.9, 1.1))
    assert (both.p10_s, both.p90_s) == pytest.approx((0.9**2**0.5, 1.1**2**0.5))


def test_the_share_of_measured_medians_in_their_bands_leaves_calibrating_cells_out() -> None:
    cells = [cell for cell in collectives("1gb") if cell.kind == "1 MB"]
    rows = [row(cell, timing(1.0), timing(2.0 if cell.calibrates else 1.05)) for cell in cells]  # p10 is 0.9 of it
    assert share_inside(rows) == 1.0
    (found,) = classes([*rows, row(next(c for c in cells if not c.calibrates), timing(2.0), timing(1.0))])
    assert found.inside == pytest.approx(found.cells / (found.cells + 1), abs=0.1)
    assert found.inside < 1.0


def test_a_slept_training_is_simulated_with_the_time_of_its_machine() -> None:
    """Each of two ranks computes for about 60 ms of a step, and what it sends takes a few more."""
    cell = TrainingCell("100mb", 2, "digits", "ddp", "topk:0.01+ef")
    assert 0.05 < predicted(cell, Network(), IDEAL).median_s < 0.09


def test_runs_that_differ_bound_the_error_of_any_prediction() -> None:
    """Of five runs, one takes twice as long: the median of the others is off by half there, and nowhere else."""
    runs = {run_name(CELL.name, run): timing(2.0 if run == 3 else 1.0) for run in range(1, 6)}
    found = bound({CELL.name: 1.25, "not repeated": 7.0}, runs)
    assert found is not None
    assert (found.cells, found.runs, found.median) == (1, 5, 0.0)
    assert deviations(runs_of(runs, CELL.name)) == [0.0, 0.0, 0.5, 0.0, 0.0]
    assert (found.error_median, found.error_p90) == pytest.approx((0.25, 0.25))


def test_cells_that_were_not_repeated_have_no_bound() -> None:
    assert bound({CELL.name: 1.0}, {run_name(CELL.name, 1): timing(1.0)}) is None
    (found,) = classes([row(replace(CELL, size_bytes=1 * MB), timing(1.0), timing(1.0))])
    assert found.runs_median is None


def test_what_is_repeated_did_not_calibrate() -> None:
    for medium in WIRED:
        cells = [each.inner for each in repeated(medium)]
        assert cells
        assert not any(cell.calibrates for cell in cells)


def scheduler() -> Scheduler:
    """One as of Linux on two cores: 1.4 ms, which are seen every 4 ms."""
    alone = Wakes(0.0001, 0.00003, False, 100, 0.00006, (0.00006,) * 9, 0.00003)
    busy = Wakes(0.0001, 0.002, True, 100, 0.0005, (*(0.00006,) * 8, 0.00146), 0.004)
    return Scheduler(gaps_s=(0.004,) * 5, own_s=(0.004,) * 5, wakes=(alone, busy), pairs=())


def test_the_slice_of_a_scheduler_is_the_longest_wait_and_its_tick_divides_turns() -> None:
    assert (scheduler().slice_s, scheduler().tick_s) == pytest.approx((0.0014, 0.004))


def test_a_core_that_is_shared_half_of_the_time_makes_computing_half_as_long_again() -> None:
    """A step that computes for a second and sends next to nothing; with the neighbour on the other machine, too."""
    slow = Machine("slow", FlopRate(2e6), ByteRate(1e12), overhead_s=Seconds(0), shares_processor=True)
    training = next(cell for cell in loaded_computing() if cell.inner.medium == "1gb" and cell.inner.task == "digits")

    def lasts_s(which: Which) -> float:
        home = scenario_of(replace(training, which=which), Network(), slow, scheduler())
        turn = replace(training.turn, rounds=1, repeats=1)
        return simulated(training, home, turn).median_s

    alone_s = lasts_s("none")
    assert lasts_s("all") / alone_s == pytest.approx(1 + SHARE, rel=0.1)
    assert lasts_s("one") / alone_s == pytest.approx(1 + SHARE, rel=0.1)


@pytest.mark.slow
def test_a_ring_over_shaped_ports_takes_as_long_as_predicted() -> None:
    """Its ports bound it, so that a busy machine lengthens it little."""
    if why_not := obstacle():
        pytest.skip(why_not)
    expected = predicted(CELL, Network(), IDEAL)
    errors = []
    for _ in range(3):
        found: list[Timing] = []
        measure([CELL], lambda _, timing, found=found: found.append(timing))
        assert found[0].sha256 == expected.sha256
        errors.append(abs(expected.median_s / found[0].median_s - 1))
        if errors[-1] < DRIFT:
            return
    pytest.fail(f"the prediction is off by {', '.join(f'{error:.0%}' for error in errors)}")
