"""Execution traces: what google's protobuf reads of them, the rules of their consumers, and hostile files."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from hcsim import simulate, simulate_training
from hcsim.cli.app import app
from hcsim.collectives.group import Group
from hcsim.config import Cluster, Crash, Training, load_scenario
from hcsim.errors import ConfigError
from hcsim.launch.real import RealNode, train_in_cluster
from hcsim.node import ClusterJob
from hcsim.real.keys import new_secret, save_secret
from hcsim.runtime.channel import Phantom
from hcsim.telemetry.chakra import MOST_MESSAGE_BYTES, ChakraNode, TraceLimits, read_trace, write_traces
from hcsim.telemetry.execution import ExecutionGraph
from hcsim.units import Seconds
from tests.conftest import free_addresses

FIELDS = {
    "GlobalMetadata": {"version": (1, "string")},
    "Node": {
        "id": (1, "uint64"), "name": (2, "string"), "type": (3, "int32"), "ctrl_deps": (4, "uint64*"),
        "data_deps": (5, "uint64*"), "start_time_micros": (6, "uint64"), "duration_micros": (7, "uint64"),
        "inputs": (8, "IOInfo"), "attr": (10, "AttributeProto*"),
    },
    "IOInfo": {"values": (1, "string")},
    "AttributeProto": {
        "name": (1, "string"), "int32_val": (7, "int32"), "int64_val": (9, "int64"), "uint64_val": (13, "uint64"),
        "bool_val": (27, "bool"), "string_val": (29, "string"),
    },
}  # fmt: skip
"""The part of et_def.proto that traces of hcsim use."""
COMP, SEND, RECV, COLL = 4, 5, 6, 7


def schema() -> dict[str, Any]:
    """The classes that google's protobuf makes of it."""
    descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="et.proto", package="et", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            many = kinds.LABEL_REPEATED if kind.endswith("*") else kinds.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=many)
            if (plain := kind.rstrip("*")) in FIELDS:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".et.{plain}"
            else:
                added.type = getattr(kinds, f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"et.{name}")) for name in FIELDS}


def decoded(path: Path) -> tuple[Any, list[Any]]:
    """The metadata and the nodes of a file."""
    classes, data, at = schema(), path.read_bytes(), 0
    found: list[Any] = []
    while at < len(data):
        length = shift = 0
        while True:
            byte = data[at]
            length, shift, at = length | (byte & 0x7F) << shift, shift + 7, at + 1
            if byte < 0x80:
                break
        found.append(classes["Node" if found else "GlobalMetadata"].FromString(data[at : at + length]))
        at += length
    return found[0], found[1:]


def value(node: Any, name: str) -> Any:
    """An attribute, by the field that the feeder of Chakra reads it from."""
    kinds = {"num_ops": "int64", "comm_type": "int64", "comm_size": "int64", "tensor_size": "uint64"}
    kinds |= {"comm_src": "int32", "comm_dst": "int32", "comm_tag": "int32", "pg_name": "string", "is_cpu_op": "bool"}
    return next(getattr(each, f"{kinds[name]}_val") for each in node.attr if each.name == name)


def feed(nodes: list[Any]) -> Iterator[Any]:
    """The nodes as the feeder issues them: each once its data dependencies are over; it fails where it would hang."""
    by_id = {node.id: node for node in nodes}
    assert len(by_id) == len(nodes)
    waits = {node.id: len(node.data_deps) for node in nodes}
    children: dict[int, list[int]] = {}
    for node in nodes:
        assert not node.ctrl_deps, "the feeder does not look at them"
        for parent in node.data_deps:
            assert parent in by_id
            children.setdefault(parent, []).append(node.id)
    ready = [number for number, count in waits.items() if not count]
    issued = 0
    while ready:
        number = ready.pop()
        issued += 1
        yield by_id[number]
        for child in children.get(number, ()):
            waits[child] -= 1
            if not waits[child]:
                ready.append(child)
    assert issued == len(nodes), "there is a cycle"


def exported(tmp_path: Path, training: Training, scenario: str = "two-macs-wifi") -> list[list[Any]]:
    """The nodes of each rank of a simulated training."""
    graph = ExecutionGraph()
    simulate_training(scenario, training, sink=graph).values()
    return [decoded(path)[1] for path in write_traces(tmp_path / "run", graph.ranks()).files]


@pytest.mark.parametrize(
    ("strategy", "compressor"), [("ddp", "none"), ("ddp", "int8+ef"), ("local_sgd:2", "none"), ("hierarchical", "none")]
)
def test_a_feeder_takes_every_node_of_every_rank(tmp_path: Path, strategy: str, compressor: str) -> None:
    training = Training(task="resnet50", steps=2, strategy=strategy, compressor=compressor)
    scenario = "two-homes-wan" if strategy == "hierarchical" else "two-macs-wifi"
    ranks = exported(tmp_path, training, scenario)
    collectives: dict[int, list[tuple[str, int]]] = {}
    for nodes in ranks:
        issued = list(feed([node for node in nodes if node.type != 1]))
        assert Counter(node.type for node in issued)[COMP] > 2 * 18, (
            "forward and backward of each block, and the update"
        )
        for node in issued:
            if node.type == COLL:
                collectives.setdefault(node.id, []).append((value(node, "pg_name"), value(node, "comm_type")))
    assert collectives
    groups = {"0": len(ranks), "1": 2, "2": 2, "3": 2}
    for calls in collectives.values():
        assert len({*calls}) == 1, "a collective is the same on all its ranks, and has one number"
        assert len(calls) == groups[calls[0][0]]


