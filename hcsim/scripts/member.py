"""A script on a real cluster: this machine's rank, started once the requested number of members has joined.

The members discover each other as for a training. The most senior member decides which members take part,
numbers their ranks, and keeps the store. Members that join later are told that they are too late. The script's
groups live in its own process. Their connections are those of members: TLS, with proof of the cluster's secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from hcsim.cluster.membership_source import next_view
from hcsim.cluster.node import ClusterNode
from hcsim.cluster.view import Member, View
from hcsim.config import Cluster
from hcsim.errors import ConfigError, HcsimError
from hcsim.launch.real import RealNode, real_introduction, real_member
from hcsim.node import admitted, running
from hcsim.runtime.address import hosts_of
from hcsim.runtime.channel import Listener
from hcsim.runtime.host import Host
from hcsim.scripts.environment import environment
from hcsim.scripts.ipc import (
    FAILURES,
    STORE_REQUESTS,
    IpcClosed,
    IpcConnection,
    RankFailed,
    SimulatorReply,
    Stored,
    ended_how,
    failure_of,
)
from hcsim.scripts.processes import end_of, lost
from hcsim.scripts.store import LINGER_S, StoreClient, StoreService
from hcsim.telemetry.history import RunHistory
from hcsim.transport.admission_queue import one_line

_BEGUN = "hcsim/begun"
_FAILED = "hcsim/failed"
_BEGIN_S = 60.0
_GRACE_S = 5.0


class ScriptSpec(msgspec.Struct, frozen=True):
    """The script to run, the same on all machines."""

    path: str
    arguments: tuple[str, ...]
    sha256: str

    @classmethod
    def read(cls, path: Path, arguments: Sequence[str]) -> ScriptSpec:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: the script cannot be read: {error.strerror}") from None
        return cls(str(path.resolve()), tuple(arguments), hashlib.sha256(data).hexdigest())


class ScriptExit(msgspec.Struct, frozen=True):
    """How this rank's script ended."""

    rank: int
    world: int
    code: int
    """The exit status, or the negated number of the signal that ended it."""


async def run_in_cluster(
    here: RealNode,
    cluster: Cluster,
    script: ScriptSpec,
    *,
    tell: Callable[[str], None] = lambda what: None,
    leaving: asyncio.Event | None = None,
) -> ScriptExit:
    """Find the other machines, run this rank of the script, and leave when it ends, or earlier once `leaving`
    is set."""
    if cluster.coordinator is not None:
        raise ConfigError("coordinator is for training: the machines of a script find each other; leave it out")
    async with real_member(here, tell) as (host, credentials):
        me = real_introduction(host, here, cluster, credentials)
        history = RunHistory(Path(script.path).name)

        def say(text: str) -> None:
            history.say(host.clock.elapsed(), one_line(text))
            tell(text)

        inside = admitted(host, credentials, say)
        node = ClusterNode(
            inside,
            me,
            cluster,
            say,
            {"the script": f"with SHA-256 {script.sha256[:12]}…"},
            credentials.trusted,
            history,
        )
        door = await inside.listen(me.address)  # before anybody counts on us: the port may be taken
        async with running(node):
            view = await next_view(inside, node, -1, leaving)
            if view is None:
                raise HcsimError("left before the script began")
            async with _meeting(inside, node, view, door) as store:
                members = await _begin(store, node, view, say)
                us = members.index(node.us)
                found = _found(here, view, us, members)
                losing = lost(inside, node, view, members, store)
                code = await _run([script.path, *script.arguments], found, store, losing, leaving)
                await _end(store, us, len(members), code)
            await node.leave()
            return ScriptExit(us, len(members), code)


@asynccontextmanager
async def _meeting(host: Host, node: ClusterNode, view: View, door: Listener) -> AsyncIterator[StoreClient]:
    """Connect to the store; the most senior member serves it on its listener."""
    if view.leader.node == node.us.node:
        host.spawn(StoreService().serve(host, door), name="store")
    else:
        await door.close()
    store = StoreClient(host, view.leader.name, view.leader.address)
    try:
        yield store
    finally:
        await store.close()


async def _begin(store: StoreClient, node: ClusterNode, view: View, tell: Callable[[str], None]) -> list[Member]:
    """Return the members that take part, by rank, as the most senior member has decided."""
    if view.leader.node == node.us.node:
        decided = msgspec.json.encode(view.members)
        await store.do(Stored("set", (_BEGUN,), (decided,), timeout_s=_BEGIN_S))
    reply = await store.do(Stored("get", (_BEGUN,), timeout_s=_BEGIN_S))
    members = msgspec.json.decode(reply.values[0], type=list[Member])
    names = ", ".join(member.name for member in members)
    if node.us not in members:
        raise HcsimError(f"the script has begun without this machine, on {names}: start it again on all of them")
    tell(f"the script begins on {names}; this machine is rank {members.index(node.us)}")
    return members


