"""The execution graph of a run: what every machine computed and exchanged, and what depended on what.

A trace's sink builds it from the intervals that the hosts note (`trace.Intervals`). Within one asyncio task the order
is that of the program, so it is exact: a piece of work depends on the one before it in its task, and the first of a
task on what the parent had done when it started the task. What other tasks did counts as a dependency

- of an operation's caller, once the operation is over;
- of a task that waited ("exchange"), with the end of the wait, for all tasks that it has started, and for theirs.

So two things are more orderly here than in the program: a caller that keeps an operation in flight, and lets it end
before it awaits it, depends on it a little too early; so does one that waits for only some of several tasks.

The graph begins with the first computation: operations that end before it, on all their ranks, prepare the run. It ends
where the ranks are numbered anew (a view with other members). Operations that not all of their ranks took part in are
left out, and what depended on them depends on what they depended on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hcsim.telemetry.trace import Event, IntervalSink

MOST_NODES = 1_000_000
_WORK = ("compute", "encode")
_NUMBER_BITS, _BUCKET_BITS = 48, 16
"""How a message's number and its bucket hold its tag (see `collectives.operation`)."""


class Exchange(NamedTuple):
    """An operation, as one rank called it."""

    name: str
    rank: int
    epoch: int
    group: int
    number: int
    bucket: int
    size_bytes: int
    """This rank's input."""
    peer: int
    """The root of a collective, or the peer of a message."""
    members: tuple[int, ...]
    """The ranks of a collective."""

    @property
    def tag(self) -> int:
        """Of a message."""
        return self.number >> _NUMBER_BITS << _BUCKET_BITS | self.bucket

    @property
    def key(self) -> tuple[object, ...]:
        """The same on all ranks that take part."""
        if self.members:
            return self.epoch, self.group, self.bucket, self.number
        ends = (self.rank, self.peer) if self.name == "send" else (self.peer, self.rank)
        return self.epoch, self.group, self.bucket, self.number, ends

    @property
    def partners(self) -> int:
        return len(self.members) or 2


class GraphNode:
    """A piece of work, or an operation, on one machine."""

    __slots__ = ("begin_ns", "dependencies", "end_ns", "exchange", "flops", "moved_bytes", "name")

    def __init__(self, name: str, begin_ns: int, dependencies: list[GraphNode], exchange: Exchange | None) -> None:
        self.name = name
        self.begin_ns = begin_ns
        self.end_ns = -1
        """-1 while it has not ended."""
        self.dependencies = dependencies
        self.exchange = exchange
        self.flops = 0
        self.moved_bytes = 0


class _Thread:
    """An asyncio task."""

    def __init__(self, parent: _Thread | None) -> None:
        self.parent = parent
        self.frontier: dict[GraphNode, None] = {} if parent is None else dict(parent.frontier)
        """What its next piece of work depends on."""
        self.children: dict[_Thread, None] = {}
        self.at_work = 0

    def merge(self, nodes: Iterable[GraphNode]) -> None:
        """Let the next piece of work depend on these, too."""
        for node in nodes:
            for each in node.dependencies:
                self.frontier.pop(each, None)
            self.frontier[node] = None

    def join(self) -> None:
        """Let the next piece of work depend on what the tasks started from here have done."""
        for child in list(self.children):
            child.join()
            if not child.at_work:
                self.merge(child.frontier)
                if not child.children:
                    del self.children[child]


class _Machine:
    """What one machine did."""

    def __init__(self) -> None:
        self.rank: int | None = None
        self.epoch: int | None = None
        self.nodes: list[GraphNode] = []
        self.threads: dict[int, _Thread] = {}
        self.open: dict[int, tuple[_Thread, GraphNode | None]] = {}
        self.busy_until_ns = 0

    def thread(self, number: int) -> _Thread:
        thread = self.threads.get(number)
        if thread is None:
            thread = self.threads[number] = _Thread(None)
        return thread


class RankGraph(NamedTuple):
    """The nodes of one rank, each after those that it depends on."""

    rank: int
    machine: str
    nodes: list[GraphNode]