def test_the_bytes_and_the_work_of_a_step_are_those_of_the_model(tmp_path: Path) -> None:
    one, two = exported(tmp_path, Training(task="resnet50", steps=2))
    for nodes in (one, two):
        reduced = sum(value(node, "comm_size") for node in nodes if node.type == COLL)
        assert reduced == 2 * 4 * 25_557_032, "ResNet-50 has so many parameters"
        flops = sum(value(node, "num_ops") for node in nodes if node.name == "forward")
        assert flops == pytest.approx(2 * 32 * 2 * 4.09e9, rel=0.01), "4.1 billion multiply-adds for an image"


def test_times_of_nodes_add_up_to_those_of_the_machine(tmp_path: Path) -> None:
    graph = ExecutionGraph()
    report = simulate_training("two-macs-wifi", Training(task="resnet50", steps=3), sink=graph).values()[0]
    nodes = decoded(write_traces(tmp_path / "run", graph.ranks()).files[0])[1]
    computed_us = sum(n.duration_micros for n in nodes if n.type == COMP and n.name not in ("encode", "decode"))
    last_us = max(node.start_time_micros + node.duration_micros for node in nodes)
    assert last_us == pytest.approx(report.duration_s * 1e6, abs=20)
    assert computed_us == pytest.approx(report.spent_s["compute"] * 1e6, rel=0.01)


