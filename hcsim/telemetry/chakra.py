"""Execution traces in the format of MLCommons Chakra (Sridharan et al., 2023, arXiv 2305.14516): one file for each
rank, PREFIX.RANK.et.

A file is a `GlobalMetadata` and then `Node`s, each with its length in front. The numbers are those of
schema/protobuf/et_def.proto of https://github.com/mlcommons/chakra; types of attributes are those that its feeder
reads. A node has all its dependencies in `data_deps`. The feeder does not look at `ctrl_deps`, and neither does the
reader: in traces of torch they name the call within which a call was made, which is over later, or not there. The size
of a collective (`comm_size`) is that of one rank's input. Groups other than all ranks are named by a metadata node, as
in traces of torch: "['[{"pg_name": "1", "ranks": [0, 1]}]']". Times are whole microseconds; the rest is carried over to
the machine's next node, so that it does not add up.

A file that is read may come from anywhere: its nodes, its dependencies and the size of each message are limited, and an
error says what is wrong in a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import BinaryIO, NamedTuple, TypeAlias

import msgspec

from hcsim.errors import ConfigError
from hcsim.telemetry.execution import Exchange, GraphNode, RankGraph
from hcsim.telemetry.protobuf import FieldValue, delimited, packed, read_fields, read_varint, signed, text, uint, varint

VERSION = "1.0.0"
MOST_NODES = 2_000_000
MOST_DEPENDENCIES = 8_000_000
MOST_MESSAGE_BYTES = 16 << 20
_MOST_NAME = 200
_MOST_LENGTH_BYTES = 10
_DOUBLE, _FLOAT = Struct("<d"), Struct("<f")
_FIRST_ID = 1
_TAG_MASK = (1 << 31) - 1


class NodeType(IntEnum):
    """What a node does."""

    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    COMM_SEND = 5
    COMM_RECV = 6
    COMM_COLL = 7


class CollectiveType(IntEnum):
    """What a collective node does."""

    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


class _Field(IntEnum):
    METADATA_VERSION = 1
    NODE_ID = 1
    NODE_NAME = 2
    NODE_TYPE = 3
    NODE_DATA_DEPS = 5
    NODE_START = 6
    NODE_DURATION = 7
    NODE_INPUTS = 8
    NODE_ATTRIBUTE = 10
    IO_VALUES = 1
    ATTRIBUTE_NAME = 1
    DOUBLE = 3
    FLOAT = 5
    INT32 = 7
    INT64 = 9
    UINT32 = 11
    UINT64 = 13
    SINT32 = 15
    SINT64 = 17
    FIXED32 = 19
    FIXED64 = 21
    SFIXED32 = 23
    SFIXED64 = 25
    BOOL = 27
    STRING = 29


AttributeValue: TypeAlias = int | float | str
_PLAIN = (_Field.INT32, _Field.INT64, _Field.UINT32, _Field.UINT64, _Field.BOOL)
_ZIGZAG = (_Field.SINT32, _Field.SINT64)
_FIXED = (_Field.FIXED32, _Field.FIXED64, _Field.SFIXED32, _Field.SFIXED64)


class ChakraNode(msgspec.Struct, gc=False):
    """A node of a trace."""

    id: int
    name: str
    type: NodeType
    dependencies: tuple[int, ...] = ()
    start_us: int = 0
    duration_us: int = 0
    inputs: str = ""
    attributes: dict[str, AttributeValue] = {}

    def __str__(self) -> str:
        return f"node {self.id} ({self.name})" if self.name else f"node {self.id}"


# Writing.


class ChakraExport(NamedTuple):
    """What was written."""

    files: tuple[Path, ...]
    nodes: int


def trace_file(prefix: Path, rank: int) -> Path:
    return prefix.with_name(f"{prefix.name}.{rank}.et")


def write_traces(prefix: Path, graphs: Sequence[RankGraph]) -> ChakraExport:
    """Write the file of each rank."""
    numbers = _numbered(graphs)
    groups = _group_names(graphs)
    start_ns = min((node.begin_ns for graph in graphs for node in graph.nodes), default=0)
    files, count = [], 0
    for graph in graphs:
        path = trace_file(prefix, graph.rank)
        try:
            with path.open("wb") as file:
                for message in _rank_messages(graph, numbers, groups, start_ns):
                    file.write(varint(len(message)) + message)
                    count += 1
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
        files.append(path)
    return ChakraExport(tuple(files), max(0, count - len(files)))


def _numbered(graphs: Sequence[RankGraph]) -> dict[GraphNode, int]:
    """Number the nodes by the time at which they begin; a collective has one number on all its ranks."""
    first_ns: dict[tuple[object, ...], int] = {}
    for node in (node for graph in graphs for node in graph.nodes):
        if node.exchange is not None and node.exchange.members:
            key = node.exchange.key
            first_ns[key] = min(node.begin_ns, first_ns.get(key, node.begin_ns))
    order = []
    for place, graph in enumerate(graphs):
        for number, node in enumerate(graph.nodes):
            key = node.exchange.key if node.exchange is not None and node.exchange.members else ()
            order.append((first_ns.get(key, node.begin_ns), place, number, key, node))
    order.sort(key=lambda entry: entry[:3])
    numbers: dict[GraphNode, int] = {}
    shared: dict[tuple[object, ...], int] = {}
    following = _FIRST_ID + 1
    for *_, key, node in order:
        number = shared.get(key, following) if key else following
        if key:
            shared[key] = number
        numbers[node] = number
        following += number == following
    return numbers


def _group_names(graphs: Sequence[RankGraph]) -> dict[tuple[int, ...], str]:
    """Name the groups of ranks; all ranks are "0"."""
    exchanges = (node.exchange for graph in graphs for node in graph.nodes)
    used = {each.members for each in exchanges if each is not None and each.members}
    everybody = max((max(members) for members in used), default=0) + 1
    parts = sorted(members for members in used if members != tuple(range(everybody)))
    return {tuple(range(everybody)): "0", **{members: str(number) for number, members in enumerate(parts, 1)}}


def _rank_messages(
    graph: RankGraph, numbers: Mapping[GraphNode, int], groups: Mapping[tuple[int, ...], str], start_ns: int
) -> Iterator[bytes]:
    yield text(_Field.METADATA_VERSION, VERSION)
    described = [{"pg_name": name, "ranks": list(members)} for members, name in groups.items()]
    if len(described) > 1:
        listed = f"['{msgspec.json.encode(described).decode()}']"
        yield _message(_FIRST_ID, "process groups", NodeType.METADATA) + delimited(
            _Field.NODE_INPUTS, text(_Field.IO_VALUES, listed)
        )
    rest_ns = 0
    for node in graph.nodes:
        lasted_ns = node.end_ns - node.begin_ns
        if node.exchange is None:
            lasted_ns += rest_ns
        duration_us = max(0, lasted_ns + 500) // 1000
        if node.exchange is None:
            rest_ns = lasted_ns - 1000 * duration_us
        kind, attributes = _meaning(node, groups)
        yield b"".join(
            (
                _message(numbers[node], node.name, kind),
                packed(_Field.NODE_DATA_DEPS, [numbers[each] for each in node.dependencies]),
                uint(_Field.NODE_START, (node.begin_ns - start_ns) // 1000),
                uint(_Field.NODE_DURATION, duration_us),
                *attributes,
            )
        )


def _message(number: int, name: str, kind: NodeType) -> bytes:
    return uint(_Field.NODE_ID, number) + text(_Field.NODE_NAME, name) + uint(_Field.NODE_TYPE, kind)


def _meaning(node: GraphNode, groups: Mapping[tuple[int, ...], str]) -> tuple[NodeType, list[bytes]]:
    """Return a node's type and its attributes."""
    exchange = node.exchange
    attributes = [_attribute("is_cpu_op", _Field.BOOL, 0)]
    if exchange is None:
        attributes.append(_attribute("num_ops", _Field.INT64, node.flops))
        attributes.append(_attribute("tensor_size", _Field.UINT64, node.moved_bytes))
        return NodeType.COMP, attributes
    attributes.append(_attribute("comm_size", _Field.INT64, exchange.size_bytes))
    if exchange.members:
        kind = CollectiveType[exchange.name.upper()]
        attributes.append(_attribute("comm_type", _Field.INT64, kind))
        named = delimited(_Field.NODE_ATTRIBUTE, text(_Field.ATTRIBUTE_NAME, "pg_name") + text(
            _Field.STRING, groups[exchange.members]
        ))  # fmt: skip
        return NodeType.COMM_COLL, [*attributes, named, _attribute("comm_root", _Field.INT32, exchange.peer)]
    sends = exchange.name == "send"
    ends = (exchange.rank, exchange.peer) if sends else (exchange.peer, exchange.rank)
    attributes += [
        _attribute(name, _Field.INT32, end) for name, end in zip(("comm_src", "comm_dst"), ends, strict=True)
    ]
    attributes.append(_attribute("comm_tag", _Field.INT32, _tag(exchange)))
    return NodeType.COMM_SEND if sends else NodeType.COMM_RECV, attributes