class ExecutionGraph(IntervalSink):
    """Builds the graph of a run."""

    def __init__(self, most_nodes: int = MOST_NODES) -> None:
        self._machines: dict[str, _Machine] = {}
        self._left = most_nodes
        self.is_cut = False
        """Whether the run went on after the end of the graph."""
        self._take: dict[str, Callable[[int, _Machine, Sequence[Any]], None]] = {
            "begin": self._begin,
            "end": self._end,
            "spawn": self._spawn,
        }

    def __call__(self, events: Sequence[Event]) -> None:
        for at_ns, kind, where, *fields in events:
            take = self._take.get(str(kind))
            if take is not None:
                machine = self._machines.get(str(where))
                if machine is None:
                    machine = self._machines[str(where)] = _Machine()
                take(int(at_ns), machine, fields)

    def _spawn(self, _at_ns: int, machine: _Machine, fields: Sequence[Any]) -> None:
        number, parent = fields
        above = machine.thread(parent)
        thread = machine.threads[number] = _Thread(above)
        above.children[thread] = None

    def _begin(self, at_ns: int, machine: _Machine, fields: Sequence[Any]) -> None:
        number, purpose, detail, of, *figures = fields
        thread = machine.thread(of)
        if purpose == "exchange":
            machine.open[number] = thread, None
            return
        exchange = None
        if purpose == "operation":
            exchange = Exchange._make([*figures[:8], _members(figures[8])])
            self.is_cut |= not _is_of(machine, exchange)
        elif purpose not in _WORK:
            return
        self.is_cut |= self._left <= 0
        if self.is_cut:
            return
        self._left -= 1
        node = GraphNode(detail or purpose, at_ns, list(thread.frontier), exchange)
        if exchange is None and figures:
            node.flops, node.moved_bytes = figures
        machine.nodes.append(node)
        machine.open[number] = thread, node
        thread.at_work += 1

    def _end(self, at_ns: int, machine: _Machine, fields: Sequence[Any]) -> None:
        thread, node = machine.open.pop(fields[0], (None, None))
        if thread is None:
            return
        if node is None:
            thread.join()
            return
        if node.exchange is None:  # the device does one piece after the other, in the order of the requests
            node.begin_ns = max(node.begin_ns, min(machine.busy_until_ns, at_ns))
            machine.busy_until_ns = max(machine.busy_until_ns, at_ns)
        thread.at_work -= 1
        if len(fields) > 1:  # it failed
            return
        node.end_ns = at_ns
        thread.merge([node])
        parent = thread.parent
        if parent is not None and node.exchange is not None:
            parent.merge([node])
            parent.children.pop(thread, None)
        elif parent is not None:
            parent.children[thread] = None

    def ranks(self) -> list[RankGraph]:
        """Return the graph of each rank that took part, complete operations only."""
        seen = [(name, machine) for name, machine in self._machines.items() if machine.nodes]
        preparing = _preparing([machine.nodes for _, machine in seen])
        taken: dict[tuple[object, ...], int] = {}
        for node in (node for _, machine in seen for node in machine.nodes):
            if node.exchange is not None and node.end_ns >= 0:
                taken[node.exchange.key] = taken.get(node.exchange.key, 0) + 1
        sees_all = len(seen) > 1

        def is_kept(node: GraphNode) -> bool:
            if node.end_ns < 0 or (exchange := node.exchange) is None:
                return node.end_ns >= 0
            whole = not sees_all or taken[exchange.key] == exchange.partners
            return whole and exchange.key not in preparing

        graphs = []
        for place, (name, machine) in enumerate(seen):
            rank = place if machine.rank is None else machine.rank
            graphs.append(RankGraph(rank, name, _only(machine.nodes, is_kept)))
        return sorted(graphs, key=lambda graph: graph.rank)


def _members(listed: str) -> tuple[int, ...]:
    return tuple(map(int, listed.split(","))) if listed else ()


def _is_of(machine: _Machine, exchange: Exchange) -> bool:
    """Return whether the ranks are numbered as in the machine's first operation."""
    if machine.rank is None:
        machine.rank, machine.epoch = exchange.rank, exchange.epoch
    return (machine.rank, machine.epoch) == (exchange.rank, exchange.epoch)


def _preparing(machines: Sequence[Sequence[GraphNode]]) -> set[tuple[object, ...]]:
    """Return the operations that were over before the first computation, on each machine that computes."""
    early: set[tuple[object, ...]] = set()
    late: set[tuple[object, ...]] = set()
    computes = [[node.begin_ns for node in nodes if node.exchange is None] for nodes in machines]
    if not any(computes):
        return early
    for nodes, begins_ns in zip(machines, computes, strict=True):
        first_ns = min(begins_ns) if begins_ns else None
        for node in nodes:
            if node.exchange is not None:
                is_early = first_ns is None or 0 <= node.end_ns <= first_ns
                (early if is_early else late).add(node.exchange.key)
    return early - late


def _only(nodes: Sequence[GraphNode], is_kept: Callable[[GraphNode], bool]) -> list[GraphNode]:
    """Leave out the others; what depended on them depends on what they depended on."""
    instead: dict[GraphNode, list[GraphNode]] = {}
    kept = []
    for node in nodes:
        node.dependencies = list(dict.fromkeys(_resolved(node.dependencies, instead)))
        if is_kept(node):
            kept.append(node)
        else:
            instead[node] = node.dependencies
    return kept


def _resolved(nodes: Iterable[GraphNode], instead: dict[GraphNode, list[GraphNode]]) -> Iterator[GraphNode]:
    for node in nodes:
        yield from instead.get(node, (node,))
