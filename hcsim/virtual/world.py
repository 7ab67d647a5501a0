"""The virtual world: the hosts of a scenario on its network, simulated as a discrete-event system."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import simpy

from hcsim.config import AnyFault, Processor, Scenario
from hcsim.errors import ConfigError, HcsimError, UsageError
from hcsim.registry import function_in
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import Header
from hcsim.telemetry.metrics import HostMetrics
from hcsim.telemetry.trace import Event, Sink, Trace
from hcsim.virtual import faults
from hcsim.virtual.environment import NS
from hcsim.virtual.hardware import machine_of
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.host_network import FrameFaults, HostNetwork
from hcsim.virtual.lan import DatagramRules
from hcsim.virtual.links import ResourceGraph
from hcsim.virtual.loop import VirtualLoop
from hcsim.virtual.network import FluidNetwork
from hcsim.virtual.processor import Cores
from hcsim.virtual.time_slices import TimeSlicedCores

T = TypeVar("T")

_TRAFFIC_FRAME_BYTES = 1 << 16
_TRAFFIC_SILENCE_S = 60.0
_COUNTED_EVERY_S = 1.0


class HostCrashed(HcsimError):
    """The result of a host's program if the host has crashed or is paused for good."""


class World:
    """A simulation of everything a scenario describes.

    The same scenario gives the same trace digest in any process. In a `sealed` world, connections are encrypted as
    in a real cluster: a bit changed in transit ends the connection."""

    def __init__(self, scenario: Scenario, *, sink: Sink | None = None, sealed: bool = False) -> None:
        if not scenario.nodes:
            raise ConfigError(f"{scenario.name} has no [[node]]: there is nobody to simulate")
        self.scenario = scenario
        self.trace = Trace(sink)
        self.loop = VirtualLoop()
        self.env = self.loop.env
        """The SimPy environment, in which plain processes run beside the hosts."""
        self.env.on_timer = lambda number: self.trace.record((self.env.now_ns, "timer", number))
        self.net = FluidNetwork(self.env, scenario.tcp, scenario.seed, self.trace)
        self._program: Callable[[VirtualHost], Coroutine[Any, Any, Any]] | None = None
        self._outcomes: dict[str, asyncio.Future[Any]] = {}
        self.returns: dict[str, int] = {}
        """The number of pending restarts by host."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when all programs have ended. Later trace events belong to the teardown, in which crashed hosts also
        finish their tasks."""
        self.spoofed: dict[str, list[str]] = {}
        """Services announced by foreign machines: the homes by service name."""
        self._hosts: dict[str, VirtualHost] = {}
        self.wiring = HostNetwork(scenario, self.net, self._hosts)
        self.datagrams = DatagramRules()
        self.tampering = FrameFaults(self.wiring, self.trace, sealed=sealed)
        shared = {processor.name: self._cores_of(processor) for processor in scenario.processors}
        for node in scenario.nodes:
            cores = shared[node.processor] if node.processor else Cores()
            self._hosts[node.name] = VirtualHost(self, node.name, machine_of(node), cores)
        for fault in scenario.faults:
            faults.schedule(self, fault)
        for name in scenario.processes:
            process = function_in(name)(self)
            if not isinstance(process, Generator):
                raise ConfigError(f"{name}: a SimPy process is a generator, and this is {type(process).__name__}")
            self.env.process(process)

    def _cores_of(self, processor: Processor) -> Cores:
        return TimeSlicedCores(self.env, processor) if processor.slice_s > 0.0 else Cores(processor.cores)

    @property
    def topology(self) -> ResourceGraph:
        """The current media and routes."""
        return self.wiring.topology

    @property
    def hosts(self) -> tuple[VirtualHost, ...]:
        """The hosts in the order of the scenario."""
        return tuple(self._hosts.values())

    def host(self, name: str) -> VirtualHost:
        if name not in self._hosts:
            raise ConfigError(f"there is no host {name!r} in this world: it has {', '.join(self._hosts)}")
        return self._hosts[name]

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine outside of any host, then end everything else."""
        with _few_collections():
            return self.loop.run_to_end(main)

    def run_on_all(self, program: Callable[[VirtualHost], Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        """Run a program on every host; return the result of each, or the exception that ended it.

        A restarted host runs the program again; the result of its last life counts."""
        return self.run(self._all(program))

    def begin(self, program: Callable[[VirtualHost], Coroutine[Any, Any, T]]) -> dict[str, asyncio.Future[T]]:
        """Start a program on every host of the running world; return a future for each host by name."""
        self._program = program
        for host in self.hosts:
            self._begin(host)
        return dict(self._outcomes)

    def restart(self, name: str, records: Mapping[str, bytes] | None = None) -> VirtualHost:
        """Restart a crashed host with these records in its store; None keeps the previous ones."""
        old = self.host(name)
        if old.alive:
            raise UsageError(f"{name} is alive: only a host that crashed can be started again")
        host = self._hosts[name] = VirtualHost(
            self, name, old.machine, old.cores, old.store.records if records is None else records, old
        )
        for other in self.hosts:
            for channel in list(other.channels):
                if channel.peer == name:
                    channel.retransmit()
        self._begin(host)
        return host

    def tell_metrics(self) -> dict[str, HostMetrics]:
        """Return the metrics of each host; append them to the trace if that is written to a sink."""
        if self.trace.is_kept:
            from hcsim.telemetry.exposition import events

            for host in self.hosts:
                self.trace.append(events(self.env.now_ns, host.name, host.metrics))
        return {host.name: host.metrics for host in self.hosts}

    def inject(self, fault: AnyFault) -> None:
        """Add a fault that is not in the scenario."""
        faults.schedule(self, fault)

    def transfer(self, source: str, target: str, size_bytes: int) -> simpy.Event:
        """Send background traffic of this size over a separate connection.

        The event succeeds when everything has arrived. It fails if the connection breaks or nothing arrives for a
        minute."""
        arrived = self.env.event()
        arrived.defused = True  # nobody has to wait for it
        sender, receiver = self.host(source), self.host(target)
        if not (sender.alive and receiver.alive):
            return arrived.fail(HostCrashed(f"{source if receiver.alive else target} is down: nothing is transferred"))
        meeting: asyncio.Future[str] = self.loop.create_future()

        async def receive() -> None:
            listener = await receiver.listen(f"{target}:0")
            meeting.set_result(listener.address)
            channel = await listener.accept()
            await listener.close()
            left = size_bytes
            while left > 0:
                async with asyncio.timeout(_TRAFFIC_SILENCE_S):
                    header, _ = await channel.recv(lambda header: None)
                left -= header.length
            await channel.close()

        async def send() -> None:
            channel = await sender.connect(await meeting)
            for lo in range(0, size_bytes, _TRAFFIC_FRAME_BYTES):
                length = min(_TRAFFIC_FRAME_BYTES, size_bytes - lo)
                await channel.send(Header(length), Phantom(length))

        def sent(task: asyncio.Task[None]) -> None:
            if task.cancelled() or task.exception() is not None:
                receiving.cancel()

        def received(task: asyncio.Task[None]) -> None:
            error = HcsimError(f"the transfer from {source} to {target} was broken off")
            if task.cancelled():
                arrived.fail(error)
            elif (cause := task.exception()) is not None:
                error.__cause__ = cause
                arrived.fail(error)
            else:
                arrived.succeed()

        receiving = receiver.spawn(receive(), name=f"traffic from {source}", over=received)
        sender.spawn(send(), name=f"traffic to {target}", over=sent)
        return arrived

    async def _all(self, program: Callable[[VirtualHost], Coroutine[Any, Any, T]]) -> list[T | BaseException]:
        self.begin(program)
        while True:
            outcomes = tuple(self._outcomes.values())
            results: list[T | BaseException] = await asyncio.gather(*outcomes, return_exceptions=True)
            if outcomes == tuple(self._outcomes.values()):  # else a host has begun anew after its program had ended
                self.on_end()
                return results

    def _begin(self, host: VirtualHost) -> None:
        if self._program is None:
            return
        outcome = self._outcomes.get(host.name)
        if outcome is not None and outcome.done():
            outcome.exception()  # the error of an earlier life counts for nothing: asyncio need not log it
        if outcome is None or outcome.done():
            outcome = self._outcomes[host.name] = self.loop.create_future()
        if host.alive:
            host.spawn(self._program(host), name="main").add_done_callback(partial(self._settle, host, outcome))

    def _settle(self, host: VirtualHost, outcome: asyncio.Future[Any], task: asyncio.Task[Any]) -> None:
        if outcome.done():
            return
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            outcome.set_exception(HcsimError("the program was cancelled"))
        elif host.leaving.is_set() and self.returns.get(host.name) and (error is None or isinstance(error, HcsimError)):
            return  # whoever left and comes back is waited for, as is one that crashed
        elif error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())

    # What hosts and faults ask of their world.

    def host_ended(self, host: VirtualHost, why: str) -> None:
        """Record that the host's program will not end by itself, unless the host is to be restarted."""
        outcome = self._outcomes.get(host.name)
        if outcome is not None and not outcome.done() and not self.returns.get(host.name):
            outcome.set_exception(HostCrashed(f"{host.name} {why}"))


