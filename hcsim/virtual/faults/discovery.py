"""Faults of datagrams, and of the knowledge of who is there."""

from __future__ import annotations

from msgspec.structs import replace

from hcsim.config import CopiedIdentity, Datagrams, MulticastLoss, OneWayVisibility, StaleRecord, Stranger
from hcsim.runtime.host import Service, Sighting
from hcsim.virtual.environment import NS
from hcsim.virtual.faults.apply import FaultProcess, apply, draws, lasting, note, prepare
from hcsim.virtual.faults.node import bring_back, die, will_return
from hcsim.virtual.host import NO_NODES, Surroundings, VirtualHost
from hcsim.virtual.lan import LOST, PASSES, Datagram, Rule

ID_BYTES = 32
"""Of a node's id, and of a namespace's."""
SPOOFED_EVERY_S = 1.0
STRAGGLER_S = 2.0
"""The most by which a datagram that is overtaken, or a second copy of one, is late."""


@apply.register(Datagrams)
def disturb(fault: Datagrams, world: Surroundings) -> FaultProcess:
    """Each datagram on the medium draws whether it is lost, doubled, or overtaken by later ones."""
    rng = draws(world, fault)

    def rule(datagram: Datagram) -> tuple[float, ...]:
        if fault.medium not in datagram.media:
            return PASSES
        lost, doubled, overtaken, late, later = (rng.random() for _ in range(5))
        if lost < fault.loss:
            return LOST
        first_s = fault.delay_s + (STRAGGLER_S * late if overtaken < fault.reorder else 0.0)
        return (first_s, first_s + STRAGGLER_S * later) if doubled < fault.duplicate else (first_s,)

    yield from _have_rule(world, rule, fault.duration_s)


@apply.register(MulticastLoss)
def lose_multicast(fault: MulticastLoss, world: Surroundings) -> FaultProcess:
    """A share of what a host casts, or of what is cast to it, is lost; it hears itself."""
    rng = draws(world, fault)

    def rule(datagram: Datagram) -> tuple[float, ...]:
        ours = (fault.direction != "to" and datagram.source == fault.node) or (
            fault.direction != "from" and datagram.target == fault.node
        )
        if not ours or datagram.source == datagram.target:
            return PASSES
        return LOST if rng.random() < fault.share else PASSES

    yield from _have_rule(world, rule, fault.duration_s)


@apply.register(OneWayVisibility)
def hide(fault: OneWayVisibility, world: Surroundings) -> FaultProcess:
    """What the first host says of itself does not reach the second; its questions do, and are answered."""

    def rule(datagram: Datagram) -> tuple[float, ...]:
        hidden = (datagram.source, datagram.target) == fault.between and not datagram.question
        return LOST if hidden else PASSES

    yield from _have_rule(world, rule, fault.duration_s)


def _have_rule(world: Surroundings, rule: Rule, duration_s: float | None) -> FaultProcess:
    world.datagrams.add(rule)
    yield from lasting(world, duration_s)
    note(world, "clear", "datagrams")
    world.datagrams.remove(rule)


@apply.register(StaleRecord)
def bring_back_record(fault: StaleRecord, world: Surroundings) -> FaultProcess:
    """Somebody's cache speaks: all neighbours hear the first that the host ever announced under each name. When the
    records have run out, they hear again what is true, or that there is nothing."""
    host = world.host(fault.node)
    oldest: dict[str, Service] = {}
    for service in host.lan.history:
        oldest.setdefault(service.name, service)
    if fault.address is not None:
        oldest = {name: replace(service, address=fault.address) for name, service in oldest.items()}
    for stale in oldest.values():
        _tell_neighbours(host, Sighting(stale))
    yield from lasting(world, fault.duration_s)
    host = world.host(fault.node)
    for name, stale in oldest.items():
        note(world, "correct", name)
        truth = host.lan.announced(name) if host.alive else None
        _tell_neighbours(host, Sighting(stale, gone=True) if truth is None else Sighting(truth))


def _tell_neighbours(host: VirtualHost, sighting: Sighting) -> None:
    for neighbour in host.neighbours():
        if neighbour.alive:
            neighbour.lan.hear(sighting)


@prepare.register(CopiedIdentity)
def expect_copy(fault: CopiedIdentity, world: Surroundings) -> None:
    """The node will go down and come back."""
    will_return(world, fault.node)


