"""One operation in flight: what identifies it, what it works on, which state it is in, and what it waits for.

    state        the operation waits for                                            next
    ----------   ----------------------------------------------------------------   -----------------------------
    QUEUED       an operation ahead of it in its bucket, if there are many           MATCHING, CONNECTING, RUNNING
    MATCHING     a message that it may take: only of a receive from any source       CONNECTING, RUNNING
    CONNECTING   links to its peers, if some are not open yet                        RUNNING
    RUNNING      the frames of its schedule                                          DONE
    DONE         nothing: its result is there
    FAILED       nothing: it failed, took too long or was cancelled, in any of the first four

`NEXT` is this table. The scheduler creates an operation and takes it through its states; the executor carries out its
schedule with the input and output that stand here: send, post, combine, finish. `Operation.waiting_for` says at any
time which rank is waited for, and what for: that is what an error names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from hcsim.collectives.any_source import PendingReceive
from hcsim.collectives.buffers import Buffer, ScratchPool
from hcsim.collectives.schedule import Schedule
from hcsim.errors import CollectiveError, HcsimError
from hcsim.runtime.channel import Fold, Payload
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import Counter, Histogram, Host
from hcsim.transport.link import Link
from hcsim.transport.mesh import Mesh

State: TypeAlias = Literal["queued", "matching", "connecting", "running", "done", "failed"]
QUEUED: Final = "queued"
MATCHING: Final = "matching"
CONNECTING: Final = "connecting"
RUNNING: Final = "running"
DONE: Final = "done"
FAILED: Final = "failed"

NEXT: dict[State, tuple[State, ...]] = {
    QUEUED: (RUNNING, CONNECTING, MATCHING, FAILED),
    MATCHING: (RUNNING, CONNECTING, FAILED),
    CONNECTING: (RUNNING, FAILED),
    RUNNING: (DONE, FAILED),
    DONE: (),
    FAILED: (),
}

POINT_TO_POINT = 1 << 31
"""Set in the group number of point-to-point messages, which are counted apart."""
BUCKET_BITS = 16
NUMBER_BITS = 48
"""Of an operation's number. The bits above it are those of a tag that is wider than a bucket."""
TAG_BITS = BUCKET_BITS + 64 - NUMBER_BITS

RECEIVING = "receiving from"
SENDING = "sending to"
OPENING = "opening a link to"
_DATA = Kind.DATA  # an enum's member takes long to look up
_NOTHING = Schedule({}, 0)


class OperationId(msgspec.Struct, frozen=True):
    """What identifies one operation on the wire, and to people."""

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
    """Some elements of the buffer: an action, or a segment of one."""

    @property
    def lo(self) -> int: ...

    @property
    def hi(self) -> int: ...


class Activity:
    """What one task of an operation does at the moment, and with which peer.

    As a context manager it names both in an error that ends the task. (A coroutine that awaits another would do as
    well, but costs every wake-up of the operation a step of its own.)"""

    __slots__ = ("_id", "_on_cancel", "doing", "peer", "segment", "step")

    def __init__(self, identity: OperationId, on_cancel: Callable[[], None]) -> None:
        self._id = identity
        self._on_cancel = on_cancel
        self.doing = ""
        self.peer: int | None = None
        self.step = 0
        self.segment = ""

    def rest(self) -> None:
        """No peer is waited for."""
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
    """What an operation uses of the failure domain that it is part of."""

    mesh: Mesh
    scratch: ScratchPool

    def cancelling(self) -> None:
        """A task of an operation is being cancelled; what that cuts has not been noticed yet."""