def test_every_send_has_its_receive(tmp_path: Path) -> None:
    async def ring(group: Group) -> None:
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        for number in range(3):
            await group.sendrecv(Phantom(1000 + group.rank), right, Phantom(1000 + left), left, tag=number)
        pair = group.subgroup([group.rank // 2 * 2, group.rank // 2 * 2 + 1])
        await pair.all_gather(Phantom(64))

    graph = ExecutionGraph()
    simulate("four-macs-1gbe", ring, sink=graph).values()
    ends: tuple[Counter[Any], Counter[Any]] = Counter(), Counter()
    for rank, path in enumerate(write_traces(tmp_path / "ring", graph.ranks()).files):
        metadata, nodes = decoded(path)
        assert metadata.version
        groups = nodes[0].inputs.values
        assert groups.startswith("['[{")
        assert '{"pg_name":"1","ranks":[0,1]},{"pg_name":"2","ranks":[2,3]}' in groups
        issued = list(feed(nodes))
        for node in issued:
            if node.type in (SEND, RECV):
                message = tuple(value(node, name) for name in ("comm_src", "comm_dst", "comm_tag", "comm_size"))
                assert message[node.type == RECV] == rank
                ends[node.type == RECV][message] += 1
        assert [value(node, "pg_name") for node in issued if node.type == COLL] == [str(1 + rank // 2)]
    assert ends[0] == ends[1]
    assert ends[0].total() == 4 * 3


def test_operations_that_a_crash_left_undone_are_left_out(tmp_path: Path) -> None:
    scenario = replace(load_scenario("two-macs-wifi"), faults=(Crash(at_s=Seconds(7.0), node="pro-m3"),))
    graph = ExecutionGraph()
    simulate_training(scenario, Training(task="resnet50", steps=4), sink=graph)
    done = [decoded(path)[1] for path in write_traces(tmp_path / "run", graph.ranks()).files]
    collectives = [[node.id for node in feed(nodes) if node.type == COLL] for nodes in done]
    assert sorted(collectives[0]) == sorted(collectives[1])
    assert len(collectives[0]) == 4, "those of the first step"


def test_a_run_writes_the_traces_that_it_is_asked_for(tmp_path: Path) -> None:
    arguments = ["bench", "two-macs-wifi", "--size", "1MiB", "--repeat", "2", "--chakra", str(tmp_path / "run")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    kinds = [[node.type for node in decoded(tmp_path / f"run.{rank}.et")[1]] for rank in (0, 1)]
    repeats = [COLL] * 6
    """A barrier, the operation and the exchange of figures, twice."""
    assert kinds == [[RECV, SEND, *repeats], [SEND, RECV, *repeats]], "rank 0 hears of rank 1, and answers"
    arguments[-1] = str(tmp_path / "nowhere" / "run")
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "nowhere/run.0.et: cannot be written" in refused.output


def test_a_real_machine_writes_what_it_did_itself(tmp_path: Path) -> None:
    save_secret(tmp_path, "home", new_secret())
    control, data = (int(address.rpartition(":")[2]) for address in free_addresses(2))
    cluster = Cluster(nodes=1, discover=False, discovery_port=control, gradient_port=data)
    graph = ExecutionGraph()
    plan = ClusterJob(cluster, Training(task="convex", steps=4), 1)
    asyncio.run(train_in_cluster(RealNode(tmp_path, name="mac", hosts=("127.0.0.1",)), plan, sink=graph))
    (path,) = write_traces(tmp_path / "run", graph.ranks()).files
    names = Counter(node.name for node in feed(decoded(path)[1]))
    assert path.name == "run.0.et"
    assert (names["forward"], names["update"]) == (4, 4)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    written = exported(tmp_path, Training(task="resnet50", steps=1))[0]
    read = read_trace(tmp_path / "run.0.et")
    assert [(node.id, node.name, node.type) for node in read] == [(n.id, n.name, n.type) for n in written]
    assert [node.dependencies for node in read] == [tuple(node.data_deps) for node in written]
    assert [node.duration_us for node in read] == [node.duration_micros for node in written]


def encoded(*nodes: dict[str, Any], attributes: dict[str, tuple[str, object]] | None = None) -> bytes:
    """A file, by google's encoder."""
    classes = schema()
    messages = [classes["GlobalMetadata"](version="0.0.4"), *(classes["Node"](**node) for node in nodes)]
    for name, (kind, number) in (attributes or {}).items():
        messages[1].attr.add(name=name, **{kind: number})
    parts = []
    for message in messages:
        data = message.SerializeToString()
        assert len(data) < 1 << 14
        parts.append(
            (bytes([len(data)]) if len(data) < 0x80 else bytes([len(data) & 0x7F | 0x80, len(data) >> 7])) + data
        )
    return b"".join(parts)


def test_a_file_of_another_encoder_is_read_by_the_rules_of_the_feeder(tmp_path: Path) -> None:
    path = tmp_path / "a.et"
    attributes = {"comm_size": ("int64_val", 2**40), "pg_name": ("string_val", "7"), "is_cpu_op": ("bool_val", True)}
    node = {"id": 2**63, "name": "é", "type": COLL, "ctrl_deps": [1], "data_deps": [3, 2**40], "duration_micros": 7}
    path.write_bytes(encoded(node, attributes=attributes))
    (found,) = read_trace(path)
    assert (found.id, found.name, found.dependencies, found.duration_us) == (2**63, "é", (3, 2**40), 7)
    assert found.attributes == {"comm_size": 2**40, "pg_name": "7", "is_cpu_op": 1}


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "it is empty"),
        (b"\x05abc", "it ends within a message"),
        (b"\x00\x85", "it ends within a length"),
        (b"\x00" + b"\xff" * 11, "more than ten bytes"),
        (b"\x00\xff\xff\xff\xff\x7f", f"longer than the {MOST_MESSAGE_BYTES}"),
        (b"\x00\x02\x18\x63", "has type 99, which is unknown"),
        (b"\x00\x02\x08\x01", "has type 0, which is unknown"),
        (b"\x00\x03\x2a\x05\x01", "it ends within a field"),
        (b"\x00\x02\x0b\x01", "wire type 3"),
        (b"\x00\x02\x10\x01", "a field that has bytes is a number"),
        (b"\x00\x03\x0a\x01\x61", "a field that is a number has bytes"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_a_line(tmp_path: Path, data: bytes, complaint: str) -> None:
    (tmp_path / "bad.et").write_bytes(data)
    with pytest.raises(ConfigError, match=r"bad\.et: this is no execution trace of Chakra: ") as refused:
        read_trace(tmp_path / "bad.et")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_name_of_several_lines_is_told_in_one(tmp_path: Path) -> None:
    path = tmp_path / "lines.et"
    path.write_bytes(encoded({"id": 7, "name": "a\nb\x1b[31m", "type": 99}))
    with pytest.raises(ConfigError, match=r"node 7 \(a\?b\?\[31m\) has type 99"):
        read_trace(path)


@given(data=st.binary(max_size=200), cut=st.integers(0, 400), at=st.integers(0, 400))
@settings(max_examples=200, deadline=None)
def test_no_file_whatever_makes_reading_fail_otherwise(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int, at: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.et"
    whole = encoded({"id": 1, "name": "a", "type": COMP, "data_deps": [1, 2]}, attributes={"num_ops": ("int64_val", 5)})
    path.write_bytes(whole[: at % len(whole)] + data + whole[cut % len(whole) :])
    try:
        nodes = read_trace(path)
    except ConfigError as error:
        nodes = []
        lines = str(error).count("\n")
    else:
        lines = 0
    assert all(isinstance(node, ChakraNode) for node in nodes)
    assert lines == 0


def test_no_more_nodes_and_dependencies_are_read_than_can_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "many.et"
    path.write_bytes(encoded(*({"id": number, "type": COMP, "data_deps": [1, 2, 3]} for number in range(1, 9))))
    with pytest.raises(ConfigError, match="message 6: there are more nodes than can be kept"):
        read_trace(path, TraceLimits(nodes=5))
    with pytest.raises(ConfigError, match="message 4: there are more dependencies than can be kept"):
        read_trace(path, TraceLimits(dependencies=9))
