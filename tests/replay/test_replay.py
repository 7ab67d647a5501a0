"""Programs from execution traces: how long they take, and what is refused before they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from hcsim import simulate, simulate_training
from hcsim.cli.app import app
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config import Scenario, Training, load_scenario
from hcsim.config.machine import Machine
from hcsim.errors import CollectiveTimeout, ConfigError
from hcsim.replay.program import Program, load_program, program_of_all, program_of_one
from hcsim.replay.run import ReplayRepeat, TimeSource, replay
from hcsim.runtime.channel import Phantom
from hcsim.telemetry.chakra import ChakraNode, CollectiveType, NodeType, write_traces
from hcsim.telemetry.execution import ExecutionGraph
from hcsim.telemetry.timeline import Timeline
from tests.switches import on_switch

PATH = Path("trace.et")


def node(number: int, *after: int, type: NodeType = NodeType.COMP, us: int = 0, **attributes: Any) -> ChakraNode:
    return ChakraNode(number, f"n{number}", type, after, duration_us=us, attributes=attributes)


def collective(
    number: int, *after: int, of: CollectiveType = CollectiveType.ALL_REDUCE, **attributes: Any
) -> ChakraNode:
    return node(number, *after, type=NodeType.COMM_COLL, **{"comm_type": int(of), "comm_size": 1 << 20, **attributes})


def send(number: int, *after: int, to: int, **attributes: Any) -> ChakraNode:
    return node(number, *after, type=NodeType.COMM_SEND, comm_dst=to, **{"comm_size": 1000, **attributes})


def receive(number: int, *after: int, source: int, **attributes: Any) -> ChakraNode:
    return node(number, *after, type=NodeType.COMM_RECV, comm_src=source, **{"comm_size": 1000, **attributes})


def of_all(*ranks: list[ChakraNode]) -> Program:
    return program_of_all([(Path(f"trace.{number}.et"), nodes) for number, nodes in enumerate(ranks)])


def replayed(
    program: Program, scenario: str | Scenario = "two-macs-wifi", times: TimeSource = "recorded", repeats: int = 1
) -> list[ReplayRepeat]:
    async def run(group: Group) -> list[ReplayRepeat]:
        return await replay(group, program, times, repeats)

    return simulate(scenario, run, options=Options(timeout_s=1e6)).values()[0]


@pytest.mark.parametrize(
    ("strategy", "compressor"),
    [("ddp", "none"), ("ddp", "int8+ef"), ("local_sgd:2", "none"), ("diloco:2", "topk:0.01+ef")],
)
def test_a_replayed_training_takes_as_long_as_the_recorded_one(tmp_path: Path, strategy: str, compressor: str) -> None:
    graph = ExecutionGraph()
    training = Training(task="resnet50", steps=4, strategy=strategy, compressor=compressor)
    report = simulate_training("four-macs-1gbe", training, sink=graph).values()[0]
    write_traces(tmp_path / "run", graph.ranks())
    program = load_program(tmp_path / "run")
    assert program.recorded_s == pytest.approx(report.duration_s, rel=0.01)
    assert replayed(program, "four-macs-1gbe")[0].seconds == pytest.approx(program.recorded_s, rel=0.005)


def test_where_the_network_is_faster_the_replay_is_as_much_faster_as_the_training(tmp_path: Path) -> None:
    training = Training(task="resnet50", steps=3)
    graph = ExecutionGraph()
    simulate_training("two-macs-wifi", training, sink=graph)
    write_traces(tmp_path / "run", graph.ranks())
    wired = replace(load_scenario("four-macs-1gbe"), nodes=load_scenario("four-macs-1gbe").nodes[:2])
    machines = load_scenario("two-macs-wifi").nodes
    nodes = (replace(n, machine=m.machine) for n, m in zip(wired.nodes, machines, strict=True))
    wired = replace(wired, nodes=tuple(nodes))
    expected_s = simulate_training(wired, training).values()[0].duration_s
    assert replayed(load_program(tmp_path / "run"), wired)[0].seconds == pytest.approx(expected_s, rel=0.01)


def test_computations_run_one_after_the_other_and_those_of_the_processor_beside_them() -> None:
    seconds = 1_000_000
    chain = program_of_one(PATH, [node(1, us=2 * seconds), node(2, 1, us=3 * seconds)], 2)
    apart = program_of_one(PATH, [node(1, us=2 * seconds), node(2, us=3 * seconds)], 2)
    on_cpu = program_of_one(PATH, [node(1, us=2 * seconds), node(2, us=3 * seconds, is_cpu_op=1)], 2)
    for program, expected_s in ((chain, 5), (apart, 5), (on_cpu, 3)):
        assert replayed(program)[0].seconds == pytest.approx(expected_s, abs=0.01)


def test_a_computation_that_is_modelled_takes_the_time_of_the_machine() -> None:
    amount = {"num_ops": 10**13, "tensor_size": 10**9}
    machine = Machine(name="mac", peak_flops=4e12, memory_Bps=1e12, overhead_s=0.0)  # type: ignore[arg-type]
    expected_s = 10**13 / (4e12 * machine.efficiency_compute)
    switched = on_switch(["a"], rate="10 Gb/s")
    alone = replace(switched, nodes=(replace(switched.nodes[0], machine=machine),))
    untimed, timed = (program_of_one(PATH, [node(1, us=us, **amount)], 1) for us in (0, 7))
    assert replayed(untimed, alone)[0].seconds == pytest.approx(expected_s, rel=0.01)
    assert replayed(timed, alone, "modelled")[0].seconds == pytest.approx(expected_s, rel=0.01)
    assert replayed(timed, alone)[0].seconds == pytest.approx(7e-6, abs=1e-6)


@pytest.mark.parametrize("kind", list(CollectiveType), ids=lambda kind: kind.name)
def test_every_collective_is_performed(kind: CollectiveType) -> None:
    program = program_of_one(PATH, [collective(1, of=kind), collective(2, 1, of=kind)], 4)
    lasted_s = replayed(program, "four-macs-1gbe")[0].seconds
    least_s = 0.0 if kind is CollectiveType.BARRIER else 2 * (1 << 18) * 8 / 1e9  # a quarter of it, over one wire
    assert least_s < lasted_s < 0.2


def test_collectives_of_unlike_order_find_each_other() -> None:
    """As a rank's dependencies allow: one begins with the first, the other with the second."""
    first = [collective(1, 3), collective(2), node(3, us=100_000)]
    second = [collective(1), collective(2, 3), node(3, us=100_000)]
    assert replayed(of_all(first, second))[0].seconds < 0.2


