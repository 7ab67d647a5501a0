"""A group of ranks with all collectives, for real and simulated clusters.

An operation starts when it is called and is a task: `await` it for its result, or keep it and continue; several
may be in flight. Ranks call operations in the same order within a `bucket`; buckets are independent of each
other. Arrays are contiguous numpy arrays and must not be changed until the operation is over. A `Phantom`,
which has a size and no data, can replace any array.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
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
from hcsim.runtime.channel import Listener, Phantom, SegmentCounts
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.runtime.host import Host
from hcsim.transport.groups import GroupListener, GroupMembership
from hcsim.transport.mesh import Mesh

T = TypeVar("T")

_WHOLE = 0
"""The number of a group that is not a subgroup."""


class Group:
    """A group of ranks, as seen from one of them."""

    def __init__(self, domain: FailureDomain, members: tuple[int, ...], number: int, options: Options) -> None:
        self._domain = domain
        self._members = members
        self._number = number
        self._reopened: list[Group] = []
        """Groups that this one was reopened as, which are closed with it; the list is shared by all of them."""
        self._timeout_s = options.timeout_s
        self.rank = members.index(domain.mesh.us.rank)
        self.size = len(members)
        self._children: dict[tuple[int, ...], int] = {}
        self._scheduler = Scheduler(domain, members, number, options)

    @classmethod
    async def open(
        cls,
        host: Host,
        us: GroupMembership,
        options: Options | None = None,
        listener: Listener | None = None,
        reception: GroupListener | None = None,
    ) -> Group:
        """Listen at this rank's address; links to other ranks open on first use.

        A caller that had to listen before the addresses were known passes its `listener`, which is closed with the
        group. A `reception` accepts connections for this group and for later ones, and is not closed."""
        mesh = Mesh(host, us, listener, reception)
        domain = FailureDomain(mesh)
        views_change = options is not None and options.views_change
        if views_change:
            mesh.on_newer = None
        mesh.patient = views_change or us.epoch > 0  # others may still be in the epoch before, and will come
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
        """Return a copy of this group with a different timeout for the operations started through it."""
        same = copy(self)
        same._timeout_s = msgspec.structs.replace(self.options, timeout_s=timeout_s).timeout_s
        return same

    @property
    def options(self) -> Options:
        """The defaults of the group's operations."""
        options = self._scheduler.options
        if options.timeout_s == self._timeout_s:
            return options
        return msgspec.structs.replace(options, timeout_s=self._timeout_s)

    async def reopen(self) -> Group:
        """Reopen the group under the next epoch after a failure. Every member has to call it.

        The new group is closed with the old one, if not before."""
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
        """Measure the links. Every member has to call it.

        Afterwards `auto` chooses by cost, and the ring uses the best order."""
        links = await measure_links(self)
        self.follow(links)
        return links

    @property
    def passes_on(self) -> bool:
        """Whether each open link can forward received data directly to any other."""
        return all(link.outlet is not None for link in self._domain.mesh.links.values())

    def follow(self, links: Links) -> None:
        """Use these link figures from now on. Every member calls it with the same ones, between two operations."""
        order = order_over(links) if self.size > 2 else ()
        self._scheduler.follow(msgspec.structs.replace(self._scheduler.options, links=links, order=order))

    def dial(self, addresses: Sequence[str]) -> None:
        """Set the addresses to dial for links that are not open yet: each rank's own, with any of its hosts first."""
        self._domain.mesh.dialled = tuple(addresses)

    @property
    def ends(self) -> dict[int, tuple[str, str]]:
        """The local and the remote address of each open link, by rank."""
        return {rank: link.channels[0].ends for rank, link in self._domain.mesh.links.items()}

    def segments_to(self, rank: int) -> SegmentCounts | None:
        """What was sent to a rank over its open link, and what of it was lost; None if the carrier does not tell."""
        link = self._domain.mesh.links.get(rank)
        told = [] if link is None else [channel.segments for channel in link.channels]
        known = [each for each in told if each is not None]
        return SegmentCounts(*map(sum, zip(*known, strict=True))) if known and len(known) == len(told) else None

    @property
    def carriers(self) -> tuple[str, ...]:
        """The kinds of connection of this rank's links, for display; each once, in the order of the ranks."""
        links = sorted(self._domain.mesh.links.items())
        return tuple(dict.fromkeys(channel.carrier for _, link in links for channel in link.channels))

    @property
    def error(self) -> HcsimError | None:
        """The reason why the group has ended, or None."""
        return self._domain.error

    @property
    def waited_for(self) -> int | None:
        """The rank that the oldest waiting operation was waiting for when the group failed, or None."""
        return self._domain.waited_for

    @property
    def standing_s(self) -> float:
        """The age of that operation at the failure; if none was waiting, the time since the last one ended."""
        return self._domain.standing_s

    @property
    def skipped(self) -> RemoteProtocolError | None:
        """Evidence that this rank skipped what was waited for, or None."""
        return self._domain.skipped

    def keep_alive(self, computes: Callable[[], bool]) -> None:
        """Tell the other ranks, while `computes()` is true, that this one computes and will come to its next operation:
        so what waits for it does not time out. See `hcsim.collectives.keep_alive`."""
        if self._domain.error is None:
            self._domain.notices.keep_sending(computes, self._timeout_s)

    def fail(self, reason: str | CollectiveError, peer: int | None = None) -> None:
        """End the group on all ranks, for a reason that it cannot detect itself."""
        self._domain.fail(CollectiveError(reason, peer=peer) if isinstance(reason, str) else reason)

    async def close(self) -> None:
        """Leave the group. Operations still in flight fail, here and on the other ranks.

        On a subgroup this has no effect, because its links belong to the whole group."""
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
        return self._domain.mesh.host

    @property
    def addresses(self) -> tuple[str, ...]:
        everyone = self._domain.mesh.us.addresses
        return tuple(everyone[member] for member in self._members)

    @property
    def epoch(self) -> int:
        """The epoch, which increases each time the group is reopened."""
        return self._domain.mesh.us.epoch

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent by this rank, in all groups over the same links."""
        return sum(link.sent_bytes for link in self._domain.mesh.links.values())

    @property
    def wire_bytes(self) -> int:
        """Bytes sent by this rank for collectives, including frame headers, in all groups over the same links."""
        return sum(link.sent_bytes + HEADER_BYTES * link.sent_frames for link in self._domain.mesh.links.values())

    def subgroup(self, ranks: Sequence[int], options: Options | None = None) -> Group:
        """Return the group of some of this group's ranks, in the given order. Only its members have to call it."""
        members = tuple(self._members[self._rank(rank)] for rank in ranks)
        if len({*members}) != len(members) or self._members[self.rank] not in members:
            raise UsageError(f"a subgroup names each of its ranks once, and ours ({self.rank}) too: {list(ranks)}")
        nth = self._children[members] = self._children.get(members, 0) + 1
        number = zlib.crc32(repr((self._number, members, nth)).encode()) & (POINT_TO_POINT - 1)
        plain = msgspec.structs.replace(self.options, order=(), groups=(), links=None)
        return Group(self._domain, members, number, options or plain)

    # Collectives.

    def all_reduce(self, data: DataT, op: str = "sum", *, algorithm: str = "auto", bucket: int = 0) -> Handle[DataT]:
        """Combine the data of all ranks in place; every rank gets the result."""
        shape = self._scheduler.shape_of_length(length_of(data))
        buffer = reduction_buffer([writable(data)], op, self.size)
        request = CollectiveRequest("all_reduce", shape, algorithm, bucket, op)
        return self._scheduler.collective(request, buffer, lambda: data, self._timeout_s)

    def reduce(
        self, data: DataT, root: int = 0, op: str = "sum", *, algorithm: str = "auto", bucket: int = 0
    ) -> Handle[DataT]:
        """Combine the data of all ranks; the root gets the result in place. The data of other ranks are unchanged."""
        shape = self._scheduler.shape_of_length(length_of(data), self._rank(root))
        work = writable(data) if self.rank == root or isinstance(data, Phantom) else data.copy()
        request = CollectiveRequest("reduce", shape, algorithm, bucket, op)
        buffer = reduction_buffer([work], op, self.size)
        return self._scheduler.collective(request, buffer, lambda: data, self._timeout_s)

    def broadcast(self, data: DataT, root: int = 0, *, algorithm: str = "auto", bucket: int = 0) -> Handle[DataT]:
        """Send the root's data to every rank, in place."""
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
        """Collect the data of all ranks on every rank, by rank. For unequal lengths, `counts` gives the elements of
        each
        rank.

        `into` is contiguous memory for the whole result; `data` may already be this rank's part of it."""
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
        """Collect the data of all ranks on the root, by rank; other ranks get None.

        On the root, `into` may be contiguous memory for the whole result."""
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
        """Send each rank its part from the root, into `into`; all parts have the same length.

        The root passes a list of parts, or one array with all parts in order."""
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
        spends: bool = False,
    ) -> Handle[Data]:
        """Combine the data of all ranks; each rank gets one part of the result (nearly equal parts, or `counts`).

        The data are unchanged, except where they share memory with `into`, which receives the result; with `spends`
        they may hold anything afterwards, which spares a copy."""
        length = length_of(data)
        cuts = split(length, self.size) if counts is None else offsets(self._sizes("counts", counts))
        shape = self._scheduler.shape(counts=tuple(hi - lo for lo, hi in itertools.pairwise(cuts)))
        if cuts[-1] != length:
            raise UsageError(f"counts {list(shape.counts)} do not divide {length} elements among {self.size} ranks")
        target = None if into is None else output_for(shape.counts[self.rank], data, into)
        algorithm = self._scheduler.algorithm("reduce_scatter", shape, data.itemsize, algorithm)
        if spends:
            buffer = reduction_buffer([writable(data)], op, self.size)
            part = part_of(data, cuts[self.rank], cuts[self.rank + 1])
        else:
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
        """Send the i-th part to rank i and receive one part from each rank.

        `received` gives the lengths of the received parts; by default they are those of the sent parts. `into` is
        contiguous memory for everything received, and must not overlap the data sent."""
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
        """Wait until every rank has called it."""
        buffer = transfer_buffer([np.empty(0, np.uint8)])
        request = CollectiveRequest("barrier", self._scheduler.shape_of_length(0), "auto", bucket)
        return self._scheduler.collective(request, buffer, lambda: None, self._timeout_s)

    # Point to point.

    def send(self, data: DataT, to: int, *, tag: int = 0) -> Handle[DataT]:
        """Send data to one rank. The peer receives messages of one tag in the order of sending."""
        message = MessageRequest("send", whole_number("a tag", tag), Send(self._peer(to), 0, length_of(data)))
        return self._scheduler.message(message, transfer_buffer([data]), lambda: data, self._timeout_s)

    def recv(self, data: DataT, source: int, *, tag: int = 0) -> Handle[DataT]:
        """Receive into `data`, which must have the length of the message."""
        message = MessageRequest("recv", whole_number("a tag", tag), Recv(self._peer(source), 0, length_of(data)))
        return self._scheduler.message(message, transfer_buffer([writable(data)]), lambda: data, self._timeout_s)

    def recv_any(self, data: Data, *, tag: int = 0) -> Handle[int]:
        """Receive the first message with this tag from any rank; the result is the rank of the sender.

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
        """Return the shape and the offsets of all ranks' data."""
        sizes = (length_of(data),) * self.size if counts is None else self._sizes("counts", counts)
        shape = self._scheduler.shape(counts=sizes, root=root)
        if sizes[self.rank] != length_of(data):
            raise UsageError(
                f"counts says {sizes[self.rank]} elements for rank {self.rank}, which has {length_of(data)}"
            )
        return shape, offsets(sizes)

    def _sizes(self, what: str, given: Sequence[int]) -> tuple[int, ...]:
        """Check a list of lengths, one for each rank."""
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
