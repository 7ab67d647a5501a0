"""One operation in flight: its identity, buffer, state, and what it waits for.

    state        the operation waits for                                           next
    ----------   ---------------------------------------------------------------   -----------------------------
    QUEUED       an earlier operation of its bucket, if there are many             MATCHING, CONNECTING, RUNNING
    MATCHING     its message, for a receive whose message is not known yet         CONNECTING, RUNNING
    CONNECTING   links to its peers, if some are not open yet                      RUNNING
    RUNNING      the frames of its schedule                                        DONE
    DONE         nothing: its result is available
    FAILED       nothing: error, timeout or cancellation in any of the first four

`NEXT` is this table. The scheduler creates an operation and moves it through its states. The executor runs its
schedule with the methods defined here: send, post, combine, finish. `Operation.waiting_for` returns the rank
that the operation waits for and the reason, which errors report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from hcsim.collectives.any_source import PendingReceive
from hcsim.collectives.buffers import Buffer, ScratchPool
from hcsim.collectives.plan import Shape, input_elements
from hcsim.collectives.schedule import Schedule
from hcsim.errors import CollectiveError, HcsimError
from hcsim.runtime.channel import Fold, Payload
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import Counter, Histogram, Host
from hcsim.transport.link import Link
from hcsim.transport.mesh import Mesh

OperationState: TypeAlias = Literal["queued", "matching", "connecting", "running", "done", "failed"]
QUEUED: Final = "queued"
MATCHING: Final = "matching"
CONNECTING: Final = "connecting"
RUNNING: Final = "running"
DONE: Final = "done"
FAILED: Final = "failed"

NEXT: dict[OperationState, tuple[OperationState, ...]] = {
    QUEUED: (RUNNING, CONNECTING, MATCHING, FAILED),
    MATCHING: (RUNNING, CONNECTING, FAILED),
    CONNECTING: (RUNNING, FAILED),
    RUNNING: (DONE, FAILED),
    DONE: (),
    FAILED: (),
}

POINT_TO_POINT = 1 << 31
"""A flag in the group number of point-to-point messages, which are numbered separately."""
BUCKET_BITS = 16
NUMBER_BITS = 48
"""Bits of an operation's number. The bits above hold the part of a tag that exceeds a bucket."""
TAG_BITS = BUCKET_BITS + 64 - NUMBER_BITS

RECEIVING = "receiving from"
SENDING = "sending to"
OPENING = "opening a link to"
_DATA = Kind.DATA  # an enum's member takes long to look up
_NOTHING = Schedule({}, 0)


class OperationId(msgspec.Struct, frozen=True):
    """The identity of an operation, on the wire and in messages."""

    name: str
    rank: int
    epoch: int
    group: int
    number: int
    """Counted per bucket, or per tag and pair of ranks."""
    bucket: int
    signature: int

    def __str__(self) -> str:
        return f"{self.name} #{self.number % (1 << NUMBER_BITS)}"


class Elements(Protocol):
    """A range of the buffer: an action, or a segment of one."""

    @property
    def lo(self) -> int: ...

    @property
    def hi(self) -> int: ...


class Activity:
    """What one task of an operation is doing, and with which peer.

    As a context manager it adds both to an error that ends the task. (A nested coroutine could do the same, but
    would cost an extra step at every wake-up.)"""

    __slots__ = ("_id", "_on_cancel", "doing", "peer", "segment", "step")

    def __init__(self, identity: OperationId, on_cancel: Callable[[], None]) -> None:
        self._id = identity
        self._on_cancel = on_cancel
        self.doing = ""
        self.peer: int | None = None
        self.step = 0
        self.segment = ""

    def rest(self) -> None:
        """Record that no peer is waited for."""
        self.doing, self.peer = "", None

    def __str__(self) -> str:
        if self.peer is None or not self.doing:
            return "waiting for its turn"
        return f"{self.doing} rank {self.peer} in round {self.step}{self.segment}"

    def __enter__(self) -> Activity:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.doing, self.peer = "", None
        elif isinstance(error, asyncio.CancelledError):
            self._on_cancel()
        elif isinstance(error, CollectiveError):  # the group failed; the peer we wait for may be why the others gave up
            if self.doing:
                text = f"{error}; {self._id} was {self} here"
                raise type(error)(text, peer=error.peer, phase=error.phase) from error.__cause__
        elif isinstance(error, HcsimError):
            text = f"{self._id} failed while {self}: {error}"
            raise CollectiveError(text, peer=self.peer, phase=str(self)) from error


class Domain(Protocol):
    """The part of the failure domain that an operation uses."""

    mesh: Mesh
    scratch: ScratchPool

    def cancelling(self) -> None:
        """Record that a task of an operation is being cancelled, before the consequences are detected."""


