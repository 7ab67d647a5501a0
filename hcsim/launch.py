"""The two ways to start: a simulated cluster, or this machine's place in a real one.

This is the only module that knows both worlds. A program is an `async def` over a `Group`, the
same in both.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import msgspec

from hcsim import rng
from hcsim.cluster.inquiry import Survey
from hcsim.cluster.node import Introduction
from hcsim.cluster.once import Once
from hcsim.cluster.probe import Prober
from hcsim.cluster.topology import Node, Topology, Way, describe, survey
from hcsim.collectives.group import Group
from hcsim.collectives.options import Options
from hcsim.config import Cluster, Leave, Scenario, Training, load_scenario
from hcsim.errors import ConfigError
from hcsim.identity.handshake import BOOT_BITS, Credentials
from hcsim.identity.key import SEED_BYTES, NodeKey
from hcsim.identity.namespace import SECRET_BYTES, ClusterSecret
from hcsim.identity.trust_store import StoredTrust, TrustStore
from hcsim.real.host import RealHost, RealOptions, check_loopback
from hcsim.real.interfaces import host_name, reachable_at
from hcsim.real.keys import beside_a_node, load_credentials
from hcsim.real.tls import ClusterTls, TlsFiles
from hcsim.runtime.address import address_at, with_port
from hcsim.runtime.target import parse
from hcsim.telemetry.metrics import HostMetrics
from hcsim.telemetry.trace import Sink, Trace
from hcsim.training.run import Observer, Report
from hcsim.training.task import Task
from hcsim.transport.admission import AdmittedHost
from hcsim.transport.callers import Refusals
from hcsim.transport.hello import Membership
from hcsim.transport.wire import Wire
from hcsim.virtual.census import Census
from hcsim.virtual.deadlock import Standstill
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World

if TYPE_CHECKING:
    from hcsim.cluster.coordinator import Policy
    from hcsim.node import Plan  # what only clusters need, and only they wait for

DEFAULT_PORT = 52416
_ANSWER_S = 2.0
PROBE_PORT = 52417
STANDSTILL_S = 3600.0
"""How long, at least, nothing moves in a simulated cluster before it is ended."""
_LOOK_S = 1.0
"""How often a host whose program has left looks whether it will be started again."""

T = TypeVar("T")
Program: TypeAlias = Callable[[Group], Coroutine[Any, Any, T]]


class Outcome(msgspec.Struct, Generic[T], frozen=True):
    """What a simulated run came to."""

    results: list[T | BaseException]
    """By rank: what the program returned, or what ended it."""
    seconds: float
    """Virtual time that passed."""
    trace_sha256: str
    """The run's fingerprint: the same scenario and program always give the same."""
    events: int
    metrics: Mapping[str, HostMetrics]
    """By host, as they were at the end."""

    def values(self) -> list[T]:
        """The results, if there are any on all ranks; otherwise the first failure is raised."""
        for result in self.results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in self.results if not isinstance(result, BaseException)]


def simulate(
    scenario: Scenario | str | Path,
    program: Program[T],
    *,
    options: Options | None = None,
    wire: Wire | None = None,
    sink: Sink | None = None,
) -> Outcome[T]:
    """Run a program on every host of a scenario (a file, or the name of a shipped one)."""
    world = World(load_scenario(scenario), sink=sink)
    names = [host.name for host in world.hosts]
    addresses = tuple(f"{name}:{DEFAULT_PORT}" for name in names)

    async def on_host(host: VirtualHost) -> T:
        us = Membership(names.index(host.name), addresses, wire=wire or Wire())
        async with await Group.open(host, us, options) as group:
            return await program(group)

    return _outcome(world, world.run_on_all(on_host))


def _outcome(world: World, results: list[T | BaseException]) -> Outcome[T]:
    metrics = world.tell_metrics()
    return Outcome(results, world.loop.time(), world.trace.digest(), world.trace.count, metrics)


def simulate_training(
    scenario: Scenario | str | Path,
    settings: Training | None = None,
    *,
    wire: Wire | None = None,
    sink: Sink | None = None,
    observer: Observer | None = None,
    what: Task | None = None,
) -> Outcome[Report]:
    """Train on every host of a scenario: what `settings` say, or else the scenario's `[training]`.

    `what` is a task of one's own, in place of the one that these name."""
    from hcsim.training.strategies import train

    loaded = load_scenario(scenario)
    chosen = settings or loaded.training or Training()
    _refuse_tunnels(chosen)
    options = Options(timeout_s=chosen.timeout_s, groups=loaded.homes if len(loaded.homes) > 1 else ())

    async def program(group: Group) -> Report:
        return await train(group, chosen, loaded.seed, observer, what)

    return simulate(loaded, program, options=options, wire=wire, sink=sink)


