"""A group of ranks that compute together: every collective, in both worlds.

An operation starts when it is called and is a task: `await` it for its result, or keep it and go
on; several may be in flight. Ranks call operations in the same order within a `bucket`; buckets
are independent of each other. Arrays are contiguous numpy arrays, and belong to the operation until it
is over; a `Phantom` stands for any of them, with a size and no data.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

import msgspec
import numpy as np

from hcsim.collectives.cost import Links
from hcsim.collectives.data import (
    Data,
    DataT,
    copy_into,
    element_bytes_of,
    in_one_piece,
    length_of,
    moving,
    overlaps,
    part_of,
    reducing,
    room_for,
    whole_number,
    writable,
)
from hcsim.collectives.dispatch import Dispatch, Message, Pending, Request
from hcsim.collectives.fate import Fate
from hcsim.collectives.layout import WORTH_SPARING, Span, combining, dealt, parts_of, spanning, touched, written
from hcsim.collectives.measure import measure_links
from hcsim.collectives.memory import Memory
from hcsim.collectives.options import Options
from hcsim.collectives.order import order_over
from hcsim.collectives.plan import Recv, Send, offsets, split
from hcsim.collectives.select import choose
from hcsim.collectives.shape import Shape
from hcsim.collectives.wiring import POINT_TO_POINT
from hcsim.errors import CollectiveError, HcsimError, RemoteProtocolError, UsageError
from hcsim.runtime.channel import Listener, Phantom
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.runtime.host import Host
from hcsim.transport.hello import Membership
from hcsim.transport.mesh import Mesh
from hcsim.transport.reception import Reception

T = TypeVar("T")

SHAPES_KEPT = 256
_WHOLE = 0
"""The number of a group that is nobody's subgroup."""


