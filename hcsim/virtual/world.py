"""The virtual world: a scenario's hosts on its network, run to the end in no time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from hcsim.config import AnyFault, LinkChange, Scenario, Wifi
from hcsim.errors import ConfigError, HcsimError, UsageError
from hcsim.telemetry.trace import Sink, Trace
from hcsim.virtual import faults
from hcsim.virtual.channel import VirtualChannel
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.links import Path, Topology, changed
from hcsim.virtual.loop import VirtualLoop
from hcsim.virtual.machines import machine_of
from hcsim.virtual.network import Gate, Network
from hcsim.virtual.stream import NS, Stream

T = TypeVar("T")


class HostCrashed(HcsimError):
    """What a crashed host's program came to."""


class World:
    """Everything a scenario describes.

    The same scenario gives the same trace digest, in any process and on any day.
    """

    def __init__(self, scenario: Scenario, *, sink: Sink | None = None) -> None:
        self.scenario = scenario
        self.trace = Trace(sink)
        self.loop = VirtualLoop()
        self.loop.on_timer = lambda number: self.trace.record((self.loop.now_ns, "timer", number))
        self.net = Network(self.loop, scenario.tcp, scenario.seed, self.trace)
        self.topology = Topology(scenario)
        self._gates = {
            f"{medium.name}.air": Gate(self.net, self.topology.resources[f"{medium.name}.air"], medium)
            for medium in scenario.media
            if isinstance(medium, Wifi) and medium.gate and f"{medium.name}.air" in self.topology.resources
        }
        self._cuts: dict[tuple[str, str], int] = {}
        self._connections = 0
        self._program: Callable[[VirtualHost], Coroutine[Any, Any, Any]] | None = None
        self._outcomes: dict[str, asyncio.Future[Any]] = {}
        self.returns: dict[str, int] = {}
        """How often each host is still to be started again."""
        self._changes: list[LinkChange] = []
        self._hosts = {node.name: VirtualHost(self, node.name, machine_of(node)) for node in scenario.nodes}
        for fault in scenario.faults:
            faults.schedule(self, fault)

    @property
    def hosts(self) -> tuple[VirtualHost, ...]:
        """In the order of the scenario."""
        return tuple(self._hosts.values())

    def host(self, name: str) -> VirtualHost:
        """The host of that name."""
        if name not in self._hosts:
            raise ConfigError(f"there is no host {name!r} in this world: it has {', '.join(self._hosts)}")
        return self._hosts[name]

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run one coroutine to its end, outside any host, and then end everything else."""
        with _few_collections():
            return self.loop.run_to_end(main)

    def run_on_all(self, program: Callable[[VirtualHost], Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        """Run a program on every host; each one's result, or the exception that ended it.

        A host that is started again runs it again, and what counts is its last life's result."""
        return self.run(self._all(program))

    def restart(self, name: str, records: Mapping[str, bytes]) -> VirtualHost:
        """Start a crashed host again, with these records in its store."""
        old = self.host(name)
        if old.alive:
            raise UsageError(f"{name} is alive: only a host that crashed can be started again")
        host = self._hosts[name] = VirtualHost(self, name, old.machine, records, old)
        for other in self.hosts:
            for channel in list(other.channels):
                if channel.peer == name:
                    channel.retransmit()
        self._begin(host)
        return host

    def inject(self, fault: AnyFault) -> None:
        """Let a fault happen that is not in the scenario."""
        faults.schedule(self, fault)

    async def _all(self, program: Callable[[VirtualHost], Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        self._program = program
        for host in self.hosts:
            self._begin(host)
        while True:
            outcomes = tuple(self._outcomes.values())
            results: list[T | BaseException] = await asyncio.gather(*outcomes, return_exceptions=True)
            if outcomes == tuple(self._outcomes.values()):  # else a host has begun anew after its program had ended
                return results

    def _begin(self, host: VirtualHost) -> None:
        if self._program is None:
            return
        outcome = self._outcomes.get(host.name)
        if outcome is None or outcome.done():
            outcome = self._outcomes[host.name] = self.loop.create_future()
        if host.alive:
            host.spawn(self._program(host), name="main").add_done_callback(partial(_settle, outcome))

    # What hosts and faults ask of their world.

    def connection(self, caller: VirtualHost, callee: VirtualHost) -> tuple[VirtualChannel, VirtualChannel]:
        """Join two hosts: the caller's end and the callee's."""
        self._connections += 1
        there, back = self._paths(caller.name, callee.name)
        number = self._connections
        near = VirtualChannel(caller, callee.name, self._stream(f"{caller.name}→{callee.name}#{number}", there, back))
        far = VirtualChannel(callee, caller.name, self._stream(f"{callee.name}→{caller.name}#{number}", back, there))
        VirtualChannel.join(near, far)
        caller.channels[near] = None
        callee.channels[far] = None
        return near, far

    def neighbours(self, host: VirtualHost) -> tuple[VirtualHost, ...]:
        """The hosts in the same broadcast domain."""
        mine = self._homes(host)
        return tuple(other for other in self.hosts if other is not host and mine & self._homes(other))

    def later(self, seconds: float, act: Callable[..., None], *args: object) -> None:
        """Have something happen to the world."""
        self.loop.call_at_ns(self.loop.now_ns + round(seconds * NS), act, *args)

    def host_died(self, host: VirtualHost) -> None:
        """Its program will never end by itself, unless it is started again."""
        outcome = self._outcomes.get(host.name)
        if outcome is not None and not outcome.done() and not self.returns.get(host.name):
            outcome.set_exception(HostCrashed(f"{host.name} crashed"))

    def is_cut(self, source: VirtualHost, target: VirtualHost) -> bool:
        """Whether packets from the one to the other are lost."""
        return self._cuts.get((source.name, target.name), 0) > 0

    def cut(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Lose all packets from the first to the second of each pair."""
        for pair in pairs:
            self._cuts[pair] = self._cuts.get(pair, 0) + 1
            self._obstruct(*pair)

    def mend(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Undo one `cut` of each pair."""
        for pair in pairs:
            self._cuts[pair] -= 1
            self._obstruct(*pair)

    def change_link(self, change: LinkChange) -> None:
        """Give a medium, or one host's attachment to it, other figures."""
        self._changes.append(change)
        self._rebuild()

    def restore_link(self, change: LinkChange) -> None:
        """Take one change back; later ones stay."""
        self._changes.remove(change)
        self._rebuild()

    def _rebuild(self) -> None:
        scenario = self.scenario
        for change in self._changes:
            scenario = changed(scenario, change)
        self.topology = Topology(scenario, self.topology.resources)
        for name, capacity in self.topology.capacities.items():
            self.net.capacity(self.topology.resources[name], capacity)
        for host in self.hosts:
            for channel in host.channels:
                channel.streams[0].reroute(*self._paths(host.name, channel.peer))

    def _obstruct(self, source: str, target: str) -> None:
        ahead = self._cuts.get((source, target), 0) > 0
        reverse = self._cuts.get((target, source), 0) > 0
        for channel in self.host(source).channels:
            if channel.peer == target:
                outgoing, incoming = channel.streams
                outgoing.obstruct(data=ahead, acks=reverse)
                incoming.obstruct(data=reverse, acks=ahead)

    def _paths(self, here: str, there: str) -> tuple[Path, Path]:
        return self.topology.path(here, there), self.topology.path(there, here)

    def _stream(self, name: str, there: Path, back: Path) -> Stream:
        stream = self.net.stream(name, there, back)
        used = [resource.name for resource, _ in there.uses]
        stream.gates = tuple(gate for air, gate in self._gates.items() if air in used)
        return stream

    def _homes(self, host: VirtualHost) -> frozenset[str]:
        links = next(node.links for node in self.scenario.nodes if node.name == host.name)
        attached = {link.medium for link in links}
        return frozenset(getattr(m, "home", m.name) for m in self.scenario.media if m.name in attached)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for garbage less often: a large world is many objects that live to its end (a sixth of the time)."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _settle(outcome: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
    if outcome.done():
        return
    if task.cancelled():
        outcome.set_exception(HcsimError("the program was cancelled"))
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())
