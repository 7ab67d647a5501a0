from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from hcsim.config import (
    CATALOGUE,
    KernelCurve,
    KernelEfficiency,
    Machine,
    Node,
    ScriptKernels,
    load_scenario,
    parse_scenario,
    shipped_scenarios,
    write_scenario,
)
from hcsim.errors import ConfigError, UsageError
from hcsim.runtime.host import KernelGroup, TaskPart, Work
from hcsim.runtime.work_time import seconds
from hcsim.virtual.hardware import machine_of

PLAIN = Machine("plain", 1e12, 1e11, efficiency_compute=0.5, efficiency_memory=0.25, overhead_s=1e-3)


def test_work_is_bound_by_arithmetic_or_by_memory_whichever_is_slower() -> None:
    assert seconds(PLAIN, Work(1e12, 0)) == pytest.approx(2.001)
    assert seconds(PLAIN, Work(0, 1e11)) == pytest.approx(4.001)
    assert seconds(PLAIN, Work(1e12, 1e11)) == pytest.approx(4.001)


def test_throttling_stretches_the_work_and_not_the_overhead() -> None:
    assert seconds(PLAIN, Work(1e12, 0), throttle=0.5) == pytest.approx(4.001)


@pytest.mark.parametrize("throttle", [0.0, -1.0, 1.5, float("nan")])
def test_a_throttle_outside_its_range_is_refused(throttle: float) -> None:
    with pytest.raises(UsageError):
        seconds(PLAIN, Work(1.0, 1.0), throttle)


def test_a_fanless_machine_computes_at_its_sustained_rate() -> None:
    cooled, hot = CATALOGUE["M2"], CATALOGUE["M2 Air"]
    work_s = seconds(cooled, Work(1e12, 0)) - cooled.overhead_s
    assert seconds(hot, Work(1e12, 0)) - hot.overhead_s == pytest.approx(work_s / 0.6)


def test_the_ideal_machine_takes_no_time() -> None:
    assert seconds(CATALOGUE["ideal"], Work(1e15, 1e12)) == 0.0


def test_every_catalogued_machine_takes_a_time_and_goes_by_its_own_name() -> None:
    for name, machine in CATALOGUE.items():
        assert machine.name == name
        if name != "ideal":
            assert 0 < seconds(machine, Work(1e9, 1e6)) < 1


def test_a_node_brings_its_own_profile_or_names_one() -> None:
    assert machine_of(Node("a", PLAIN)) is PLAIN
    assert machine_of(Node("a", "M3 Max")).peak_flops == 14.3e12


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        machine_of(Node("studio", "m2 ultra"))
    text = str(caught.value)
    assert '"studio"' in text
    assert "did you mean M2 Ultra?" in text
    assert all(name in text for name in CATALOGUE)


@pytest.mark.parametrize("name", shipped_scenarios())
def test_shipped_scenarios_name_machines_that_exist(name: str) -> None:
    for node in load_scenario(name).nodes:
        known = CATALOGUE[str(node.machine)]
        assert machine_of(node) == replace(known, ram_bytes=node.memory_bytes or known.ram_bytes)


def test_every_kernel_costs_its_launch() -> None:
    one, ten = (seconds(PLAIN, Work(1e12, 0, kernels)) for kernels in (1, 10))
    assert ten - one == pytest.approx(9 * PLAIN.overhead_s)


def test_a_measured_machine_takes_its_time_from_its_curves():
    curves = KernelCurve("matmul", ((1e6, 1e-5), (1e9, 1e-3))), KernelCurve("copy", ((4e3, 2e-6),))
    measured = Machine("mini", 1e12, 1e11, kernels=curves)
    groups = (KernelGroup("matmul", 5.005e8, 1e6, 2), KernelGroup("copy", 0.0, 8e3, 3), KernelGroup("copy", 0.0, 1.0))
    expected_s = 2 * (1e-5 + (1e-3 - 1e-5) / 2) + 3 * 4e-6 + 2e-6
    assert seconds(measured, Work(groups=groups)) == pytest.approx(expected_s)
    assert seconds(measured, Work(groups=groups), throttle=0.5) == pytest.approx(2 * expected_s)
    unmeasured = seconds(measured, Work(groups=(KernelGroup("gather", 0.0, 8.2e9),)))
    assert unmeasured == pytest.approx(0.1 + measured.overhead_s)  # 82 of 100 GB/s


