"""Discovery of other nodes, by announcements on the local network and by configured addresses.

Any machine on the local network can announce anything, so an announcement is only a hint. There are two classes
of addresses:

    known        addresses from the configuration, of authenticated nodes, and those that such nodes report.
                 They are dialled at once, each by one task.
    candidates   announced addresses where no node has been authenticated yet. Their cost is bounded: their number,
                 concurrent dials, dials per second, and log lines (see the constants). Hosts take turns,
                 so that many candidates at one host do not keep another from being dialled.

An announcement never changes what is known: another address of a known node becomes a candidate, and a
withdrawn announcement removes only candidates. A candidate that authenticates as the announced node becomes
known. A record at which no node answers is tried a few times, and again later if it is still announced. A node
that receives no announcements can still be found by the nodes that receive its own, since a connection carries
both directions.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeAlias

import msgspec

from hcsim.config.cluster import Cluster
from hcsim.errors import AdmissionRefused, ConfigError, HcsimError, WrongPeer
from hcsim.identity.trust_list import OTHER_CLUSTER
from hcsim.runtime.address import address_at, hosts_of, with_port
from hcsim.runtime.clock import TokenBucket
from hcsim.runtime.host import Host, Service
from hcsim.transport.admission_queue import one_line

Dial: TypeAlias = Callable[[str, float, str], Awaitable[str]]
"""Call an address, with this timeout, to reach the node with this id (empty: any other one); return the id of the node
that answered."""

MOST_CANDIDATES = 64
"""The maximum number of announced addresses that are kept without an authenticated node."""
MOST_PER_NODE = 2
"""The maximum number of candidates that claim to be the same node."""
MOST_DIALS = 16
DIALS_PER_S = 4.0
"""The long-term rate of dials to candidates; after a quiet time, `DIAL_BURST` of them at once."""
DIAL_BURST = 64
CROWDED_TIMEOUT_S = 1.0
"""The timeout of a dial to a candidate while others wait for their turn."""
MOST_HOSTS = 8
"""The maximum number of hosts in one announced address; each may be dialled."""
MOST_HEARD = 64
"""Announced nodes that are remembered beside those that have proved who they are."""
MOST_LINES = 8
"""The maximum number of log lines of each kind that announcements can cause."""
_PAUSE_S = 0.25
_LABEL_BYTES = 63
"""The maximum length of a service's name, which is one DNS label."""
_NOT_IN_LABELS = re.compile(r"[.\x00-\x1f\x7f]")
_HOST = re.compile(r"[\w.:%-]+", re.ASCII)


class Announcement(msgspec.Struct, frozen=True):
    """A node's announcement on the local network."""

    node: str
    name: str
    namespace: str
    """Identifies the cluster; nodes ignore announcements of other clusters."""
    boot: int
    control: str
    is_coordinated: bool = False
    """Whether a coordinator decides for it: it answers status clients, and no other node."""

    def service(self) -> Service:
        # The record has no order of its own for a machine's addresses, so the best first is said here.
        properties = {"node": self.node, "namespace": self.namespace, "boot": f"{self.boot:x}", "at": self.control}
        if self.is_coordinated:
            properties["coordinated"] = "yes"
        end = f"-{self.node[:8]}"
        label = _NOT_IN_LABELS.sub("-", self.name).encode()[: _LABEL_BYTES - len(end)].decode(errors="ignore")
        return Service(label + end, self.control, properties)


def place_of(service: Service) -> str:
    """Return the address of an announced node: the one it states, best host first, or else that of its record.

    Any machine on the local network may have written the record, so an invalid address is neither called nor
    displayed."""
    said = service.properties.get("at", "")
    try:
        hosts, port = hosts_of(said)
    except ConfigError:
        hosts = ()
    if not hosts or not all(map(_HOST.fullmatch, hosts)):
        said = service.address
        hosts, port = hosts_of(said)
    return said if len(hosts) <= MOST_HOSTS else address_at(hosts[:MOST_HOSTS], port)


class Candidate(NamedTuple):
    """An announced address, and the node that is claimed to be there."""

    node: str
    address: str


