"""`python -m hcsim.scripts.rank.member CONVERSATION NEWS SCRIPT ARGUMENTS`: a rank on a real cluster."""

from __future__ import annotations

import os
import queue
import runpy
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from hcsim.engine import use_store
from hcsim.engine.local import local_engine
from hcsim.scripts.ipc import ANSWERS, FAILURES, IpcClosed, IpcConnection, RankFailed, SimulatorReply, Stored
from hcsim.scripts.rank.imports import answer_mlx
from hcsim.scripts.rank.rendezvous import RemoteStore, install_store


class MemberProcess:
    """The parent process, which has joined the cluster and serves or reaches the store. This process ends with
    it."""

    def __init__(self, connection: IpcConnection[SimulatorReply]) -> None:
        self._connection = connection
        self._turn = threading.Lock()
        self._answers: queue.SimpleQueue[SimulatorReply] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="hcsim member", daemon=True).start()

    def ask(self, message: Stored) -> SimulatorReply:
        with self._turn:
            with suppress(IpcClosed):  # the listener hears of that
                self._connection.send(message)
            return self._answers.get()

    def _listen(self) -> None:
        try:
            while True:
                self._answers.put(self._connection.receive())
        except IpcClosed:
            os._exit(1)


def _receive_failure(news: IpcConnection[RankFailed]) -> None:
    """Fail the groups of this process when another rank's script has failed. Runs on a thread of its own."""
    with suppress(IpcClosed):
        failed = news.receive()
        local_engine().peer_failed(failed.rank, int(os.environ["WORLD_SIZE"]), failed.reason)


def _main(descriptor: str, news: str, script: str, *arguments: str) -> None:
    store = RemoteStore(MemberProcess(IpcConnection(socket.socket(fileno=int(descriptor)), ANSWERS)))
    told = IpcConnection(socket.socket(fileno=int(news)), FAILURES)
    threading.Thread(target=_receive_failure, args=(told,), name="hcsim news", daemon=True).start()
    install_store(store)
    use_store(store.part("mlx/"))
    answer_mlx()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _main(*sys.argv[1:])
