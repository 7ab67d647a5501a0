"""The root of the tree: the nodes, their TCP model, and their job. `first_nodes` returns a scenario with fewer
machines than it was written for.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from math import inf
from typing import Annotated, Literal

from msgspec import Meta, field
from msgspec.structs import replace

from hcsim.config.cluster import Cluster
from hcsim.config.faults import AnyFault, CopiedIdentity, Partition
from hcsim.config.home import AnyMedium, Thunderbolt, Wan, Wifi
from hcsim.config.machine import Basis, Machine
from hcsim.config.table import Count, Name, Table
from hcsim.config.training import Training
from hcsim.units import BitRate, Bytes, Flops, PositiveBytes, PositiveSeconds, Seconds, Share

TWIN_VERSION = 1


class Attachment(Table, frozen=True):
    """One of a node's interfaces. None: as the medium says. On Wi-Fi the rate is the station's PHY rate."""

    medium: str
    rate_bps: BitRate | None = None
    up_bps: BitRate | None = None
    """On a wire, of what the node sends; None: `rate`."""
    down_bps: BitRate | None = None
    latency_s: Seconds | None = None
    loss: Share | None = None
    burst_bytes: Bytes = Bytes(0)
    """On a wire: what a port that was idle lets pass before it has the rate above."""
    peak_bps: BitRate | None = None
    """The rate at which it lets its burst pass; None: that of the medium."""
    peak_burst_bytes: Bytes = Bytes(0)
    """What of its burst it lets pass at the rate of the medium."""
    basis: Basis | None = None


class Node(Table, frozen=True):
    """One machine. In a file, `count = 3` makes three: name-1, name-2 and name-3."""

    name: Name
    machine: str | Machine
    home: str = ""
    """The home where the node is; left out, the home of its media."""
    links: tuple[Attachment, ...] = ()
    count: Annotated[int, Meta(ge=1, le=4096)] = 1
    memory_bytes: Bytes | None = None
    """Left out, that of its machine."""
    cap_bps: BitRate | None = None
    """Limit of one connection in each direction, from and to this machine, where a processor core is slower than
    the network; several connections together may carry more. None: no limit."""
    processor: str = ""
    """The `Processor` that the machine shares with others; empty: one of its own."""


class Processor(Table, frozen=True):
    """Cores that several nodes share, as virtual machines of one computer do.

    A node that shares none has one core for its messages, and for its kernels if its machine says so."""

    name: Name
    cores: Count = 1
    slice_s: Seconds = Seconds(0)
    """How long a program keeps a core for which others wait. 0: cores are shared ideally, in slices of no length."""
    tick_s: Seconds = Seconds(0)
    """The interval of the timer at which the scheduler looks whether a slice is over."""


LARGEST_WINDOW_BYTES = 1 << 30
"""RFC 7323, section 2.3."""


class Tcp(Table, frozen=True):
    """The model of TCP, the same on every host.

    The default loss model is "bbr" (capacity × (1 − loss)), the only one that agrees with both the loss and the
    throughput that are measured on Wi-Fi: "mathis" caps a stream at 0.1 Gb/s there."""

    window_bytes: PositiveBytes = PositiveBytes(4 << 20)
    slow_start: bool = True
    initial_window_segments: Count = 10
    ack_share: Share = Share(0.03)
    """Share of a stream's rate that its acknowledgements take in the reverse direction."""
    restart_after_idle: bool = False
    loss_model: Literal["mathis", "pftk", "cubic", "bbr", "none"] = "bbr"
    headers: bool = True
    """Goodput is rate × (mtu − header) / (mtu + framing)."""
    header_bytes: Bytes = Bytes(52)
    framing_bytes: Bytes = Bytes(38)
    send_buffer_bytes: PositiveBytes = PositiveBytes(4 << 20)
    autotune: bool = False
    """Whether send buffers grow with what a connection has in flight, as systems do it, up to `send_buffer`."""
    piggyback: bool = False
    """Whether acknowledgements ride on the data of a connection that sends both ways, and take no share then."""
    congestion: Literal["cubic", "bbr"] = "cubic"
    """How connections share a port that has a `queue`."""
    tls: bool = True
    """Whether connections are encrypted. That only costs time, and only where a machine's `messages` say how much."""

    @property
    def is_unbounded(self) -> bool:
        """Whether the window is larger than TCP allows: then it limits nothing."""
        return self.window_bytes > LARGEST_WINDOW_BYTES

    @property
    def receive_buffer_bytes(self) -> int:
        """The receive buffer for unread data: the window or, if that is unbounded, the size of the send buffer."""
        return self.send_buffer_bytes if self.is_unbounded else self.window_bytes

    @property
    def largest_whole_bytes(self) -> int:
        """The largest frame that is modelled as one message; all frames are if the window is unbounded."""
        return sys.maxsize if self.is_unbounded else min(self.window_bytes, self.send_buffer_bytes)