def _tag(exchange: Exchange) -> int:
    """Return a tag that tells the messages of one group from those of another."""
    return (exchange.tag ^ exchange.group) & _TAG_MASK


def _attribute(name: str, kind: _Field, value: int) -> bytes:
    return delimited(_Field.NODE_ATTRIBUTE, text(_Field.ATTRIBUTE_NAME, name) + uint(kind, value))


# Reading.


class TraceLimits:
    """What may still be read."""

    def __init__(self, nodes: int = MOST_NODES, dependencies: int = MOST_DEPENDENCIES) -> None:
        self._nodes = nodes
        self._dependencies = dependencies

    def take(self, node: ChakraNode) -> None:
        self._nodes -= 1
        self._dependencies -= len(node.dependencies)
        if self._nodes < 0:
            raise ValueError("there are more nodes than can be kept")
        if self._dependencies < 0:
            raise ValueError("there are more dependencies than can be kept")


def read_trace(path: Path, limits: TraceLimits | None = None) -> list[ChakraNode]:
    """Read the nodes of one rank, in the order of the file."""
    limits = limits or TraceLimits()
    nodes: list[ChakraNode] = []
    try:
        with path.open("rb") as file:
            messages = _messages(file)
            if next(messages, None) is None:
                raise ValueError("it is empty")
            for message in messages:
                node = _node(message)
                limits.take(node)
                nodes.append(node)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        where = f"message {len(nodes) + 1}: " if nodes else ""
        raise ConfigError(f"{path}: this is no execution trace of Chakra: {where}{error}") from None
    return nodes