def test_the_part_of_the_processor_in_a_collective_of_torch_takes_its_time() -> None:
    call = node(1, type=NodeType.COMM_COLL, us=400_000, is_cpu_op=1)
    lasted_s = replayed(program_of_one(PATH, [call, collective(2, 1)], 2))[0].seconds
    assert lasted_s == pytest.approx(0.4 + replayed(program_of_one(PATH, [collective(2)], 2))[0].seconds, abs=0.02)


def test_a_message_arrives_before_what_depends_on_it() -> None:
    program = of_all(
        [node(1, us=500_000), send(2, 1, to=1, comm_tag=7), receive(3, source=1, comm_tag=7)],
        [receive(1, source=0, comm_tag=7), node(2, 1, us=250_000), send(3, 2, to=0, comm_tag=7)],
    )
    assert replayed(program)[0].seconds == pytest.approx(0.75, abs=0.05)


def test_groups_are_those_that_a_metadata_node_lists() -> None:
    listed = """['[{"pg_name": "3", "ranks": [1, 2]}, {"pg_name": "4", "ranks": []}]']"""
    groups = ChakraNode(9, "groups", NodeType.METADATA, inputs=listed)
    inner, outer = (
        [groups, collective(1, pg_name="3"), collective(2, 1, pg_name="4")],
        [groups, collective(2, pg_name="4")],
    )
    program = of_all(outer, inner, inner, outer)
    assert sorted(program.groups) == [(0, 1, 2, 3), (1, 2)]
    assert replayed(program, "four-macs-1gbe")[0].seconds > 0


def test_ranks_that_wait_for_each_other_end_with_an_error_that_names_them() -> None:
    program = of_all(
        [receive(1, source=1), send(2, 1, to=1)],
        [receive(1, source=0), send(2, 1, to=0)],
    )
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        replayed(program)


