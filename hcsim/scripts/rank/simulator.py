"""The rank's connection to the simulator: ordered messages, and the ends of calls."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from hcsim.errors import UsageError
from hcsim.scripts.ipc import CallFinished, Computed, IpcClosed, IpcConnection, RankMessage, SimulatorReply
from hcsim.scripts.shared_memory import SharedMemoryAllocator
from hcsim.transport.messages import Requests

_ABANDONED = 1
"""The exit status of a rank whose simulator is gone."""


class CountedWork(Protocol):
    """Work that has been counted and not yet reported."""

    def take(self) -> Computed | None:
        """Return the work counted so far, if any, and reset the counters."""

    def answered(self) -> None:
        """Note that the simulator has answered and waits for the next message."""


class AwaitedCall(Protocol):
    """A call that waits for its end."""

    def settle(self, finished: CallFinished) -> None: ...


class SimulatorClient:
    """The channel for all messages of the rank. Counted work is reported before each message."""

    def __init__(self, conversation: IpcConnection[SimulatorReply], arena: SharedMemoryAllocator) -> None:
        self.arena = arena
        self.lock = threading.RLock()
        self.now_s = self.elapsed_s = 0.0
        """The virtual times of the last answer."""
        self.stale = False
        """Whether a message was sent after the last answer, so that virtual time may have passed."""
        self.work: CountedWork | None = None
        self.pending: Requests[AwaitedCall] = Requests()
        self._conversation = conversation
        self._left = False

    def tell(self, message: RankMessage) -> None:
        """Send a message that needs no answer."""
        if self._left:
            return
        with self.lock:
            self.tell_work()
            self._say(message)

    def ask(self, message: RankMessage) -> SimulatorReply:
        """Send a request and wait for the answer, which also reports calls that have ended in the meantime."""
        if self._left:
            raise UsageError("a process that the script has started is no rank: it has no part in its rank's groups")
        with self.lock:
            self.tell_work()
            self._say(message)
            try:
                answer = self._conversation.hear()
            except IpcClosed:
                os._exit(_ABANDONED)
            self.now_s, self.elapsed_s, self.stale = answer.now_s, answer.elapsed_s, False
            if self.work is not None:
                self.work.answered()
            for finished in answer.finished:
                call = self.pending.take(finished.number)
                assert call is not None  # each ends once
                call.settle(finished)
            return answer

    def tell_work(self) -> None:
        with self.lock:
            done = self.work.take() if self.work is not None else None
            if done is not None:
                self._say(done)

    def leave(self) -> None:
        """Close the connection, in a process that was forked from this one and is no rank."""
        self._left = True
        self.lock = threading.RLock()  # a thread that is not here may have it
        self.work = None
        self._conversation.close()

    def _say(self, message: RankMessage) -> None:
        self.stale = True
        try:
            self._conversation.say(message)
        except IpcClosed:
            os._exit(_ABANDONED)
