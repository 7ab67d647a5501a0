"""A program from execution traces: what each rank does, and in which order. It is checked before it runs.

One file for each rank makes a program for as many ranks. The file of a single rank makes one for any number, in which
every rank does the same; it may then have collectives of all ranks only.

Collectives of a group are matched by their order on each rank, and messages by their order between two ranks for each
tag: by the numbers of their nodes, so those may run in any order that their dependencies allow.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from hcsim.errors import UNDECODABLE, ConfigError
from hcsim.telemetry.chakra import ChakraNode, CollectiveType, NodeType, TraceLimits, read_trace, trace_file

MOST_BYTES = 1 << 40
LONGEST_S = 1e8
MOST_RANKS = 4096
_MOST_GROUPS = 4096
_SHOWN = 8
_GROUPS = re.compile(r"^\['(\[.*\])'\]$", re.DOTALL)
_EVERYBODY = ("", "0")
_ALIKE = ("ALL_REDUCE", "REDUCE", "SCATTER", "BROADCAST", "REDUCE_SCATTER", "REDUCE_SCATTER_BLOCK", "BARRIER")
"""Collectives to which all ranks pass as much."""


class CollectiveCall(msgspec.Struct, frozen=True, gc=False):
    """A collective, on one of its ranks."""

    type: CollectiveType
    group: int
    """Which of the program's groups."""
    number: int
    """Among the collectives of the group."""
    sizes: tuple[int, ...]
    """The input of each member, in bytes."""
    root: int
    """Which of the members."""


class MessageCall(msgspec.Struct, frozen=True, gc=False):
    """A message, at one of its ends."""

    sends: bool
    peer: int
    number: int
    """Among the messages from the one to the other."""
    size_bytes: int


class Computation(msgspec.Struct, frozen=True, gc=False):
    """Work, of which a trace has the time or the amount."""

    seconds: float
    flops: int
    moved_bytes: int
    is_on_cpu: bool


Action: TypeAlias = CollectiveCall | MessageCall | Computation | None


class ProgramNode(msgspec.Struct):
    """A node of one rank."""

    name: str
    action: Action
    """None: nothing but an order."""
    waits: int
    """For how many others."""
    dependents: list[int]
    """The places of the nodes that wait for it."""