class DialQueue:
    """A bounded set of candidates with a fair order of dialling."""

    def __init__(self, is_known: Callable[[str], bool]) -> None:
        self._is_known = is_known
        self._waits: dict[Candidate, bool] = {}
        """Whether a candidate waits to be dialled; otherwise it was dialled and waits for `renew`."""
        self._hosts: dict[Candidate, str] = {}
        """The first host of each candidate's address."""
        self._at: dict[str, dict[Candidate, None]] = {}
        self._turns: dict[str, int] = {}
        """The number of the dial at which a host was last dialled."""
        self._dialled = 0

    def __contains__(self, candidate: Candidate) -> bool:
        return candidate in self._waits

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(candidate.node for candidate in self._waits)

    @property
    def are_waiting(self) -> bool:
        return any(self._waits.values())

    def add(self, candidate: Candidate) -> bool:
        """Add a candidate; return False if there is no room for it."""
        if candidate in self._waits:
            return True
        same = [other for other in self._waits if other.node == candidate.node]
        if len(same) >= MOST_PER_NODE:
            self.remove(same[0])
        host = hosts_of(candidate.address)[0][0]
        if len(self._waits) >= MOST_CANDIDATES:
            if (least := self._least(candidate.node, host)) is None:
                return False
            self.remove(least)
        self._waits[candidate] = True
        self._hosts[candidate] = host
        self._at.setdefault(host, {})[candidate] = None
        return True

    def remove(self, candidate: Candidate) -> None:
        if self._waits.pop(candidate, None) is not None:
            host = self._hosts.pop(candidate)
            del self._at[host][candidate]
            if not self._at[host]:
                del self._at[host]
                self._turns.pop(host, None)

    def drop(self, node: str) -> None:
        for candidate in [each for each in self._waits if each.node == node]:
            self.remove(candidate)

    def renew(self) -> None:
        self._waits = dict.fromkeys(self._waits, True)

    def next(self, is_here: Callable[[str], bool]) -> Candidate | None:
        """Return the candidate to dial: claims to be a known node first, then the least recently dialled host."""
        waiting = [each for each, waits in self._waits.items() if waits and not is_here(each.node)]
        if not waiting:
            return None
        return min(waiting, key=lambda each: (not self._is_known(each.node), self._turns.get(self._hosts[each], 0)))

    def dialled(self, candidate: Candidate) -> None:
        self._dialled += 1
        self._waits[candidate] = False
        self._turns[self._hosts[candidate]] = self._dialled

    def _least(self, newcomer: str, host: str) -> Candidate | None:
        """Return the candidate to evict for a newcomer at that host: one of the host with the most candidates, if
        that has more."""
        most = max(self._at.values(), key=len)
        if len(most) > 1 + len(self._at.get(host, ())):
            return next((each for each in most if not self._is_known(each.node)), None)
        if self._is_known(newcomer):
            return next((each for each in self._waits if not self._is_known(each.node)), None)
        return None


