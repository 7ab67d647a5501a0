"""This machine in a real cluster: as one of a fixed set of ranks, as an elastic member, or as the coordinator."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.messages import MemberFacts
from hcsim.cluster.overview import Overview, watched
from hcsim.cluster.status_client import ClusterWatch, StatusClient
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config import Cluster
from hcsim.errors import ConfigError
from hcsim.identity.handshake import Credentials
from hcsim.launch import DEFAULT_PORT
from hcsim.real.hardware import installed_versions, system_name, this_chip
from hcsim.real.host import RealHost, RealOptions, check_loopback
from hcsim.real.interfaces import host_name, reachable_at
from hcsim.real.keys import beside_a_node, load_credentials
from hcsim.real.process import at_work
from hcsim.real.tls import ClusterTls, TlsFiles
from hcsim.runtime.address import parse, with_port
from hcsim.telemetry.trace import Sink, Trace
from hcsim.transport.admission import AdmittedHost
from hcsim.transport.admission_queue import LogDeduplicator, RefusalLog
from hcsim.transport.groups import GroupMembership, Wire

if TYPE_CHECKING:
    from hcsim.cluster.coordinator import CoordinatorPolicy
    from hcsim.cluster.node import MeetingHandler
    from hcsim.cluster.view import View
    from hcsim.config.training import Training
    from hcsim.node import ClusterJob
    from hcsim.training.run import Observer, Report
    from hcsim.training.task import Task

_ANSWER_S = 2.0
WATCH_EVERY_S = 1.0
"""How often nodes that are watched are asked."""


class RealNode(msgspec.Struct, frozen=True):
    """This machine's settings in a real cluster."""

    home: Path
    """The folder of its key and its clusters' secrets."""
    cluster: str = "home"
    name: str = ""
    """The name of this machine for the other members; empty: its host name."""
    hosts: tuple[str, ...] = ()
    """Addresses at which the others reach it, the best first; empty: those of its interfaces, fastest medium
    first."""
    device: str = "cpu"
    state: Path | None = None
    """The folder for data that survives a crash; None: no data does."""
    metrics_at: str | None = None
    """The address (host:port) of its Prometheus metrics; None: they are not served."""


async def train_in_cluster(
    node: RealNode,
    plan: ClusterJob,
    *,
    observer: Observer | None = None,
    tell: Callable[[str], None] = lambda what: None,
    leaving: asyncio.Event | None = None,
    began: Callable[[View, int, int], None] = lambda view, rank, step: None,
    sink: Sink | None = None,
    meeting: MeetingHandler | None = None,
) -> Report:
    """Find the other machines of a cluster, and train with them until the end or until `leaving` is set.

    `began` is called with each view whose members have synchronised, our rank in it, and the number of steps taken
    by then.
    `meeting` serves requests to measure the links between this machine and others.

    `sink` receives the events of this machine's trace."""
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
            began=began,
            durable=node.state is not None,
            meeting=meeting,
        )


async def seconds_by_device(devices: Sequence[str], settings: Training, what: Task) -> dict[str, float]:
    """Measure on each device how long a step of a training takes; a device that cannot take one has no entry."""
    from hcsim.training.learner import seconds_per_step
    from hcsim.training.strategies import completed, optimizer

    chosen = completed(msgspec.structs.replace(settings, batch=None), what, 1)
    batch = chosen.batch if settings.batch is None or isinstance(settings.batch, str) else settings.batch
    samples = max(batch) if isinstance(batch, tuple) else batch
    assert isinstance(samples, int)
    found = {}
    for device in devices:
        async with RealHost(RealOptions("devices", device=device)) as host:
            with suppress(RuntimeError, ConfigError):  # torch has not everything on every device, or its memory is full
                found[device] = await seconds_per_step(host, what, optimizer(chosen), samples)
    return found


async def ask_cluster(home: Path, cluster: str, peers: Sequence[str], look_s: float, forget: str = "") -> StatusClient:
    """Query the status of the nodes of a cluster that this machine has joined, and report the node `forget` as
    gone for good.

    The handshake also exchanges the trust lists of this machine and of each node that answers."""
    proved = beside_a_node(load_credentials(home, cluster, host_name()))
    secret = proved.secret
    async with RealHost(RealOptions("asker", seed=secrets.randbits(64), tls=ClusterTls(proved.key, secret))) as host:
        admitted = AdmittedHost(host, proved)
        survey = StatusClient(admitted, secret.namespace.hex(), _ANSWER_S, forget)
        await survey.run([with_port(peer, Cluster().discovery_port) for peer in peers], look_s)
        return survey


@asynccontextmanager
async def watching_cluster(home: Path, cluster: str, peers: Sequence[str]) -> AsyncIterator[Callable[[], Overview]]:
    """Watch the nodes of a cluster that this machine has joined; yield a function that returns how it stands now, in
    seconds since 1970."""
    proved = beside_a_node(load_credentials(home, cluster, host_name()))
    secret = proved.secret
    async with RealHost(RealOptions("watcher", seed=secrets.randbits(64), tls=ClusterTls(proved.key, secret))) as host:
        addresses = [with_port(peer, Cluster().discovery_port) for peer in peers]
        admitted = AdmittedHost(host, proved)
        watch = ClusterWatch(admitted, secret.namespace.hex(), addresses, WATCH_EVERY_S, _ANSWER_S)

        def now() -> Overview:
            since_1970_s = time.time() - host.clock.elapsed()
            return watched(cluster, watch, time.time(), since_1970_s)

        try:
            yield now
        finally:
            await watch.close()


