from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from experiments.compute.predicted import Record, record_of
from experiments.compute.recorded import Recorded, read, write
from hcsim.config import Basis
from hcsim.config.machine import interpolated_s
from hcsim.torch_kernels import Kernel
from hcsim.twin.blocks import blocks
from hcsim.twin.kernels import Rest, Sample, Steps, TimedStep, curves_of, own_curves, rest_of, time_kernels

RECORDED = Path(__file__).with_name("compute.json")


def provenance(spread: float) -> Basis:
    return Basis("measured", "a test", "2026-11-19", spread)


def copies(sizes: list[float], seconds: list[float]) -> list[Sample]:
    return [
        Sample("clone", f"clone({size})", Kernel("copy", 0.0, size, "float32"), [lasts_s])
        for size, lasts_s in zip(sizes, seconds, strict=True)
    ]


def test_a_curve_goes_through_what_was_measured():
    sizes = [2.0**power for power in np.linspace(10, 24, 60)]
    (curve,) = curves_of([copies(sizes, [5e-6 + size / 1e10 for size in sizes])], Rest(), provenance)
    assert all(earlier[0] < later[0] for earlier, later in pairwise(curve.points))
    for size in (3e3, 7e4, 1e6, 1e7):
        assert interpolated_s(curve.points, size) == pytest.approx(5e-6 + size / 1e10, rel=0.15)
    assert curve.basis.spread < 0.1


def test_a_kernel_that_the_system_interrupted_does_not_bend_its_curve():
    sizes = [2.0**power for power in np.linspace(10, 24, 60)]
    seconds = [5e-6 + size / 1e10 for size in sizes]
    seconds[30] *= 50
    (curve,) = curves_of([copies(sizes, seconds)], Rest(), provenance)
    assert interpolated_s(curve.points, sizes[30]) == pytest.approx(5e-6 + sizes[30] / 1e10, rel=0.3)


def test_the_rest_of_a_step_is_found_from_its_kernels_and_their_bytes():
    timed = []
    for count, size in ((3, 1e4), (50, 1e3), (20, 1e7), (100, 1e5), (200, 1e6), (10, 3e6)):
        samples = copies([size] * count, [1e-5] * count)
        timed.append(TimedStep(samples, Steps([count * (1e-5 + 2e-6 + size * 1e-11) + 3e-4])))
    rest = rest_of(timed)
    assert rest.step_s == pytest.approx(3e-4, rel=0.05)
    assert rest.kernel_s == pytest.approx(2e-6, rel=0.05)
    assert rest.byte_s == pytest.approx(1e-11, rel=0.05)
    (curve,) = curves_of([copies([1e3] * 8, [1e-5] * 8)], rest, provenance)
    assert curve.points[0][1] == pytest.approx(1e-5 + 2e-6 + 1e-8, rel=0.01)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_first_kernels_of_a_step_take_longer_is_told_from_what_they_all_take(asynchronous: bool):
    steps = []
    for size in np.logspace(4, 6, 20):
        steps.append(
            copies([size] * 10, [size / 1e10 + 2e-5 + (0 if asynchronous else 3e-5 / k**0.5) for k in range(1, 11)])
        )
        if asynchronous:
            for k, sample in enumerate(steps[-1], start=1):
                sample.launches.append(1e-5 + 3e-5 / k**0.5)
    (curve,) = curves_of(steps, Rest(), provenance)
    assert curve.cold_s == pytest.approx(3e-5, rel=0.02)
    assert curve.launch_s == pytest.approx(1e-5 if asynchronous else 0, rel=0.02)
    for size in (2e4, 1e5, 7e5):
        assert interpolated_s(curve.points, size) == pytest.approx(2e-5 + size / 1e10, rel=0.15)


def test_views_are_found_from_steps_that_make_many():
    timed = []
    for count, views in ((10, 0), (50, 30), (100, 400), (20, 100), (70, 5)):
        lasts_s = 1e-4 + count * 1e-5 + views * 3e-6
        timed.append(TimedStep(copies([1e4] * count, [1e-5] * count), Steps([lasts_s]), views))
    rest = rest_of(timed)
    assert rest.view_s == pytest.approx(3e-6, rel=0.05)
    curves = {curve.kind: curve for curve in curves_of([each.samples for each in timed], rest, provenance)}
    assert curves["view"].points[0][1] == pytest.approx(3e-6, rel=0.05)