def test_kinds_of_kernels_have_efficiencies_of_their_own():
    shares = KernelEfficiency("matmul", 0.8), KernelEfficiency("elementwise", 0.4)
    machine = Machine("mini", 1e12, 1e11, 0.5, 0.9, overhead_s=1e-3, efficiencies=shares)
    assert seconds(machine, Work(groups=(KernelGroup("matmul", 8e11, 0.0),))) == pytest.approx(1.001)
    assert seconds(machine, Work(groups=(KernelGroup("matmul", 0.0, 9e10),))) == pytest.approx(1.001)
    assert seconds(machine, Work(groups=(KernelGroup("attention", 5e11, 0.0),))) == pytest.approx(1.001)
    assert seconds(machine, Work(groups=(KernelGroup("elementwise", 0.0, 2e10, 2),))) == pytest.approx(1.002)
    assert seconds(machine, Work(groups=(KernelGroup("copy", 0.0, 9e10),))) == pytest.approx(1.001)
    assert seconds(machine, Work(5e11, 9e9)) == pytest.approx(1.001), "a whole step, of unknown kinds"
    estimated = Work(5e11, 9e9, groups=(KernelGroup("matmul", 5e11, 9e9),), estimated=True)
    assert seconds(machine, estimated) == pytest.approx(1.001)


def test_between_two_curves_of_a_kind_the_time_follows_the_intensity():
    low = KernelCurve("convolution", ((1e6, 4e-4), (1e8, 4e-2)), intensity=1.0)
    high = KernelCurve("convolution", ((1e6, 1e-4), (1e8, 1e-2)), intensity=100.0)
    measured = Machine("mini", 1e12, 1e11, kernels=(high, low))

    def lasts_s(intensity: float) -> float:
        return seconds(measured, Work(groups=(KernelGroup("convolution", 1e8, 1e8 / intensity),)))

    assert lasts_s(1.0) == pytest.approx(4e-2)
    assert lasts_s(10.0) == pytest.approx(2e-2)
    assert lasts_s(100.0) == lasts_s(1000.0) == pytest.approx(1e-2)
    assert lasts_s(0.5) == pytest.approx(8e-2)  # twice the bytes


def test_a_step_costs_what_the_machine_needs_beside_its_kernels():
    curves = (KernelCurve("update", ((1e3, 1e-6),)),)
    machine = Machine("mini", 1e12, 1e11, kernels=curves, step_s=3e-3)
    groups = (KernelGroup("update", 0.0, 1e3),)
    assert seconds(machine, Work(groups=groups, steps=1)) == pytest.approx(3e-3 + 1e-6)
    assert seconds(machine, Work(kernels=0, steps=1)) == pytest.approx(3e-3)


def test_a_step_of_an_asynchronous_device_lasts_as_long_as_its_kernels_or_their_launches():
    curves = (
        KernelCurve("matmul", ((1e6, 1e-4),), launch_s=2e-5),
        KernelCurve("copy", ((1e6, 1e-6),), launch_s=1e-5),
    )
    device = Machine("gpu", 1e12, 1e11, kernels=curves, step_s=5e-4, overhead_s=4e-5)

    def lasts_s(*groups: KernelGroup, throttle: float = 1.0) -> float:
        return seconds(device, Work(groups=groups, steps=1), throttle)

    products, copies = KernelGroup("matmul", 1e6, 1e3, 100), KernelGroup("copy", 0.0, 1e6, 100)
    assert lasts_s(products) == pytest.approx(100 * 1e-4)
    assert lasts_s(copies) == pytest.approx(5e-4 + 100 * 1e-5)
    assert lasts_s(products, copies) == pytest.approx(100 * (1e-4 + 1e-6))
    assert lasts_s(copies, throttle=0.5) == lasts_s(copies), "the host is not throttled"
    unmeasured = KernelGroup("gather", 0.0, 1.0, 100)
    assert lasts_s(copies, unmeasured) == pytest.approx(5e-4 + 100 * (1e-5 + 4e-5))


def test_the_first_kernels_of_a_step_take_longer_than_their_repetitions():
    curve = KernelCurve("copy", ((4e3, 2e-6),), cold_s=1e-5)
    machine = Machine("mini", 1e12, 1e11, kernels=(curve,))
    first, later = KernelGroup("copy", 0.0, 4e3, 1, colds=1.0), KernelGroup("copy", 0.0, 4e3, 2, colds=1 / 2 + 1 / 3)
    assert seconds(machine, Work(groups=(first, later))) == pytest.approx(3 * 2e-6 + (1 + 1 / 2 + 1 / 3) * 1e-5)
    device = Machine("gpu", 1e12, 1e11, kernels=(msgspec.structs.replace(curve, launch_s=4e-6),))
    assert seconds(device, Work(groups=(first,), steps=1)) == pytest.approx(4e-6 + 1e-5), "the host's launch"


