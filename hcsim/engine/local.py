"""Groups in this process on the real network. An event loop runs in a thread of its own; the program's threads
submit calls to it.
"""

from __future__ import annotations

import asyncio
import atexit
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import msgspec

from hcsim.calls import GroupCall, begin, outcome
from hcsim.collectives.buffers import Array
from hcsim.collectives.group import Group
from hcsim.collectives.naming import naming
from hcsim.collectives.select import Options
from hcsim.engine import GroupSpec, RendezvousStore
from hcsim.errors import CollectiveError, ConfigError, DeadlineExceeded, UsageError
from hcsim.identity.handshake import Credentials
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.interfaces import host_name, list_interfaces, reachable_at
from hcsim.real.keys import beside_a_node, default_home, load_credentials
from hcsim.real.process import at_work
from hcsim.real.tls import ClusterTls
from hcsim.runtime.address import address_at
from hcsim.runtime.channel import Listener
from hcsim.runtime.host import Host
from hcsim.transport.admission import AdmittedHost
from hcsim.transport.groups import GroupMembership, Wire

T = TypeVar("T")
CLUSTER = "HCSIM_CLUSTER"
ADDRESSES = "HCSIM_ADDRESSES"
INSECURE = "HCSIM_INSECURE"
NAMES = "HCSIM_RANK_NAMES"
"""The machines of all ranks in their order, a line each."""
_LEAVE_S = 5.0
_WATCH_S = 2.0
"""Interval of the check for ranks that wait for each other in different collectives. torch's own timeout is
half an hour."""


class NetworkSettings(msgspec.Struct, frozen=True):
    """Network settings of a process, by which the ranks of a program reach each other. They are decided before
    its first group."""

    hosts: tuple[str, ...]
    """Hosts at which peers reach this process, the best first."""
    proved: Credentials | None = None
    """Credentials that prove this process's membership of a cluster."""
    insecure: bool = False
    names: tuple[str, ...] = ()
    """Of the machines of the program's ranks, if they are known."""


def network_settings(
    environment: Mapping[str, str], ours: Sequence[str] = (), others: Sequence[str] = ()
) -> NetworkSettings:
    """Return the settings from the variables that torchrun and the user set. If the hosts of all ranks are known,
    `ours` are this process's and `others` those of its peers."""
    name = environment.get(CLUSTER, "")
    insecure = environment.get(INSECURE, "") not in ("", "0")
    given = tuple(ours or filter(None, environment.get(ADDRESSES, "").split(",")))
    hosts = given or (("127.0.0.1",) if _all_here(environment) else reachable_at(list_interfaces()))
    if name:
        # Several ranks may run on this machine, and its own node beside them.
        names = tuple(filter(None, environment.get(NAMES, "").split("\n")))
        proved = beside_a_node(load_credentials(default_home(), name, host_name()))
        return NetworkSettings(hosts, proved, insecure, names)
    reached = tuple(dict.fromkeys((*hosts, *others)))
    if not insecure and not all(_is_loopback(host) for host in reached):
        raise ConfigError(
            f"the ranks of this program are on several machines ({', '.join(reached)}), and nothing protects what they"
            f" send: set {CLUSTER} to a cluster that all of them have joined (hcsim cluster create), or {INSECURE}=1"
            " where you trust everybody on the network"
        )
    return NetworkSettings(hosts, None, insecure)


def _all_here(environment: Mapping[str, str]) -> bool:
    """Return whether all ranks are on this machine, according to torchrun's variables or else the rendezvous
    address."""
    world = environment.get("WORLD_SIZE")
    if world is not None and world == environment.get("LOCAL_WORLD_SIZE"):
        return True
    if "LOCAL_WORLD_SIZE" in environment:
        return False
    return _is_loopback(environment.get("MASTER_ADDR", "localhost"))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host if ":" in host else socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


