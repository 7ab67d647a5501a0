"""What nodes say to each other, and bytes that are nothing of it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hcsim.cluster.messages import SCHEMA, Decided, Goodbye, HeartbeatMessage, Status
from hcsim.cluster.view import Member, View
from hcsim.errors import RemoteProtocolError
from hcsim.transport.groups import MOST_EPOCHS

NO_TEXT = msgspec.msgpack.encode(Goodbye("gone")).replace(b"gone", b"g\xffne")
ENDLESS = b"\x91" * 100_000


@given(st.binary(max_size=200))
@example(NO_TEXT)
@example(ENDLESS)
def test_bytes_that_are_no_message_are_the_peers_fault(data: bytes) -> None:
    try:
        message = SCHEMA.decode(data, "mini")
    except RemoteProtocolError:
        return
    assert SCHEMA.decode(msgspec.msgpack.encode(message), "mini") == message


@pytest.mark.parametrize("epoch", [-1, MOST_EPOCHS, 1 << 40])
def test_an_epoch_that_no_frame_has_room_for_is_the_peers_fault(epoch: int) -> None:
    mini = Member("1", 1, "mini", "mini:2")
    view = View("1.1", epoch, (mini,))
    for message in (Decided(view), HeartbeatMessage(1, Status(mini, "mini:1", "1.1", epoch, 1, True))):
        with pytest.raises(RemoteProtocolError, match="epoch"):
            SCHEMA.decode(msgspec.msgpack.encode(message), "mini")


def test_a_message_is_read_as_it_was_sent() -> None:
    assert SCHEMA.decode(msgspec.msgpack.encode(Goodbye("gone")), "mini") == Goodbye("gone")
