"""The rank's way to the simulator: what it says, in order, and what comes of its calls."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from hcsim.errors import UsageError
from hcsim.scripts.arena import Arena
from hcsim.scripts.conversation import Answer, Computed, Conversation, Finished, HungUp, Message
from hcsim.transport.messages import Requests

_ABANDONED = 1
"""Exit status of a rank whose simulator is gone."""


class Work(Protocol):
    """What has been counted and not yet been told."""

    def take(self) -> Computed | None:
        """All of it, if there is any; from then on it counts anew."""

    def answered(self) -> None:
        """The simulator has answered, and waits for what comes next."""


class Settled(Protocol):
    """A call that waits for its end."""

    def settle(self, finished: Finished) -> None:
        """This is what it came to."""


class Simulator:
    """Everything that the rank says goes through here. What was computed before it is said first."""

    def __init__(self, conversation: Conversation[Answer], arena: Arena) -> None:
        self.arena = arena
        self.lock = threading.RLock()
        self.now_s = self.elapsed_s = 0.0
        """As of the last answer."""
        self.stale = False
        """Whether something has been said since, so that time may have passed."""
        self.work: Work | None = None
        self.pending: Requests[Settled] = Requests()
        """Calls on their way."""
        self._conversation = conversation
        self._left = False

    def tell(self, message: Message) -> None:
        """Say something that needs no answer."""
        if self._left:
            return
        with self.lock:
            self.tell_work()
            self._say(message)

    def ask(self, message: Message) -> Answer:
        """Say something and wait for the answer, which also tells of calls that have ended meanwhile."""
        if self._left:
            raise UsageError("a process that the script has started is no rank: it has no part in its rank's groups")
        with self.lock:
            self.tell_work()
            self._say(message)
            try:
                answer = self._conversation.hear()
            except HungUp:
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
        """Say what has been computed."""
        with self.lock:
            done = self.work.take() if self.work is not None else None
            if done is not None:
                self._say(done)

    def leave(self) -> None:
        """Hang up: in a process that was forked from this one, which is no rank."""
        self._left = True
        self.lock = threading.RLock()  # a thread that is not here may have it
        self.work = None
        self._conversation.close()

    def _say(self, message: Message) -> None:
        self.stale = True
        try:
            self._conversation.say(message)
        except HungUp:
            os._exit(_ABANDONED)