def test_some_of_the_blocks_are_the_same_as_among_all():
    some = dict(blocks(every=60))
    for number, block in some.items():
        _, again = next(found for found in blocks(every=number or 300) if found[0] == number)
        assert str(block.module) == str(again.module)
        assert block.inputs.shape == again.inputs.shape


def launched(count: int, launch_s: float, device_s: float) -> TimedStep:
    """A step of an asynchronous device, with 2 us for each launch and 100 us for the step beside the calls."""
    samples = copies([1e6] * count, [device_s] * count)
    for sample in samples:
        sample.launches.append(launch_s)
    host_s = 1e-4 + count * (launch_s + 2e-6)
    return TimedStep(samples, Steps([max(host_s, count * device_s)], [host_s], [count * (device_s + 1e-6)]))


def test_launches_and_kernels_of_an_asynchronous_device_are_told_apart():
    timed = [launched(count, 5e-6, device_s) for count, device_s in ((10, 1e-6), (30, 5e-5), (100, 2e-6), (300, 1e-4))]
    rest = rest_of(timed)
    assert rest.step_s == pytest.approx(1e-4, rel=0.05)
    assert rest.launch_s == pytest.approx(2e-6, rel=0.05)
    assert rest.kernel_s + 1e6 * rest.byte_s == pytest.approx(1e-6, rel=0.05)
    (curve,) = curves_of([launched(8, 5e-6, 1e-4).samples], rest, provenance)
    assert curve.launch_s == pytest.approx(7e-6, rel=0.05)
    assert curve.points[0][1] == pytest.approx(1e-4 + 1e-6, rel=0.05)


def test_recorded_steps_of_an_asynchronous_device_are_predicted_by_the_longer_path(tmp_path: Path):
    blocks = {number: launched(10 + number, 5e-6, 2e-6 * number) for number in range(1, 30)}
    models = {"bound by the host": launched(200, 5e-6, 2e-6), "bound by the device": launched(200, 5e-6, 3e-5)}
    file = tmp_path / "measured.json"
    write(file, [Recorded("cuda", 1, {}, blocks, models)])
    (found,) = read(file)
    own = {row.model: row for row in record_of(found).rows() if row.method == "own kernels"}
    assert own["bound by the host"].predicted_s == pytest.approx(1e-4 + 200 * 7e-6, rel=0.05)
    assert own["bound by the device"].predicted_s == pytest.approx(200 * 3.1e-5, rel=0.05)


def test_a_step_has_the_kernels_that_it_launches_with_a_time_for_each_repetition():
    weights = torch.ones(8, 8, requires_grad=True)
    samples, _ = time_kernels(lambda: (weights @ weights).sum().backward(), repeats=3)
    assert [sample.kernel.kind for sample in samples].count("matmul") == 3
    assert all(len(sample.seconds) == 3 and min(sample.seconds) > 0 for sample in samples)
    curves = own_curves(samples, Rest(), provenance)
    assert {curve.signature for curve in curves} == {sample.signature for sample in samples}


def test_recorded_steps_are_predicted_from_recorded_kernels():
    """What changes how kernels are looked up shows here; how they are counted and measured does not."""
    records = msgspec.json.decode(RECORDED.read_bytes(), type=list[Record])
    errors = [abs(each.predicted_s(model) / model.step_s - 1) for each in records for model in each.models]
    assert len(errors) == 28
    assert np.median(errors) < 0.15
    assert np.quantile(errors, 0.9) < 0.45


def test_a_step_without_its_kernels_by_kind_would_be_predicted_far_worse():
    """The same steps by the roofline alone, with the best rates of the curves."""
    records = msgspec.json.decode(RECORDED.read_bytes(), type=list[Record])
    for each in records:
        matmul = [size / lasts_s for c in each.curves if c.kind == "matmul" for size, lasts_s in c.points]
        copied = [size / lasts_s for c in each.curves if c.kind == "copy" for size, lasts_s in c.points]
        errors, by_kind = [], []
        for model in each.models:
            roofline_s = sum(g.count * max(g.flops / max(matmul), g.moved_bytes / max(copied)) for g in model.groups)
            errors.append(abs(roofline_s / model.step_s - 1))
            by_kind.append(abs(each.predicted_s(model) / model.step_s - 1))
        assert np.median(errors) > 2 * np.median(by_kind)