class LocalCall:
    """A call in flight in the event loop's thread."""

    __slots__ = ("_acts", "_error", "_guard", "_outcome", "_over")

    def __init__(self) -> None:
        self._over = threading.Lock()
        self._over.acquire()
        self._guard = threading.Lock()
        self._acts: list[Callable[[], None]] | None = []
        self._error: BaseException | None = None
        self._outcome = 0

    def done(self) -> bool:
        return self._acts is None

    def wait(self, timeout_s: float | None) -> int:
        if not self._over.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise DeadlineExceeded(f"the call was not over after {timeout_s:g} s; it goes on")
        self._over.release()
        if self._error is not None:
            raise self._error
        return self._outcome

    def on_done(self, act: Callable[[], None]) -> None:
        """See `PendingCall.on_done`. The callback runs in the loop's thread or the caller's."""
        with self._guard:
            if self._acts is not None:
                self._acts.append(act)
                return
        act()

    def finish(self, outcome: int, error: BaseException | None = None) -> None:
        self._outcome, self._error = outcome, error
        with self._guard:
            acts, self._acts = self._acts or [], None
        self._over.release()
        for act in acts:
            act()


class LocalGroup:
    """This rank's side of a group."""

    def __init__(
        self, engine: LocalEngine, group: Group, *, whole: LocalGroup | None = None, counted: Sequence[int] = ()
    ) -> None:
        """`whole` is the parent group's line, with which a subgroup ends. `counted` translates the ranks in the
        group's errors to the program's, if they differ."""
        self._engine = engine
        self._group = group
        self._part = whole is not None
        self._counted = counted
        self._under_way = 0
        self._given: dict[asyncio.Task[Any], None] = {} if whole is None else whole._given
        """Tasks in flight, in this group or a subgroup, that peers wait for: all but receives."""
        self.rank = group.rank
        self.size = group.size

    def start(self, call: GroupCall, arrays: Sequence[Array]) -> LocalCall:
        pending = LocalCall()
        self._engine.hand_over(self._begin, call, arrays, pending)
        return pending

    def subgroup(self, ranks: Sequence[int]) -> LocalGroup:
        async def make() -> Group:
            return self._group.subgroup(ranks)

        return LocalGroup(self._engine, self._engine.run(make()), whole=self)

    def close(self) -> None:
        """See `EngineGroup.close`. Sends that no peer receives are dropped after the group's timeout."""
        if not self._part:
            if not self._engine.forked:
                self._engine.run(self._flush())
            self._engine.close(self._group)

    async def _flush(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._group.options.timeout_s):
                await asyncio.gather(*self._given, return_exceptions=True)

    def abort(self) -> None:
        """See `EngineGroup.abort`. Without calls in flight, peers see a graceful close."""
        if not self._engine.forked:
            self._engine.run(self._give_up())
        if not self._part:
            self._engine.close(self._group)

    async def _give_up(self) -> None:
        if self._under_way:
            self._group.fail("the program destroyed the process group while calls were under way")

    def _begin(self, call: GroupCall, arrays: Sequence[Array], pending: LocalCall) -> None:
        """Start the call, in the loop's thread. The operation's own task is used as it is: a wrapper task would
        only cost time."""
        try:
            task = begin(self._group, call, arrays)
        except Exception as error:
            pending.finish(0, error)
            return
        self._under_way += 1
        if call.operation != "recv":
            self._given[task] = None

        def ended(task: asyncio.Task[Any]) -> None:
            self._under_way -= 1
            self._given.pop(task, None)
            if task.cancelled():
                pending.finish(0, CollectiveError("the process group was shut down"))
            elif (error := task.exception()) is not None:
                pending.finish(0, self._engine.named(_recounted(error, self._counted)))
            else:
                pending.finish(outcome(call, task.result()))

        task.add_done_callback(ended)