class Job(Table, frozen=True):
    """The work that the nodes do together."""

    operation: Literal[
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "barrier",
    ] = "all_reduce"
    algorithm: str = "auto"
    size_bytes: Bytes = Bytes(16 << 20)
    dtype: Literal["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64"] = "float32"
    payload: Literal["data", "phantom"] = "data"
    repeat: Count = 3
    compute: Flops | None = None
    """Work of every node before each repeat."""
    timeout_s: PositiveSeconds = PositiveSeconds(60)


class Scenario(Table, frozen=True):
    """The root of the tree."""

    name: Name
    nodes: tuple[Node, ...] = field(name="node", default=())
    """The machines. A file without any defines only the work, and runs on real machines only."""
    description: str = ""
    machines: tuple[Machine, ...] = field(name="machine", default=())
    """Machines that nodes name, before those of the catalogue."""
    plugins: tuple[str, ...] = ()
    """Modules, or files in the same folder, that are imported before the rest is read: see `hcsim.plugins`."""
    processors: tuple[Processor, ...] = field(name="processor", default=())
    """Those that several nodes share."""
    processes: tuple[str, ...] = ()
    """SimPy processes that run beside the hosts: "module:function" or "file.py:function", called with the world."""
    twin: Annotated[int, Meta(ge=1)] | None = None
    """The version of the format in which `hcsim probe` wrote the file; None: it was not written by it."""
    seed: int = 1
    effects: Literal["all", "ideal"] = "all"
    """With "ideal" only latency and bandwidth are left: see `idealised`."""
    routes: Literal["fastest", "service_order"] = "fastest"
    """How a host with several links picks one: the fastest route, or the first of its `links` that leads there."""
    media: tuple[AnyMedium, ...] = field(name="medium", default=())
    wan: tuple[Wan, ...] = ()
    tcp: Tcp = Tcp()
    faults: tuple[AnyFault, ...] = field(name="fault", default=())
    job: Job = Job()
    training: Training | None = None
    """The training; without it the nodes do the job."""
    cluster: Cluster | None = None
    """How nodes find each other and handle losses; without it, all are present from the start and a loss ends the
    run."""

    @property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each home, in the order of the nodes."""
        ranks: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            ranks.setdefault(node.home, []).append(rank)
        return tuple(map(tuple, ranks.values()))

    def line_rate_bps(self, node: Node) -> float:
        """Return the nominal rate of the node's fastest interface; infinite where none is known."""
        media = {medium.name: medium for medium in self.media}
        rates = []
        for link in node.links:
            medium = media.get(link.medium)
            rate = link.rate_bps or getattr(medium, "rate_bps", None) or getattr(medium, "phy_rate_bps", None)
            rates += [float(rate)] if rate else []
        return max(rates, default=inf)


def idealised(scenario: Scenario) -> Scenario:
    """Return the scenario with latency and bandwidth as the only effects, for comparison with closed forms. No
    window limits anything.

    Faults stay: they are an explicit list."""
    quiet = {"jitter_s": Seconds(0), "loss": Share(0)}
    media = tuple(
        replace(medium, **quiet, **({"gate": False} if isinstance(medium, Wifi) else {}))
        if not isinstance(medium, Thunderbolt) else medium
        for medium in scenario.media
    )  # fmt: skip
    tcp = replace(
        scenario.tcp, window_bytes=PositiveBytes(1 << 60), slow_start=False, ack_share=Share(0),
        restart_after_idle=False, loss_model="none", headers=False,
    )  # fmt: skip
    wan = tuple(replace(line, **quiet, buffer_bytes=None) for line in scenario.wan)
    nodes = tuple(
        replace(node, machine="ideal", links=tuple(replace(link, loss=None) for link in node.links))
        for node in scenario.nodes
    )
    return replace(scenario, effects="ideal", media=media, wan=wan, tcp=tcp, nodes=nodes)


def first_nodes(scenario: Scenario, count: int) -> Scenario:
    """Return the scenario with its first nodes. Faults of the other nodes, or that need one of them, are dropped.
    A partition keeps the remaining nodes on its sides, if there are any on both."""
    nodes = scenario.nodes[:count]
    left = [node.name for node in nodes]
    faults = (_among(fault, left) for fault in scenario.faults)
    return replace(scenario, nodes=nodes, faults=tuple(fault for fault in faults if fault is not None))


def _among(fault: AnyFault, left: Container[str]) -> AnyFault | None:
    """Return the part of the fault that applies to the remaining nodes."""
    if isinstance(fault, Partition):
        one, other = (tuple(name for name in side if name in left) for side in fault.sides)
        return replace(fault, sides=(one, other)) if one and other else None
    node: str | None = getattr(fault, "node", None)
    pair: tuple[str, ...] = getattr(fault, "between", ())
    source = (fault.of,) if isinstance(fault, CopiedIdentity) else ()
    named = (*(() if node is None else (node,)), *pair, *source)
    return fault if all(name in left for name in named) else None
