"""Typed messages over a socket pair, with open files where a process is started by another."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from hcsim.errors import CollectiveError, CompressionError, HcsimError, RemoteProtocolError, UsageError
from hcsim.scripts.ipc import FAILURES, IpcClosed, IpcConnection, RankFailed, failure_of, raised

Ends = tuple[IpcConnection[RankFailed], IpcConnection[RankFailed]]


@pytest.fixture(params=[None, 4096], ids=["usual buffers", "8 KiB, as on macOS"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    one, other = socket.socketpair()
    with one, other:
        if request.param is not None:  # Linux takes twice as much
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, request.param)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, request.param)
        yield IpcConnection(one, FAILURES, descriptors=1), IpcConnection(other, FAILURES, descriptors=1)


def test_messages_that_have_piled_up_are_read_one_by_one(ends: Ends) -> None:
    said = [RankFailed(rank, "x" * (rank * 999)) for rank in range(20)]
    sending = threading.Thread(target=lambda: [ends[0].send(message) for message in said])
    sending.start()
    assert [ends[1].receive() for _ in said] == said
    sending.join()


def test_a_request_is_answered_however_large_it_is(ends: Ends) -> None:
    large = RankFailed(1, "x" * 4_000_000)
    answering = threading.Thread(target=lambda: ends[1].send(ends[1].receive()))
    answering.start()
    assert ends[0].ask(large) == large
    answering.join()


def test_an_open_file_comes_with_its_message(ends: Ends) -> None:
    read, write = os.pipe()
    ends[0].send(RankFailed(1, ""), (write,))
    os.close(write)
    assert ends[1].receive() == RankFailed(1, "")
    (theirs,) = ends[1].take_descriptors()
    assert ends[1].take_descriptors() == []
    os.write(theirs, b"here")
    assert os.read(read, 4) == b"here"
    os.close(theirs)
    os.close(read)


def test_the_end_of_the_peer_ends_the_wait(ends: Ends) -> None:
    ends[0].send(RankFailed(1, "last word"))
    ends[0].close()
    assert ends[1].receive() == RankFailed(1, "last word")
    with pytest.raises(IpcClosed):
        ends[1].receive()
    with pytest.raises(IpcClosed):
        ends[1].send(RankFailed(1, ""))


def test_another_message_is_the_peers_fault(ends: Ends) -> None:
    ends[0].send([1, 2, 3])
    with pytest.raises(RemoteProtocolError):
        ends[1].receive()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UsageError("no such rank"), UsageError, "no such rank"),
        (CollectiveError("rank 2 left", peer=2, phase="ring"), CollectiveError, "rank 2 left"),
        (CompressionError("too long", "weight"), HcsimError, "weight: too long"),
        (OSError("no space"), HcsimError, "OSError: no space"),
        (ValueError(), HcsimError, "ValueError: ValueError()"),
    ],
)
def test_an_error_reaches_the_rank(error: Exception, kind: type[HcsimError], text: str) -> None:
    reached = raised(failure_of(error))
    assert type(reached) is kind
    assert str(reached) == text
    assert getattr(reached, "peer", None) == getattr(error, "peer", None)
    assert getattr(reached, "phase", None) == getattr(error, "phase", None)
