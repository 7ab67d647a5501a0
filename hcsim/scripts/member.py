"""A script on a real cluster: this machine's rank of it, once as many members are there as were asked for.

The members find each other as for a training. The most senior one says who takes part, in the order of their ranks, and
keeps the store; whoever comes later is told that it is too late. The script's own groups are in its process, and their
connections are those of members: TLS, and proof of the cluster's secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec

from hcsim.cluster.conductor import next_view
from hcsim.cluster.node import Node
from hcsim.cluster.view import View
from hcsim.config import Cluster
from hcsim.errors import ConfigError, DeadlineExceeded, HcsimError
from hcsim.launch import RealNode, real_introduction, real_member
from hcsim.node import admitted, running
from hcsim.runtime.address import hosts_of
from hcsim.runtime.host import Host
from hcsim.scripts.conversation import Answer, Conversation, Failed, HungUp, Stored
from hcsim.scripts.environment import environment
from hcsim.scripts.failures import ended_how, failure_of
from hcsim.scripts.store import Reply, StoreLine, StoreService

_BEGUN = "hcsim/begun"
_ENDED = "hcsim/ended"
_FAILED = "hcsim/failed"
_BEGIN_S = 60.0
_LINGER_S = 30.0
"""How long the store outlives its own machine's script, for those that are slower; and how long a rank waits there
for the others once a script has failed: who has failed sets no more keys."""
_GRACE_S = 5.0


class Script(msgspec.Struct, frozen=True):
    """What is run, the same on all machines."""

    path: str
    arguments: tuple[str, ...]
    sha256: str

    @classmethod
    def read(cls, path: Path, arguments: Sequence[str]) -> Script:
        """The script in that file."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: the script cannot be read: {error.strerror}") from None
        return cls(str(path.resolve()), tuple(arguments), hashlib.sha256(data).hexdigest())


class Ended(msgspec.Struct, frozen=True):
    """How our rank's script came to its end."""

    rank: int
    world: int
    code: int
    """Its exit status, or minus the signal that ended it."""


async def run_in_cluster(
    here: RealNode,
    cluster: Cluster,
    script: Script,
    *,
    tell: Callable[[str], None] = lambda what: None,
    leaving: asyncio.Event | None = None,
) -> Ended:
    """Find the other machines, run our rank of the script, and leave when it ends, or ends early with `leaving`."""
    async with real_member(here, tell) as (host, credentials):
        me = real_introduction(host, here, cluster, credentials)
        inside = admitted(host, credentials, tell)
        node = Node(inside, me, cluster, tell, {"the script": f"with SHA-256 {script.sha256[:12]}…"})
        async with running(node):
            view = await next_view(inside, node, -1, leaving)
            if view is None:
                raise HcsimError("left before the script began")
            async with _meeting(inside, node, view) as store:
                members = await _begin(store, node, view, tell)
                us = members.index(node.us.node)
                found = _found(here, view, us, len(members), hosts_of(node.us.address)[0])
                code = await _run([script.path, *script.arguments], found, store, leaving)
                await _end(store, us, len(members), code)
            await node.leave()
            return Ended(us, len(members), code)


@asynccontextmanager
async def _meeting(host: Host, node: Node, view: View) -> AsyncIterator[StoreLine]:
    """Our way to the store; the most senior member keeps it."""
    if view.leader.node == node.us.node:
        host.spawn(StoreService().serve(host, view.leader.address), name="store")
    store = StoreLine(host, view.leader.name, view.leader.address)
    try:
        yield store
    finally:
        await store.close()


async def _begin(store: StoreLine, node: Node, view: View, tell: Callable[[str], None]) -> list[str]:
    """Who takes part, by rank, as the most senior member has decided."""
    if view.leader.node == node.us.node:
        decided = msgspec.json.encode([[member.node, member.name] for member in view.members])
        await store.do(Stored("set", (_BEGUN,), (decided,), timeout_s=_BEGIN_S))
    reply = await store.do(Stored("get", (_BEGUN,), timeout_s=_BEGIN_S))
    members: list[list[str]] = msgspec.json.decode(reply.values[0])
    nodes, names = [node for node, _ in members], ", ".join(name for _, name in members)
    if node.us.node not in nodes:
        raise HcsimError(f"the script has begun without this machine, on {names}: start it again on all of them")
    tell(f"the script begins on {names}; this machine is rank {nodes.index(node.us.node)}")
    return nodes


