"""Machines on a network, driven by hand: copied, moved, without their disks, or taken away for good.

Two of them may have one key here. So who hears whom is a matter of lines, as it is in
`hcsim.cluster.control_connections`: a machine has one to each node id, and refuses a second machine that says it is the
same node as long as the first one answers. What must always hold is asserted as it happens: a view has one successor,
and an epoch never goes back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hcsim.cluster.agreement import AcceptorState
from hcsim.cluster.membership import AdoptView, CheckNewcomer, Membership, ReportWaiting, SendMessage
from hcsim.cluster.messages import ControlMessage
from hcsim.cluster.view import Member, MembershipRules, View


@dataclass(eq=False)
class Machine:
    """A key and a record on a disk, a name and an address, and perhaps a process."""

    lan: Lan
    node: str
    name: str
    address: str
    record: AcceptorState | None = None
    core: Membership | None = None
    lines: dict[str, Machine] = field(default_factory=dict)
    epoch: int = -1
    said: list[str] = field(default_factory=list)
    """To the person in front of it."""

    @property
    def member(self) -> Member:
        return Member(self.node, 0, self.name, self.address)

    @property
    def members(self) -> str:
        return "".join(member.name for member in self.core.view.members)

    def start(self) -> None:
        self.stop()
        self.lan.boots += 1
        us = Member(self.node, self.lan.boots, self.name, self.address)
        self.core = Membership(us, f"{self.name}:1", self.lan.rules, self.record, self.save)
        self.drain()

    def stop(self) -> None:
        for other in list(self.lines.values()):
            self.hang_up(other)
        self.core = None

    def hang_up(self, other: Machine) -> None:
        del self.lines[other.node]
        del other.lines[self.node]
        self.lan.mail = [each for each in self.lan.mail if {*each[:2]} != {self, other}]

    def save(self, record: AcceptorState) -> None:
        self.record = record

    def drain(self) -> None:
        while self.core is not None and self.core.effects:
            effects, self.core.effects = self.core.effects, []
            for effect in effects:
                if isinstance(effect, SendMessage) and effect.to in self.lines:
                    self.lan.mail.append((self, self.lines[effect.to], effect.message))
                elif isinstance(effect, CheckNewcomer):
                    self.core.qualified(effect.lineage, self.lan.now)
                elif isinstance(effect, AdoptView):
                    self.lan.adopted(self, effect.view)
                elif isinstance(effect, ReportWaiting):
                    self.said.append(effect.reason)

    def hear(self, other: Machine) -> None:
        self.core.heard(other.core.status, self.lan.now)
        self.core.found(other.node, self.lan.now)
        self.drain()

    def lose(self, node: str) -> None:
        self.core.lost(node, "as a test", self.lan.now)
        self.drain()


class Lan:
    """Who hears whom, and what is on its way."""

    def __init__(self, count: int, rules: MembershipRules) -> None:
        self.rules = rules
        self.now = 0.0
        self.boots = 0
        self.keys = 0
        self.mail: list[tuple[Machine, Machine, ControlMessage]] = []
        self.cut: list[tuple[Machine, Machine]] = []
        """Whom nobody hears, and who does not hear it."""
        self.known: dict[tuple[str, int, str], tuple[View, list[Machine]]] = {}
        """The view of a lineage and epoch, and the one after it; and who knows of it."""
        self.machines = [self.machine(name) for name in "abcdefgh"[:count]]
        for machine in self.machines:
            machine.start()

    def machine(self, name: str) -> Machine:
        self.keys += 1
        return Machine(self, f"{name}{self.keys}", name, f"{name}:2")

    @property
    def alive(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.core is not None]

    def adopted(self, machine: Machine, view: View) -> None:
        assert view.epoch > machine.epoch, "an epoch went back"
        machine.epoch = view.epoch
        if view.formed or len(view.members) > 1:
            for key in ((view.lineage, view.epoch, "is"), (view.lineage, view.previous, "was")):
                other, knowers = self.known.get(key, (view, []))
                assert other == view or not knowers, f"two views: {key}, {other}, {view}"
                self.known[key] = view, [*(each for each in knowers if other == view and each is not machine), machine]

    def lost_disk(self, machine: Machine) -> None:
        """Nobody can hold it to what it alone knew."""
        self.known = {
            key: (view, [each for each in knowers if each is not machine])
            for key, (view, knowers) in self.known.items()
        }

    def split(self, *pairs: tuple[Machine, Machine]) -> None:
        """These do not hear each other; all the rest do."""
        self.cut = [*pairs, *((other, one) for one, other in pairs)]

    def talk(self, one: Machine, other: Machine) -> bool:
        """Whether both hear each other."""
        return (one, other) not in self.cut and (other, one) not in self.cut

    def connect(self, one: Machine, other: Machine) -> None:
        strangers = one.core is not None and other.core is not None and one.node != other.node
        if not strangers or one.lines.get(other.node) is other or not self.talk(one, other):
            return
        for here, there in ((one, other), (other, one)):
            old = here.lines.get(there.node)
            if old is not None:
                if self.talk(here, old):
                    return  # it answers: the newcomer is refused
                here.hang_up(old)
        one.lines[other.node], other.lines[one.node] = other, one
        for here, there in ((one, other), (other, one)):
            here.hear(there)
            here.core.connected(there.node, self.now)
            here.drain()

    def deliver(self, number: int) -> None:
        heard = [each for each in self.mail if each[:2] not in self.cut]
        if heard:
            source, target, message = each = heard[number % len(heard)]
            self.mail.remove(each)
            target.core.message(source.node, message, self.now)
            target.core.found(source.node, self.now)
            target.drain()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for machine in self.alive:
            machine.core.tick(self.now)
            machine.drain()

    def round(self) -> None:
        """Whoever can reach each other hears of each other, and every message arrives; whoever cannot is suspected."""
        for one in self.alive:
            for other in self.alive:
                self.connect(one, other)
                if one.lines.get(other.node) is other and (other, one) not in self.cut:
                    one.hear(other)
            for node in list(one.core.roster.peers):
                if node not in one.lines or (one.lines[node], one) in self.cut:
                    one.lose(node)
        for _ in range(len(self.mail) * 4):
            self.deliver(0)
        self.pass_time(1.0)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()
            if self.together() and not self.mail:
                break

    def forget(self, tell: list[Machine]) -> None:
        """A person who knows all machines says who will not come."""
        for machine in tell:
            for member in machine.core.view.members:
                if not any(each.node == member.node and not member.elsewhere(each.member) for each in self.machines):
                    machine.core.forget(member.node, self.now)
                    machine.drain()

    def copy(self, machine: Machine, *, with_memory: bool) -> Machine:
        """Another machine starts from a copy of this one's key."""
        copy = self.machine(f"copy{self.keys}")
        copy.node = machine.node
        if with_memory and machine.record is not None:
            copy.record, copy.epoch = machine.record, machine.record.view.epoch
        self.machines.append(copy)
        copy.start()
        return copy

    def lose_disk(self, machine: Machine) -> None:
        """It starts from an empty disk, with a new key."""
        machine.stop()
        self.lost_disk(machine)
        self.keys += 1
        machine.node, machine.record, machine.epoch = f"{machine.name}{self.keys}", None, -1
        machine.start()

    def destroy(self, machine: Machine) -> None:
        """It is gone for good."""
        if len(self.machines) > 1:
            machine.stop()
            self.lost_disk(machine)
            self.machines.remove(machine)

    def move(self, machine: Machine, *, name: bool, address: bool) -> None:
        """It starts with its disk under another name, at another address, or both."""
        self.keys += 1
        machine.name = f"{machine.name}{self.keys}" if name else machine.name
        machine.address = f"{self.keys}{machine.address}" if address else machine.address
        machine.start()

    def all_well(self, *, first: bool) -> None:
        """Nothing is cut, everybody runs, and of two machines with one key one is taken away."""
        self.cut = []
        for machine in [*self.machines] if first else self.machines[::-1]:
            if sum(each.node == machine.node for each in self.machines) > 1:
                self.destroy(machine)
        for machine in self.machines:
            if machine.core is None:
                machine.start()

    def together(self) -> bool:
        views = {machine.core.view for machine in self.machines if machine.core is not None}
        (view, *others) = views
        return (
            not others
            and sorted(view.nodes) == sorted(machine.node for machine in self.machines)
            and len(self.alive) == len(self.machines)
            and all(view.rank(machine.core.us) is not None for machine in self.machines)
        )
