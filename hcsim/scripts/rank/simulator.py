"""The simulator, as a rank's process sees it: ordered messages, the ends of calls, and the groups that live there
(see `hcsim.engine`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from hcsim.calls import ARRAYS, GroupCall
from hcsim.collectives.buffers import Array
from hcsim.engine import GroupSpec, RendezvousStore
from hcsim.errors import DeadlineExceeded, UsageError
from hcsim.scripts.ipc import (
    Awaited,
    CallFinished,
    Closed,
    Computed,
    IpcClosed,
    IpcConnection,
    Opened,
    RankMessage,
    SharedArray,
    SharedMemoryAllocator,
    SimulatorReply,
    Slept,
    Started,
    raised,
)
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

    def __init__(self, connection: IpcConnection[SimulatorReply], arena: SharedMemoryAllocator) -> None:
        self.arena = arena
        self.lock = threading.RLock()
        self.now_s = self.elapsed_s = 0.0
        """The virtual times of the last answer."""
        self.stale = False
        """Whether a message was sent after the last answer, so that virtual time may have passed."""
        self.work: CountedWork | None = None
        self.pending: Requests[AwaitedCall] = Requests()
        self._connection = connection
        self._left = False

    def tell(self, message: RankMessage) -> None:
        """Send a message that needs no answer."""
        if self._left:
            return
        with self.lock:
            self.tell_work()
            self._send(message)

    def ask(self, message: RankMessage) -> SimulatorReply:
        """Send a request and wait for the answer, which also reports calls that have ended in the meantime."""
        if self._left:
            raise UsageError("a process that the script has started is no rank: it has no part in its rank's groups")
        with self.lock:
            self.tell_work()
            self._send(message)
            try:
                answer = self._connection.receive()
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
                self._send(done)

    def leave(self) -> None:
        """Close the connection, in a process that was forked from this one and is no rank."""
        self._left = True
        self.lock = threading.RLock()  # a thread that is not here may have it
        self.work = None
        self._connection.close()

    def _send(self, message: RankMessage) -> None:
        self.stale = True
        try:
            self._connection.send(message)
        except IpcClosed:
            os._exit(_ABANDONED)


_LOOK_S = 10e-6
"""The cost of polling a call: it lets virtual time pass for a script that polls in a loop."""


class RemoteCall:
    """A call in flight on the simulated network."""

    def __init__(self, engine: RemoteEngine, number: int, arrays: Sequence[tuple[str, Array, SharedArray]]) -> None:
        self._engine = engine
        self._number = number
        self._arrays = arrays
        self._finished: CallFinished | None = None

    def done(self) -> bool:
        if self._finished is None:
            self._engine.simulator.ask(Slept(_LOOK_S))
        return self._finished is not None

    def wait(self, timeout_s: float | None) -> int:
        self.settled_within(timeout_s)
        if self._finished is None:
            raise DeadlineExceeded(f"the call was not over after {timeout_s:g} s")
        if self._finished.failure is not None:
            raise raised(self._finished.failure)
        return self._finished.result

    def settled_within(self, timeout_s: float | None) -> None:
        """Wait for the end of the call, with or without an error."""
        if self._finished is None:
            self._engine.simulator.ask(Awaited(self._number, timeout_s))

    def on_done(self, act: Callable[[], None]) -> None:
        """See `PendingCall.on_done`. Within a backward pass the callback runs at the end of the pass, otherwise now."""
        if self._finished is None and torch._C._current_graph_task_id() != -1:
            self._engine.after_backward(self, act)
        else:
            self.settled_within(None)
            act()

    def settle(self, finished: CallFinished) -> None:
        """End the call: copy its output to the caller's arrays and free its slots."""
        self._finished = finished
        for what, array, slot in self._arrays:
            if what != "i" and finished.failure is None:
                np.copyto(array, self._engine.simulator.arena.mapped.at(slot))
            self._engine.simulator.arena.give_back(slot, array.nbytes)
        self._arrays = ()


class RemoteGroup:
    """This rank's side of a group."""

    def __init__(self, engine: RemoteEngine, number: int, place: GroupSpec) -> None:
        self.rank = place.rank
        self.size = place.size
        self.number = number
        self._engine = engine

    def start(self, call: GroupCall, arrays: Sequence[Array]) -> RemoteCall:
        return self._engine.start(self.number, call, arrays)

    def close(self) -> None:
        self._engine.simulator.ask(Closed(self.number, in_order=True))

    def abort(self) -> None:
        self._engine.simulator.ask(Closed(self.number, in_order=False))


class RemoteEngine:
    """Opens groups in the simulator."""

    def __init__(self, simulator: SimulatorClient) -> None:
        self.simulator = simulator
        self._after_backward: dict[int, list[tuple[RemoteCall, Callable[[], None]]]] = {}

    def open(self, place: GroupSpec, store: RendezvousStore) -> RemoteGroup:
        """See `Engine.open`. No rendezvous is needed: the simulator knows all addresses."""
        assert place.parent is None or isinstance(place.parent, RemoteGroup)
        parent = None if place.parent is None else place.parent.number
        answer = self.simulator.ask(
            Opened(place.name, place.rank, place.size, place.timeout_s, parent, tuple(place.ranks))
        )
        if answer.failure is not None:
            raise raised(answer.failure)
        return RemoteGroup(self, answer.number, place)

    def start(self, group: int, call: GroupCall, arrays: Sequence[Array]) -> RemoteCall:
        """Copy the call's inputs into the shared memory, and start it."""
        simulator = self.simulator
        with simulator.lock:
            number = simulator.pending.number()
            taken = []
            for what, array in zip(ARRAYS[call.operation], arrays, strict=False):
                slot, grown = simulator.arena.take(array)
                if grown is not None:
                    simulator.tell(grown)
                if what != "o":
                    np.copyto(simulator.arena.mapped.at(slot), array)
                taken.append((what, array, slot))
            pending = RemoteCall(self, number, taken)
            simulator.pending.add(number, pending)
            simulator.tell(Started(number, group, call, tuple(slot for *_, slot in taken)))
            return pending

    def after_backward(self, pending: RemoteCall, act: Callable[[], None]) -> None:
        """Run the callback when both the current backward pass and the call have ended.

        The code that waits for the call is C++ and cannot ask the simulator. It waits at the end of the pass at
        the earliest, in a callback that it registers after its first call. This callback is registered before
        it, so it runs before it."""
        task = torch._C._current_graph_task_id()
        waiting = self._after_backward.get(task)
        if waiting is None:
            waiting = self._after_backward[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._settle(task))
        waiting.append((pending, act))

    def _settle(self, task: int) -> None:
        for pending, act in self._after_backward.pop(task):
            pending.settled_within(None)
            act()