class LocalEngine:
    """This process as a host."""

    def __init__(self, settings: NetworkSettings) -> None:
        self._settings = settings
        self.forked = False
        """Whether this is a forked child of the engine's process: the thread and the groups exist only in the
        parent."""
        self._groups: list[Group] = []
        self._failed: tuple[int, int, str] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hcsim", daemon=True)
        self._thread.start()
        self._work = ExitStack()
        try:
            self._work.enter_context(at_work())
            self._host = self.run(self._make_host())
        except BaseException:
            self._work.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            raise
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._stay_behind)

    def open(self, place: GroupSpec, store: RendezvousStore) -> LocalGroup:
        if isinstance(place.parent, LocalGroup):
            return place.parent.subgroup(place.ranks)
        listener = self.run(self._host.listen(address_at(self._settings.hosts, 0)))
        port = listener.address.rpartition(":")[2]
        return self._join(place, _meet(place, store, address_at(self._settings.hosts, int(port))), listener)

    def open_at(self, place: GroupSpec, addresses: tuple[str, ...]) -> LocalGroup:
        """Join a group whose addresses are known, by rank."""
        return self._join(place, addresses, self.run(self._host.listen(addresses[place.rank])))

    def _join(self, place: GroupSpec, addresses: tuple[str, ...], listener: Listener) -> LocalGroup:
        # A rank may call late, as long as the group's own time allows: ranks open links when they first need them.
        us = GroupMembership(place.rank, addresses, name=place.name, wire=Wire(connect_timeout_s=place.timeout_s))
        options = Options(timeout_s=place.timeout_s, watch_s=_WATCH_S)
        group = self.run(Group.open(self._host, us, options, listener))
        self._groups.append(group)
        self.hand_over(self._fail_groups)
        return LocalGroup(self, group, counted=place.ranks)

    def named(self, error: BaseException) -> BaseException:
        """Return the error with the machines' names, if these and the program's ranks are in it."""
        if not isinstance(error, CollectiveError) or isinstance(error.__cause__, CollectiveError):
            return error
        return naming(error, self._settings.names)

    def close(self, group: Group) -> None:
        """Leave a group that was opened here; idempotent."""
        if not self.forked:
            self.run(group.close())
        if group in self._groups:
            self._groups.remove(group)

    def peer_failed(self, rank: int, world: int, reason: str) -> None:
        """Handle the failure of a rank of the program: fail the groups of all ranks, also those opened later."""
        self._failed = rank, world, reason
        self.hand_over(self._fail_groups)

    def _fail_groups(self) -> None:
        if self._failed is not None:
            rank, world, reason = self._failed
            for group in self._groups:
                if group.size == world:  # who has made a smaller one has done so without that rank
                    group.fail(reason, rank)

    def hand_over(self, act: Callable[..., object], *args: object) -> None:
        """Schedule a function in the loop's thread, in the order of these calls."""
        if self.forked:
            raise UsageError(
                "this process group is the parent's: the process was forked after the group was made; make one here"
            )
        self._loop.call_soon_threadsafe(act, *args)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run the coroutine in the loop's thread, and wait for its result."""
        running: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return running.result(timeout_s)

    async def _make_host(self) -> Host:
        way = self._settings
        proved = way.proved
        tls = None if proved is None else ClusterTls(proved.key, proved.secret)
        host = RealHost(RealOptions(f"process {os.getpid()}", tls=tls, insecure=way.insecure))
        self._real = host
        return host if proved is None else AdmittedHost(host, proved)

    def _stay_behind(self) -> None:
        self.forked = True
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """Leave at the program's exit; flush what was sent."""
        with suppress(TimeoutError), self._work:
            self.run(self._end(), _LEAVE_S)
        self.hand_over(self._loop.stop)

    async def _end(self) -> None:
        for group in self._groups:
            await group.close()
        await self._real.close()


def _recounted(error: BaseException, counted: Sequence[int]) -> BaseException:
    """Return the error with its rank translated to the program's numbering."""
    if not isinstance(error, CollectiveError) or list(counted) == list(range(len(counted))):
        return error
    text = f"{error} (as this group counts: its ranks are {', '.join(map(str, counted))} of the program)"
    peer = None if error.peer is None else counted[error.peer]
    again = type(error)(text, peer=peer, phase=error.phase)
    again.__cause__ = error
    return again


def _meet(place: GroupSpec, store: RendezvousStore, ours: str) -> tuple[str, ...]:
    """Exchange addresses through the store; return them by rank. The last rank deletes the keys, for a later
    group that uses the same store."""
    keys = [f"hcsim/{rank}" for rank in range(place.size)]
    store.set(keys[place.rank], ours)
    addresses = tuple(store.get(key).decode() for key in keys)
    if store.add("hcsim/met", 1) == place.size:
        for key in (*keys, "hcsim/met"):
            store.delete_key(key)
    return addresses


_engines: dict[int, LocalEngine] = {}


def local_engine(ours: Sequence[str] = (), others: Sequence[str] = ()) -> LocalEngine:
    """Return this process's engine; a forked child gets its own.

    The first call may say at which hosts the other ranks reach this process, and at which it reaches them, in place of
    the environment."""
    process = os.getpid()
    if process not in _engines:
        _engines[process] = LocalEngine(network_settings(os.environ, ours, others))
    return _engines[process]