def test_a_cycle_is_refused_by_its_nodes() -> None:
    nodes = [node(1), node(2, 1, 4), node(3, 2), node(4, 3), node(5, 4)]
    with pytest.raises(ConfigError) as refused:
        program_of_one(PATH, nodes, 2)
    cycle = "node 2 (n2) on node 4 (n4) on node 3 (n3) on node 2 (n2)"
    assert str(refused.value) == f"trace.et: these nodes wait for each other: {cycle}"


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [
        ([node(1, 7)], "node 1 (n1) depends on node 7, which is not there"),
        ([node(1, 1)], "these nodes wait for each other: node 1 (n1) on node 1 (n1)"),
        ([node(1), node(1)], "node 1 (n1) has a number that another node has, too"),
        ([node(1, us=10**15)], "and 1e+08 s are the most"),
        ([node(1, num_ops=-5)], "node 1 (n1) has num_ops = -5, which is no number from 0"),
        ([collective(1, comm_type=11)], "node 1 (n1) has comm_type = 11, which is no number from 0 to 9"),
        ([collective(1, comm_size="x")], "node 1 (n1) has comm_size = 'x'"),
        ([collective(1, comm_size=2**60)], "node 1 (n1) has comm_size = 1152921504606846976"),
        ([node(1, type=NodeType.COMM_COLL, comm_size=4)], "node 1 (n1) has no comm_type"),
        ([collective(1, pg_name="5")], "node 1 (n1) is of process group '5', which no metadata node lists"),
        ([collective(1, comm_root=9)], "node 1 (n1) has root 9, which is not in its group"),
        ([send(1, to=1)], "node 1 (n1) is not for all ranks: that needs the files of all of them"),
        (
            [ChakraNode(9, "g", NodeType.METADATA, inputs="""['[{"pg_name": 3}]']""")],
            "node 9 (g) lists process groups that cannot be read",
        ),
    ],
)
def test_what_one_rank_cannot_do_is_refused(nodes: list[ChakraNode], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        program_of_one(PATH, nodes, 2)
    assert str(refused.value).startswith("trace.et: ")
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("one", "two", "complaint"),
    [
        ([collective(1)], [], "trace.1.et: rank 1 has 0 collectives of group [0, 1], and rank 0 has 1"),
        (
            [collective(1)],
            [collective(2, of=CollectiveType.BROADCAST)],
            "trace.1.et: node 2 (n2) has comm_type = 5, and node 1 (n1) of rank 0 has 0",
        ),
        ([collective(1)], [collective(1, comm_size=3)], "node 1 (n1) has comm_size = 3, and node 1 (n1) of rank 0"),
        ([send(1, to=1)], [], "rank 0 sends 1 messages with tag 0 to rank 1, which receives 0"),
        ([], [receive(1, source=0)], "rank 0 sends 0 messages with tag 0 to rank 1, which receives 1"),
        ([send(1, to=1)], [receive(1, source=0, comm_tag=2)], "sends 1 messages with tag 0"),
        (
            [send(1, to=1)],
            [receive(4, source=0, comm_size=9)],
            "node 4 (n4) receives 9 bytes, of which rank 0 sends 1000",
        ),
        ([send(1, to=0)], [], "node 1 (n1) has comm_src = 0 and comm_dst = 0, and is of rank 0"),
        ([send(1, to=5)], [], "node 1 (n1) has comm_dst = 5, which is no number from 0 to 1"),
        ([send(1, to=1, comm_src=1)], [], "node 1 (n1) has comm_src = 1 and comm_dst = 1, and is of rank 0"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(
    one: list[ChakraNode], two: list[ChakraNode], complaint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        of_all(one, two)
    assert complaint in str(refused.value)


def test_a_replay_is_shown_and_timed_as_any_run(tmp_path: Path) -> None:
    prefix = str(tmp_path / "run")
    runner = CliRunner()
    recorded = runner.invoke(app, ["bench", "two-macs-wifi", "--size", "1MiB", "--repeat", "2", "--chakra", prefix])
    assert recorded.exit_code == 0
    done = runner.invoke(app, ["replay", prefix, "two-macs-wifi", "--repeat", "2", "--timeline", f"{prefix}.pftrace"])
    assert done.exit_code == 0
    assert "repeat 2: " in done.output
    assert "What limits it is the network" in done.output
    for arguments, complaint in (
        ([prefix, "two-macs-wifi", "--nodes", "3"], "--nodes 3: "),
        ([str(tmp_path / "none"), "two-macs-wifi"], "none.0.et: there is no such file; give PREFIX"),
        ([str(tmp_path / "none.et"), "two-macs-wifi"], "none.et: cannot be read: No such file or directory"),
        ([prefix, "two-macs-wifi", "--times", "guessed"], "--times guessed: "),
        ([prefix], "give a scenario"),
    ):
        refused = runner.invoke(app, ["replay", *arguments])
        assert refused.exit_code == 2
        assert complaint in refused.output


def test_repeats_of_a_replay_are_the_steps_of_its_timeline() -> None:
    program = program_of_one(PATH, [node(1, us=300_000), collective(2, 1)], 2)
    timeline = Timeline(lambda data: None)

    async def run(group: Group) -> list[ReplayRepeat]:
        return await replay(group, program, "recorded", 3)

    laps = simulate("two-macs-wifi", run, sink=timeline).values()[0]
    steps = [step for step in timeline.end().steps if step.machine == "pro-m3"]
    assert [step.number for step in steps] == [lap.number for lap in laps] == [1, 2, 3]
    assert [step.compute_ns for step in steps] == [pytest.approx(300_000_000, abs=2)] * 3


def test_what_all_collectives_of_a_replay_take_is_what_the_group_takes() -> None:
    async def alone(group: Group) -> float:
        await group.barrier()
        began_s = group.host.clock.elapsed()
        await group.all_reduce(Phantom(8 << 20))
        return group.host.clock.elapsed() - began_s

    expected_s = max(simulate("two-macs-wifi", alone).values())
    program = program_of_one(PATH, [collective(1, comm_size=8 << 20)], 2)
    assert replayed(program)[0].seconds == pytest.approx(expected_s, rel=1e-6)
