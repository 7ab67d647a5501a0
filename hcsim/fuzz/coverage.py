"""Coverage of protocol phases by faults: pairs of a kind of fault and the phase of a machine when it struck.

A fault concerns some machines (the one that crashes, both ends of a connection, all on a medium). Each of
them is in some phase of the protocol at that moment, which is read from its trace:

    forming         it is in no working view, and looks for the others
    synchronising   it has begun with a view, whose members synchronise their state
    computing       it works on a step, and has sent nothing of it yet
    reducing        it exchanges the results of the step
    voting          it votes on the step
    serving         the same three, of a parameter server and its workers: they overlap
    leaving         it has finished, and leaves
    down            it is not running

The number of pairs that a search has seen tells whether more seeds are worthwhile: see `Coverage`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hcsim.config import OWN_FAULTS, AnyFault, Partition, Scenario
from hcsim.runtime.frame import Kind
from hcsim.telemetry.trace import Event

PHASES = ("forming", "synchronising", "computing", "reducing", "voting", "serving", "leaving", "down")
SHORT = ("form", "sync", "comp", "reduce", "vote", "serve", "leave", "down")
"""The phases, abbreviated as heads of narrow columns."""
PAIRS = len(OWN_FAULTS) * len(PHASES)
STALE_SHARE, STALE_SEEDS = 0.3, 100
"""A search is stale once the seeds since the last new pair are this share of all seeds, and at least this
many."""

_TAGS = {kind.__name__: tag for tag, kind in OWN_FAULTS.items()}


class Tracker:
    """Tracks the protocol phase of each host, and records it when a fault strikes."""

    def __init__(self, scenario: Scenario) -> None:
        self.struck: Counter[str] = Counter()
        self.pairs: dict[str, None] = {}
        """As "kind × phase", in the order of first occurrence."""
        self._faults = {repr(fault): fault for fault in scenario.faults}
        self._scenario = scenario
        self._serves = bool(scenario.training and scenario.training.strategy.startswith("parameter_server"))
        names = [node.name for node in scenario.nodes]
        self._phase = dict.fromkeys(names, "forming")
        self._operation = dict.fromkeys(names, -1)
        """The newest operation for which the host has sent data."""
        self._struck_in: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
        """Kinds of faults that struck during an exchange of the host, and the operation of that exchange."""

    def follow(self, events: Sequence[Event]) -> None:
        for event in events:
            kind = event[1]
            if kind == "send" and event[3] == Kind.DATA:
                self._sent(str(event[2]).partition("→")[0], int(event[4]))
            elif kind in ("follows", "synchronised", "voted", "applied", "view failed"):
                self._moved(str(kind), str(event[2]))
            elif kind == "fault":
                self._fault(str(event[2]), str(event[3]))

    def ended(self, host: str) -> None:
        self._moved("ended", host)

    def _sent(self, host: str, operation: int) -> None:
        if self._phase[host] == "computing":
            self._phase[host] = "reducing"
        self._operation[host] = operation

    def _moved(self, kind: str, host: str) -> None:
        phase = self._phase[host]
        if kind == "follows":
            phase = "serving" if self._serves else "synchronising"
        elif kind == "view failed":
            phase = "forming"
        elif kind == "ended":
            phase = "leaving"
        elif kind != "voted":
            phase = "computing"
        for fault, operation in self._struck_in[host]:  # the vote is the last operation of a step
            self._note(fault, "voting" if kind == "voted" and operation == self._operation[host] else "reducing")
        self._struck_in[host].clear()
        self._phase[host] = phase

    def _fault(self, what: str, detail: str) -> None:
        if what == "start":
            self._phase[detail.partition(" ")[0]] = "forming"
        fault = self._faults.get(detail)
        if fault is None or what not in _TAGS:
            return
        tag = _TAGS[what]
        self.struck[tag] += 1
        for host in concerned(fault, self._scenario):
            if self._phase[host] == "reducing":
                self._struck_in[host].append((tag, self._operation[host]))
            else:
                self._note(tag, self._phase[host])
            if tag in ("crash", "restart", "copied_identity"):
                self._phase[host] = "down"

    def _note(self, tag: str, phase: str) -> None:
        self.pairs.setdefault(f"{tag} × {phase}")


def concerned(fault: AnyFault, scenario: Scenario) -> list[str]:
    if isinstance(fault, Partition):
        return [*fault.sides[0], *fault.sides[1]]
    pair: tuple[str, str] | None = getattr(fault, "between", None)
    node: str | None = getattr(fault, "node", None)
    if pair is not None or node is not None:
        return [*pair] if pair is not None else [str(node)]
    medium: str | None = getattr(fault, "medium", None)
    return [node.name for node in scenario.nodes if medium is None or any(link.medium == medium for link in node.links)]


class Coverage:
    """The pairs that a search has seen, and whether it still finds new ones."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        """The number of seeds in which each pair was seen."""
        self.seeds = 0
        self.newest = 0
        """The last seed, counted from one, that brought a new pair."""

    def add(self, pairs: Iterable[str]) -> list[str]:
        """Add the pairs of a seed, and return the new ones."""
        self.seeds += 1
        new = [pair for pair in pairs if pair not in self.seen]
        for pair in pairs:
            self.seen[pair] = self.seen.get(pair, 0) + 1
        self.newest = self.seeds if new else self.newest
        return new

    @property
    def is_stale(self) -> bool:
        return self.seeds - self.newest >= max(STALE_SEEDS, STALE_SHARE * self.seeds)

    def count(self, kind: str, phase: str) -> int:
        """Return the number of seeds in which a fault of that kind struck in that phase."""
        return self.seen.get(f"{kind} × {phase}", 0)
