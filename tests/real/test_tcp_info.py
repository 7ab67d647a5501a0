"""What the system counts about a connection: sent and lost segments."""

from __future__ import annotations

import socket
import struct
import sys

import pytest

from hcsim.real.tcp_info import linux_counts, macos_counts, segment_counts

SIZE_BYTES = 1 << 20


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="other systems do not tell")
def test_a_connection_over_the_loopback_sends_segments_and_loses_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
        other, _ = listener.accept()
        with other:
            before = segment_counts(one)
            left = SIZE_BYTES
            while left:
                one.sendall(bytes(1 << 14))
                left -= len(other.recv(1 << 14, socket.MSG_WAITALL))
            after = segment_counts(one)
    assert before is not None
    assert after is not None
    assert after.sent - before.sent >= SIZE_BYTES / 65536  # the largest segment that there is
    assert after.lost == 0


def test_a_socket_that_is_no_connection_counts_nothing() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        assert segment_counts(sock) is None


def test_linux_does_not_count_what_had_arrived_as_lost() -> None:
    told = bytearray(232)
    for place, value in ((100, 12), (156, 5000), (216, 2)):
        struct.pack_into("=I", told, place, value)
    assert linux_counts(bytes(told)) == (5000, 10)
    assert linux_counts(bytes(told[:160])) == (5000, 12)
    assert linux_counts(bytes(told[:104])) is None


def test_macos_counts_packets_that_were_sent_again() -> None:
    told = bytearray(112)
    struct.pack_into("=Q", told, 56, 5000)
    struct.pack_into("=Q", told, 104, 7)
    assert macos_counts(bytes(told)) == (5000, 7)
    assert macos_counts(bytes(told[:104])) is None
