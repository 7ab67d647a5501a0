"""What nodes say to each other, and bytes that are nothing of it."""

from __future__ import annotations

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from hcsim.cluster.messages import Goodbye, decode
from hcsim.errors import RemoteProtocolError

NO_TEXT = msgspec.msgpack.encode(Goodbye("gone")).replace(b"gone", b"g\xffne")
ENDLESS = b"\x91" * 100_000


@given(st.binary(max_size=200))
@example(NO_TEXT)
@example(ENDLESS)
def test_bytes_that_are_no_message_are_the_peers_fault(data: bytes) -> None:
    try:
        message = decode(data, "mini")
    except RemoteProtocolError:
        return
    assert decode(msgspec.msgpack.encode(message), "mini") == message


def test_a_message_is_read_as_it_was_sent() -> None:
    assert decode(msgspec.msgpack.encode(Goodbye("gone")), "mini") == Goodbye("gone")
