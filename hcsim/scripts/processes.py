"""The ranks' processes, as the simulator sees them, and the failure watch of a real cluster.

All processes are children of one fork server (see `fork_server`), which ends them when the simulator's process
is gone, for whatever reason.

On a real cluster the view tells which machines are lost while a script runs on them. Not every end of a view is
a loss to the script: a view also ends when a newcomer is lost or was started with another configuration, and it
changes when a member joins, or leaves after its script has ended.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from hcsim.cluster.messages import StatusReply, StatusRequest
from hcsim.cluster.node import GONE, ClusterNode
from hcsim.cluster.view import Member, View
from hcsim.errors import HcsimError
from hcsim.real.process import raise_descriptors
from hcsim.runtime.host import Host
from hcsim.scripts.environment import RankSpec
from hcsim.scripts.fork_server import REPLIES, START_METHOD, EndRequest, ForkRequest, StartMethod
from hcsim.scripts.ipc import (
    MESSAGES,
    IpcClosed,
    IpcConnection,
    RankFailed,
    RankMessage,
    SharedMemoryMap,
    Stored,
    shared_file,
)
from hcsim.scripts.store import StoreClient
from hcsim.workers import ONE_THREAD

_LOOK_S = 1.0
_ASK_S = 5.0


def end_of(rank: int) -> str:
    """Return the key that a rank sets when its script has ended, with or without an error."""
    return f"hcsim/ended/{rank}"


async def lost(host: Host, node: ClusterNode, view: View, members: Sequence[Member], store: StoreClient) -> RankFailed:
    """Wait until a member is lost before its script has ended. Return its rank and the reason."""
    ended: dict[int, None] = {}
    host.spawn(_note_end(store, ended), name="end of rank 0")
    while True:
        await host.clock.sleep(_LOOK_S)
        if not node.over(view.epoch).done() and not node.superseded(view.epoch):
            continue
        told = node.asked(StatusRequest())
        for rank, member in enumerate(members):
            why = _missing(member, told)
            if why and rank not in ended:
                has_ended = rank != 0 and await _has_ended(store, rank)
                if has_ended is None and 0 in ended:  # the store has gone with rank 0, and nobody could say so there
                    has_ended = why == GONE
                if not has_ended:
                    return RankFailed(rank, f"rank {rank} ({member.name}) was lost: {why}")
                ended[rank] = None


async def _note_end(store: StoreClient, ended: dict[int, None]) -> None:
    """Record the end of rank 0, which is announced before the store goes away with it."""
    with suppress(HcsimError):
        await store.do(Stored("wait", (end_of(0),)))
        ended[0] = None


async def _has_ended(store: StoreClient, rank: int) -> bool | None:
    """Return whether the rank has ended; None if the store does not answer."""
    try:
        return bool((await store.do(Stored("check", (end_of(rank),), timeout_s=_ASK_S))).number)
    except HcsimError:
        return None


def _missing(member: Member, told: StatusReply) -> str:
    """Return why a member cannot be reached in the incarnation that the script began with; empty if it can."""
    if member.node == told.status.us.node:
        return ""
    newest = told.view.member(member.node)
    if newest is not None and newest.boot != member.boot:
        return "it was started anew"
    links = {link.node: link.suspected for link in told.links}
    return links.get(member.node, "there is no connection to it")


class RankProcess:
    """One rank's process, with its socket and shared memory."""

    def __init__(self, pid: int, connection: IpcConnection[RankMessage], arena: SharedMemoryMap) -> None:
        self.pid = pid
        self.connection = connection
        self.arena = arena


class RankProcesses:
    """All ranks' processes."""

    def __init__(self, method: StartMethod = START_METHOD) -> None:
        raise_descriptors()  # each rank takes two
        ours, theirs = socket.socketpair()
        with theirs:
            self._fork_server = subprocess.Popen(
                [sys.executable, "-m", "hcsim.scripts.fork_server", str(theirs.fileno()), method],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # The order in which several threads of a rank would add up is not deterministic.
                env={"PYTHONHASHSEED": "0", **os.environ, **ONE_THREAD},
                start_new_session=True,  # an interrupt is for us, and we end them
            )
        self._connection = IpcConnection(ours, REPLIES)
        self._living: dict[int, RankProcess] = {}

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in tuple(self._living.values()):
            self.end(process, at_once=True)
        self._connection.close()
        self._fork_server.wait()

    def start(self, spec: RankSpec) -> RankProcess:
        ours, theirs = socket.socketpair()
        arena = shared_file()
        try:
            with theirs:
                pid = self._ask(ForkRequest(spec), (theirs.fileno(), arena))
        except BaseException:
            ours.close()
            os.close(arena)
            raise
        process = self._living[pid] = RankProcess(pid, IpcConnection(ours, MESSAGES), SharedMemoryMap(arena))
        return process

    def end(self, process: RankProcess, *, at_once: bool) -> int:
        """End the process, unless it has exited, and all processes that it started. Return the exit status, or the
        negated number of the signal."""
        if self._living.pop(process.pid, None) is None:
            return 0
        process.connection.close()
        process.arena.close()
        try:
            return self._ask(EndRequest(process.pid, at_once))
        except HcsimError:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            return -signal.SIGKILL

    def _ask(self, what: ForkRequest | EndRequest, descriptors: tuple[int, ...] = ()) -> int:
        try:
            return self._connection.ask(what, descriptors)
        except IpcClosed:
            raise HcsimError("the process that starts the ranks has ended: look above for its reason") from None