def simulate_cluster(
    scenario: Scenario | str | Path,
    settings: Training | None = None,
    *,
    wire: Wire | None = None,
    sink: Sink | None = None,
    observer: Observer | None = None,
    tell: Callable[[str, str], None] = lambda host, what: None,
    what: Task | None = None,
    limit_s: float | None = None,
    census: Census | None = None,
) -> Outcome[Report]:
    """Let the hosts of a scenario find each other and train, whatever happens to them: see its `[cluster]`.

    `tell` hears what each host has to say about it. `what` is a task of one's own. Whoever has not come to an end
    after `limit_s` of virtual time is stopped, and its result is a `TimeoutError`; who waits when nothing moves any
    more, a `TrainingError`. A `census` takes the sink's
    place, and counts what the hosts use."""
    from hcsim.node import Plan, train_as_member

    loaded = load_scenario(scenario)
    cluster = loaded.cluster or Cluster()
    if cluster.nodes is None:
        cluster = msgspec.structs.replace(cluster, nodes=len(loaded.nodes))
    plan = Plan(cluster, settings or loaded.training or Training(), loaded.seed, wire or Wire())
    _refuse_tunnels(plan.training)
    world = World(loaded, sink=sink if census is None else census, sealed=True)
    if census is not None:
        census.watch(world)
    homes = {node.name: node.home for node in loaded.nodes} if len(loaded.homes) > 1 else {}
    leavers = [fault.node for fault in loaded.faults if isinstance(fault, Leave)]
    said: dict[str, str] = {}
    standstill = _standstill(world, max(STANDSTILL_S, 20 * plan.training.timeout_s), limit_s)

    async def on_host(host: VirtualHost) -> Report:
        proved = _virtual_credentials(host, loaded.seed)
        me = _introduced(host.name, _virtual_hosts(host), cluster, proved, homes.get(host.name, ""))

        def heard(what: str) -> None:
            said[host.name] = what
            tell(host.name, what)

        async with standstill.noticed(lambda: said.get(host.name, "nothing")):
            report = await train_as_member(
                host,
                me,
                plan,
                credentials=proved,
                observer=observer,
                tell=heard,
                leaving=host.leaving if host.name in leavers else None,
                what=what,
            )
        if report.steps < plan.training.steps:
            await _last_start(world, host)
        return report

    return _outcome(world, world.run_on_all(on_host))


async def _last_start(world: World, host: VirtualHost) -> None:
    """The program has left before the end, and its machine may be started again: until then the world is not at its
    end, also if all have left. They go on from what they have saved."""
    while world.returns.get(host.name):
        await host.clock.sleep(_LOOK_S)


def _standstill(world: World, patience_s: float, limit_s: float | None) -> Standstill:
    """Ends a cluster in which nobody takes a step or forms a view any more, once all faults have healed."""

    def moved() -> list[tuple[float, float]]:
        """How far each host has come in its training, and in its views."""
        return [
            (host.metrics.value("hcsim_training_steps_total"), host.metrics.value("hcsim_view_epoch"))
            for host in world.hosts
        ]

    healed_s = max((fault.over_s for fault in world.scenario.faults), default=0.0)
    return Standstill(world.env, moved, every_s=patience_s, from_s=healed_s, limit_s=limit_s)


def _introduced(name: str, hosts: Sequence[str], cluster: Cluster, proved: Credentials, home: str = "") -> Introduction:
    """A machine that is reached at these hosts, as it introduces itself to the others."""
    return Introduction(
        node=proved.key.node_id,
        boot=proved.boot,
        name=name,
        control=address_at(hosts, cluster.discovery_port),
        address=address_at(hosts, cluster.gradient_port),
        namespace=proved.secret.namespace.hex(),
        home=home,
    )


def _refuse_tunnels(settings: Training) -> None:
    for name, address in (("server", settings.server), ("listen", settings.listen)):
        if address is not None and "://" in address:
            raise ConfigError(
                f'{name} = "{address}": there are no tunnels and proxies in a simulation; leave out server and listen'
            )


