"""Faults of datagrams and of service discovery."""

from __future__ import annotations

from msgspec.structs import replace

from hcsim.config import CopiedIdentity, Datagrams, MulticastLoss, OneWayVisibility, StaleRecord, Stranger
from hcsim.runtime.host import Service, Sighting
from hcsim.virtual.environment import NS
from hcsim.virtual.faults.apply import FaultProcess, apply, draws, lasting, note, prepare
from hcsim.virtual.faults.node import bring_back, die, will_return
from hcsim.virtual.host import NO_NODES, Surroundings, VirtualHost
from hcsim.virtual.lan import LOST, PASSES, Datagram, DatagramRule

ID_BYTES = 32
"""The size of a node id and of a namespace."""
SPOOFED_EVERY_S = 1.0
STRAGGLER_S = 2.0
"""The maximum extra delay of a reordered datagram or of a duplicate."""


@apply.register(Datagrams)
def disturb(fault: Datagrams, world: Surroundings) -> FaultProcess:
    """Drop, duplicate or reorder each datagram on the medium with the given probabilities."""
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
    """Drop a share of the multicast datagrams from a host, or to it. Datagrams to itself always arrive."""
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
    """Drop the announcements of the first host to the second. Its queries still arrive and are answered."""

    def rule(datagram: Datagram) -> tuple[float, ...]:
        hidden = (datagram.source, datagram.target) == fault.between and not datagram.question
        return LOST if hidden else PASSES

    yield from _have_rule(world, rule, fault.duration_s)


def _have_rule(world: Surroundings, rule: DatagramRule, duration_s: float | None) -> FaultProcess:
    world.datagrams.add(rule)
    yield from lasting(world, duration_s)
    note(world, "clear", "datagrams")
    world.datagrams.remove(rule)


@apply.register(StaleRecord)
def bring_back_record(fault: StaleRecord, world: Surroundings) -> FaultProcess:
    """Deliver stale cache entries: all neighbours receive the first announcement of the host under each name. At the
    end of the fault they receive the current record, or a withdrawal."""
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
    """Register that the node will go down and come back."""
    will_return(world, fault.node)


@apply.register(CopiedIdentity)
def copy_identity(fault: CopiedIdentity, world: Surroundings) -> FaultProcess:
    """Restart the host from a copy of the disk that another host has at that time."""
    die(world, world.host(fault.node), clean=False)
    yield from lasting(world, fault.down_s)
    bring_back(world, fault.node, world.host(fault.of).store.records)


@apply.register(Stranger)
def announce_strangers(fault: Stranger, world: Surroundings) -> FaultProcess:
    """Announce foreign records periodically until the fault ends."""
    stranger = _Stranger(world, fault)
    if fault.ghosts:
        world.env.process(stranger.announce_ghosts(fault.ghosts))
    if fault.spoofs is not None:
        world.env.process(stranger.spoof(fault.spoofs))
    yield from lasting(world, fault.duration_s)
    stranger.leave()


class _Stranger:
    """A foreign machine on a home network. It knows of a cluster only what it has received there."""

    def __init__(self, world: Surroundings, fault: Stranger) -> None:
        self._world = world
        self._fault = fault
        self._rng = draws(world, fault)
        self._address = next(place for place, answer in NO_NODES.items() if answer == fault.addresses)
        self._ghosts: list[Service] = []
        self._spoofed: dict[str, Service] = {}
        self._is_gone = False

    def announce_ghosts(self, per_s: float) -> FaultProcess:
        """Announce nodes that do not exist, one after the other."""
        while not self._is_gone:
            ghost, address = self._rng.randbytes(ID_BYTES).hex(), f"{self._address}:{self._rng.randint(1024, 65535)}"
            properties = {"node": ghost, "namespace": self._namespace(), "boot": f"{self._rng.getrandbits(32):x}"}
            service = Service(f"ghost-{ghost[:8]}", address, {**properties, "at": address})
            self._ghosts.append(service)
            note(self._world, "ghost", service.name)
            self._cast(Sighting(service))
            yield from lasting(self._world, 1.0 / per_s)

    def spoof(self, node: str) -> FaultProcess:
        """Announce all services of a node at a foreign address, periodically."""
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
        """Withdraw the foreign records; the neighbours receive the current ones."""
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
        """Return the namespace of the cluster if it is to be known and was announced; else a random one."""
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
