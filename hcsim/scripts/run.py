"""A script on every machine of a scenario, from start to end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hcsim.config import Node, Scenario, load_scenario
from hcsim.errors import ConfigError
from hcsim.rng import stream
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.scripts.environment import RankSpec
from hcsim.scripts.ipc import ended_how
from hcsim.scripts.processes import RankProcess, RankProcesses
from hcsim.scripts.rank_proxy import GroupDirectory, RankGroups, RankProxy, RankStats, flops_per_byte, grouping
from hcsim.scripts.store import PORT as STORE_PORT
from hcsim.scripts.store import StoreClient, StoreService
from hcsim.telemetry.metrics import HistogramSeries, HostMetrics
from hcsim.telemetry.trace import Sink
from hcsim.transport.groups import Wire
from hcsim.virtual.hardware import machine_of
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.link_load import SENT, LinkLoad, loads
from hcsim.virtual.world import World

FRAMES = "hcsim_link_sent_frames_total"


def sent_bytes(metrics: HostMetrics) -> int:
    """Return the bytes that a host has sent to others for its groups, headers included."""
    cost = {SENT: 1, FRAMES: HEADER_BYTES}
    return round(
        sum(
            cost[metric.name] * series.value
            for metric, _, series in metrics.series()
            if metric.name in cost and not isinstance(series, HistogramSeries)
        )
    )


Say = Callable[[int, int, str], None]
"""Called with (rank, stream, text) for the scripts' output, in the order of virtual time; the stream is 1
or 2."""


class ScriptRun(msgspec.Struct, frozen=True):
    """The result of a run."""

    ranks: tuple[RankStats, ...]
    seconds: float
    loads: tuple[LinkLoad, ...]
    trace_sha256: str
    events: int
    metrics: Mapping[str, HostMetrics]

    @property
    def succeeded(self) -> bool:
        """Whether every rank ended, with exit status 0."""
        return all(record.code == 0 for record in self.ranks)

    @property
    def took_part(self) -> bool:
        """Whether any rank did something that takes simulated time."""
        return any(record.calls or record.flops or record.compute_s or record.wait_s for record in self.ranks)


class _ScriptWorld(World):
    """A world of machines that each run one process; a machine's crash ends its process."""

    def __init__(self, scenario: Scenario, sink: Sink | None, processes: RankProcesses, wire: Wire) -> None:
        super().__init__(scenario, sink=sink)
        self._names = [node.name for node in scenario.nodes]
        self._records = [RankStats(rank, name) for rank, name in enumerate(self._names)]
        self._directory = GroupDirectory(self._names, wire)
        self._attendants: dict[VirtualHost, RankProxy] = {}
        self._failed: dict[int, tuple[VirtualHost, str]] = {}
        """Ranks whose scripts have failed, with host and reason."""
        self._processes = processes
        self._running: dict[str, RankProcess] = {}

    def host_ended(self, host: VirtualHost, why: str) -> None:
        process = self._running.pop(host.name, None)
        if process is not None:
            self._processes.end(process, at_once=True)
        super().host_ended(host, why)

    def end_processes(self) -> None:
        """End the remaining processes, after an error of the simulation."""
        for process in self._running.values():
            self._processes.end(process, at_once=True)

    async def attend(self, host: VirtualHost, script: Path, arguments: tuple[str, ...], say: Say) -> None:
        """Run the host's process to its end. The first host keeps the store that all ranks use."""
        names, rank = self._names, self._names.index(host.name)
        store = f"{names[0]}:{STORE_PORT}"
        if rank == 0:
            host.spawn(StoreService().serve(host, await host.listen(store)), name="store")
        seed = stream(self.scenario.seed, "script", host.name, host.life).getrandbits(32)
        spec = RankSpec(
            rank, len(names), names[0], str(script), arguments, flops_per_byte(host), seed, host.life, grouping(host)
        )
        process = self._running[host.name] = self._processes.start(spec)
        groups = RankGroups(host, rank, self._directory)
        record = self._records[rank]
        attendant = RankProxy(host, process, groups, StoreClient(host, names[0], store), record)
        self._began(host, rank, attendant)
        left = await attendant.attend(partial(say, rank))
        del self._running[host.name]
        code = self._processes.end(process, at_once=False)
        record.code, record.error = (left.code, left.error) if left is not None else (code or 1, _fate(code))
        record.ended_s = self.loop.time()
        host.trace("script ended", rank, record.code)
        reason = f"the script of rank {rank} failed: {record.error}" if record.code else ""
        if reason:
            self._failed[rank] = host, reason
        for other, theirs in self._attendants.items():  # as a launcher would: not all of them have a link to us
            if reason and other is not host:
                host.signal(other, "end", theirs.peer_failed, rank, reason)
        await attendant.end(reason)

    def _began(self, host: VirtualHost, rank: int, attendant: RankProxy) -> None:
        """Notify the new rank of earlier failures, and the other ranks that a failure of this rank's earlier
        incarnation is over."""
        self._failed.pop(rank, None)
        for theirs in self._attendants.values():
            theirs.peer_began_anew(rank)
        self._attendants[host] = attendant
        for other, (where, reason) in self._failed.items():
            where.signal(host, "end", attendant.peer_failed, other, reason)

    def came_to(self, outcomes: Sequence[object]) -> ScriptRun:
        records = self._records
        for outcome, record, host in zip(outcomes, records, self.hosts, strict=True):
            if host.alive and isinstance(outcome, Exception):
                raise outcome  # no script's: that is in its record
            record.sent_bytes = sent_bytes(host.metrics)
            if not host.alive:
                record.code, record.error = None, f"{host.name} crashed"
        seconds = max((record.ended_s or 0.0 for record in records), default=0.0)
        metrics = self.tell_metrics()
        return ScriptRun(tuple(records), seconds, loads(self, seconds), self.trace.digest(), self.trace.count, metrics)


def simulate_script(
    scenario: Scenario | str | Path,
    script: Path,
    arguments: Sequence[str] = (),
    *,
    say: Say = lambda rank, stream, text: None,
    wire: Wire | None = None,
    sink: Sink | None = None,
    processes: RankProcesses | None = None,
) -> ScriptRun:
    """Run a torch.distributed script on every host of a scenario: one process and one rank each.

    A caller that runs several scripts can share one `RankProcesses` among them, which has torch loaded already."""
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such script")
    loaded = load_scenario(scenario)
    if not loaded.nodes:
        raise ConfigError(f"{loaded.name} has no [[node]]: there is nobody to run {script.name}")
    path, given = script.resolve(), tuple(arguments)
    loaded = replace(loaded, nodes=tuple(_running(node, script.name) for node in loaded.nodes))
    with ExitStack() as stack:
        world = _ScriptWorld(loaded, sink, processes or stack.enter_context(RankProcesses()), wire or Wire())
        stack.callback(world.end_processes)
        return world.came_to(world.run_on_all(lambda host: world.attend(host, path, given, say)))


def _running(node: Node, script: str) -> Node:
    """Return the node with the kernels of this script, if its machine has them."""
    machine = machine_of(node)
    own = machine.running(script)
    return node if own is machine else replace(node, machine=own)


def _fate(code: int) -> str:
    """Describe the exit of a process that sent no `Left` message."""
    return f"its process {ended_how(code)}" if code < 0 else f"its process ended without a word, with status {code}"