class _Shared:
    """What a group is by whichever time limit one calls it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.shapes: dict[tuple[int, int], Shape] = {}
        """Of operations on a length and a root, kept: a training loop asks for the same few again and again."""


class _Lives:
    """What the lives of a group have in common."""

    newest: Group | None = None
    """The one that was opened last; it ends with whoever owned the first."""


class Group:
    """This rank's view of the group."""

    def __init__(self, fate: Fate, members: tuple[int, ...], number: int, options: Options) -> None:
        self._fate = fate
        self._members = members
        self._number = number
        self._shared = _Shared(options)
        self._lives = _Lives()
        self._timeout_s = options.timeout_s
        self.rank = members.index(fate.mesh.us.rank)
        self.size = len(members)
        self._children: dict[tuple[int, ...], int] = {}
        self._dispatch = Dispatch(fate, members, number)

    @classmethod
    async def open(
        cls,
        host: Host,
        us: Membership,
        options: Options | None = None,
        listener: Listener | None = None,
        reception: Reception | None = None,
    ) -> Group:
        """Listen at our address; links to the others open when they are first needed.

        A caller that had to listen before the addresses were known gives the listener, which is then closed with the
        group. A `reception` takes callers for this group and for those that follow it, and is left open."""
        mesh = Mesh(host, us, listener, reception)
        fate = Fate(mesh)
        conducted = options is not None and options.conducted
        if conducted:
            mesh.on_newer = None
        mesh.patient = conducted or us.epoch > 0  # others may still be in the epoch before, and will come
        await mesh.open()
        if options is not None and options.watch_s is not None:
            try:
                await fate.watch(options.watch_s)
            except BaseException:
                fate.fail(CollectiveError(f"rank {us.rank} gave up while it opened the group", peer=us.rank))
                await fate.ended()
                raise
        return cls(fate, tuple(range(us.world)), _WHOLE, options or Options())

    def within(self, timeout_s: float) -> Group:
        """This same group, with another time limit for the operations that are started through what this returns."""
        same = copy(self)
        same._timeout_s = msgspec.structs.replace(self.options, timeout_s=timeout_s).timeout_s
        return same

    @property
    def options(self) -> Options:
        """How it works where a call does not say."""
        options = self._shared.options
        if options.timeout_s == self._timeout_s:
            return options
        return msgspec.structs.replace(options, timeout_s=self._timeout_s)

    async def reopen(self) -> Group:
        """After a failure: the same group anew, under the next epoch. Every member has to call it.

        It is closed with the old one, if not before."""
        if self._is_part:
            raise UsageError("a subgroup has no life of its own: reopen the whole group, and make it from that")
        await self.close()
        mesh = self._fate.mesh
        us = msgspec.structs.replace(mesh.us, epoch=max(mesh.us.epoch + 1, mesh.newest_epoch))
        again = await Group.open(mesh.host, us, self.options)
        again._lives = self._lives
        self._lives.newest = again
        return again

    async def measure(self) -> Links:
        """Measure the links; from now on `auto` chooses by price, and the ring goes the best way. All call it."""
        links = await measure_links(self)
        self.follow(links)
        return links

    @property
    def passes_on(self) -> bool:
        """Whether what comes over any of our links so far can go on over any other without a stop."""
        return all(link.outlet is not None for link in self._fate.mesh.links.values())

    def follow(self, links: Links) -> None:
        """Choose by these figures from now on. All members call it, with the same ones, between two operations."""
        order, shared = order_over(links) if self.size > 2 else (), self._shared
        shared.options = msgspec.structs.replace(shared.options, links=links, order=order)
        shared.shapes = {}

    def dial(self, addresses: Sequence[str]) -> None:
        """Reach the others there, by rank, where no link is open yet: at their own addresses, in another order."""
        self._fate.mesh.dialled = tuple(addresses)

    @property
    def ends(self) -> dict[int, tuple[str, str]]:
        """By rank: the two addresses that an open link goes between, ours first."""
        return {rank: link.channels[0].ends for rank, link in self._fate.mesh.links.items()}

    @property
    def carriers(self) -> tuple[str, ...]:
        """What this rank's links go by, for people; each once, in the order of their ranks."""
        links = sorted(self._fate.mesh.links.items())
        return tuple(dict.fromkeys(channel.carrier for _, link in links for channel in link.channels))

    @property
    def error(self) -> HcsimError | None:
        """Why it has ended, if it has."""
        return self._fate.error

    @property
    def waited_for(self) -> int | None:
        """The rank that the oldest operation here was waiting for when the group failed, if it was waiting."""
        return self._fate.waited_for

    @property
    def standing_s(self) -> float:
        """How long that operation had been under way then; or, if none was waiting, how long ago the last one ended
        here."""
        return self._fate.standing_s

    @property
    def skipped(self) -> RemoteProtocolError | None:
        """What shows that this rank had left out what was waited for, if anything does."""
        return self._fate.skipped

    def fail(self, reason: str | CollectiveError, peer: int | None = None) -> None:
        """End it here and at the others, for a reason that it cannot see by itself."""
        self._fate.fail(CollectiveError(reason, peer=peer) if isinstance(reason, str) else reason)

    async def close(self) -> None:
        """Leave. Operations that are still under way fail, here and at the others.

        A subgroup has nothing to leave: its links are the whole group's."""
        if self._is_part:
            return
        newest = self._lives.newest
        try:
            await self._fate.leave()
        finally:
            if newest is not None and newest._fate is not self._fate:
                await newest.close()

    async def __aenter__(self) -> Group:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<group {self._number:x}, rank {self.rank} of {self.size}>"

    @property
    def _is_part(self) -> bool:
        return self._number != _WHOLE

    @property
    def host(self) -> Host:
        """The machine that this rank runs on."""
        return self._fate.mesh.host

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where each rank listens."""
        everyone = self._fate.mesh.us.addresses
        return tuple(everyone[member] for member in self._members)

    @property
    def epoch(self) -> int:
        """Counts the lives of this group."""
        return self._fate.mesh.us.epoch

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that left this rank, in all groups over the same links."""
        return sum(link.sent_bytes for link in self._fate.mesh.links.values())

    @property
    def wire_bytes(self) -> int:
        """The same with the frames' headers: all that this rank put on its channels for collectives."""
        return sum(link.sent_bytes + HEADER_BYTES * link.sent_frames for link in self._fate.mesh.links.values())

    def subgroup(self, ranks: Sequence[int], options: Options | None = None) -> Group:
        """The group of some of our ranks, in that order. Its members call this, the others need not."""
        members = tuple(self._members[self._rank(rank)] for rank in ranks)
        if len({*members}) != len(members) or self._members[self.rank] not in members:
            raise UsageError(f"a subgroup names each of its ranks once, and ours ({self.rank}) too: {list(ranks)}")
        nth = self._children[members] = self._children.get(members, 0) + 1
        number = zlib.crc32(repr((self._number, members, nth)).encode()) & (POINT_TO_POINT - 1)
        plain = msgspec.structs.replace(self.options, order=(), groups=(), links=None)
        return Group(self._fate, members, number, options or plain)

    # Collectives.

    def all_reduce(self, data: DataT, op: str = "sum", *, algorithm: str = "auto", bucket: int = 0) -> Pending[DataT]:
        """Combine everybody's data; everybody gets the result, in place."""
        shape = self._of_length(length_of(data))
        return self._start(
            "all_reduce", shape, reducing([writable(data)], op, self.size), lambda: data, algorithm, bucket, op
        )

    def reduce(
        self, data: DataT, root: int = 0, op: str = "sum", *, algorithm: str = "auto", bucket: int = 0
    ) -> Pending[DataT]:
        """Combine everybody's data; the root gets the result, in place. The others' data stay as they are."""
        shape = self._of_length(length_of(data), self._rank(root))
        work = writable(data) if self.rank == root or isinstance(data, Phantom) else data.copy()
        return self._start("reduce", shape, reducing([work], op, self.size), lambda: data, algorithm, bucket, op)

    def broadcast(self, data: DataT, root: int = 0, *, algorithm: str = "auto", bucket: int = 0) -> Pending[DataT]:
        """Everybody gets the root's data, in place."""
        shape = self._of_length(length_of(data), self._rank(root))
        memory = moving([data if self.rank == root else writable(data)])
        return self._start("broadcast", shape, memory, lambda: data, algorithm, bucket)

    def all_gather(
        self,
        data: Data,
        counts: Sequence[int] | None = None,
        *,
        into: Data | None = None,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Pending[list[Data]]:
        """Everybody gets everybody's data, by rank. Unequal lengths: `counts` has each rank's, in elements.

        `into` has room for all of it in one piece; our data may be its part of that already."""
        shape, cuts = self._parts(data, counts)
        whole = room_for(cuts[-1], data, into)
        parts = parts_of(whole, cuts, data, counts)
        copy_into(parts[self.rank], data)
        return self._start("all_gather", shape, moving([whole]), lambda: parts, algorithm, bucket)

    def gather(
        self,
        data: Data,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        into: Data | None = None,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Pending[list[Data] | None]:
        """The root gets everybody's data, by rank, `into` one piece if it has one for it; the others get None."""
        shape, cuts = self._parts(data, counts, root=self._rank(root))
        if self.rank == root:
            whole = room_for(cuts[-1], data, into)
            parts = parts_of(whole, cuts, data, counts)
            copy_into(parts[root], data)
            return self._start("gather", shape, moving([whole]), lambda: parts, algorithm, bucket)
        own = Span(cuts[self.rank], cuts[self.rank + 1])
        algorithm = self._algorithm("gather", shape, data, algorithm)
        reach = touched("gather", algorithm, self.rank, shape, own)
        memory, place = spanning(in_one_piece(data), own, reach)
        copy_into(place, data)
        return self._start("gather", shape, memory, lambda: None, algorithm, bucket)

    def scatter(
        self,
        data: Sequence[Data] | Data | None,
        into: DataT,
        root: int = 0,
        *,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Pending[DataT]:
        """Everybody gets the part that the root has for it, `into` the given data; all parts are of one length.

        The root has a list of them, or one array with all of them one after the other."""
        moving([writable(into)])  # refuses a target whose elements are not in one piece: a copy of it would be filled
        counts = (length_of(into),) * self.size
        shape, cuts = self._shape(counts=counts, root=self._rank(root)), offsets(counts)
        own = Span(cuts[self.rank], cuts[self.rank + 1])
        algorithm = self._algorithm("scatter", shape, into, algorithm)
        if self.rank == root:
            whole = dealt(data, into, cuts)
            memory, place = moving([whole]), part_of(whole, *own)
        else:
            memory, place = spanning(into, own, touched("scatter", algorithm, self.rank, shape, own))

        def result() -> DataT:
            copy_into(into, place)
            return into

        return self._start("scatter", shape, memory, result, algorithm, bucket)

    def reduce_scatter(
        self,
        data: Data,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        *,
        into: Data | None = None,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Pending[Data]:
        """Combine everybody's data; each rank gets its part of the result (nearly equal ones, or `counts`).

        The data stay as they are, but for what of them is also `into`, where the result goes."""
        length = length_of(data)
        cuts = split(length, self.size) if counts is None else offsets(self._sizes("counts", counts))
        shape = self._shape(counts=tuple(hi - lo for lo, hi in itertools.pairwise(cuts)))
        if cuts[-1] != length:
            raise UsageError(f"counts {list(shape.counts)} do not divide {length} elements among {self.size} ranks")
        own = Span(cuts[self.rank], cuts[self.rank + 1])
        target = None if into is None else room_for(own.hi - own.lo, data, into)
        changed = Span(0, length)
        if length >= WORTH_SPARING:
            algorithm = self._algorithm("reduce_scatter", shape, data, algorithm)
            changed = written("reduce_scatter", algorithm, self.rank, shape, own)
        memory, part = combining(data, target, own, changed, op, self.size)

        def result() -> Data:
            if target is None:
                return part
            copy_into(target, part)
            return target

        return self._start("reduce_scatter", shape, memory, result, algorithm, bucket, op)

    def all_to_all(
        self,
        data: Sequence[Data],
        received: Sequence[int] | None = None,
        *,
        into: Data | None = None,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Pending[list[Data]]:
        """Send the i-th part to rank i, get one from each. Unless all are alike, `received` has their lengths.

        `into` has room for all that is received in one piece, which is no part of what is sent."""
        if len(data) != self.size:
            raise UsageError(f"all_to_all needs one part for each of the {self.size} ranks, not {len(data)}")
        sent = tuple(length_of(part) for part in data)
        coming = sent if received is None else self._sizes("received", received)
        shape = self._shape(sent=sent, received=coming)
        cuts = offsets(coming)
        if cuts[-1] and sent[self.rank] != coming[self.rank]:
            raise UsageError(f"our part for ourselves has {sent[self.rank]} elements, not {coming[self.rank]}")
        whole = room_for(cuts[-1], data[0], into)
        if into is not None and overlaps(whole, data):
            raise UsageError("an all_to_all cannot receive into what it sends")
        parts = [part_of(whole, lo, hi) for lo, hi in itertools.pairwise(cuts)]
        copy_into(parts[self.rank], data[self.rank])
        return self._start("all_to_all", shape, moving([*data, whole]), lambda: parts, algorithm, bucket)

    def barrier(self, *, bucket: int = 0) -> Pending[None]:
        """Return when everybody has called it."""
        return self._start("barrier", self._of_length(0), moving([np.empty(0, np.uint8)]), lambda: None, "auto", bucket)

    # Point to point.

    def send(self, data: DataT, to: int, *, tag: int = 0) -> Pending[DataT]:
        """Send data to one rank, which receives it with the same tag, in the order of sending."""
        message = Message("send", whole_number("a tag", tag), Send(self._peer(to), 0, length_of(data)))
        return self._dispatch.message(message, moving([data]), lambda: data, self._timeout_s)

    def recv(self, data: DataT, source: int, *, tag: int = 0) -> Pending[DataT]:
        """Receive into the data, which has the length of what comes."""
        message = Message("recv", whole_number("a tag", tag), Recv(self._peer(source), 0, length_of(data)))
        return self._dispatch.message(message, moving([writable(data)]), lambda: data, self._timeout_s)

    def recv_any(self, data: Data, *, tag: int = 0) -> Pending[int]:
        """Receive a message from whoever sends one with that tag first; the result is the sender's rank.

        Messages go to those who ask, whether from anybody or from one rank, in the order in which they asked."""
        if self.size == 1:
            raise UsageError("there is nobody to receive from in a group of one")
        memory = moving([writable(data)])
        return self._dispatch.from_anybody(length_of(data), whole_number("a tag", tag), memory, self._timeout_s)

    def sendrecv(self, data: Data, to: int, into: DataT, source: int, *, tag: int = 0) -> Pending[DataT]:
        """Send and receive at the same time."""
        number = whole_number("a tag", tag)
        out, given = Message("send", number, Send(self._peer(to), 0, length_of(data))), moving([data])
        back, place = Message("recv", number, Recv(self._peer(source), 0, length_of(into))), moving([writable(into)])
        # Both were checked before either starts: a call that is refused has done nothing.
        sending = self._dispatch.message(out, given, lambda: data, self._timeout_s)
        receiving = self._dispatch.message(back, place, lambda: into, self._timeout_s)

        def over(task: Pending[DataT]) -> None:
            if task.cancelled():  # perhaps before it waited for either
                sending.cancel()
                receiving.cancel()
            else:
                task.exception()  # as of any operation: who does not await it learns of the group's failure otherwise

        return self.host.spawn(_both(sending, receiving), name="sendrecv", over=over)

    # What the operations have in common.

    def _start(
        self,
        operation: str,
        shape: Shape,
        memory: Memory,
        result: Callable[[], T],
        algorithm: str,
        bucket: int,
        op: str = "",
    ) -> Pending[T]:
        if algorithm == "auto":
            segment_bytes = self._fate.mesh.us.wire.segment_bytes
            algorithm = choose(operation, shape, memory.element_bytes, self._shared.options.links, segment_bytes)
        request = Request(operation, algorithm, shape, op, whole_number("a bucket", bucket))
        return self._dispatch.collective(request, memory, result, self._timeout_s)

    def _algorithm(self, operation: str, shape: Shape, data: Data, algorithm: str) -> str:
        """The algorithm, where it has to be known before there is memory."""
        if algorithm != "auto":
            return algorithm
        segment_bytes = self._fate.mesh.us.wire.segment_bytes
        return choose(operation, shape, element_bytes_of(data), self._shared.options.links, segment_bytes)

    def _of_length(self, length: int, root: int = 0) -> Shape:
        shapes = self._shared.shapes
        shape = shapes.get((length, root))
        if shape is None:
            if len(shapes) >= SHAPES_KEPT:
                shapes.clear()
            shape = shapes[length, root] = self._shape(length=length, root=root)
        return shape

    def _shape(self, **sizes: Any) -> Shape:
        o = self._shared.options
        return Shape(
            world=self.size, arity=o.arity, order=o.order, groups=o.groups, local=o.local, cross=o.cross, **sizes
        )

    def _parts(self, data: Data, counts: Sequence[int] | None, root: int = 0) -> tuple[Shape, tuple[int, ...]]:
        """How everybody's data lie one after the other."""
        sizes = (length_of(data),) * self.size if counts is None else self._sizes("counts", counts)
        shape = self._shape(counts=sizes, root=root)
        if sizes[self.rank] != length_of(data):
            raise UsageError(
                f"counts says {sizes[self.rank]} elements for rank {self.rank}, which has {length_of(data)}"
            )
        return shape, offsets(sizes)

    def _sizes(self, what: str, given: Sequence[int]) -> tuple[int, ...]:
        """Somebody's list of lengths, one for each rank."""
        if len(given) != self.size:
            raise UsageError(f"{what} has one size per rank: {self.size} of them, not {len(given)}")
        return tuple(whole_number("a size", size) for size in given)

    def _rank(self, rank: int) -> int:
        rank = whole_number("a rank", rank)
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank} in a group of {self.size}")
        return rank

    def _peer(self, rank: int) -> int:
        rank = self._rank(rank)
        if rank == self.rank:
            raise UsageError(f"rank {rank} cannot send to itself or receive from itself")
        return rank


async def _both(sending: Pending[Any], receiving: Pending[T]) -> T:
    await sending
    return await receiving