class Program(msgspec.Struct, frozen=True):
    """What all ranks do."""

    ranks: tuple[tuple[ProgramNode, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    recorded_s: float
    """How long the recorded run took, from its first node to its last; 0 if the trace does not tell."""


def load_program(what: Path, ranks: int | None = None) -> Program:
    """Return the program in PREFIX.0.et, PREFIX.1.et, …, or in the file of one rank that all do."""
    if what.suffix == ".et":
        return program_of_one(what, read_trace(what), ranks or 1)
    limits = TraceLimits()
    files: list[tuple[Path, list[ChakraNode]]] = []
    while (path := trace_file(what, len(files))).exists() and len(files) < MOST_RANKS:
        files.append((path, read_trace(path, limits)))
    if not files:
        raise ConfigError(f"{path}: there is no such file; give PREFIX of PREFIX.0.et, …, or a file with the .et")
    return program_of_all(files)


def program_of_one(path: Path, nodes: Sequence[ChakraNode], ranks: int) -> Program:
    """Return the program in which every rank does the same."""
    rank = _Rank(path, nodes)
    everybody = tuple(range(ranks))
    for node in rank.exchanges:
        if node.type != NodeType.COMM_COLL or rank.members(node, ranks) != everybody:
            raise ConfigError(f"{path}: {node} is not for all ranks: that needs the files of all of them")
    calls: Calls = {
        node.id: _collective(rank, node, number, everybody, (0, (rank.size(node),) * ranks))
        for number, node in enumerate(rank.exchanges)
    }
    return Program((rank.program(calls),) * ranks, (everybody,), _recorded_s([rank]))


def program_of_all(files: Sequence[tuple[Path, Sequence[ChakraNode]]]) -> Program:
    """Return the program in which every rank has a file of its own."""
    ranks = [_Rank(path, nodes) for path, nodes in files]
    groups, calls = _matched_collectives(ranks)
    for own, messages in zip(calls, _matched_messages(ranks), strict=True):
        own.update(messages)
    programs = tuple(rank.program(own) for rank, own in zip(ranks, calls, strict=True))
    return Program(programs, groups, _recorded_s(ranks))


Calls: TypeAlias = dict[int, CollectiveCall | MessageCall]


class _GroupListing(msgspec.Struct):
    pg_name: str
    ranks: list[int]


class _Rank:
    """The trace of one rank."""

    def __init__(self, path: Path, nodes: Sequence[ChakraNode]) -> None:
        self.path = path
        self.nodes = nodes
        self.places: dict[int, int] = {}
        for place, node in enumerate(nodes):
            if self.places.setdefault(node.id, place) != place:
                raise self.wrong(node, "has a number that another node has, too")
        self._groups = self._listed_groups()
        self.exchanges = sorted((node for node in nodes if _is_exchange(node)), key=lambda node: node.id)

    def wrong(self, node: ChakraNode, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {node} {what}")

    def _listed_groups(self) -> dict[str, list[int]]:
        """Return the process groups that metadata nodes list."""
        found: dict[str, list[int]] = {}
        for node in self.nodes:
            listed = _GROUPS.match(node.inputs)
            if listed is None:
                continue
            try:
                groups = msgspec.json.decode(listed[1], type=list[_GroupListing])
            except (*UNDECODABLE, msgspec.ValidationError) as error:
                raise self.wrong(node, f"lists process groups that cannot be read: {error}") from None
            found.update((group.pg_name, group.ranks) for group in groups)
        if len(found) > _MOST_GROUPS:
            raise ConfigError(f"{self.path}: there are {len(found)} process groups, and {_MOST_GROUPS} are the most")
        return found

    def number(self, node: ChakraNode, name: str, most: int, usual: int | None = None) -> int:
        """Return an attribute that is a number from 0 to `most`."""
        value = node.attributes.get(name, usual)
        if value is None:
            raise self.wrong(node, f"has no {name}")
        if not isinstance(value, int) or not 0 <= value <= most:
            raise self.wrong(node, f"has {name} = {value!r}, which is no number from 0 to {most}")
        return value

    def size(self, node: ChakraNode) -> int:
        is_barrier = node.type == NodeType.COMM_COLL and node.attributes.get("comm_type") == CollectiveType.BARRIER
        return self.number(node, "comm_size", MOST_BYTES, 0 if is_barrier else None)

    def members(self, node: ChakraNode, ranks: int) -> tuple[int, ...]:
        """Return the ranks that take part in a collective."""
        name = str(node.attributes.get("pg_name", ""))
        listed = self._groups.get(name)
        if listed is None and name not in _EVERYBODY:
            raise self.wrong(node, f"is of process group {name!r}, which no metadata node lists")
        members = tuple(listed or range(ranks))
        if len({*members}) != len(members) or not all(0 <= rank < ranks for rank in members):
            raise self.wrong(
                node, f"is of process group {name!r}, whose ranks are not among the {ranks} that there are"
            )
        return members

    def program(self, calls: Calls) -> tuple[ProgramNode, ...]:
        """Return the nodes with what each does and waits for."""
        nodes = [ProgramNode(str(node), self._action(node, calls), 0, []) for node in self.nodes]
        for place, node in enumerate(self.nodes):
            for number in node.dependencies:
                before = self.places.get(number)
                if before is None:
                    raise self.wrong(node, f"depends on node {number}, which is not there")
                nodes[before].dependents.append(place)
                nodes[place].waits += 1
        self._check_acyclic(nodes)
        lasts_s = sum(node.action.seconds for node in nodes if isinstance(node.action, Computation))
        if lasts_s > LONGEST_S:
            raise ConfigError(f"{self.path}: its nodes take {lasts_s:g} s together, and {LONGEST_S:g} s are the most")
        return tuple(nodes)

    def _action(self, node: ChakraNode, calls: Calls) -> Action:
        if node.type == NodeType.METADATA:
            return None
        if node.id in calls:
            return calls[node.id]
        flops = self.number(node, "num_ops", (1 << 63) - 1, 0)
        moved_bytes = self.number(node, "tensor_size", (1 << 63) - 1, 0)
        is_on_cpu = bool(node.attributes.get("is_cpu_op", False))
        return Computation(node.duration_us / 1e6, flops, moved_bytes, is_on_cpu)

    def _check_acyclic(self, nodes: Sequence[ProgramNode]) -> None:
        waits = [node.waits for node in nodes]
        ready = deque(place for place, count in enumerate(waits) if not count)
        while ready:
            for place in nodes[ready.popleft()].dependents:
                waits[place] -= 1
                if not waits[place]:
                    ready.append(place)
        left = [place for place, count in enumerate(waits) if count]
        if left:
            raise ConfigError(f"{self.path}: these nodes wait for each other: {self._cycle(left)}")

    def _cycle(self, left: Sequence[int]) -> str:
        """Return the nodes of a cycle in words, among these, each of which waits for another."""
        among = dict.fromkeys(left)
        way: dict[int, None] = {}
        place = left[0]
        while place not in way:
            way[place] = None
            befores = (self.places[number] for number in self.nodes[place].dependencies)
            place = next(before for before in befores if before in among)
        cycle = list(way)[list(way).index(place) :]
        names = [str(self.nodes[each]) for each in cycle[:_SHOWN]]
        more = ["…"] if len(cycle) > _SHOWN else []
        return " on ".join([*names, *more, names[0]])


def _is_exchange(node: ChakraNode) -> bool:
    """Return whether a node exchanges data. In traces of torch, the processor's part of a collective has its type, too,
    and takes time like a computation."""
    if node.type not in (NodeType.COMM_COLL, NodeType.COMM_SEND, NodeType.COMM_RECV):
        return False
    return not (node.attributes.get("is_cpu_op") and "comm_size" not in node.attributes)


def _collective(
    rank: _Rank, node: ChakraNode, number: int, members: tuple[int, ...], where: tuple[int, tuple[int, ...]]
) -> CollectiveCall:
    group, sizes = where
    kind = CollectiveType(rank.number(node, "comm_type", max(CollectiveType)))
    root = rank.number(node, "comm_root", MOST_RANKS, members[0])
    if root not in members:
        raise rank.wrong(node, f"has root {root}, which is not in its group")
    return CollectiveCall(kind, group, number, sizes, members.index(root))


def _matched_collectives(ranks: Sequence[_Rank]) -> tuple[tuple[tuple[int, ...], ...], list[Calls]]:
    """Return the groups, and the collectives of each rank by the numbers of their nodes."""
    sequences: dict[tuple[int, ...], dict[int, list[ChakraNode]]] = {}
    for number, rank in enumerate(ranks):
        for node in rank.exchanges:
            if node.type == NodeType.COMM_COLL:
                members = rank.members(node, len(ranks))
                if number not in members:
                    raise rank.wrong(node, f"is of a group without this rank: {', '.join(map(str, members))}")
                sequences.setdefault(members, {}).setdefault(number, []).append(node)
    calls: list[Calls] = [{} for _ in ranks]
    for group, (members, by_rank) in enumerate(sequences.items()):
        counts = [len(by_rank.get(each, ())) for each in members]
        if min(counts) != max(counts):
            some, many = (members[counts.index(count)] for count in (min(counts), max(counts)))
            raise ConfigError(
                f"{ranks[some].path}: rank {some} has {min(counts)} collectives of group {list(members)}, and rank"
                f" {many} has {max(counts)}"
            )
        for place, nodes in enumerate(zip(*(by_rank[each] for each in members), strict=True)):
            _check_alike(ranks, members, nodes)
            sizes = tuple(ranks[each].size(node) for each, node in zip(members, nodes, strict=True))
            for each, node in zip(members, nodes, strict=True):
                calls[each][node.id] = _collective(ranks[each], node, place, members, (group, sizes))
    return tuple(sequences), calls


def _check_alike(ranks: Sequence[_Rank], members: Sequence[int], nodes: Sequence[ChakraNode]) -> None:
    """Refuse a collective that is not the same on all of its ranks."""
    first = ranks[members[0]]
    kind = first.number(nodes[0], "comm_type", max(CollectiveType))
    for each, node in zip(members, nodes, strict=True):
        rank = ranks[each]
        alike = ["comm_type"] + ["comm_size"] * (CollectiveType(kind).name in _ALIKE) + ["comm_root"]
        for name in alike:
            ours, theirs = node.attributes.get(name), nodes[0].attributes.get(name)
            if ours != theirs:
                raise rank.wrong(node, f"has {name} = {ours}, and {nodes[0]} of rank {members[0]} has {theirs}")


def _matched_messages(ranks: Sequence[_Rank]) -> list[Calls]:
    """Return the messages of each rank by the numbers of their nodes."""
    ends: tuple[dict[tuple[int, int, int], list[ChakraNode]], ...] = ({}, {})
    for number, rank in enumerate(ranks):
        for node in rank.exchanges:
            if node.type != NodeType.COMM_COLL:
                sends = node.type == NodeType.COMM_SEND
                ends[not sends].setdefault(_between(rank, node, number, len(ranks)), []).append(node)
    calls: list[Calls] = [{} for _ in ranks]
    counted: dict[tuple[int, int], int] = {}
    for key in dict.fromkeys([*ends[0], *ends[1]]):
        source, target, tag = key
        sent, received = (each.get(key, []) for each in ends)
        if len(sent) != len(received):
            raise ConfigError(
                f"{ranks[source].path}: rank {source} sends {len(sent)} messages with tag {tag} to rank {target}, which"
                f" receives {len(received)}"
            )
        for there, here in zip(sent, received, strict=True):
            size_bytes, expected = ranks[source].size(there), ranks[target].size(here)
            if size_bytes != expected:
                raise ranks[target].wrong(here, f"receives {expected} bytes, of which rank {source} sends {size_bytes}")
            number = counted[source, target] = counted.get((source, target), -1) + 1
            calls[source][there.id] = MessageCall(True, target, number, size_bytes)
            calls[target][here.id] = MessageCall(False, source, number, size_bytes)
    return calls


def _between(rank: _Rank, node: ChakraNode, number: int, ranks: int) -> tuple[int, int, int]:
    """Return the source, the target and the tag of a message."""
    sends = node.type == NodeType.COMM_SEND
    own, other = ("comm_src", "comm_dst") if sends else ("comm_dst", "comm_src")
    us, peer = rank.number(node, own, ranks - 1, number), rank.number(node, other, ranks - 1)
    if us != number or peer == number:
        raise rank.wrong(node, f"has {own} = {us} and {other} = {peer}, and is of rank {number}")
    tag = node.attributes.get("comm_tag", 0)
    return (us, peer, int(tag)) if sends else (peer, us, int(tag))


def _recorded_s(ranks: Iterable[_Rank]) -> float:
    starts: Mapping[bool, list[int]] = {True: [], False: []}
    for node in (node for rank in ranks for node in rank.nodes if node.type != NodeType.METADATA):
        starts[False].append(node.start_us)
        starts[True].append(node.start_us + node.duration_us)
    if not any(starts[False]):
        return 0.0
    return (max(starts[True]) - min(starts[False])) / 1e6