def _found(here: RealNode, view: View, rank: int, members: Sequence[Member]) -> dict[str, str]:
    first = hosts_of(view.leader.address)[0][0]
    cluster = {
        "HCSIM_CLUSTER": here.cluster,
        "HCSIM_HOME": str(here.home),
        "HCSIM_ADDRESSES": ",".join(hosts_of(members[rank].address)[0]),
        "HCSIM_RANK_NAMES": "\n".join(member.name for member in members),
    }
    return {**os.environ, **environment(rank, len(members), first, 1), **cluster}


async def _run(
    script: Sequence[str],
    found: dict[str, str],
    store: StoreClient,
    losing: Coroutine[Any, Any, RankFailed],
    leaving: asyncio.Event | None,
) -> int:
    """Run the script to its end and return its exit status. Meanwhile serve its store requests and watch for
    failures of other ranks."""
    ours, theirs = socket.socketpair()
    news, to_them = socket.socketpair()
    with theirs, to_them:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hcsim.scripts.rank.member", str(theirs.fileno()), str(to_them.fileno()), *script,
            pass_fds=[theirs.fileno(), to_them.fileno()], env=found,
            start_new_session=True,  # an interrupt is for us, and we pass it on
        )  # fmt: skip
    told = IpcConnection(news, FAILURES)
    beside = [
        asyncio.ensure_future(_tell_failure(store, told)),
        asyncio.ensure_future(_tell_loss(losing, store, told)),
        asyncio.ensure_future(_attend(IpcConnection(ours, STORE_REQUESTS), store)),
    ]
    passing_on = asyncio.ensure_future(_interrupt(process, leaving)) if leaving is not None else None
    try:
        return await process.wait()
    finally:
        if passing_on is not None:
            passing_on.cancel()
        _signal(process, signal.SIGKILL)  # and all that it started
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


async def _tell_failure(store: StoreClient, news: IpcConnection[RankFailed]) -> None:
    """Notify the script of the first failure of a script on any machine."""
    try:
        word = (await store.do(Stored("get", (_FAILED,)))).values[0]
    except HcsimError as error:
        store.hurry(str(error), LINGER_S)
        return
    failed = FAILURES.decode(word, "the store")
    store.hurry(failed.reason, LINGER_S)
    with suppress(IpcClosed):
        news.send(failed)


async def _tell_loss(losing: Awaitable[RankFailed], store: StoreClient, news: IpcConnection[RankFailed]) -> None:
    """Notify the script, and the other ranks, of the first machine that is lost. With the machine of rank 0 the
    store is lost too."""
    failed = await losing
    store.hurry(failed.reason, LINGER_S if failed.rank else 0.0)
    with suppress(IpcClosed):
        news.send(failed)
    with suppress(HcsimError):
        await _set_failed(store, failed)


async def _set_failed(store: StoreClient, failed: RankFailed) -> None:
    """Publish the failure to all ranks, if it is the first."""
    word = FAILURES.encode(failed)
    await store.do(Stored("compare_set", (_FAILED,), (b"", word), timeout_s=_GRACE_S))


async def _attend(connection: IpcConnection[Stored], store: StoreClient) -> None:
    while True:
        try:
            asked = await asyncio.to_thread(connection.receive)
        except IpcClosed:
            return
        try:
            reply = await store.do(asked)
            answer = SimulatorReply(0.0, 0.0, number=reply.number, values=reply.values)
        except HcsimError as error:
            answer = SimulatorReply(0.0, 0.0, failure=failure_of(error))
        with suppress(IpcClosed):
            connection.send(answer)


async def _interrupt(process: asyncio.subprocess.Process, leaving: asyncio.Event) -> None:
    await leaving.wait()
    _signal(process, signal.SIGINT)
    await asyncio.sleep(_GRACE_S)
    _signal(process, signal.SIGKILL)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _end(store: StoreClient, rank: int, world: int, code: int) -> None:
    """Publish that this rank has ended, and its exit status. The member that keeps the store waits for the
    others to do so."""
    with suppress(HcsimError):
        if code:
            await _set_failed(store, RankFailed(rank, f"the script of rank {rank} failed: it {ended_how(code)}"))
        await store.do(Stored("set", (end_of(rank),), (b"",), timeout_s=_GRACE_S))
        if rank == 0:
            others = tuple(end_of(other) for other in range(1, world))
            await store.do(Stored("wait", others, timeout_s=LINGER_S))
