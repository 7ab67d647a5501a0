"""A group of ranks that compute together: every collective, in both worlds.

An operation starts when it is called and is a task: `await` it for its result, or keep it and go
on; several may be in flight. Ranks call operations in the same order within a `bucket`; buckets
are independent of each other. Arrays are contiguous numpy arrays, and belong to the operation until it
is over; a `Phantom` stands for any of them, with a size and no data.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from copy import copy
from typing import Any, TypeVar

import msgspec
import numpy as np

from hcsim.collectives.buffers import (
    Data,
    DataT,
    contiguous,
    copy_into,
    length_of,
    output_for,
    overlaps,
    part_buffer,
    part_of,
    parts_by_rank,
    reduce_scatter_buffer,
    reduction_buffer,
    scatter_input,
    transfer_buffer,
    writable,
)
from hcsim.collectives.cost import Links
from hcsim.collectives.failure_domain import FailureDomain
from hcsim.collectives.operation import POINT_TO_POINT
from hcsim.collectives.plan import Recv, Send, Shape, offsets, split
from hcsim.collectives.ring_order import order_over
from hcsim.collectives.scheduler import CollectiveRequest, Handle, MessageRequest, Scheduler
from hcsim.collectives.select import Options, whole_number
from hcsim.collectives.startup import measure_links
from hcsim.errors import CollectiveError, HcsimError, RemoteProtocolError, UsageError
from hcsim.runtime.channel import Listener, Phantom
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.runtime.host import Host
from hcsim.transport.hello import Membership
from hcsim.transport.mesh import Mesh
from hcsim.transport.reception import Reception

T = TypeVar("T")

_WHOLE = 0
"""The number of a group that is no subgroup."""


class Group:
    """This rank's view of the group."""

    def __init__(self, domain: FailureDomain, members: tuple[int, ...], number: int, options: Options) -> None:
        self._domain = domain
        self._members = members
        self._number = number
        self._reopened: list[Group] = []
        """What this group was last reopened as, which is closed with it; one list for all of them."""
        self._timeout_s = options.timeout_s
        self.rank = members.index(domain.mesh.us.rank)
        self.size = len(members)
        self._children: dict[tuple[int, ...], int] = {}
        self._scheduler = Scheduler(domain, members, number, options)

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
        domain = FailureDomain(mesh)
        conducted = options is not None and options.conducted
        if conducted:
            mesh.on_newer = None
        mesh.patient = conducted or us.epoch > 0  # others may still be in the epoch before, and will come
        await mesh.open()
        if options is not None and options.watch_s is not None:
            try:
                await domain.watch(options.watch_s)
            except BaseException:
                domain.fail(CollectiveError(f"rank {us.rank} gave up while it opened the group", peer=us.rank))
                await domain.ended()
                raise
        return cls(domain, tuple(range(us.world)), _WHOLE, options or Options())

    def within(self, timeout_s: float) -> Group:
        """A copy of this group with another time limit for the operations that are started through it."""
        same = copy(self)
        same._timeout_s = msgspec.structs.replace(self.options, timeout_s=timeout_s).timeout_s
        return same

    @property
    def options(self) -> Options:
        """How it works where a call does not say."""
        options = self._scheduler.options
        if options.timeout_s == self._timeout_s:
            return options
        return msgspec.structs.replace(options, timeout_s=self._timeout_s)

    async def reopen(self) -> Group:
        """After a failure: the same group anew, under the next epoch. Every member has to call it.

        It is closed with the old one, if not before."""
        if self._is_part:
            raise UsageError("a subgroup has no life of its own: reopen the whole group, and make it from that")
        await self.close()
        mesh = self._domain.mesh
        us = msgspec.structs.replace(mesh.us, epoch=max(mesh.us.epoch + 1, mesh.newest_epoch))
        again = await Group.open(mesh.host, us, self.options)
        again._reopened = self._reopened
        self._reopened[:] = [again]
        return again

    async def measure(self) -> Links:
        """Measure the links; from now on `auto` chooses by cost, and the ring takes the best order. All call it."""
        links = await measure_links(self)
        self.follow(links)
        return links

    @property
    def passes_on(self) -> bool:
        """Whether what comes over any of our links so far can go on over any other without a stop."""
        return all(link.outlet is not None for link in self._domain.mesh.links.values())

    def follow(self, links: Links) -> None:
        """Choose by these figures from now on. All members call it, with the same ones, between two operations."""
        order = order_over(links) if self.size > 2 else ()
        self._scheduler.follow(msgspec.structs.replace(self._scheduler.options, links=links, order=order))

    def dial(self, addresses: Sequence[str]) -> None:
        """Reach the others there, by rank, where no link is open yet: at their own addresses, in another order."""
        self._domain.mesh.dialled = tuple(addresses)

    @property
    def ends(self) -> dict[int, tuple[str, str]]:
        """By rank: the two addresses that an open link goes between, ours first."""
        return {rank: link.channels[0].ends for rank, link in self._domain.mesh.links.items()}

    @property
    def carriers(self) -> tuple[str, ...]:
        """What this rank's links go by, for people; each once, in the order of their ranks."""
        links = sorted(self._domain.mesh.links.items())
        return tuple(dict.fromkeys(channel.carrier for _, link in links for channel in link.channels))

    @property
    def error(self) -> HcsimError | None:
        """Why it has ended, if it has."""
        return self._domain.error

    @property
    def waited_for(self) -> int | None:
        """The rank that the oldest operation here was waiting for when the group failed, if it was waiting."""
        return self._domain.waited_for

    @property
    def standing_s(self) -> float:
        """How long that operation had been under way then; or, if none was waiting, how long ago the last one ended
        here."""
        return self._domain.standing_s

    @property
    def skipped(self) -> RemoteProtocolError | None:
        """What shows that this rank had left out what was waited for, if anything does."""
        return self._domain.skipped

    def fail(self, reason: str | CollectiveError, peer: int | None = None) -> None:
        """End it here and at the others, for a reason that it cannot see by itself."""
        self._domain.fail(CollectiveError(reason, peer=peer) if isinstance(reason, str) else reason)

    async def close(self) -> None:
        """Leave. Operations that are still in flight fail, here and at the others.

        A subgroup has nothing to leave: its links are the whole group's."""
        if self._is_part:
            return
        others = [group for group in self._reopened if group._domain is not self._domain]
        try:
            await self._domain.leave()
        finally:
            for group in others:
                await group.close()

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
        return self._domain.mesh.host

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where each rank listens."""
        everyone = self._domain.mesh.us.addresses
        return tuple(everyone[member] for member in self._members)

    @property
    def epoch(self) -> int:
        """How often this group was reopened."""
        return self._domain.mesh.us.epoch

    @property
    def bytes_sent(self) -> int:
        """Payload bytes that left this rank, in all groups over the same links."""
        return sum(link.sent_bytes for link in self._domain.mesh.links.values())

    @property
    def wire_bytes(self) -> int:
        """The same with the frames' headers: all that this rank put on its channels for collectives."""
        return sum(link.sent_bytes + HEADER_BYTES * link.sent_frames for link in self._domain.mesh.links.values())

    def subgroup(self, ranks: Sequence[int], options: Options | None = None) -> Group:
        """The group of some of our ranks, in that order. Its members call this, the others need not."""
        members = tuple(self._members[self._rank(rank)] for rank in ranks)
        if len({*members}) != len(members) or self._members[self.rank] not in members:
            raise UsageError(f"a subgroup names each of its ranks once, and ours ({self.rank}) too: {list(ranks)}")
        nth = self._children[members] = self._children.get(members, 0) + 1
        number = zlib.crc32(repr((self._number, members, nth)).encode()) & (POINT_TO_POINT - 1)
        plain = msgspec.structs.replace(self.options, order=(), groups=(), links=None)
        return Group(self._domain, members, number, options or plain)

    # Collectives.

    def all_reduce(self, data: DataT, op: str = "sum", *, algorithm: str = "auto", bucket: int = 0) -> Handle[DataT]:
        """Combine all ranks' data; every rank gets the result, in place."""
        shape = self._scheduler.shape_of_length(length_of(data))
        buffer = reduction_buffer([writable(data)], op, self.size)
        request = CollectiveRequest("all_reduce", shape, algorithm, bucket, op)
        return self._scheduler.collective(request, buffer, lambda: data, self._timeout_s)

    def reduce(
        self, data: DataT, root: int = 0, op: str = "sum", *, algorithm: str = "auto", bucket: int = 0
    ) -> Handle[DataT]:
        """Combine all ranks' data; the root gets the result, in place. The others' data stay as they are."""
        shape = self._scheduler.shape_of_length(length_of(data), self._rank(root))
        work = writable(data) if self.rank == root or isinstance(data, Phantom) else data.copy()
        request = CollectiveRequest("reduce", shape, algorithm, bucket, op)
        buffer = reduction_buffer([work], op, self.size)
        return self._scheduler.collective(request, buffer, lambda: data, self._timeout_s)

    def broadcast(self, data: DataT, root: int = 0, *, algorithm: str = "auto", bucket: int = 0) -> Handle[DataT]:
        """Every rank gets the root's data, in place."""
        shape = self._scheduler.shape_of_length(length_of(data), self._rank(root))
        buffer = transfer_buffer([data if self.rank == root else writable(data)])
        request = CollectiveRequest("broadcast", shape, algorithm, bucket)
        return self._scheduler.collective(request, buffer, lambda: data, self._timeout_s)

    def all_gather(
        self,
        data: Data,
        counts: Sequence[int] | None = None,
        *,
        into: Data | None = None,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Handle[list[Data]]:
        """Every rank gets all ranks' data, by rank. Unequal lengths: `counts` has each rank's, in elements.

        `into` has room for all of it in one piece; our data may be its part of that already."""
        shape, cuts = self._parts(data, counts)
        whole = output_for(cuts[-1], data, into)
        parts = parts_by_rank(whole, cuts, data, counts)
        copy_into(parts[self.rank], data)
        request = CollectiveRequest("all_gather", shape, algorithm, bucket)
        return self._scheduler.collective(request, transfer_buffer([whole]), lambda: parts, self._timeout_s)

    def gather(
        self,
        data: Data,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        into: Data | None = None,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Handle[list[Data] | None]:
        """The root gets all ranks' data, by rank, `into` one piece if it has one for it; the others get None."""
        shape, cuts = self._parts(data, counts, root=self._rank(root))
        if self.rank == root:
            whole = output_for(cuts[-1], data, into)
            parts = parts_by_rank(whole, cuts, data, counts)
            copy_into(parts[root], data)
            request = CollectiveRequest("gather", shape, algorithm, bucket)
            return self._scheduler.collective(request, transfer_buffer([whole]), lambda: parts, self._timeout_s)
        algorithm = self._scheduler.algorithm("gather", shape, data.itemsize, algorithm)
        buffer, place = part_buffer("gather", algorithm, self.rank, shape, contiguous(data))
        copy_into(place, data)
        request = CollectiveRequest("gather", shape, algorithm, bucket)
        return self._scheduler.collective(request, buffer, lambda: None, self._timeout_s)

    def scatter(
        self,
        data: Sequence[Data] | Data | None,
        into: DataT,
        root: int = 0,
        *,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Handle[DataT]:
        """Every rank gets the part that the root has for it, `into` the given data; all parts are of one length.

        The root has a list of them, or one array with all of them one after the other."""
        transfer_buffer([writable(into)])  # rejects a target that is not contiguous: a copy of it would be filled
        counts = (length_of(into),) * self.size
        shape, cuts = self._scheduler.shape(counts=counts, root=self._rank(root)), offsets(counts)
        algorithm = self._scheduler.algorithm("scatter", shape, into.itemsize, algorithm)
        if self.rank == root:
            whole = scatter_input(data, into, cuts)
            buffer, place = transfer_buffer([whole]), part_of(whole, cuts[root], cuts[root + 1])
        else:
            buffer, place = part_buffer("scatter", algorithm, self.rank, shape, into)

        def result() -> DataT:
            copy_into(into, place)
            return into

        request = CollectiveRequest("scatter", shape, algorithm, bucket)
        return self._scheduler.collective(request, buffer, result, self._timeout_s)

    def reduce_scatter(
        self,
        data: Data,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        *,
        into: Data | None = None,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Handle[Data]:
        """Combine all ranks' data; each rank gets its part of the result (nearly equal ones, or `counts`).

        The data stay as they are, but for what of them is also `into`, where the result goes."""
        length = length_of(data)
        cuts = split(length, self.size) if counts is None else offsets(self._sizes("counts", counts))
        shape = self._scheduler.shape(counts=tuple(hi - lo for lo, hi in itertools.pairwise(cuts)))
        if cuts[-1] != length:
            raise UsageError(f"counts {list(shape.counts)} do not divide {length} elements among {self.size} ranks")
        target = None if into is None else output_for(shape.counts[self.rank], data, into)
        algorithm = self._scheduler.algorithm("reduce_scatter", shape, data.itemsize, algorithm)
        buffer, part = reduce_scatter_buffer(data, target, op, algorithm, self.rank, shape)

        def result() -> Data:
            if target is None:
                return part
            copy_into(target, part)
            return target

        request = CollectiveRequest("reduce_scatter", shape, algorithm, bucket, op)
        return self._scheduler.collective(request, buffer, result, self._timeout_s)

    def all_to_all(
        self,
        data: Sequence[Data],
        received: Sequence[int] | None = None,
        *,
        into: Data | None = None,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Handle[list[Data]]:
        """Send the i-th part to rank i, get one from each. Unless all are alike, `received` has their lengths.

        `into` has room for all that is received in one piece, which is no part of what is sent."""
        if len(data) != self.size:
            raise UsageError(f"all_to_all needs one part for each of the {self.size} ranks, not {len(data)}")
        sent = tuple(length_of(part) for part in data)
        coming = sent if received is None else self._sizes("received", received)
        shape = self._scheduler.shape(sent=sent, received=coming)
        cuts = offsets(coming)
        if cuts[-1] and sent[self.rank] != coming[self.rank]:
            raise UsageError(f"our part for ourselves has {sent[self.rank]} elements, not {coming[self.rank]}")
        whole = output_for(cuts[-1], data[0], into)
        if into is not None and overlaps(whole, data):
            raise UsageError("an all_to_all cannot receive into what it sends")
        parts = [part_of(whole, lo, hi) for lo, hi in itertools.pairwise(cuts)]
        copy_into(parts[self.rank], data[self.rank])
        request = CollectiveRequest("all_to_all", shape, algorithm, bucket)
        return self._scheduler.collective(request, transfer_buffer([*data, whole]), lambda: parts, self._timeout_s)

    def barrier(self, *, bucket: int = 0) -> Handle[None]:
        """Return when every rank has called it."""
        buffer = transfer_buffer([np.empty(0, np.uint8)])
        request = CollectiveRequest("barrier", self._scheduler.shape_of_length(0), "auto", bucket)
        return self._scheduler.collective(request, buffer, lambda: None, self._timeout_s)

    # Point to point.

    def send(self, data: DataT, to: int, *, tag: int = 0) -> Handle[DataT]:
        """Send data to one rank, which receives it with the same tag, in the order of sending."""
        message = MessageRequest("send", whole_number("a tag", tag), Send(self._peer(to), 0, length_of(data)))
        return self._scheduler.message(message, transfer_buffer([data]), lambda: data, self._timeout_s)

    def recv(self, data: DataT, source: int, *, tag: int = 0) -> Handle[DataT]:
        """Receive into the data, which has the length of what comes."""
        message = MessageRequest("recv", whole_number("a tag", tag), Recv(self._peer(source), 0, length_of(data)))
        return self._scheduler.message(message, transfer_buffer([writable(data)]), lambda: data, self._timeout_s)

    def recv_any(self, data: Data, *, tag: int = 0) -> Handle[int]:
        """Receive the first message with that tag from any rank; the result is the sender's rank.

        Receives with one tag, from any rank or from a given one, are matched in the order in which they were posted."""
        if self.size == 1:
            raise UsageError("there is nobody to receive from in a group of one")
        buffer = transfer_buffer([writable(data)])
        return self._scheduler.from_any_source(length_of(data), whole_number("a tag", tag), buffer, self._timeout_s)

    def sendrecv(self, data: Data, to: int, into: DataT, source: int, *, tag: int = 0) -> Handle[DataT]:
        """Send and receive at the same time."""
        number = whole_number("a tag", tag)
        out, given = MessageRequest("send", number, Send(self._peer(to), 0, length_of(data))), transfer_buffer([data])
        back, place = (
            MessageRequest("recv", number, Recv(self._peer(source), 0, length_of(into))),
            transfer_buffer([writable(into)]),
        )
        # Both were checked before either starts: a call that is refused has done nothing.
        sending = self._scheduler.message(out, given, lambda: data, self._timeout_s)
        receiving = self._scheduler.message(back, place, lambda: into, self._timeout_s)

        def over(task: Handle[DataT]) -> None:
            if task.cancelled():  # perhaps before it waited for either
                sending.cancel()
                receiving.cancel()
            else:
                task.exception()  # as of any operation: a caller need not await it to see the group's failure

        return self.host.spawn(_both(sending, receiving), name="sendrecv", over=over)

    # What the operations have in common.

    def _parts(self, data: Data, counts: Sequence[int] | None, root: int = 0) -> tuple[Shape, tuple[int, ...]]:
        """How all ranks' data lie one after the other."""
        sizes = (length_of(data),) * self.size if counts is None else self._sizes("counts", counts)
        shape = self._scheduler.shape(counts=sizes, root=root)
        if sizes[self.rank] != length_of(data):
            raise UsageError(
                f"counts says {sizes[self.rank]} elements for rank {self.rank}, which has {length_of(data)}"
            )
        return shape, offsets(sizes)

    def _sizes(self, what: str, given: Sequence[int]) -> tuple[int, ...]:
        """A caller's list of lengths, one for each rank."""
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


async def _both(sending: Handle[Any], receiving: Handle[T]) -> T:
    await sending
    return await receiving