def measure_topology(scenario: Scenario | str | Path) -> Topology:
    """Have every host of a scenario measure itself and its ways to the others, as real ones would."""
    world = World(load_scenario(scenario))

    async def everybody() -> Topology:
        probers = [Prober(host, host.name) for host in world.hosts]
        for host, prober in zip(world.hosts, probers, strict=True):
            listener = await host.listen(f"{host.name}:{PROBE_PORT}")
            host.spawn(prober.serve(listener), name="answer probes")
        speeds = [host.spawn(describe(host, host.name), name="describe") for host in world.hosts]
        nodes: list[Node] = await asyncio.gather(*speeds)
        ways: list[Way] = []
        for host, prober, us in zip(world.hosts, probers, nodes, strict=True):
            others = [node for node in nodes if node is not us]
            ways += await host.spawn(survey(prober, us, others, PROBE_PORT), name="survey")
        return Topology(nodes, ways)

    return world.run(everybody())


class RealNode(msgspec.Struct, frozen=True):
    """What a person decides about this machine's place in a real cluster."""

    home: Path
    """Where its key and its clusters' secrets are."""
    cluster: str = "home"
    """Which of them."""
    name: str = ""
    """What the others call this machine; empty: its host name."""
    hosts: tuple[str, ...] = ()
    """Addresses that the others reach it at, the best first; empty: those of its interfaces, fastest medium first."""
    device: str = "cpu"
    state: Path | None = None
    """A folder for what outlives a crash; None: nothing does."""
    metrics_at: str | None = None
    """Where Prometheus finds its figures (host:port); None: nowhere."""


async def train_in_cluster(
    node: RealNode,
    plan: Plan,
    *,
    observer: Observer | None = None,
    tell: Callable[[str], None] = lambda what: None,
    leaving: asyncio.Event | None = None,
    sink: Sink | None = None,
) -> Report:
    """Find the other machines of a cluster, and train with them until the end or until `leaving` is set.

    `sink` gets the events of this machine's trace."""
    from hcsim.node import train_as_member

    async with real_member(node, tell, sink) as (host, credentials):
        me = real_introduction(host, node, plan.cluster, credentials)
        tell(f"{me.name} is node {me.node[:8]}, at {me.address}")
        return await train_as_member(
            host,
            me,
            plan,
            credentials=credentials,
            observer=observer,
            tell=tell,
            leaving=leaving,
            durable=node.state is not None,
        )


async def ask_cluster(home: Path, cluster: str, peers: Sequence[str], look_s: float, forget: str = "") -> Survey:
    """Ask the nodes of a cluster that this machine has joined how they stand; tell them who is gone for good.

    Whoever is asked gets our trust list with the handshake, and we get theirs."""
    proved = beside_a_node(load_credentials(home, cluster, host_name()))
    secret = proved.secret
    async with RealHost(RealOptions("asker", seed=secrets.randbits(64), tls=ClusterTls(proved.key, secret))) as host:
        admitted = AdmittedHost(host, proved)
        survey = Survey(admitted, secret.namespace.hex(), _ANSWER_S, forget)
        await survey.run([with_port(peer, Cluster().discovery_port) for peer in peers], look_s)
        return survey


async def serve_coordinator(
    listen: str,
    policy: Policy,
    tell: Callable[[str], None],
    *,
    tls: TlsFiles | None = None,
    insecure: bool = False,
    state: Path | None = None,
) -> None:
    """Be the place where workers meet, until cancelled; `tell` hears what happens."""
    from hcsim.cluster.coordinator import Coordinator

    async with RealHost(RealOptions("coordinator", tls=tls, insecure=insecure, state=state)) as host:
        coordinator = Coordinator(host, policy, note=tell)
        listener = await host.listen(listen)
        tell(f"coordinator at {listener.address}: waiting for {policy.workers} workers")
        coordinator.open(listener)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await coordinator.close()
            await listener.close()


@asynccontextmanager
async def real_member(
    node: RealNode, tell: Callable[[str], None] = lambda what: None, sink: Sink | None = None
) -> AsyncIterator[tuple[RealHost, Credentials]]:
    """This machine, with the TLS of a cluster that it has joined; `tell` hears who did not get through it."""
    name = node.name or host_name()
    proved = load_credentials(node.home, node.cluster, name)
    tls = ClusterTls(proved.key, proved.secret)
    options = RealOptions(name, seed=secrets.randbits(64), tls=tls, device=node.device, state=node.state)
    once = Once(tell)
    trace = None if sink is None else Trace(sink)
    here = RealHost(options, trace=trace, on_refused=lambda error: once(f"a call was not taken: {error}"))
    async with here as host, _serving(node.metrics_at, host):
        try:
            yield host, proved
        finally:
            if trace is not None:
                trace.digest()  # hands on the last events