class Operation:
    """One operation of this rank, from its call until it is done or has failed."""

    __slots__ = (
        "_activities",
        "_device",
        "_domain",
        "_rooms",
        "_size",
        "ahead",
        "asked",
        "buffer",
        "id",
        "links",
        "pending",
        "queue",
        "schedule",
        "state",
        "task",
    )  # fmt: skip

    def __init__(self, identity: OperationId, steps: Schedule | PendingReceive, buffer: Buffer, domain: Domain) -> None:
        self.id = identity
        self.buffer = buffer
        self.links: dict[int, Link] = {}
        """Links to its peers, by rank; complete when it runs."""
        self.state: OperationState = QUEUED
        self.task: asyncio.Task[Any] | None = None
        self.queue: list[Operation] | None = None
        """For a collective: the unfinished operations of its bucket, in order."""
        self.asked: tuple[Shape, tuple[int, ...]] | int = 0
        """For a collective, its shape and the ranks that take part; for a message, its length."""
        self.ahead: Operation | None = None
        """The operation that must end before this one starts."""
        self.pending: PendingReceive | None = None
        """The pending receive, if its message is not known yet."""
        if isinstance(steps, PendingReceive):
            self.pending, steps = steps, _NOTHING
        self.schedule = steps
        self._domain = domain
        self._device = domain.mesh.host.device
        self._size = buffer.element_bytes
        self._activities: list[Activity] = []
        self._rooms: dict[tuple[int, int], tuple[memoryview, Fold | None]] = {}

    def __str__(self) -> str:
        return str(self.id)

    def figures(self) -> tuple[str | int, ...]:
        """Return the name, this rank, the epoch, the group, the number and the bucket; this rank's input in bytes; the
        root or the peer; and the ranks that take part."""
        us = self.id
        known = us.name, us.rank, us.epoch, us.group, us.number, us.bucket
        if isinstance(self.asked, int):
            (peer,) = self.schedule.peers
            return *known, self.asked * self._size, peer, ""
        shape, members = self.asked
        length = input_elements(us.name, shape, members.index(us.rank))
        return *known, length * self._size, members[shape.root], ",".join(map(str, members))

    @property
    def sent_bytes(self) -> int:
        """Bytes that the whole operation sends."""
        return self.schedule.sent * self._size

    # Its states.

    def enter(self, state: OperationState) -> None:
        assert state in NEXT[self.state], f"{self} is {self.state}, and cannot become {state}"
        self.state = state

    def match(self, identity: OperationId, schedule: Schedule) -> None:
        """Set the identity and the schedule, once the message to receive is known."""
        self.id, self.schedule = identity, schedule

    def attach_links(self) -> bool:
        """Look up the links to the peers; return whether all are open."""
        open_links = self._domain.mesh.links
        for peer in self.schedule.peers:
            link = open_links.get(peer)
            if link is None:
                return False
            self.links[peer] = link
        return True

    async def connect(self, activity: Activity) -> None:
        self.enter(CONNECTING)
        mesh, peers = self._domain.mesh, self.schedule.peers
        activity.doing, activity.peer = OPENING, mesh.unreached(peers)
        try:
            await mesh.reach(peers)
        finally:
            if (unreached := mesh.unreached(peers)) is not None:
                activity.peer = unreached
        activity.rest()
        self.attach_links()

    def activity(self) -> Activity:
        """Return the activity of an additional task of this operation."""
        made = Activity(self.id, self._domain.cancelling)
        self._activities.append(made)
        return made

    def waiting_for(self) -> tuple[int | None, str]:
        """Return the rank waited for, or None, and the reason. Receivers take precedence: they know better than senders
        which rank is late."""
        if self.state is QUEUED and self.ahead is not None:
            return self._waiting_for_turn(self.ahead)
        if self.state is MATCHING and self.pending is not None:
            return None, self.pending.why_waiting()
        for doing in (RECEIVING, OPENING, SENDING):
            for activity in self._activities:
                if activity.doing == doing:
                    if doing == OPENING and (unreached := self._domain.mesh.unreached(self.schedule.peers)) is not None:
                        activity.peer = unreached
                    return activity.peer, str(activity)
        return None, "waiting"

    def _waiting_for_turn(self, ahead: Operation) -> tuple[int | None, str]:
        for other in (ahead, *(self.queue or ())):
            peer, phase = other.waiting_for() if other.state is not QUEUED else (None, "")
            if peer is not None:
                return peer, f"waiting for {other}, which is {phase}"
        return None, f"waiting for {ahead}"

    # Its input and output.

    def send(
        self, link: Link, part: Elements, step: int, offset: int = 0, total: int | None = None
    ) -> Coroutine[Any, Any, None]:
        """Send a range, at `offset` in a message of `total` elements. By default the range is the whole message."""
        return link.send(self.header(part, step, self.id.rank, offset, total), self.buffer.payload(part.lo, part.hi))

    def post(
        self,
        link: Link,
        part: Elements,
        step: int,
        into: memoryview | Fold | None,
        offset: int = 0,
        total: int | None = None,
    ) -> asyncio.Future[Payload]:
        size, us = self._size, self.id
        tag = (us.group, us.number, us.bucket, step, offset * size)
        return link.post(tag, into, us.signature, (part.hi - part.lo if total is None else total) * size)

    def header(self, part: Elements, step: int, sender: int, offset: int = 0, total: int | None = None) -> Header:
        size, us = self._size, self.id
        length = (part.hi - part.lo) * size
        return Header(
            length, _DATA, sender, us.bucket, us.epoch, us.group, us.number, us.signature, step, offset * size,
            length if total is None else total * size,
        )  # fmt: skip

    def scratch(self, which: tuple[int, int], part: Elements, *, now: bool) -> memoryview | Fold | None:
        """Return scratch memory for receiving a range to be combined; `combine` with the same name releases it.

        `now` says that its turn has come: nothing else reads or writes the range before it arrives, so that it may be
        added on receive."""
        if self.buffer.is_phantom:
            return None
        size_bytes = (part.hi - part.lo) * self._size
        whole = self._domain.scratch.take(size_bytes)
        room = whole[:size_bytes]
        fold = self.buffer.fold(part.lo, part.hi, room) if now else None
        self._rooms[which] = whole, fold
        return fold or room

    def combine(
        self, which: tuple[int, int], part: Elements, received: Payload, *, received_left: bool
    ) -> Coroutine[Any, Any, None]:
        """Combine received data with the range, unless they were added on receive, and release the scratch memory.

        The returned coroutine waits for the time that this takes."""
        if not self.buffer.is_phantom:
            whole, fold = self._rooms.pop(which)
            if fold is None or received is not fold.into:
                self.buffer.combine(part.lo, part.hi, received, received_left=received_left)
            self._domain.scratch.give_back(whole)
        return self._device.touch(3 * received.nbytes)

    def finish(self, lo: int, hi: int) -> Coroutine[Any, Any, None]:
        """Apply the last step of the reduction to the range; the coroutine waits for the time that this takes."""
        self.buffer.finish(lo, hi)
        return self._device.touch(2 * (hi - lo) * self._size)

    def check_complete(self) -> None:
        """Check after success that no unexpected frame of this operation has arrived."""
        us = self.id
        if not us.group & POINT_TO_POINT:  # there the peer's numbers are its own
            for link in self.links.values():
                link.check_over(us.group, us.number, us.bucket)


