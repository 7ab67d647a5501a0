"""How the machines of a group agree on the clock of their timelines: they ask each other for the time.

A machine that records frames asks the others to which it has links, a few times in a row as soon as there is a link and
every few seconds after that. Every machine answers; what counts is told in `timeline_clock`. A question and its answer
are frames without payload:

    operation   the reference of the answerer's clock; 0 if it has none
    group       the number of the question          signature   the error of the answerer's clock in µs
    step        1 in a question, 2 in an answer     offset, total   when the question came, and when it was answered
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count

from hcsim.errors import HcsimError
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import Host
from hcsim.runtime.timeline_clock import ClockSample
from hcsim.transport.groups import GroupMembership
from hcsim.transport.link import Link

_QUESTION, _ANSWER = 1, 2
_QUESTIONS = 8
"""How often a peer is asked in a row; the shortest round trip counts."""
_ANSWER_S = 1.0
_AGAIN_S = 5.0
_SOON_S = 0.05
"""How long to wait before asking again as long as the clock is not known well enough."""
_GOOD_NS = 50_000
_MOST_ROUNDS = 20
"""How often to ask for a better clock before the timeline begins with what there is."""
_MOST_LONELY_ROUNDS = 100
"""So often nobody has a clock until this machine is the reference: the others record nothing."""
_NS = 1_000_000_000
_MOST_ERROR_US = (1 << 32) - 1


class ClockQuestions:
    """The questions and answers of one member of a group."""

    def __init__(self, host: Host, us: GroupMembership, links: dict[int, Link]) -> None:
        self._host = host
        self._us = us
        self._links = links
        self._asked = 0
        self._waiting: dict[int, asyncio.Future[tuple[Header, int]]] = {}
        self._answering: set[Link] = set()
        self._joined = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._is_told = False
        """Whether the timeline knows the clock."""

    def start(self) -> None:
        """Ask for the time from now on, if a timeline is recorded here."""
        clock = self._host.timeline_clock
        if clock is not None:
            if self._us.rank == 0:
                clock.be_reference()
            self._asking = self._host.spawn(self._ask_on(), name="ask for the time")

    def stop(self) -> None:
        clock = self._host.timeline_clock
        if self._asking is not None and clock is not None:
            self._asking.cancel()
            if clock.reference and not self._is_told:
                self._tell()

    def joined(self, link: Link) -> None:
        """There is a new link."""
        link.on_clock = self._heard
        self._joined.set()

    def _now_ns(self) -> int:
        return round(self._host.clock.elapsed() * _NS)

    def _tell(self) -> None:
        clock = self._host.timeline_clock
        assert clock is not None
        self._is_told = True
        self._host.note("clock", clock.offset_ns, clock.error_ns(self._now_ns()), clock.reference)

    def _heard(self, link: Link, header: Header) -> None:
        now_ns = self._now_ns()
        if header.step == _QUESTION and link in self._answering:
            return  # it has not taken the last answer yet
        if header.step == _QUESTION:
            self._answering.add(link)
            self._host.spawn(self._answer(link, header.group, now_ns), name="tell the time")
        elif (waiting := self._waiting.get(header.group)) is not None and not waiting.done():
            waiting.set_result((header, now_ns))

    async def _answer(self, link: Link, number: int, received_ns: int) -> None:
        clock = self._host.timeline_clock
        reference = offset_ns = error_us = 0
        if clock is not None:
            reference, offset_ns = clock.reference, clock.offset_ns
            error_us = min(-(-clock.error_ns(received_ns) // 1000), _MOST_ERROR_US)
        times_ns = max(0, received_ns + offset_ns), max(0, self._now_ns() + offset_ns)
        try:
            with suppress(HcsimError):
                await self._send(link, _ANSWER, number, times_ns, (reference, error_us))
        finally:
            self._answering.discard(link)

    async def _send(
        self, link: Link, step: int, number: int, times_ns: tuple[int, int] = (0, 0), clock: tuple[int, int] = (0, 0)
    ) -> None:
        (received_ns, answered_ns), (reference, error_us) = times_ns, clock
        header = Header(
            0, Kind.CLOCK, self._us.rank, epoch=self._us.epoch, group=number, operation=reference,
            signature=error_us, step=step, offset=received_ns, total=answered_ns,
        )  # fmt: skip
        await link.channels[0].send(header)

    async def _ask_on(self) -> None:
        clock = self._host.timeline_clock
        assert clock is not None
        for rounds in count():
            self._joined.clear()
            for link in list(self._links.values()):
                with suppress(HcsimError, TimeoutError):
                    await self._ask(link)
            if rounds == _MOST_LONELY_ROUNDS:
                clock.be_reference()
            is_good = rounds >= _MOST_ROUNDS or clock.error_ns(self._now_ns()) <= _GOOD_NS
            is_alone = not self._links and self._us.world > 1  # others may have a clock already
            if clock.reference and is_good and not is_alone and not self._is_told:
                self._tell()
            with suppress(TimeoutError):
                async with self._host.clock.timeout(_AGAIN_S if self._is_told else _SOON_S):
                    await self._joined.wait()

    async def _ask(self, link: Link) -> None:
        """Ask one peer; keep the best of its answers if that is better than what is known."""
        clock = self._host.timeline_clock
        assert clock is not None
        best: tuple[int, ClockSample] | None = None
        for _ in range(_QUESTIONS):
            reference, sample = await self._trip(link)
            if not reference:
                return
            if best is None or sample.bound_ns < best[1].bound_ns:
                best = reference, sample
        if best is not None and clock.learn(*best) and self._is_told:
            self._tell()

    async def _trip(self, link: Link) -> tuple[int, ClockSample]:
        """Ask once; return the reference of the peer's clock, and the times."""
        self._asked = number = (self._asked + 1) % (1 << 32)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            asked_ns = self._now_ns()
            await self._send(link, _QUESTION, number)  # without a limit, which could cut the frame
            async with self._host.clock.timeout(_ANSWER_S):
                header, heard_ns = await answer
        finally:
            del self._waiting[number]
        error_ns = 1000 * header.signature
        return header.operation, ClockSample(asked_ns, header.offset, header.total, heard_ns, error_ns)
