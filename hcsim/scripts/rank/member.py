"""`python -m hcsim.scripts.rank.member CONVERSATION SCRIPT ARGUMENTS`: a rank on a real cluster."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import threading
from pathlib import Path

from hcsim.scripts.conversation import Answer, Conversation, HungUp, Stored
from hcsim.scripts.rank import rendezvous
from hcsim.scripts.rank.store import RemoteStore


class Member:
    """The process that has found the cluster, and keeps or reaches the store for us."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._turn = threading.Lock()

    def ask(self, message: Stored) -> Answer:
        """Ask, and wait for the answer."""
        with self._turn:
            try:
                self._conversation.say(message)
                answer: Answer = self._conversation.hear()
            except HungUp:
                os._exit(1)  # whoever started us is gone
        return answer


def _main(descriptor: str, script: str, *arguments: str) -> None:
    store = RemoteStore(Member(Conversation(socket.socket(fileno=int(descriptor)), Answer)))
    rendezvous.install(store)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _main(*sys.argv[1:])
