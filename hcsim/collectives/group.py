"""A group of ranks that compute together: every collective, in both worlds.

An operation starts when it is called and is a task: `await` it for its result, or keep it and go
on; several may be in flight. Ranks call operations in the same order within a `bucket`; buckets
are independent of each other. Arrays are contiguous numpy arrays; a `Phantom` stands for any of
them, with a size and no data.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from hcsim.collectives.cost import Links
from hcsim.collectives.data import (
    Data,
    DataT,
    copy_into,
    empty_like,
    length_of,
    moving,
    part_of,
    reducing,
    writable,
)
from hcsim.collectives.dispatch import Dispatch, Message, Pending, Request
from hcsim.collectives.fate import Fate
from hcsim.collectives.measure import measure_links
from hcsim.collectives.memory import Memory
from hcsim.collectives.order import ring_order
from hcsim.collectives.plan import Plan, Recv, Send, offsets, split
from hcsim.collectives.select import choose
from hcsim.collectives.shape import Shape
from hcsim.collectives.wiring import POINT_TO_POINT
from hcsim.errors import CollectiveError, HcsimError, UsageError
from hcsim.runtime.channel import Listener, Phantom
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.runtime.host import Host
from hcsim.transport.mesh import Membership, Mesh

T = TypeVar("T")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a group works where a call does not say."""

    timeout_s: float = 60.0
    """How long an operation may take before it fails on every rank."""
    arity: int = 2
    """Branches of a tree: higher is flatter, with busier inner ranks."""
    order: tuple[int, ...] = ()
    """The ring's order; empty for 0, 1, 2, …"""
    groups: tuple[tuple[int, ...], ...] = ()
    """Hierarchical: who is close to whom."""
    local: str = "tree"
    cross: str = "ring"
    conducted: bool = False
    """Somebody else says when this group is over. Otherwise it is when a member calls from a later epoch."""
    links: Links | None = None
    """Measured links, the same on all ranks: `auto` then chooses by price."""