@apply.register(CopiedIdentity)
def copy_identity(fault: CopiedIdentity, world: Surroundings) -> FaultProcess:
    """The host is started from a copy of another one's disk, as it is then."""
    die(world, world.host(fault.node), clean=False)
    yield from lasting(world, fault.down_s)
    bring_back(world, fault.node, world.host(fault.of).store.records)


@apply.register(Stranger)
def announce_strangers(fault: Stranger, world: Surroundings) -> FaultProcess:
    """Somebody else's records come into view, in a rhythm, until the fault ends."""
    stranger = _Stranger(world, fault)
    if fault.ghosts:
        world.env.process(stranger.announce_ghosts(fault.ghosts))
    if fault.spoofs is not None:
        world.env.process(stranger.spoof(fault.spoofs))
    yield from lasting(world, fault.duration_s)
    stranger.leave()


class _Stranger:
    """A machine on a home's network. What it knows of a cluster it has heard there."""

    def __init__(self, world: Surroundings, fault: Stranger) -> None:
        self._world = world
        self._fault = fault
        self._rng = draws(world, fault)
        self._address = next(place for place, answer in NO_NODES.items() if answer == fault.addresses)
        self._ghosts: list[Service] = []
        self._spoofed: dict[str, Service] = {}
        self._is_gone = False

    def announce_ghosts(self, per_s: float) -> FaultProcess:
        """A node that does not exist, and after a while the next one."""
        while not self._is_gone:
            ghost, address = self._rng.randbytes(ID_BYTES).hex(), f"{self._address}:{self._rng.randint(1024, 65535)}"
            properties = {"node": ghost, "namespace": self._namespace(), "boot": f"{self._rng.getrandbits(32):x}"}
            service = Service(f"ghost-{ghost[:8]}", address, {**properties, "at": address})
            self._ghosts.append(service)
            note(self._world, "ghost", service.name)
            self._cast(Sighting(service))
            yield from lasting(self._world, 1.0 / per_s)

    def spoof(self, node: str) -> FaultProcess:
        """All that a node has announced is at our address now, again and again."""
        while not self._is_gone:
            for service in self._world.host(node).lan.history:
                port = service.address.rpartition(":")[2]
                address = f"{self._address}:{port}"
                properties = {**service.properties, "at": address, "namespace": self._namespace()}
                if service.name not in self._spoofed:
                    self._world.spoofed.setdefault(service.name, []).append(self._fault.home)
                self._spoofed[service.name] = Service(service.name, address, properties)
            for ours in self._spoofed.values():
                note(self._world, "spoof", ours.name)
                self._cast(Sighting(ours))
            yield from lasting(self._world, SPOOFED_EVERY_S)

    def leave(self) -> None:
        """Its records run out; what is true is heard again."""
        self._is_gone = True
        note(self._world, "leave", self._fault.home)
        for ghost in self._ghosts:
            self._cast(Sighting(ghost, gone=True))
        for name, ours in self._spoofed.items():
            self._world.spoofed[name].remove(self._fault.home)
            host = self._world.host(self._fault.spoofs or "")
            truth = host.lan.announced(name) if host.alive else None
            self._cast(Sighting(ours, gone=True) if truth is None else Sighting(truth))

    def _namespace(self) -> str:
        """The cluster's, if it is to be known and somebody has said it; else another one."""
        if self._fault.knows_namespace:
            for host in self._hearers():
                for service in host.lan.services:
                    if said := service.properties.get("namespace"):
                        return said
        return self._rng.randbytes(ID_BYTES).hex()

    def _cast(self, sighting: Sighting) -> None:
        env = self._world.env
        for host in self._hearers():
            datagram = Datagram("stranger", host.name, (self._fault.home, self._fault.home), question=False)
            for delay_s in self._world.datagrams.delays_s(datagram):
                env.call_at(env.now_ns + round(delay_s * NS), _hear, host, sighting)

    def _hearers(self) -> list[VirtualHost]:
        return [host for host in self._world.hosts if self._world.wiring.is_at_home(host.name, self._fault.home)]


def _hear(host: VirtualHost, sighting: Sighting) -> None:
    if host.alive:
        host.lan.hear(sighting)
