"""The parts of remote calls, without a network: parcels, pieces in any order of messages, counts of references."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hcsim.errors import RemoteProtocolError, UsageError
from hcsim.transport.rpc import RemoteRef
from hcsim.transport.rpc.messages import OF_CALL, SCHEMA, ArraySpec, CallRequest, EncodedValue, Limits
from hcsim.transport.rpc.references import DTYPES, ReferenceTable, oversized, pack, unpack
from hcsim.transport.rpc.transfers import Inbox, OutgoingMessage


async def nowhere(ref: RemoteRef[Any], kind: Any, deadline_s: float | None) -> None:
    raise AssertionError("nothing is fetched here")


def book() -> ReferenceTable:
    return ReferenceTable("peer", 100, lambda number, times: None, nowhere)


arrays = hnp.arrays(
    st.sampled_from([np.dtype(kind) for kind in ("f4", "f8", "i1", "i8", "u2", "?", "c8")]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    elements=st.integers(0, 1),
)
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    plain | arrays | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def received(messages: list[OutgoingMessage], order: list[int]) -> list[list[np.ndarray]]:
    """Put the messages' frames through an inbox, taking the next frame of the message that `order` names."""

    async def main() -> list[list[np.ndarray]]:
        inbox = Inbox("peer", lambda key: True)
        incoming = {}
        queues = [deque(message.frames) for message in messages]
        turns = deque(order)
        while any(queues):
            which = turns.popleft() if turns else next(n for n, queue in enumerate(queues) if queue)
            if not queues[which % len(queues)]:
                continue
            header, payload = queues[which % len(queues)].popleft()
            if header.kind:
                call = SCHEMA.decode(payload, "peer")
                assert isinstance(call, CallRequest)
                incoming[call.number] = inbox.announce((OF_CALL, call.number), call.parcel, {})
            else:
                inbox.place(header)[:] = payload
                inbox.landed(header)
        assert all(one.complete.done() for one in incoming.values())
        assert inbox.held_bytes == 0
        return [incoming[number].arrays for number in sorted(incoming)]

    return asyncio.run(main())


@pytest.mark.slow
@given(st.lists(values, min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=60), st.integers(1, 40))
@settings(max_examples=100)
def test_values_arrive_as_they_were_sent_however_their_pieces_are_mixed(sent, order, segment_bytes):
    packed = [pack(value, book(), Limits()) for value in sent]
    calls = [
        OutgoingMessage(CallRequest(number, "f", one.parcel), OF_CALL, one.arrays, segment_bytes)
        for number, one in enumerate(packed, 1)
    ]
    arrived = received(calls, order)
    for value, one, got in zip(sent, packed, arrived, strict=True):
        assert same(unpack(one.parcel, got, {}, Any), value)


@given(st.binary(max_size=60))
@settings(max_examples=300)
def test_bytes_that_are_no_message_are_the_peers_fault(data):
    try:
        message = SCHEMA.decode(memoryview(data), "peer")
    except RemoteProtocolError:
        return
    assert SCHEMA.decode(memoryview(SCHEMA.encode(message)), "peer") == message


@given(
    st.lists(
        st.builds(ArraySpec, st.sampled_from([*DTYPES, "object", "V8"]), st.lists(st.integers(0, 2**47)).map(tuple))
    )
)
def test_no_announced_array_is_larger_than_allowed(specs):
    limits = Limits(max_array_bytes=10_000, max_arrays=4)
    parcel = EncodedValue(b"\xc0", tuple(specs))
    if not oversized(parcel, limits):
        total = sum(np.empty(spec.shape, DTYPES[spec.dtype]).nbytes for spec in specs)
        assert total <= 10_000
        assert len(specs) <= 4


@pytest.mark.parametrize("value", [object(), np.array([object()]), np.array(["text"]), {1, object()}, 2**70])
def test_what_cannot_be_sent_is_the_callers_mistake(value):
    refs = book()
    with pytest.raises(UsageError, match="sent"):
        pack([RemoteRef.lend([1]), value], refs, Limits())
    assert refs.lent == 0


class References(RuleBasedStateMachine):
    """An owner, a holder, and messages that take their time in both directions."""

    @initialize()
    def begin(self) -> None:
        self.released: deque[tuple[int, int]] = deque()
        self.owner = book()
        self.holder = ReferenceTable("owner", 100, lambda number, times: self.released.append((number, times)), nowhere)
        self.values = [RemoteRef.lend([number]) for number in range(3)]
        self.under_way: deque[tuple[int, EncodedValue]] = deque()
        self.held: dict[int, Any] = {}

    @rule(which=st.integers(0, 2), copies=st.integers(1, 2))
    def lend(self, which: int, copies: int) -> None:
        self.under_way.append((which, pack([self.values[which]] * copies, self.owner, Limits()).parcel))

    @precondition(lambda self: self.under_way)
    @rule(read=st.booleans())
    def arrive(self, read: bool) -> None:
        which, parcel = self.under_way.popleft()
        taken = self.holder.take(parcel)
        if read:
            self.held[which] = unpack(parcel, [], taken, list[RemoteRef[list]])[0]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        del self.held[data.draw(st.sampled_from(sorted(self.held)))]

    @precondition(lambda self: self.released)
    @rule()
    def hear_of_a_drop(self) -> None:
        self.owner.released(*self.released.popleft())

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        which = data.draw(st.sampled_from(sorted(self.held)))
        parcel = pack(self.held[which], self.holder, Limits()).parcel
        assert unpack(parcel, [], self.owner.take(parcel), RemoteRef) is self.values[which]

    @invariant()
    def nothing_that_is_held_or_under_way_is_released(self) -> None:
        if hasattr(self, "held"):
            for which, ref in self.held.items():
                back = pack(ref, self.holder, Limits()).parcel
                assert unpack(back, [], self.owner.take(back), RemoteRef) is self.values[which]
            assert self.owner.lent >= len({*self.held, *(which for which, _ in self.under_way)})

    def teardown(self) -> None:
        if hasattr(self, "held"):
            self.held.clear()
            while self.under_way:
                self.holder.take(self.under_way.popleft()[1])
            while self.released:
                self.owner.released(*self.released.popleft())
            assert self.owner.lent == 0


TestReferences = pytest.mark.slow(References.TestCase)
TestReferences.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_release_of_what_is_not_held_is_the_peers_fault():
    refs = book()
    parcel = pack(RemoteRef.lend([1]), refs, Limits()).parcel
    with pytest.raises(RemoteProtocolError):
        refs.released(parcel.loans[0].number, 2)
    refs.released(parcel.loans[0].number, 1)
    with pytest.raises(RemoteProtocolError):
        refs.released(parcel.loans[0].number, 1)


def test_nothing_is_lent_over_a_channel_that_has_ended():
    refs = book()
    parcel = pack(RemoteRef.lend([1]), refs, Limits()).parcel
    refs.close()
    assert refs.lent == 0
    refs.released(parcel.loans[0].number, 1)  # a call that was never sent gives back what it was to lend


def test_only_so_much_is_lent_at_once():
    refs = ReferenceTable("peer", 2, lambda number, times: None, nowhere)
    with pytest.raises(UsageError, match="drop"):
        pack([RemoteRef.lend([n]) for n in range(3)], refs, Limits())
    assert refs.lent == 0


def test_limits_of_nothing_are_refused():
    with pytest.raises(UsageError, match="max_calls"):
        Limits(max_calls=0)
    assert msgspec.structs.replace(Limits(), max_calls=1).max_served > 1