class _Series:
    """The metrics of one kind of operation, cached because a lookup costs more than an update."""

    __slots__ = ("count", "failures", "seconds", "sent_bytes")

    def __init__(self, host: Host, name: str) -> None:
        metrics = host.metrics
        self.count: Counter = metrics.counter("hcsim_collectives_total", operation=name)
        self.failures: Counter = metrics.counter("hcsim_collective_failures_total", operation=name)
        self.sent_bytes: Counter = metrics.counter("hcsim_collective_bytes_total", operation=name)
        self.seconds: Histogram = metrics.histogram("hcsim_collective_seconds", operation=name)


class OperationMetrics:
    """Metrics of the operations of all groups over one mesh.

    Small operations are frequent, so an operation costs two clock readings and a few additions."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._now_s = host.clock.elapsed
        self._busy = host.metrics.counter("hcsim_collectives_busy_seconds_total")
        self._series: dict[str, _Series] = {}
        self._in_flight = 0
        self._busy_since_s = 0.0

    def begin(self) -> float:
        """Count the start of an operation; return the time for `end`."""
        now_s = self._now_s()
        if not self._in_flight:
            self._busy_since_s = now_s
        self._in_flight += 1
        return now_s

    def end(self, name: str, began_s: float, sent_bytes: int | None) -> None:
        """Count the end of an operation and the bytes that it sent; None if it failed."""
        now_s = self._now_s()
        self._in_flight -= 1
        if not self._in_flight:
            self._busy.value += now_s - self._busy_since_s
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = _Series(self._host, name)
        if sent_bytes is None:
            series.failures.value += 1
        else:
            series.count.value += 1
            series.sent_bytes.value += sent_bytes
            series.seconds.observe(now_s - began_s)