class Group:
    """This rank's view of the group."""

    def __init__(self, fate: Fate, members: tuple[int, ...], number: int, options: Options) -> None:
        self._fate = fate
        self._members = members
        self._number = number
        self.options = options
        self.rank = members.index(fate.mesh.us.rank)
        self.size = len(members)
        self._children: dict[tuple[int, ...], int] = {}
        self._dispatch = Dispatch(fate, members, number)

    @classmethod
    async def open(
        cls, host: Host, us: Membership, options: Options | None = None, listener: Listener | None = None
    ) -> Group:
        """Listen at our address; links to the others open when they are first needed.

        Who had to listen before the addresses were known gives the listener, which is then closed with the group."""
        mesh = Mesh(host, us, listener)
        fate = Fate(mesh)
        if options is not None and options.conducted:
            mesh.on_newer = None
            mesh.patient = True
        await mesh.open()
        return cls(fate, tuple(range(us.world)), 0, options or Options())

    def within(self, timeout_s: float) -> Group:
        """This same group, with another time limit for the operations that are started through what this returns."""
        same = object.__new__(Group)
        same.__dict__.update(self.__dict__)
        same.options = msgspec.structs.replace(self.options, timeout_s=timeout_s)
        return same

    async def reopen(self) -> Group:
        """After a failure: the same group anew, under the next epoch. Every member has to call it."""
        await self.close()
        mesh = self._fate.mesh
        us = msgspec.structs.replace(mesh.us, epoch=max(mesh.us.epoch + 1, mesh.newest_epoch))
        return await Group.open(mesh.host, us, self.options)

    async def measure(self) -> Links:
        """Measure the links; from now on `auto` chooses by price, and the ring goes the best way. All call it."""
        links = await measure_links(self)
        order = ring_order(links.bandwidth_Bps, links.latency_s) if self.size > 2 else ()
        self.options = msgspec.structs.replace(self.options, links=links, order=order)
        return links

    @property
    def error(self) -> HcsimError | None:
        """Why it has ended, if it has."""
        return self._fate.error

    def fail(self, reason: str, peer: int | None = None) -> None:
        """End it here and at the others, for a reason that it cannot see by itself."""
        self._fate.fail(CollectiveError(reason, peer=peer))

    async def close(self) -> None:
        """Leave. Operations that are still under way fail, here and at the others."""
        await self._fate.leave()

    async def __aenter__(self) -> Group:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<group {self._number:x}, rank {self.rank} of {self.size}>"

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
        shape = self._shape(length=length_of(data))
        return self._start(
            "all_reduce", shape, reducing(writable(data), op, self.size), lambda: data, algorithm, bucket, op
        )

    def reduce(
        self, data: DataT, root: int = 0, op: str = "sum", *, algorithm: str = "auto", bucket: int = 0
    ) -> Pending[DataT]:
        """Combine everybody's data; the root gets the result, in place. The others' data stay as they are."""
        shape = self._shape(length=length_of(data), root=self._rank(root))
        work = writable(data) if self.rank == root or isinstance(data, Phantom) else data.copy()
        return self._start("reduce", shape, reducing(work, op, self.size), lambda: data, algorithm, bucket, op)

    def broadcast(self, data: DataT, root: int = 0, *, algorithm: str = "auto", bucket: int = 0) -> Pending[DataT]:
        """Everybody gets the root's data, in place."""
        shape = self._shape(length=length_of(data), root=self._rank(root))
        memory = moving([data if self.rank == root else writable(data)])
        return self._start("broadcast", shape, memory, lambda: data, algorithm, bucket)

    def all_gather(
        self, data: Data, counts: Sequence[int] | None = None, *, algorithm: str = "auto", bucket: int = 0
    ) -> Pending[list[Data]]:
        """Everybody gets everybody's data, by rank. Unequal lengths: `counts` has each rank's, in elements."""
        whole, shape, parts = self._parts_of(data, counts)
        return self._start("all_gather", shape, moving([whole]), lambda: parts, algorithm, bucket)

    def gather(
        self,
        data: Data,
        root: int = 0,
        counts: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Pending[list[Data] | None]:
        """The root gets everybody's data, by rank; the others get None."""
        whole, shape, parts = self._parts_of(data, counts, root=self._rank(root))
        result = parts if self.rank == root else None
        return self._start("gather", shape, moving([whole]), lambda: result, algorithm, bucket)

    def scatter(
        self, data: Sequence[Data] | None, into: DataT, root: int = 0, *, algorithm: str = "auto", bucket: int = 0
    ) -> Pending[DataT]:
        """Everybody gets the part that the root has for it, `into` the given data; all parts are of one length."""
        moving([into])  # refuses a target whose elements are not in one piece: a copy of it would be filled
        counts = (length_of(into),) * self.size
        shape = self._shape(counts=counts, root=self._rank(root))
        whole = empty_like(into, sum(counts))
        cuts = offsets(counts)
        if self.rank == root:
            if data is None or len(data) != self.size:
                raise UsageError(f"the root of a scatter has one part for each of the {self.size} ranks")
            for part, lo, hi in zip(data, cuts, cuts[1:], strict=False):
                copy_into(part_of(whole, lo, hi), part)

        def result() -> DataT:
            copy_into(into, part_of(whole, cuts[self.rank], cuts[self.rank + 1]))
            return into

        return self._start("scatter", shape, moving([whole]), result, algorithm, bucket)

    def reduce_scatter(
        self,
        data: Data,
        op: str = "sum",
        counts: Sequence[int] | None = None,
        *,
        algorithm: str = "auto",
        bucket: int = 0,
    ) -> Pending[Data]:
        """Combine everybody's data; each rank gets its part of the result (nearly equal ones, or `counts`)."""
        length = length_of(data)
        cuts = offsets(counts) if counts is not None else split(length, self.size)
        shape = self._shape(counts=tuple(hi - lo for lo, hi in itertools.pairwise(cuts)))
        if len(cuts) != self.size + 1 or cuts[-1] != length:
            raise UsageError(f"counts {list(counts or ())} do not divide {length} elements among {self.size} ranks")
        work = data if isinstance(data, Phantom) else data.reshape(-1).copy()
        part = part_of(work, cuts[self.rank], cuts[self.rank + 1])
        return self._start("reduce_scatter", shape, reducing(work, op, self.size), lambda: part, algorithm, bucket, op)

    def all_to_all(
        self, data: Sequence[Data], received: Sequence[int] | None = None, *, algorithm: str = "auto", bucket: int = 0
    ) -> Pending[list[Data]]:
        """Send the i-th part to rank i, get one from each. Unless all are alike, `received` has their lengths."""
        if len(data) != self.size:
            raise UsageError(f"all_to_all needs one part for each of the {self.size} ranks, not {len(data)}")
        sent = tuple(length_of(part) for part in data)
        coming = tuple(received) if received is not None else sent
        shape = self._shape(sent=sent, received=coming)
        cuts = offsets(coming)
        if cuts[-1] and len(coming) == self.size and sent[self.rank] != coming[self.rank]:
            raise UsageError(f"our part for ourselves has {sent[self.rank]} elements, not {coming[self.rank]}")
        whole = empty_like(data[0], cuts[-1])
        parts = [part_of(whole, lo, hi) for lo, hi in itertools.pairwise(cuts)]
        copy_into(parts[self.rank], data[self.rank])
        return self._start("all_to_all", shape, moving([*data, whole]), lambda: parts, algorithm, bucket)

    def barrier(self, *, bucket: int = 0) -> Pending[None]:
        """Return when everybody has called it."""
        return self._start("barrier", self._shape(), moving([np.empty(0, np.uint8)]), lambda: None, "auto", bucket)

    # Point to point.

    def send(self, data: DataT, to: int, *, tag: int = 0) -> Pending[DataT]:
        """Send data to one rank, which receives it with the same tag, in the order of sending."""
        rounds: Plan = ((Send(self._peer(to), 0, length_of(data)),),)
        return self._to_one("send", rounds, data, to, tag)

    def recv(self, data: DataT, source: int, *, tag: int = 0) -> Pending[DataT]:
        """Receive into the data, which has the length of what comes."""
        rounds: Plan = ((Recv(self._peer(source), 0, length_of(writable(data))),),)
        return self._to_one("recv", rounds, data, source, tag)

    def recv_any(self, data: Data, *, tag: int = 0) -> Pending[int]:
        """Receive a message from whoever sends one with that tag first; the result is the sender's rank.

        Messages go to those who ask, whether from anybody or from one rank, in the order in which they asked."""
        if self.size == 1:
            raise UsageError("there is nobody to receive from in a group of one")
        memory = moving([writable(data)])
        return self._dispatch.from_anybody(length_of(data), tag, memory, self.options.timeout_s)

    async def sendrecv(self, data: Data, to: int, into: DataT, source: int, *, tag: int = 0) -> DataT:
        """Send and receive at the same time."""
        sending, receiving = self.send(data, to, tag=tag), self.recv(into, source, tag=tag)
        await sending
        return await receiving

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
            algorithm = choose(operation, shape, memory.element_bytes, self.options.links, segment_bytes)
        request = Request(operation, algorithm, shape, op, bucket)
        return self._dispatch.collective(request, memory, result, self.options.timeout_s)

    def _to_one(self, name: str, rounds: Plan, data: DataT, peer: int, tag: int) -> Pending[DataT]:
        message = Message(name, peer, tag, rounds)
        return self._dispatch.message(message, moving([data]), lambda: data, self.options.timeout_s)

    def _shape(self, **sizes: Any) -> Shape:
        o = self.options
        return Shape(
            world=self.size, arity=o.arity, order=o.order, groups=o.groups, local=o.local, cross=o.cross, **sizes
        )

    def _parts_of(self, data: Data, counts: Sequence[int] | None, root: int = 0) -> tuple[Data, Shape, list[Data]]:
        """Room for everybody's data, with ours in its place."""
        sizes = tuple(counts) if counts is not None else (length_of(data),) * self.size
        shape = self._shape(counts=sizes, root=root)
        if sizes[self.rank] != length_of(data):
            raise UsageError(
                f"counts says {sizes[self.rank]} elements for rank {self.rank}, which has {length_of(data)}"
            )
        cuts = offsets(sizes)
        whole = empty_like(data, cuts[-1])
        parts = [part_of(whole, lo, hi) for lo, hi in itertools.pairwise(cuts)]
        copy_into(parts[self.rank], data)
        if counts is None and not isinstance(data, Phantom):
            parts = [part.reshape(data.shape) for part in parts if not isinstance(part, Phantom)]
        return whole, shape, parts

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank} in a group of {self.size}")
        return rank

    def _peer(self, rank: int) -> int:
        if self._rank(rank) == self.rank:
            raise UsageError(f"rank {rank} cannot send to itself or receive from itself")
        return rank