def _messages(file: BinaryIO) -> Iterator[memoryview]:
    """Yield the messages of a file, one after the other."""
    while head := file.read(1):
        while head[-1] > 0x7F and len(head) < _MOST_LENGTH_BYTES:
            digit = file.read(1)
            if not digit:
                raise ValueError("it ends within a length")
            head += digit
        length, _ = read_varint(memoryview(head), 0)
        if length > MOST_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes is longer than the {MOST_MESSAGE_BYTES} that are read")
        message = file.read(length)
        if len(message) < length:
            raise ValueError("it ends within a message")
        yield memoryview(message)


def _node(message: memoryview) -> ChakraNode:
    number = kind = start_us = duration_us = 0
    name = inputs = ""
    dependencies: list[int] = []
    attributes: dict[str, AttributeValue] = {}
    for field, value in read_fields(message):
        if field == _Field.NODE_ID:
            number = _whole(value)
        elif field == _Field.NODE_NAME:
            name = _line(value)
        elif field == _Field.NODE_TYPE:
            kind = _whole(value)
        elif field == _Field.NODE_DATA_DEPS:
            dependencies.extend([value] if isinstance(value, int) else _unpacked(value))
        elif field == _Field.NODE_START:
            start_us = _whole(value)
        elif field == _Field.NODE_DURATION:
            duration_us = _whole(value)
        elif field == _Field.NODE_INPUTS and kind == NodeType.METADATA:
            inputs = _string(next((each for of, each in read_fields(_part(value)) if of == _Field.IO_VALUES), 0))
        elif field == _Field.NODE_ATTRIBUTE:
            attributes.update(_named(_part(value)))
    if kind not in NodeType.__members__.values():
        raise ValueError(f"node {number} ({name}) has type {kind}, which is unknown")
    once = tuple(dict.fromkeys(dependencies))
    return ChakraNode(number, name, NodeType(kind), once, start_us, duration_us, inputs, attributes)


_WANTED = (
    "is_cpu_op", "num_ops", "tensor_size", "comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "comm_root",
    "pg_name",
)  # fmt: skip


def _named(message: memoryview) -> Iterator[tuple[str, AttributeValue]]:
    """Yield an attribute, if it is one that is used."""
    name = ""
    for field, value in read_fields(message):
        if field == _Field.ATTRIBUTE_NAME:
            name = _string(value)
        elif name in _WANTED and (found := _attribute_value(field, value)) is not None:
            yield name, found


def _attribute_value(field: int, value: FieldValue) -> AttributeValue | None:
    if field in _PLAIN:
        return signed(_whole(value))
    if field in _ZIGZAG:
        return _whole(value) >> 1 ^ -(_whole(value) & 1)
    if field in _FIXED:
        return int.from_bytes(_part(value), "little", signed=field in (_Field.SFIXED32, _Field.SFIXED64))
    if field == _Field.STRING:
        return _line(value)
    if field in (_Field.DOUBLE, _Field.FLOAT):
        coded = _DOUBLE if field == _Field.DOUBLE else _FLOAT
        if len(_part(value)) != coded.size:
            raise ValueError("an attribute has another length than its type")
        (number,) = coded.unpack(_part(value))
        return float(number)
    return None


def _unpacked(data: memoryview) -> Iterable[int]:
    at = 0
    while at < len(data):
        value, at = read_varint(data, at)
        yield value


def _whole(value: FieldValue) -> int:
    if not isinstance(value, int):
        raise ValueError("a field that is a number has bytes")
    return value


def _part(value: FieldValue) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a field that has bytes is a number")
    return value


def _line(value: FieldValue) -> str:
    """Return the beginning of a string as it can be shown: in one line, without codes for a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in _string(value)[:_MOST_NAME])


def _string(value: FieldValue) -> str:
    return bytes(_part(value)).decode(errors="replace") if value else ""
