"""Typed messages: what a schema accepts, which requests wait, how errors travel."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcsim.errors import CompressionError, ConfigError, RemoteProtocolError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.messages import MAX_TEXT, Requests, Schema, describe, expect, revive


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    pass


SCHEMA: Schema[Ping | Pong] = Schema(Ping | Pong)


@given(st.integers(-(2**63), 2**63))
def test_a_message_is_read_from_its_frame(number: int) -> None:
    header, payload = SCHEMA.frame(Ping(number))
    assert header == Header(len(payload), Kind.CONTROL)
    assert SCHEMA.framed(header, payload, "mini") == Ping(number)


@pytest.mark.parametrize(
    ("header", "payload"),
    [
        (Header(4, Kind.DATA), memoryview(SCHEMA.encode(Pong()))),
        (Header(4, Kind.CONTROL), Phantom(4)),
        (Header(1, Kind.CONTROL), memoryview(b"\xc1")),
        (Header(1, Kind.CONTROL), memoryview(msgspec.msgpack.encode(Ping(1)).replace(b"Ping", b"Pang"))),
    ],
    ids=["data", "phantom", "garbage", "another message"],
)
def test_other_frames_are_the_peers_fault(header: Header, payload: memoryview | Phantom) -> None:
    with pytest.raises(RemoteProtocolError, match=r"^mini sent"):
        SCHEMA.framed(header, payload, "mini")


def test_a_message_that_was_not_due_is_the_peers_fault() -> None:
    assert expect(Pong(), Pong, "mini") == Pong()
    with pytest.raises(RemoteProtocolError, match="mini sent the message 'ping' where 'pong' was due"):
        expect(Ping(1), Pong, "mini")


def test_a_schema_says_its_own_complaint() -> None:
    with pytest.raises(RemoteProtocolError, match=r"^mini does not measure as we do"):
        Schema(Ping, "does not measure as we do").decode(b"\xc1", "mini")


@given(st.lists(st.integers(0, 12)))
def test_a_request_has_one_reply_and_its_number_is_never_used_again(replies: list[int]) -> None:
    requests: Requests[str] = Requests()
    for _ in range(8):
        number = requests.number()
        requests.add(number, f"request {number}")
    waiting = {number: f"request {number}" for number in range(1, 9)}
    for number in replies:
        assert requests.made(number) == (1 <= number <= 8)
        assert requests.get(number) == waiting.get(number)
        assert requests.take(number) == waiting.pop(number, None)
        assert requests.waiting() == tuple(waiting.values())
        assert len(requests) == len(waiting)
    assert requests.number() == 9


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "described"),
    [
        (ConfigError("job.toml: no such key"), ("ConfigError", "job.toml: no such key")),
        (OSError("\udce4.txt"), ("OSError", "\\udce4.txt")),
        (ValueError("x" * 9000), ("ValueError", "x" * MAX_TEXT)),
        (Mute(), ("Mute", "an error that cannot say what it is")),
    ],
    ids=["ours", "no text in it", "long", "mute"],
)
def test_any_error_can_be_described(error: Exception, described: tuple[str, str]) -> None:
    assert describe(error) == described
    msgspec.msgpack.encode(described)


def test_an_error_is_built_anew_from_a_table_and_from_nothing_else() -> None:
    revived = revive("ConfigError", "no such key", {"ConfigError": ConfigError})
    assert type(revived) is ConfigError
    assert str(revived) == "no such key"
    assert revive(CompressionError.__name__, "no such key", {"ConfigError": ConfigError}) is None
