"""From a request to a running operation: its plan, its place on the wire, and its turn.

An operation's number is counted per bucket, so ranks may start buckets in unlike orders. Plans
are kept: a training loop asks for the same few again and again. Collectives of one bucket move
bytes a few at a time, so that a fast rank cannot flood a slow one.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import msgspec

from hcsim.collectives.agreement import signature_of
from hcsim.collectives.algorithms import plan
from hcsim.collectives.buffers import Buffer
from hcsim.collectives.execute import Execution
from hcsim.collectives.fate import Fate, Turn
from hcsim.collectives.inbox import Waiting
from hcsim.collectives.mail import Mail, Receipt
from hcsim.collectives.plan import Finish, Plan, Recv, Send, Shape
from hcsim.collectives.schedule import Schedule, schedule
from hcsim.collectives.wiring import BUCKET_BITS, NUMBER_BITS, POINT_TO_POINT, TAG_BITS, Ticket, Wiring
from hcsim.errors import UsageError
from hcsim.transport.link import Tag

T = TypeVar("T")
Pending: TypeAlias = asyncio.Task[T]
"""An operation on its way."""

_InLine: TypeAlias = tuple[Pending[Any], Execution]

PLANS_KEPT = 64
IN_FLIGHT = 8
"""Collectives of one bucket that move bytes at once; further ones wait for their turn."""


class Request(msgspec.Struct, frozen=True):
    """A collective that somebody asks for."""

    operation: str
    algorithm: str
    shape: Shape
    op: str
    """The reduction, if it is one."""
    bucket: int


class Message(msgspec.Struct, frozen=True):
    """A message to or from one rank."""

    name: str
    tag: int
    action: Send | Recv

    def __post_init__(self) -> None:
        if not 0 <= self.tag < 1 << TAG_BITS:
            raise UsageError(f"a tag is a number from 0 to {(1 << TAG_BITS) - 1}, not {self.tag}")


class Dispatch:
    """Starts a group's operations."""

    def __init__(self, fate: Fate, members: tuple[int, ...], number: int) -> None:
        self._fate = fate
        self._members = members
        self._number = number
        self._rank = members.index(fate.mesh.us.rank)
        fate.agreement.lowest[number] = min(members)
        self._counts: dict[tuple[str, int, int], int] = {}
        self._plans: dict[object, tuple[Schedule, int]] = {}
        self._lines: dict[int, list[_InLine]] = {}
        self._mail = Mail(fate, members, self._next_tag, lambda tag, source: self._count("recv", source, tag))

    def collective(self, request: Request, buffer: Buffer, result: Callable[[], T], timeout_s: float) -> Pending[T]:
        """Start a collective; its result is what `result` says once it is over."""
        bucket = request.bucket
        steps, signature = self._planned(request, buffer)
        ticket = self._ticket(request.operation, bucket, self._count("", 0, bucket), signature)
        self._fate.begin(ticket)
        line = self._lines.setdefault(bucket, [])
        before = _turn_in(line) if len(line) >= IN_FLIGHT else None

        def over(task: Pending[T]) -> None:
            line.remove(place)  # not only when the next one comes: it holds what the caller may want to free
            self._fate.agreement.end(ticket)

        execution = self._execution(steps, ticket, buffer)
        task = self._fate.see_through(execution, result, timeout_s, before, over)
        place = (task, execution)
        line.append(place)
        return task

    def message(self, message: Message, buffer: Buffer, result: Callable[[], T], timeout_s: float) -> Pending[T]:
        """Start to send or receive a message."""
        name, peer, tag = message.name, message.action.peer, message.tag
        if name == "recv" and self._mail.is_awaited(tag):
            waiting = self._mail.wait(tag, peer)
            return self._fate.see_through(self._receipt(message, buffer, waiting), result, timeout_s)
        execution = self._to_one(message, buffer, self._count(name, peer, tag))
        return self._fate.see_through(execution, result, timeout_s)

    def from_anybody(self, length: int, tag: int, buffer: Buffer, timeout_s: float) -> Pending[int]:
        """Start to receive a message from anybody; the result is who sent it."""
        message = Message("recv_any", tag, Recv(0, 0, length))
        waiting = self._mail.wait(tag, None)
        return self._fate.see_through(
            self._receipt(message, buffer, waiting), lambda: waiting.matched.result()[0], timeout_s
        )

    def _receipt(self, message: Message, buffer: Buffer, waiting: Waiting) -> Receipt:
        """What receives a message whose number, or even sender, is not known yet."""

        def begin(source: int, number: int) -> Execution:
            recv = Recv(source, message.action.lo, message.action.hi)
            return self._to_one(Message("recv", message.tag, recv), buffer, number)

        asked = self._count(f"{message.name} asked", message.action.peer, message.tag)
        return self._mail.receipt(self._message_ticket(message, buffer, asked), waiting, begin)

    def _to_one(self, message: Message, buffer: Buffer, number: int) -> Execution:
        steps = self._scheduled(Plan(((message.action,),)), buffer)
        return self._execution(steps, self._message_ticket(message, buffer, number), buffer)

    def _message_ticket(self, message: Message, buffer: Buffer, number: int) -> Ticket:
        us, (operation, bucket) = self._fate.mesh.us, _numbered(number, message.tag)
        signature = zlib.crc32(buffer.kind.encode())
        return Ticket(message.name, us.rank, us.epoch, self._number | POINT_TO_POINT, operation, bucket, signature)

    def _next_tag(self, tag: int, source: int) -> Tag:
        operation, bucket = _numbered(self._counts.get(("recv", source, tag), 0), tag)
        return (self._number | POINT_TO_POINT, operation, bucket, 0, 0)

    def _execution(self, steps: Schedule, ticket: Ticket, buffer: Buffer) -> Execution:
        fate = self._fate
        wiring = Wiring(ticket, buffer, fate.scratch, fate.mesh.host.device)
        return Execution(steps, wiring, fate.mesh, fate.cutting)

    def _planned(self, request: Request, buffer: Buffer) -> tuple[Schedule, int]:
        """What we do, and a digest of what all ranks must agree on."""
        key = (request.operation, request.algorithm, request.shape, request.op, buffer.kind)
        if key not in self._plans:
            if len(self._plans) >= PLANS_KEPT:
                self._plans.pop(next(iter(self._plans)))
            made = plan(request.operation, request.algorithm, self._rank, request.shape)
            steps = self._scheduled(made if request.op == "mean" else _unfinished(made), buffer)
            shape = msgspec.structs.replace(request.shape, sent=(), received=())
            agreed = (request.algorithm, request.op, shape, buffer.kind)
            self._plans[key] = steps, signature_of(request.operation, agreed)
        return self._plans[key]

    def _scheduled(self, made: Plan, buffer: Buffer) -> Schedule:
        """How it is executed, where links, headers and errors name ranks as the whole group does, not as a subgroup."""
        if self._members != tuple(range(len(self._members))):
            made = made.among(self._members)
        return schedule(made, max(1, self._fate.mesh.us.wire.segment_bytes // buffer.element_bytes))

    def _ticket(self, name: str, bucket: int, operation: int, signature: int) -> Ticket:
        us = self._fate.mesh.us
        if not 0 <= bucket < 1 << BUCKET_BITS:
            raise UsageError(f"a bucket is a number from 0 to {(1 << BUCKET_BITS) - 1}, not {bucket}")
        return Ticket(name, us.rank, us.epoch, self._number, operation, bucket, signature)

    def _count(self, kind: str, peer: int, bucket: int) -> int:
        number = self._counts.get((kind, peer, bucket), 0)
        self._counts[kind, peer, bucket] = number + 1
        return number


def _turn_in(line: list[_InLine]) -> Turn:
    """What the next of a line waits for."""
    task, execution = line[-IN_FLIGHT]

    def blame() -> tuple[int | None, str]:
        for ahead in (execution, *(execution for _, execution in line)):  # it may wait for its own turn
            peer, phase = ahead.blame()
            if peer is not None:
                return peer, f"waiting for {ahead.ticket}, which is {phase}"
        return None, f"waiting for {execution.ticket}"

    return Turn(task, blame)


def _numbered(number: int, tag: int) -> tuple[int, int]:
    """The operation and bucket of a message's frames."""
    return number | tag >> BUCKET_BITS << NUMBER_BITS, tag & (1 << BUCKET_BITS) - 1


def _unfinished(made: Plan) -> Plan:
    """Without `Finish`, which is the last action of its round."""
    rounds = [actions[:-1] if actions and type(actions[-1]) is Finish else actions for actions in made.rounds]
    return Plan(tuple(rounds), made.peers, made.survey, made.in_step)