def real_introduction(host: RealHost, node: RealNode, cluster: Cluster, proved: Credentials) -> Introduction:
    """This machine, as it introduces itself to the others."""
    return _introduced(host.name, node.hosts or reachable_at(host.interfaces()), cluster, proved)


def _virtual_hosts(host: VirtualHost) -> tuple[str, ...]:
    """Where the others reach it: with several interfaces at each of them, fastest medium first, as a real machine."""
    interfaces = host.interfaces()
    if len(interfaces) < 2:
        return (host.name,)
    return tuple(address for interface in interfaces for address in interface.addresses)


def _virtual_credentials(host: VirtualHost, seed: int) -> Credentials:
    """The key that the host has kept, or else a new one; the cluster's secret is the scenario's."""
    kept = host.store.load("node_key")
    if kept is None:
        kept = host.rng("node key").randbytes(SEED_BYTES)
        host.store.save("node_key", kept)
    key, secret = NodeKey(kept), ClusterSecret(rng.stream(seed, "cluster secret").randbytes(SECRET_BYTES))
    trusted = TrustStore(secret, key, host.name, StoredTrust(host.store))
    return Credentials(key, secret, host.rng("boot").getrandbits(BOOT_BITS), host.rng("nonces").randbytes, trusted)


@asynccontextmanager
async def real_group(
    rank: int,
    peers: Sequence[str],
    *,
    options: Options | None = None,
    wire: Wire | None = None,
    tls: TlsFiles | ClusterTls | None = None,
    insecure: bool = False,
    shared_memory: bool = True,
    device: str = "cpu",
    metrics_at: str | None = None,
    on_refused: Callable[[str], None] = lambda what: None,
) -> AsyncIterator[Group]:
    """Join a real group: `peers` are all ranks' addresses in order, ours included; the port may be left out.

    Ranks of one machine that are named by its loopback reach each other through shared memory, unless they want TCP
    there too. `device` is what a training run computes with, as torch calls it. At `metrics_at` (host:port) Prometheus
    finds our figures meanwhile. `on_refused` hears, once for each reason, of callers that were not let in.
    """
    addresses = tuple(with_port(peer, DEFAULT_PORT) for peer in peers)
    twice = next((address for address in addresses if addresses.count(address) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is there twice among the peers: each rank needs an address of its own")
    for address in addresses:
        if parse(address).port == 0 and len(addresses) > 1:  # one that nobody can ever call from is not waited for
            raise ConfigError(f"{address}: the others cannot know which port that is: give each rank one of its own")
    if len(addresses) > 1 and not insecure:
        _refuse_plaintext(addresses, has_tls=tls is not None)
    refusals = Refusals(Once(on_refused))
    us = Membership(rank, addresses, wire=wire or Wire(), refusals=refusals)
    async with AsyncExitStack() as stack:
        named = RealOptions(
            name=f"rank {rank}",
            seed=secrets.randbits(64),
            tls=tls,
            insecure=insecure,
            shared_memory=shared_memory,
            device=device,
        )
        host = await stack.enter_async_context(RealHost(named, on_refused=lambda error: refusals(str(error))))
        await stack.enter_async_context(_serving(metrics_at, host))
        yield await stack.enter_async_context(await Group.open(host, us, options))


def _refuse_plaintext(addresses: Sequence[str], *, has_tls: bool) -> None:
    """What the host refuses where it listens and dials, for all ranks at once: some of them only call us.

    What a name stands for the host finds out when it calls it."""
    for target in map(parse, addresses):
        for host in target.hosts if not target.encrypted(has_tls=has_tls) else ():
            with suppress(ValueError):  # a name
                check_loopback(host)


def _serving(address: str | None, host: RealHost) -> AbstractAsyncContextManager[object]:
    """A host's metrics are served there meanwhile, if anywhere."""
    if address is None:
        return nullcontext()
    from hcsim.real.http import serving_metrics

    return serving_metrics(host.metrics, address)