class Operation:
    """One operation of this rank, from the call that starts it until it is done or has failed."""

    __slots__ = (
        "_activities",
        "_device",
        "_domain",
        "_rooms",
        "_size",
        "ahead",
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
        """To its peers, by rank; all of them once it runs."""
        self.state: State = QUEUED
        self.task: asyncio.Task[Any] | None = None
        self.queue: list[Operation] | None = None
        """The operations of its bucket that are not over, in order, if it is a collective."""
        self.ahead: Operation | None = None
        """The one whose end it waits for before it starts."""
        self.pending: PendingReceive | None = None
        """Its place among the receives of unknown messages, if it is one."""
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

    @property
    def sent_bytes(self) -> int:
        """What it sends from begin to end."""
        return self.schedule.sent * self._size

    # Its states.

    def enter(self, state: State) -> None:
        assert state in NEXT[self.state], f"{self} is {self.state}, and cannot become {state}"
        self.state = state

    def match(self, identity: OperationId, schedule: Schedule) -> None:
        """The message that it receives is known now."""
        self.id, self.schedule = identity, schedule

    def attach_links(self) -> bool:
        """Whether all links that it needs are open."""
        open_links = self._domain.mesh.links
        for peer in self.schedule.peers:
            link = open_links.get(peer)
            if link is None:
                return False
            self.links[peer] = link
        return True

    async def connect(self, activity: Activity) -> None:
        """Open the links that it needs."""
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
        """Of one more task of this operation."""
        made = Activity(self.id, self._domain.cancelling)
        self._activities.append(made)
        return made

    def waiting_for(self) -> tuple[int | None, str]:
        """The rank that we wait for, if it is one, and what for: a receiver knows better than a sender which rank is
        late."""
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
        """Send a range, which lies at `offset` of a message of `total` elements (both: all of it)."""
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
        """Say where a range goes that the peer will send."""
        size, us = self._size, self.id
        tag = (us.group, us.number, us.bucket, step, offset * size)
        return link.post(tag, into, us.signature, (part.hi - part.lo if total is None else total) * size)

    def header(self, part: Elements, step: int, sender: int, offset: int = 0, total: int | None = None) -> Header:
        """Of the frame that carries a range."""
        size, us = self._size, self.id
        length = (part.hi - part.lo) * size
        return Header(
            length, _DATA, sender, us.bucket, us.epoch, us.group, us.number, us.signature, step, offset * size,
            length if total is None else total * size,
        )  # fmt: skip

    def scratch(self, which: tuple[int, int], part: Elements, *, now: bool) -> memoryview | Fold | None:
        """Room beside the buffer for a range that is combined, until it is released by that name.

        Where `now` is its turn, and nothing else reads or writes the range before it has come, it may be added to it
        on the way."""
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
        """Combine what was received with the range, unless it was added to it on the way, and release its room.

        What is left to wait for is the time that this takes."""
        if not self.buffer.is_phantom:
            whole, fold = self._rooms.pop(which)
            if fold is None or received is not fold.into:
                self.buffer.combine(part.lo, part.hi, received, received_left=received_left)
            self._domain.scratch.give_back(whole)
        return self._device.touch(3 * received.nbytes)

    def finish(self, lo: int, hi: int) -> Coroutine[Any, Any, None]:
        """Apply what comes last to the range; wait for the time that this takes."""
        self.buffer.finish(lo, hi)
        return self._device.touch(2 * (hi - lo) * self._size)

    def check_complete(self) -> None:
        """All went well here, so nothing more may have come for this operation."""
        us = self.id
        if not us.group & POINT_TO_POINT:  # there the peer's numbers are its own
            for link in self.links.values():
                link.check_over(us.group, us.number, us.bucket)


class _Series:
    """The metrics of one kind of operation, kept: to look them up costs more than to add to them."""

    __slots__ = ("count", "failures", "seconds", "sent_bytes")

    def __init__(self, host: Host, name: str) -> None:
        metrics = host.metrics
        self.count: Counter = metrics.counter("hcsim_collectives_total", operation=name)
        self.failures: Counter = metrics.counter("hcsim_collective_failures_total", operation=name)
        self.sent_bytes: Counter = metrics.counter("hcsim_collective_bytes_total", operation=name)
        self.seconds: Histogram = metrics.histogram("hcsim_collective_seconds", operation=name)


class OperationMetrics:
    """What the operations of all groups over one mesh come to, in figures.

    Small operations are frequent, so this is kept short: two looks at the clock, and plain additions."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._now_s = host.clock.elapsed
        self._busy = host.metrics.counter("hcsim_collectives_busy_seconds_total")
        self._series: dict[str, _Series] = {}
        self._in_flight = 0
        self._busy_since_s = 0.0

    def begin(self) -> float:
        """An operation is in flight; the moment, for `end`."""
        now_s = self._now_s()
        if not self._in_flight:
            self._busy_since_s = now_s
        self._in_flight += 1
        return now_s

    def end(self, name: str, began_s: float, sent_bytes: int | None) -> None:
        """It is over, and has sent that much; None: it failed."""
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