async def serve_coordinator(
    listen: str,
    policy: CoordinatorPolicy,
    tell: Callable[[str], None],
    *,
    tls: TlsFiles | None = None,
    insecure: bool = False,
    state: Path | None = None,
    member: tuple[Path, str] | None = None,
) -> None:
    """Run a coordinator until cancelled; `tell` is called for every status message.

    With a `member` (the home of this machine's key, and a cluster) the workers are members of that cluster."""
    from hcsim.cluster.coordinator import Coordinator
    from hcsim.node import admitted

    proved = None if member is None else beside_a_node(load_credentials(*member, host_name()))
    secured = tls if proved is None else ClusterTls(proved.key, proved.secret)
    options = RealOptions("coordinator", seed=secrets.randbits(64), tls=secured, insecure=insecure, state=state)
    once = LogDeduplicator(tell)
    async with AsyncExitStack() as stack:
        stack.enter_context(at_work(tell))
        host = await stack.enter_async_context(
            RealHost(options, on_refused=lambda error: once(f"a call was not taken: {error}"))
        )
        inside = host if proved is None else admitted(host, proved, tell)
        coordinator = Coordinator(inside, policy, note=tell)
        listener = await inside.listen(listen)
        tell(f"coordinator at {listener.address}: waiting for {policy.needed} workers")
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
    """Yield this machine's host with the TLS of a cluster that it has joined. `tell` is called for rejected
    connections."""
    name = node.name or host_name()
    proved = load_credentials(node.home, node.cluster, name)
    tls = ClusterTls(proved.key, proved.secret)
    options = RealOptions(name, seed=secrets.randbits(64), tls=tls, device=node.device, state=node.state)
    once = LogDeduplicator(tell)
    trace = None if sink is None else Trace(sink)
    here = RealHost(options, trace=trace, on_refused=lambda error: once(f"a call was not taken: {error}"), tell=tell)
    with at_work(tell):
        async with here as host, _serving(node.metrics_at, host):
            try:
                yield host, proved
            finally:
                if trace is not None:
                    trace.digest()  # hands on the last events


def real_introduction(host: RealHost, node: RealNode, cluster: Cluster, proved: Credentials) -> NodeInfo:
    from hcsim.node import introduced

    name, chip, versions = system_name(), this_chip().name, installed_versions()
    us = introduced(host.name, node.hosts or reachable_at(host.interfaces()), cluster, proved)
    return msgspec.structs.replace(us, facts=lambda: MemberFacts(name, chip, versions, time.time()))


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
    tell: Callable[[str], None] = lambda what: None,
    sink: Sink | None = None,
) -> AsyncIterator[Group]:
    """Join a real group: `peers` are all ranks' addresses in order, this rank's included; the port may be left
    out.

    Ranks on one machine that are named by its loopback address reach each other through shared memory, unless
    `shared_memory` is false. `device` is the device of a training run, as torch names it, or "sleep:M4" to take the
    time of another machine. Prometheus metrics are served at `metrics_at` (host:port). `on_refused` is called for
    rejected connections, once per reason; `tell` for what a user should know of the device. `sink` receives the events
    of this rank's trace."""
    addresses = tuple(with_port(peer, DEFAULT_PORT) for peer in peers)
    twice = next((address for address in addresses if addresses.count(address) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is there twice among the peers: each rank needs an address of its own")
    for address in addresses:
        if parse(address).port == 0 and len(addresses) > 1:  # one that nobody can ever call from is not waited for
            raise ConfigError(f"{address}: the others cannot know which port that is: give each rank one of its own")
    if len(addresses) > 1 and not insecure:
        _refuse_plaintext(addresses, has_tls=tls is not None)
    refusals = RefusalLog(LogDeduplicator(on_refused))
    us = GroupMembership(rank, addresses, wire=wire or Wire(), refusals=refusals)
    async with AsyncExitStack() as stack:
        stack.enter_context(at_work())
        named = RealOptions(
            name=f"rank {rank}",
            seed=secrets.randbits(64),
            tls=tls,
            insecure=insecure,
            shared_memory=shared_memory,
            device=device,
        )
        trace = None if sink is None else Trace(sink)
        if trace is not None:
            stack.callback(trace.digest)  # hands on the last events
        ours = RealHost(named, trace=trace, on_refused=lambda error: refusals(str(error)), tell=tell)
        host = await stack.enter_async_context(ours)
        await stack.enter_async_context(_serving(metrics_at, host))
        yield await stack.enter_async_context(await Group.open(host, us, options))


def _refuse_plaintext(addresses: Sequence[str], *, has_tls: bool) -> None:
    """Reject plaintext addresses of all ranks at once, as the host does when it listens and dials: some ranks only
    call this one.

    Host names are checked when the host resolves them."""
    for target in map(parse, addresses):
        for host in target.hosts if not target.encrypted(has_tls=has_tls) else ():
            with suppress(ValueError):  # a name
                check_loopback(host)


def _serving(address: str | None, host: RealHost) -> AbstractAsyncContextManager[object]:
    """Serve a host's metrics at this address meanwhile, if there is one."""
    if address is None:
        return nullcontext()
    from hcsim.real.http import serving_metrics

    return serving_metrics(host.metrics, address)
