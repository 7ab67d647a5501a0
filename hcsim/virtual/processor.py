"""The processor of a host, which handles its messages one after the other.

A message costs its sender `send_s` and a time per byte before it is in the network, and its receiver a time per byte
and `receive_s` before the program has it. A message of n bytes that is alone, between two hosts whose processors pass
on R and R' bytes a second, over a line of rate x and latency λ, takes

    send_s + n/R + n/x + λ + n/R' + receive_s

if it is one piece. A larger one goes in N pieces of c bytes, of which one is handled at the sender while another is on
the line and a third one is handled at the receiver, so that it takes

    send_s + c/R + c/x + λ + c/R' + receive_s + (N − 1) · max(c/R, c/x, c/R').

A host that takes part in a collective operation pays `operation_s` for it once. That work does not depend on what the
peers do, so a processor that has waited for the first message has done it meanwhile.

Messages are first in, first out. Several processors may share cores: n that are busy on fewer cores have an equal share
each, as a system's scheduler gives it, or take turns where its slices are known (`time_slices.py`). So it is with a
device that computes on its host's processor, and with programs of the machine's owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil, inf
from typing import Protocol

from hcsim.config import MessageCosts
from hcsim.runtime.frame import Header, Kind
from hcsim.virtual.environment import NS, Environment

SMALLEST_PIECE_BYTES = 16 * 1024
MOST_PIECES = 32
_REMEMBERED_OPERATIONS = 256


def piece_bytes(size_bytes: int) -> int:
    """Return the size of the pieces in which a processor handles a message."""
    return max(SMALLEST_PIECE_BYTES, ceil(size_bytes / MOST_PIECES))


class CoreUser(Protocol):
    """Something that runs on a core while it has work."""

    def run_at(self, share: float) -> None:
        """It has this share of a core from now on; 0: it waits for one."""


class Cores:
    """Cores that are shared equally by all users that have work; each uses one core at most."""

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._busy: dict[CoreUser, None] = {}

    @property
    def share(self) -> float:
        """The share of a core that each busy user has."""
        return min(1.0, self._count / max(len(self._busy), 1))

    def enter(self, user: CoreUser) -> None:
        """The user has work from now on."""
        before = self.share
        self._busy[user] = None
        user.run_at(self.share)
        self._tell_others(user, before)

    def leave(self, user: CoreUser) -> None:
        """The user has no work any more."""
        before = self.share
        self._busy.pop(user, None)
        self._tell_others(user, before)

    def _tell_others(self, user: CoreUser, before: float) -> None:
        if (share := self.share) != before:
            for other in self._busy:
                if other is not user:
                    other.run_at(share)


class CoreWork:
    """Work that is done on a core, at the share of it that there is: a `CoreUser`."""

    def __init__(self, env: Environment, cores: Cores) -> None:
        self._env = env
        self._cores = cores
        self._left_ns = 0.0
        """Work that is left, as of `_since_ns`."""
        self._since_ns = 0
        self._share = 0.0
        self._due = 0

    def run_at(self, share: float) -> None:
        """Go on with this share of a core."""
        now_ns = self._env.now_ns
        self._left_ns -= (now_ns - self._since_ns) * self._share
        self._since_ns, self._share = now_ns, share
        self._due += 1
        if share > 0.0:
            self._env.call_at(now_ns + max(ceil(self._left_ns / share), 0), self._reached, self._due)

    def _reached(self, due: int) -> None:
        if due == self._due:
            self._done()

    def _begin(self, work_ns: float) -> None:
        self._left_ns, self._since_ns = work_ns, self._env.now_ns

    def _stop(self) -> None:
        """There is nothing left to do."""
        self._due += 1
        self._share = 0.0
        self._cores.leave(self)

    def _done(self) -> None:
        """Called when no work is left."""
        raise NotImplementedError


class MessageProcessor(CoreWork):
    """Handles the messages of one host, in the order in which they come."""

    def __init__(self, env: Environment, costs: MessageCosts, cores: Cores, *, tls: bool) -> None:
        super().__init__(env, cores)
        self._costs = costs
        self._send_s_per_byte = 1.0 / costs.send_rate_Bps + (1.0 / costs.tls_send_rate_Bps if tls else 0.0)
        self._receive_s_per_byte = 1.0 / costs.receive_rate_Bps + (1.0 / costs.tls_receive_rate_Bps if tls else 0.0)
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._idle_since_ns = 0
        self._operations: dict[tuple[int, int, int], None] = {}
        self.busy_ns = 0
        """Work done so far, without what is in the queue."""

    def send(self, header: Header, size_bytes: int, done: Callable[[], None], *, begins: bool = True) -> None:
        """Handle a message that is sent, or a piece of it; `done` is called when it may enter the network."""
        fixed_s = self._costs.send_s if begins else 0.0
        self._handle(fixed_s + size_bytes * self._send_s_per_byte, self._operation_ns(header), done)

    def receive(self, header: Header | None, size_bytes: int, done: Callable[[], None]) -> None:
        """Handle a message that has come, or a piece of it, which is without a header unless it is the last one."""
        fixed_s = self._costs.receive_s if header is not None else 0.0
        operation_ns = self._operation_ns(header) if header is not None else 0
        self._handle(fixed_s + size_bytes * self._receive_s_per_byte, operation_ns, done)

    def _operation_ns(self, header: Header) -> int:
        """Return what is still to be done for the message's operation itself."""
        key = (header.group, header.epoch, header.operation)
        if header.kind is not Kind.DATA or key in self._operations:
            return 0
        self._operations[key] = None
        if len(self._operations) > _REMEMBERED_OPERATIONS:
            del self._operations[next(iter(self._operations))]
        idle_ns = 0 if self._queue else self._env.now_ns - self._idle_since_ns
        return max(round(self._costs.operation_s * NS) - idle_ns, 0)

    def _handle(self, seconds: float, operation_ns: int, done: Callable[[], None]) -> None:
        self._queue.append((round(seconds * NS) + operation_ns, done))
        if len(self._queue) == 1:
            self._begin(float(self._queue[0][0]))
            self._cores.enter(self)

    def end(self) -> None:
        """Handle nothing more; what is in the queue is lost."""
        self._queue.clear()
        self._stop()

    def _done(self) -> None:
        work_ns, done = self._queue.popleft()
        self.busy_ns += work_ns
        if self._queue:
            self._begin(float(self._queue[0][0]))
            self.run_at(self._share)
        else:
            self._idle_since_ns = self._env.now_ns
            self._stop()
        done()


def costs_nothing(costs: MessageCosts) -> bool:
    """Return whether no message takes any time."""
    rates = (costs.send_rate_Bps, costs.receive_rate_Bps, costs.tls_send_rate_Bps, costs.tls_receive_rate_Bps)
    return costs.send_s == costs.receive_s == costs.operation_s == 0.0 and all(rate == inf for rate in rates)