class Discovery:
    """Keeps dialling the nodes that are expected and not connected."""

    def __init__(
        self,
        host: Host,
        config: Cluster,
        us: Announcement,
        dial: Dial,
        has: Callable[[str], bool],
        tell: Callable[[str], None],
    ) -> None:
        self._host = host
        self._config = config
        self._us = us
        self._dial = dial
        self._has = has
        self._tell = tell
        self._announced = False
        self._over = False
        self._wanted: dict[str, str] = {}
        """Known addresses, by node id, or by address while the id is unknown."""
        self._withdrawn: dict[str, None] = {}
        """Known nodes whose announcement was withdrawn; they are dialled nevertheless."""
        self._candidates = DialQueue(self._wanted.__contains__)
        self._trying: dict[Candidate, None] = {}
        self._allowance = TokenBucket(DIALS_PER_S, DIAL_BURST)
        self._pacing = False
        self._lines: dict[str, int] = {}
        self._foreign: dict[str, None] = {}
        self._heard: dict[str, None] = {}
        """The nodes of this cluster that are announced, as far as is claimed."""
        self._nodes: dict[str, str] = {}
        self._calling: dict[str, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._peers = tuple(with_port(peer, config.discovery_port) for peer in config.peers)

    @property
    def known(self) -> tuple[str, ...]:
        """Return the expected nodes: ids, and addresses where no node has answered yet."""
        wanted = [self._nodes.get(key, key) for key in self._wanted if key not in self._withdrawn]
        return tuple(dict.fromkeys((*wanted, *self._candidates.nodes)))

    @property
    def heard(self) -> tuple[str, ...] | None:
        """Return the nodes of this cluster whose announcements come here; None if nothing is listened for."""
        return tuple(self._heard) if self._announced else None

    async def run(self) -> None:
        for address in self._peers:
            if not _overlap(address, self._us.control):  # one list may serve all machines
                self.want(address, address)
        if self._config.discover is not False:
            await self._announce()
        while True:
            await self._host.clock.sleep(self._config.peer_timeout_s)
            if self._announced:  # whoever was cut off when we began has not heard of us
                await self._say_again()
            for key in list(self._wanted):
                self._call(key)
            self._candidates.renew()
            self._try_candidates()

    async def goodbye(self) -> None:
        """Stop looking for nodes, and withdraw the announcement."""
        self._over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._announced:
            await self._host.lan.withdraw(self._us.service().name)

    def want(self, key: str, address: str) -> None:
        """Add a known address: of an authenticated node, or of a peer whose id is not known yet."""
        self._wanted[key] = address
        self._withdrawn.pop(key, None)
        self._candidates.drop(key)
        self._call(key)

    def learn(self, node: str, address: str) -> None:
        """Record the address at which an authenticated node reaches another one; what that one states itself has
        precedence."""
        if node not in self._wanted:
            self.want(node, address)

    def forget(self, key: str) -> None:
        """Expect no node at this key any more."""
        if key not in self._peers:
            self._wanted.pop(key, None)
            self._withdrawn.pop(key, None)
            self._candidates.drop(key)

    async def _announce(self) -> None:
        """Announce this node. If that fails, only configured addresses and incoming connections remain."""
        service = self._us.service()
        try:
            name = await self._host.lan.advertise(service)
        except HcsimError as error:
            self._tell(f"not announced: {error}")
            if not self._peers:
                raise
        else:
            if name != service.name:
                self._tell(f"another machine announces itself as {service.name}: this one is announced as {name}")
            self._announced = True
            self._start(self._browse(), "browse")

    async def _say_again(self) -> None:
        try:
            await self._host.lan.advertise(self._us.service())
        except HcsimError as error:
            self._host.trace("not announced", str(error))

    async def _browse(self) -> None:
        async for sighting in self._host.lan.browse():
            properties = sighting.service.properties
            node = properties.get("node", "")
            if not node or node == self._us.node or "coordinated" in properties:
                continue
            if properties.get("namespace") != self._us.namespace:
                if not sighting.gone:
                    self._tell_foreign(node, properties.get("namespace", ""), sighting.service)
            elif sighting.gone:
                self._heard.pop(node, None)
                self._candidates.drop(node)
                if node in self._wanted:
                    self._withdrawn[node] = None
            else:
                if node in self._wanted or len(self._heard) < MOST_HEARD:  # anybody may announce anything
                    self._heard[node] = None
                self._consider(Candidate(node, place_of(sighting.service)))

    def _consider(self, candidate: Candidate) -> None:
        """Dial an announced address as soon as the bounds allow it."""
        if self._wanted.get(candidate.node) == candidate.address:
            self._withdrawn.pop(candidate.node, None)
            self._call(candidate.node)
        elif self._candidates.add(candidate):
            self._try_candidates()
        else:
            text = "more machines are announced on the local network than can be dialled: not all of them are tried"
            self._tell_some("left out", text, most=1)

    def _tell_foreign(self, node: str, namespace: str, service: Service) -> None:
        """Log a node of another cluster, once per machine: the user may be waiting for it."""
        if node not in self._foreign and len(self._foreign) < MOST_LINES:
            self._foreign[node] = None
            self._tell(
                f"{one_line(service.name, 80)}, a machine at {place_of(service)}, belongs to another cluster "
                f"({one_line(namespace, 8)}; this one is {self._us.namespace[:8]}): if it should take part here, "
                f"{OTHER_CLUSTER}"
            )

    def _tell_some(self, kind: str, text: str, most: int = MOST_LINES) -> None:
        """Log a message, unless announcements have caused enough lines of this kind."""
        if (lines := self._lines.get(kind, 0)) < most:
            self._lines[kind] = lines + 1
            last = lines + 1 == most > 1
            self._tell(f"{text} (further announced machines that do not answer are not named)" if last else text)

    def _try_candidates(self) -> None:
        while len(self._trying) < MOST_DIALS and not self._pacing and not self._over:
            candidate = self._candidates.next(self._has)
            if candidate is None:
                return
            if not self._allowance.take(self._host.clock.elapsed()):
                self._pacing = True
                self._start(self._pace(), "pace dials")
                return
            self._candidates.dialled(candidate)
            if candidate not in self._trying:
                self._trying[candidate] = None
                self._start(self._try(candidate), f"dial {candidate.address}")

    async def _pace(self) -> None:
        try:
            await self._host.clock.sleep(self._allowance.wait_s(self._host.clock.elapsed()))
        finally:
            self._pacing = False
        self._try_candidates()

    async def _try(self, candidate: Candidate) -> None:
        node, address = candidate
        failure: HcsimError | None = None
        try:
            for attempt in range(self._config.max_retries):
                known = self._wanted.get(node) == address
                if not (known or candidate in self._candidates) or self._has(node):
                    return
                crowded = self._candidates.are_waiting and not known
                timeout_s = self._config.connection_timeout_s
                try:
                    limit_s = min(timeout_s, CROWDED_TIMEOUT_S) if crowded else timeout_s
                    answered = await self._dial(address, limit_s, node)
                except WrongPeer as error:
                    self._candidates.remove(candidate)  # what was announced there is not there
                    self._host.trace("not reached", address, str(error))
                    return
                except HcsimError as error:
                    failure = error
                    self._host.trace("not reached", address, str(error))
                    if crowded:
                        break
                    await self._host.clock.sleep(min(_PAUSE_S * 2**attempt, self._config.peer_timeout_s))
                else:
                    self._candidates.remove(candidate)
                    if answered == node:  # else we ourselves, or somebody else than was announced there
                        self._nodes[node] = node
                        self._wanted.setdefault(node, address)
                    return
            if failure is not None and not isinstance(failure, AdmissionRefused):  # of that we have heard already
                self._tell_some("not reached", f"{address} was not reached: {failure}")
        finally:
            del self._trying[candidate]
            self._try_candidates()

    def _call(self, key: str) -> None:
        under_way = key in self._calling or Candidate(key, self._wanted[key]) in self._trying
        if not under_way and not self._here(key):
            self._calling[key] = None
            self._start(self._attempts(key), f"dial {self._wanted[key]}")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._host.spawn(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def _here(self, key: str) -> bool:
        return self._has(self._nodes.get(key, key))

    async def _attempts(self, key: str) -> None:
        failure: HcsimError | None = None
        try:
            for attempt in range(self._config.max_retries):
                if key not in self._wanted or self._here(key):
                    return
                try:
                    expected = "" if key in self._peers else key
                    node = await self._dial(self._wanted[key], self._config.connection_timeout_s, expected)
                    if node == self._us.node or (node != key and key not in self._peers):
                        self._wanted.pop(key, None)  # we ourselves, or somebody else than was announced there
                        return
                    self._nodes[key] = node
                except WrongPeer as error:
                    self._wanted.pop(key, None)
                    self._host.trace("not reached", key, str(error))
                    return
                except HcsimError as error:
                    failure = error
                    self._host.trace("not reached", self._wanted.get(key, key), str(error))
                    await self._host.clock.sleep(min(_PAUSE_S * 2**attempt, self._config.peer_timeout_s))
                else:
                    return
            if failure is not None and not isinstance(failure, AdmissionRefused):  # of that we have heard already
                self._tell(f"{self._wanted.get(key, key)} was not reached: {failure}")
        finally:
            del self._calling[key]


def _overlap(one: str, other: str) -> bool:
    """Return whether two addresses have a host and port in common."""
    hosts, port = hosts_of(one)
    others, other_port = hosts_of(other)
    return port == other_port and any(host in others for host in hosts)