def test_views_cost_nothing_where_they_were_not_measured():
    views = KernelGroup("view", 0.0, 0.0, 10)
    for measured in (KernelCurve("copy", ((4e3, 2e-6),)), KernelCurve("copy", ((4e3, 2e-6),), launch_s=1e-5)):
        machine = Machine("mini", 1e12, 1e11, kernels=(measured,))
        assert seconds(machine, Work(groups=(views,))) == 0
    curve = KernelCurve("view", ((1.0, 3e-6),))
    assert seconds(Machine("mini", 1e12, 1e11, kernels=(curve,)), Work(groups=(views,))) == pytest.approx(3e-5)


def test_sums_of_many_rows_follow_another_curve_than_sums_of_few():
    few, many = (
        KernelCurve("reduction", ((1e6, lasts_s),), intensity=row) for row, lasts_s in ((1e4, 2e-4), (1e2, 5e-5))
    )
    machine = Machine("mini", 1e12, 1e11, kernels=(few, many))
    groups = [KernelGroup("reduction", 0.0, 1e6, rows=rows) for rows in (1e2, 1e4, 1e5)]
    assert [seconds(machine, Work(groups=(group,))) for group in groups] == pytest.approx([2e-4, 5e-5, 5e-5])


def test_an_operation_that_was_measured_by_itself_takes_that_time():
    own = KernelCurve("copy", ((4e3, 7e-6),), signature="clone(10x100)")
    measured = Machine("mini", 1e12, 1e11, kernels=(KernelCurve("copy", ((4e3, 2e-6),)), own))
    same, other = (KernelGroup("copy", 0.0, 4e3, signature=name) for name in ("clone(10x100)", "clone(100x10)"))
    assert seconds(measured, Work(groups=(same, other))) == pytest.approx(9e-6)


def test_a_file_brings_machines_of_its_own_that_its_nodes_name():
    text = """
name = "measured"
[[machine]]
name = "mini"
peak = "4 TFLOPS"
memory = "120 GB/s"
step = "3 ms"
messages = { send = "60 us", receive = "80 us", basis = { kind = "measured", date = "2026-11-19", spread = 0.1 } }
[[machine.kernel]]
kind = "matmul"
points = [[1e6, 1e-5], [1e9, 1e-3]]
[[medium]]
kind = "ethernet"
name = "switch"
rate = "1 Gb/s"
[[node]]
name = "a"
machine = "mini"
links = ["switch"]
"""
    scenario = parse_scenario(text, "measured.toml")
    machine = machine_of(scenario.nodes[0])
    assert machine.step_s == 3e-3
    assert machine.messages is not None
    assert machine.messages.basis.spread == 0.1
    written = write_scenario(scenario)
    assert 'machine = "mini"' in written
    assert parse_scenario(written, "again").nodes == scenario.nodes
    with pytest.raises(ConfigError, match=r'node\[0\].machine = "mimi".*did you mean mini'):
        parse_scenario(text.replace('machine = "mini"', 'machine = "mimi"'), "measured.toml")
    with pytest.raises(ConfigError, match=r"machine\[0\].kernel\[0\].*order of increasing sizes"):
        parse_scenario(text.replace("[1e6, 1e-5]", "[1e9, 1e-5]"), "measured.toml")


def test_a_task_whose_parts_were_measured_takes_their_times_for_its_batch_and_nothing_beside_them():
    forward = KernelCurve("matmul", ((8, 1e-3), (16, 2e-3)), signature="digits forward")
    known = ScriptKernels("digits", kernels=(forward,))
    machine = Machine("mini", 1e12, 1e11, overhead_s=0, step_s=0.5, hand_over_s=1e-2, tasks=(known,))
    half, other = (Work(1e9, part=TaskPart(f"digits {name}", 12), steps=1) for name in ("forward", "backward 0"))
    assert seconds(machine, half) == pytest.approx(1.5e-3)
    assert seconds(machine, half, throttle=0.5) == pytest.approx(3e-3)
    assert seconds(machine, other) == pytest.approx(1e9 / 0.36e12 + 0.5 + 1e-2)
