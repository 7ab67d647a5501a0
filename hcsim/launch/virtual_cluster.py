"""Simulated elastic clusters: hosts that find each other, train, and measure the links between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from hcsim import rng
from hcsim.cluster.probe import Prober
from hcsim.cluster.topology import Topology, TopologyEdge, TopologyNode, describe, survey
from hcsim.config import Cluster, Leave, Scenario, Training, load_scenario
from hcsim.errors import ConfigError
from hcsim.identity.handshake import BOOT_BITS, Credentials
from hcsim.identity.keys import SECRET_BYTES, SEED_BYTES, ClusterSecret, NodeKey
from hcsim.identity.trust_store import StoredTrust, TrustStore
from hcsim.launch.virtual import Outcome, outcome_of, refuse_tunnels
from hcsim.node import ClusterJob, coordinating, introduced, train_as_member
from hcsim.telemetry.trace import Sink
from hcsim.training.run import Observer, Report
from hcsim.training.task import Task
from hcsim.transport.groups import Wire
from hcsim.units import did_you_mean
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.stall_detector import StallDetector
from hcsim.virtual.world import UsageMonitor, World

PROBE_PORT = 52417
STANDSTILL_S = 3600.0
"""The least time without progress after which a simulated cluster is ended."""
_LOOK_S = 1.0
"""The interval at which a host whose program has left checks whether it will be restarted."""


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
    census: UsageMonitor | None = None,
) -> Outcome[Report]:
    """Let the hosts of a scenario find each other and train, through all faults: see its `[cluster]`.

    `tell(host, message)` is called for every status message. `what` is a custom task. A host that has not ended
    after `limit_s` of virtual time is stopped, and its result is a `TimeoutError`. A host that still waits when
    no host makes progress any more ends with a `TrainingError`. A `census` replaces the sink, and counts the
    resources that hosts use."""
    loaded = load_scenario(scenario)
    cluster = loaded.cluster or Cluster()
    if cluster.coordinator is not None:
        cluster = _with_coordinating_node(cluster, cluster.coordinator, [node.name for node in loaded.nodes])
    if cluster.nodes is None:
        cluster = msgspec.structs.replace(cluster, nodes=len(loaded.nodes))
    plan = ClusterJob(cluster, settings or loaded.training or Training(), loaded.seed, wire or Wire())
    refuse_tunnels(plan.training)
    world = World(loaded, sink=sink if census is None else census, sealed=True)
    if census is not None:
        census.watch(world)
    homes = {node.name: node.home for node in loaded.nodes} if len(loaded.homes) > 1 else {}
    leavers = [fault.node for fault in loaded.faults if isinstance(fault, Leave)]
    said: dict[str, str] = {}
    standstill = _standstill(world, max(STANDSTILL_S, 20 * plan.training.timeout_s), limit_s)

    async def on_host(host: VirtualHost) -> Report:
        proved = _virtual_credentials(host, loaded.seed)
        me = introduced(host.name, _virtual_hosts(host), cluster, proved, homes.get(host.name, ""))

        def heard(what: str) -> None:
            said[host.name] = what
            tell(host.name, what)

        async with (
            coordinating(host, cluster, len(loaded.nodes), proved, heard),
            standstill.noticed(lambda: said.get(host.name, "nothing")),
        ):
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

    return outcome_of(world, world.run_on_all(on_host))


async def _last_start(world: World, host: VirtualHost) -> None:
    """Wait until no restart of this host is scheduled. The program has left before the end, and until its last
    restart the world is not at its end, even if all have left. Restarted hosts resume from what they have
    saved."""
    while world.returns.get(host.name):
        await host.clock.sleep(_LOOK_S)


def _with_coordinating_node(cluster: Cluster, coordinator: str, names: list[str]) -> Cluster:
    """Take NAME.local, as real machines are called in a home, for the node of that name."""
    host, _, port = coordinator.rpartition(":")
    node = host if host in names else host.removesuffix(".local")
    if node not in names:
        raise ConfigError(
            f'coordinator = "{coordinator}": there is no such node{did_you_mean(node, names)}; there are '
            + ", ".join(names)
        )
    return msgspec.structs.replace(cluster, coordinator=f"{node}:{port}")


def _standstill(world: World, patience_s: float, limit_s: float | None) -> StallDetector:
    """Return a detector that ends a cluster in which no host takes a step or forms a view, once all faults have
    healed."""

    def moved() -> list[tuple[float, float]]:
        """Return each host's progress in its training and in its views."""
        return [
            (host.metrics.value("hcsim_training_steps_total"), host.metrics.value("hcsim_view_epoch"))
            for host in world.hosts
        ]

    healed_s = max((fault.over_s for fault in world.scenario.faults), default=0.0)
    return StallDetector(world.env, moved, every_s=patience_s, from_s=healed_s, limit_s=limit_s)


def _virtual_hosts(host: VirtualHost) -> tuple[str, ...]:
    """Return the addresses of the host: with several interfaces those of each, fastest medium first, as on a real
    machine."""
    interfaces = host.interfaces()
    if len(interfaces) < 2:
        return (host.name,)
    return tuple(address for interface in interfaces for address in interface.addresses)


def _virtual_credentials(host: VirtualHost, seed: int) -> Credentials:
    """Return the key in the host's store, or else a new one; the cluster's secret is the scenario's."""
    kept = host.store.load("node_key")
    if kept is None:
        kept = host.rng("node key").randbytes(SEED_BYTES)
        host.store.save("node_key", kept)
    key, secret = NodeKey(kept), ClusterSecret(rng.stream(seed, "cluster secret").randbytes(SECRET_BYTES))
    trusted = TrustStore(secret, key, host.name, StoredTrust(host.store))
    return Credentials(key, secret, host.rng("boot").getrandbits(BOOT_BITS), host.rng("nonces").randbytes, trusted)


def measure_topology(scenario: Scenario | str | Path) -> Topology:
    """Have every host of a scenario measure itself and its links to the others, as real ones would."""
    world = World(load_scenario(scenario))

    async def everybody() -> Topology:
        probers = [Prober(host, host.name) for host in world.hosts]
        for host, prober in zip(world.hosts, probers, strict=True):
            listener = await host.listen(f"{host.name}:{PROBE_PORT}")
            host.spawn(prober.serve(listener), name="answer probes")
        speeds = [host.spawn(describe(host, host.name), name="describe") for host in world.hosts]
        nodes: list[TopologyNode] = await asyncio.gather(*speeds)
        ways: list[TopologyEdge] = []
        for host, prober, us in zip(world.hosts, probers, nodes, strict=True):
            others = [node for node in nodes if node is not us]
            ways += await host.spawn(survey(prober, us, others, PROBE_PORT), name="survey")
        return Topology(nodes, ways)

    return world.run(everybody())
