"""The scheduler: starts the operations of a group and moves each through its states.

A request becomes a schedule: its algorithm (or the choice of `auto`) makes a plan, which is cut into segments.
Schedules are cached, because a training loop repeats the same few requests. Operations are numbered per bucket,
so ranks may start buckets in different orders. Only a few collectives of one bucket transfer data at a time, so
that a fast rank cannot flood a slow one; further ones are queued.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from hcsim.collectives.algorithms import plan
from hcsim.collectives.any_source import AnySource, PendingReceive
from hcsim.collectives.buffers import Buffer
from hcsim.collectives.executor import execute
from hcsim.collectives.failure_domain import FailureDomain
from hcsim.collectives.mismatch import signature_of
from hcsim.collectives.operation import (
    BUCKET_BITS,
    DONE,
    FAILED,
    MATCHING,
    NUMBER_BITS,
    POINT_TO_POINT,
    QUEUED,
    TAG_BITS,
    Operation,
    OperationId,
)
from hcsim.collectives.plan import Finish, Plan, Recv, Send, Shape
from hcsim.collectives.schedule import Schedule, schedule
from hcsim.collectives.select import Options, choose, whole_number
from hcsim.errors import ChannelError, CollectiveError, HcsimError, UsageError
from hcsim.transport.link import Tag

T = TypeVar("T")
Handle: TypeAlias = asyncio.Task[T]
"""An operation in flight, as returned to the caller: await it for its result."""

SCHEDULES_KEPT = 64
SHAPES_KEPT = 256
IN_FLIGHT = 8
"""The number of collectives of one bucket that transfer data at once; further ones are queued."""


class CollectiveRequest(msgspec.Struct, frozen=True):
    """A collective requested by a caller."""

    operation: str
    shape: Shape
    algorithm: str
    bucket: int
    op: str = ""
    """The reduction, if there is one."""


class MessageRequest(msgspec.Struct, frozen=True):
    """A request for a message to or from one rank."""

    name: str
    tag: int
    action: Send | Recv

    def __post_init__(self) -> None:
        if not 0 <= self.tag < 1 << TAG_BITS:
            raise UsageError(f"a tag is a number from 0 to {(1 << TAG_BITS) - 1}, not {self.tag}")


class Scheduler:
    """The operations of one group."""

    def __init__(self, domain: FailureDomain, members: tuple[int, ...], group: int, options: Options) -> None:
        self.options = options
        self._domain = domain
        self._members = members
        self._group = group
        self._us = domain.mesh.us
        self._rank = members.index(self._us.rank)
        domain.mismatches.lowest[group] = min(members)
        self._numbers: dict[tuple[str, int, int], int] = {}
        """The next operation number, by kind, peer, and bucket or tag."""
        self._schedules: dict[object, tuple[Schedule, int]] = {}
        self._shapes: dict[tuple[int, int], Shape] = {}
        """Cached shapes by length and root."""
        self._queues: dict[int, list[Operation]] = {}
        """The unfinished collectives by bucket."""
        self._any_source: AnySource | None = None

    def follow(self, options: Options) -> None:
        self.options = options
        self._shapes.clear()
        self._schedules.clear()

    def shape(self, **sizes: Any) -> Shape:
        o, world = self.options, len(self._members)
        return Shape(world=world, arity=o.arity, order=o.order, groups=o.groups, local=o.local, cross=o.cross, **sizes)

    def shape_of_length(self, length: int, root: int = 0) -> Shape:
        """Return the cached shape of a collective with one length on all ranks."""
        shape = self._shapes.get((length, root))
        if shape is None:
            if len(self._shapes) >= SHAPES_KEPT:
                self._shapes.clear()
            shape = self._shapes[length, root] = self.shape(length=length, root=root)
        return shape

    def algorithm(self, operation: str, shape: Shape, element_bytes: int, name: str) -> str:
        """Return the algorithm of this name, resolving `auto`."""
        if name != "auto":
            return name
        return choose(operation, shape, element_bytes, self.options.links, self._us.wire.segment_bytes)

    def collective(
        self, request: CollectiveRequest, buffer: Buffer, result: Callable[[], T], timeout_s: float
    ) -> Handle[T]:
        """Start a collective. Its result is the return value of `result`, called at the end."""
        steps, signature = self._scheduled(request, buffer)
        bucket, us, domain = whole_number("a bucket", request.bucket), self._us, self._domain
        number = self._take_number("", 0, bucket)
        if not 0 <= bucket < 1 << BUCKET_BITS:
            raise UsageError(f"a bucket is a number from 0 to {(1 << BUCKET_BITS) - 1}, not {bucket}")
        identity = OperationId(request.operation, us.rank, us.epoch, self._group, number, bucket, signature)
        trouble = domain.mismatches.begin(identity)
        if trouble is not None:  # others do something else in its place
            domain.fail(trouble)
        operation = Operation(identity, steps, buffer, domain)
        operation.asked = request.shape, self._members
        queue = operation.queue = self._queues.setdefault(bucket, [])
        if len(queue) >= IN_FLIGHT:
            operation.ahead = queue[-IN_FLIGHT]
        handle = self._start(operation, result, timeout_s)
        queue.append(operation)
        return handle

    def message(self, message: MessageRequest, buffer: Buffer, result: Callable[[], T], timeout_s: float) -> Handle[T]:
        name, peer, tag, any_source = message.name, message.action.peer, message.tag, self._any_source
        if name == "recv" and any_source is not None and any_source.is_awaited(tag):
            return self._receive(message, buffer, any_source.post(tag, peer), result, timeout_s)
        identity = self._message_id(message, buffer, self._take_number(name, peer, tag))
        steps = self._cut(Plan(((message.action,),)), buffer)
        operation = Operation(identity, steps, buffer, self._domain)
        operation.asked = message.action.hi - message.action.lo
        return self._start(operation, result, timeout_s)

    def from_any_source(self, length: int, tag: int, buffer: Buffer, timeout_s: float) -> Handle[int]:
        """Start an any-source receive; its result is the rank of the sender."""
        message = MessageRequest("recv_any", tag, Recv(0, 0, length))
        if self._any_source is None:
            self._any_source = AnySource(
                self._domain.mesh,
                self._members,
                self._next_tag,
                lambda tag, source: self._take_number("recv", source, tag),
            )
            self._domain.observers.append(self._any_source)
        pending = self._any_source.post(tag, None)
        return self._receive(message, buffer, pending, lambda: pending.matched.result()[0], timeout_s)

    def _receive(
        self,
        message: MessageRequest,
        buffer: Buffer,
        pending: PendingReceive,
        result: Callable[[], T],
        timeout_s: float,
    ) -> Handle[T]:
        """Start a receive whose message number, or sender, is not known yet."""
        posted = self._take_number(f"{message.name} posted", message.action.peer, message.tag)
        identity = self._message_id(message, buffer, posted)
        operation = Operation(identity, pending, buffer, self._domain)
        operation.asked = message.action.hi - message.action.lo
        return self._start(operation, result, timeout_s, message)

    # One operation, from its start to its end.

    def _start(
        self, operation: Operation, result: Callable[[], T], timeout_s: float, message: MessageRequest | None = None
    ) -> Handle[T]:
        running = self._run(operation, result, timeout_s, message)
        handle: Handle[T] = self._domain.mesh.host.spawn(
            running, name=str(operation.id), over=partial(self._over, operation)
        )
        operation.task = handle
        return handle

    def _over(self, operation: Operation, task: Handle[Any]) -> None:
        """Clean up after an operation, however it ended. This runs before the tasks that wait for it."""
        if not task.cancelled():
            task.exception()  # a group's failure ends all its operations: it is enough to await one of them
        elif operation.state == QUEUED:  # before it ran at all, so the others have not been told
            operation.enter(FAILED)
            with suppress(ChannelError):  # with a host that has crashed
                self._domain.fail(_cancelled(operation))
        if operation.queue is not None:
            operation.queue.remove(operation)  # now: it holds what the caller may want to free
            self._domain.mismatches.end(operation.id)

    async def _run(
        self, operation: Operation, result: Callable[[], T], timeout_s: float, message: MessageRequest | None
    ) -> T:
        domain = self._domain
        began_s, sent_bytes = domain.metrics.begin(), None
        domain.in_flight[operation] = began_s
        limit = domain.mesh.host.clock.timeout(timeout_s)
        domain.deadlines[operation] = limit, timeout_s
        try:
            async with limit:
                if operation.ahead is not None:
                    assert operation.ahead.task is not None
                    await asyncio.gather(asyncio.shield(operation.ahead.task), return_exceptions=True)
                    operation.ahead = None  # it holds what its caller may want to free
                if domain.error is not None:
                    raise domain.not_started(operation) from domain.error
                if message is not None:
                    await self._match(operation, message)
                with (
                    domain.mesh.host.interval("operation", operation, operation.figures),
                    operation.activity() as activity,
                ):
                    if not operation.attach_links():
                        await operation.connect(activity)
                    await execute(operation, activity)
                    activity.rest()
                    operation.check_complete()
            sent_bytes, domain.ended_s = operation.sent_bytes, domain.mesh.host.clock.elapsed()
        except CollectiveError as error:
            reason = await domain.reason(operation, error)
            await domain.broken(reason)
            raise reason from error.__cause__
        except TimeoutError:
            late = domain.timeout(operation, timeout_s)
            operation.ahead = None
            await domain.broken(late)
            raise late from late.__cause__
        except asyncio.CancelledError:
            await domain.broken(_cancelled(operation))
            raise
        except Exception as error:  # not ours, so the others cannot know: no memory, say
            rank = operation.id.rank
            await domain.broken(CollectiveError(f"{operation} failed on rank {rank}: {error!r}", peer=rank))
            raise
        finally:
            operation.enter(FAILED if sent_bytes is None else DONE)
            del domain.in_flight[operation], domain.deadlines[operation]
            domain.metrics.end(operation.id.name, began_s, sent_bytes)
        return result()

    async def _match(self, operation: Operation, message: MessageRequest) -> None:
        """Wait until the message to receive is known."""
        assert operation.pending is not None
        operation.enter(MATCHING)
        try:
            source, number = await operation.pending.matched
        except CollectiveError:
            raise
        except HcsimError as error:
            raise CollectiveError(f"{operation} failed: {error}", phase=operation.waiting_for()[1]) from error
        receive = Recv(source, message.action.lo, message.action.hi)
        steps = self._cut(Plan(((receive,),)), operation.buffer)
        operation.match(self._message_id(message, operation.buffer, number), steps)

    # What it does, and how it is called on the wire.

    def _scheduled(self, request: CollectiveRequest, buffer: Buffer) -> tuple[Schedule, int]:
        """Return the schedule of this rank, and a signature of everything that all ranks must agree on."""
        key = (request.operation, request.algorithm, request.shape, request.op, buffer.kind, buffer.element_bytes)
        known = self._schedules.get(key)
        if known is None:
            if len(self._schedules) >= SCHEDULES_KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            algorithm = self.algorithm(request.operation, request.shape, buffer.element_bytes, request.algorithm)
            made = plan(request.operation, algorithm, self._rank, request.shape)
            steps = self._cut(made if request.op == "mean" else _unfinished(made), buffer)
            shape = msgspec.structs.replace(request.shape, sent=(), received=())
            agreed = (algorithm, request.op, shape, buffer.kind)
            known = self._schedules[key] = steps, signature_of(request.operation, agreed)
        return known

    def _cut(self, made: Plan, buffer: Buffer) -> Schedule:
        """Return the schedule of a plan. Its peers are ranks of the whole group, as in links, headers and errors."""
        if self._members != tuple(range(len(self._members))):
            made = made.among(self._members)
        return schedule(made, max(1, self._us.wire.segment_bytes // buffer.element_bytes))

    def _message_id(self, message: MessageRequest, buffer: Buffer, number: int) -> OperationId:
        us, (of_tag, bucket) = self._us, _numbered(number, message.tag)
        signature = zlib.crc32(buffer.kind.encode())
        return OperationId(message.name, us.rank, us.epoch, self._group | POINT_TO_POINT, of_tag, bucket, signature)

    def _next_tag(self, tag: int, source: int) -> Tag:
        number, bucket = _numbered(self._numbers.get(("recv", source, tag), 0), tag)
        return (self._group | POINT_TO_POINT, number, bucket, 0, 0)

    def _take_number(self, kind: str, peer: int, bucket: int) -> int:
        key = (kind, peer, bucket)
        number = self._numbers.get(key, 0)
        self._numbers[key] = number + 1
        return number


def _cancelled(operation: Operation) -> CollectiveError:
    rank = operation.id.rank
    return CollectiveError(f"{operation} was cancelled on rank {rank}", peer=rank)


def _numbered(number: int, tag: int) -> tuple[int, int]:
    """Return the operation number and the bucket for the frames of a message."""
    return number | tag >> BUCKET_BITS << NUMBER_BITS, tag & (1 << BUCKET_BITS) - 1


def _unfinished(made: Plan) -> Plan:
    """Return the plan without `Finish`, which is the last action of its round."""
    rounds = [actions[:-1] if actions and type(actions[-1]) is Finish else actions for actions in made.rounds]
    return Plan(tuple(rounds), made.peers, made.summary, made.in_step)