class Usage(msgspec.Struct, frozen=True):
    """Resource usage of one host."""

    descriptors: int = 0
    """Connections, including those being established."""
    tasks: int = 0
    buffered_bytes: int = 0
    """Bytes sent but not delivered, or delivered but not read."""

    def most(self, other: Usage) -> Usage:
        """Return the element-wise maximum."""
        return Usage(
            max(self.descriptors, other.descriptors),
            max(self.tasks, other.tasks),
            max(self.buffered_bytes, other.buffered_bytes),
        )


class UsageMonitor:
    """A trace sink that samples the usage of the hosts.

    It samples when an event is recorded at least one second of virtual time after the last sample. It schedules
    nothing, so it does not change the run."""

    def __init__(self, sink: Sink) -> None:
        """`sink` receives the events until all programs have ended; events of the teardown are not passed on."""
        self.most: dict[str, Usage] = {}
        """The peak usage by host, over all its lives."""
        self.is_over = False
        self._sink = sink
        self._world: World | None = None
        self._due_ns = 0

    def watch(self, world: World) -> None:
        self._world = world
        world.on_end = self._end

    def __call__(self, events: Sequence[Event]) -> None:
        """Pass the events on to the sink, and sample if a sample is due."""
        if self.is_over:
            return
        self._sink(events)
        world, now_ns = self._world, int(events[-1][0])
        if world is None or now_ns < self._due_ns:
            return
        self._due_ns = now_ns + round(_COUNTED_EVERY_S * NS)
        for host in world.hosts:
            self.most[host.name] = self.most.get(host.name, Usage()).most(usage(host))

    def _end(self) -> None:
        assert self._world is not None
        self._world.trace.digest()  # which takes all events that there are so far
        self.is_over = True


def usage(host: VirtualHost) -> Usage:
    return Usage(host.descriptors, host.loop.tasks_of(host), sum(_buffered(host)))


def _buffered(host: VirtualHost) -> Iterable[int]:
    for channel in host.channels:
        outgoing, incoming = channel.streams
        yield outgoing.queued_bytes + incoming.outstanding


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect garbage less often, because most objects of a large world live to its end (saves a sixth)."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