def _found(here: RealNode, view: View, rank: int, world: int, ours: Sequence[str]) -> dict[str, str]:
    """The script's environment."""
    first = hosts_of(view.leader.address)[0][0]
    cluster = {"HCSIM_CLUSTER": here.cluster, "HCSIM_HOME": str(here.home), "HCSIM_ADDRESSES": ",".join(ours)}
    return {**os.environ, **environment(rank, world, first, 1), **cluster}


async def _run(script: Sequence[str], found: dict[str, str], store: StoreLine, leaving: asyncio.Event | None) -> int:
    """Run it to its end, and see to its store meanwhile; its exit status."""
    ours, theirs = socket.socketpair()
    news, to_them = socket.socketpair()
    with theirs, to_them:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hcsim.scripts.rank.member", str(theirs.fileno()), str(to_them.fileno()), *script,
            pass_fds=[theirs.fileno(), to_them.fileno()], env=found,
            start_new_session=True,  # an interrupt is for us, and we pass it on
        )  # fmt: skip
    failure = asyncio.ensure_future(_failure(store, Conversation(news, Failed)))
    attending = asyncio.ensure_future(_attend(Conversation(ours, Stored), store, failure))
    passing_on = asyncio.ensure_future(_interrupt(process, leaving)) if leaving is not None else None
    try:
        return await process.wait()
    finally:
        if passing_on is not None:
            passing_on.cancel()
        _signal(process, signal.SIGKILL)  # and all that it started
        attending.cancel()
        failure.cancel()
        await asyncio.gather(attending, failure, return_exceptions=True)


async def _failure(store: StoreLine, news: Conversation) -> str:
    """The first failure of a script on any machine, of which ours is told."""
    failed = msgspec.msgpack.decode((await store.do(Stored("get", (_FAILED,)))).values[0], type=Failed)
    with suppress(HungUp):
        news.say(failed)
    return failed.reason


async def _attend(conversation: Conversation, store: StoreLine, failure: asyncio.Task[str]) -> None:
    while True:
        try:
            asked = await asyncio.to_thread(conversation.hear)
        except HungUp:
            return
        try:
            reply = await _done(asked, store, failure)
            answer = Answer(0.0, 0.0, number=reply.number, values=reply.values)
        except HcsimError as error:
            answer = Answer(0.0, 0.0, failure=failure_of(error))
        with suppress(HungUp):
            conversation.say(answer)


async def _done(asked: Stored, store: StoreLine, failure: asyncio.Task[str]) -> Reply:
    """What comes of it; it takes not much longer once a script has failed."""
    try:
        async with asyncio.timeout(None) as limit:

            def hurry(_: asyncio.Task[str]) -> None:
                limit.reschedule(asyncio.get_running_loop().time() + _LINGER_S)

            failure.add_done_callback(hurry)
            try:
                return await store.do(asked)
            finally:
                failure.remove_done_callback(hurry)
    except TimeoutError:
        what = f"{asked.operation} of {', '.join(asked.keys)}"
        raise HcsimError(f"{what}: {failure.result()}") from None


async def _interrupt(process: asyncio.subprocess.Process, leaving: asyncio.Event) -> None:
    await leaving.wait()
    _signal(process, signal.SIGINT)
    await asyncio.sleep(_GRACE_S)
    _signal(process, signal.SIGKILL)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _end(store: StoreLine, rank: int, world: int, code: int) -> None:
    """Say that we are done, and how; who keeps the store waits for the others to say so."""
    with suppress(HcsimError, DeadlineExceeded):
        if code:
            failed = Failed(rank, f"the script of rank {rank} failed: it {ended_how(code)}")
            word = msgspec.msgpack.encode(failed)
            await store.do(Stored("compare_set", (_FAILED,), (b"", word), timeout_s=_GRACE_S))
        done = (await store.do(Stored("add", (f"{_ENDED}/count",), amount=1, timeout_s=_GRACE_S))).number
        if done == world:
            await store.do(Stored("set", (_ENDED,), (b"",), timeout_s=_GRACE_S))
        if rank == 0:
            await store.do(Stored("wait", (_ENDED,), timeout_s=_LINGER_S))
