"""What the system counts about a TCP connection.

Linux tells it as `struct tcp_info` (linux/tcp.h), macOS as `struct tcp_connection_info` (bsd/netinet/tcp.h of XNU).
Both only ever grow at their ends, so that a figure keeps its place. Linux also counts what the peer said it had twice
(D-SACK, RFC 2883): such a segment was sent again although it had arrived, and is not lost.
"""

from __future__ import annotations

import socket
import struct
import sys

from hcsim.runtime.channel import SegmentCounts

_TCP_CONNECTION_INFO = 0x106
"""The option of macOS, for which older Pythons have no name."""
_ROOM_BYTES = 512
_LINUX_RETRANSMITTED, _LINUX_SENT, _LINUX_DUPLICATES = 100, 156, 216
_MACOS_SENT, _MACOS_RETRANSMITTED = 56, 104


def segment_counts(sock: socket.socket, system: str = sys.platform) -> SegmentCounts | None:
    """Return how many segments a connection has sent and lost; None where the system does not tell."""
    option = _TCP_CONNECTION_INFO if system == "darwin" else getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, option, _ROOM_BYTES)
    except OSError:
        return None
    return macos_counts(told) if system == "darwin" else linux_counts(told)


def linux_counts(told: bytes) -> SegmentCounts | None:
    """Read a `tcp_info`. Kernels before 4.6 do not count the segments with data, those before 4.19 no duplicates."""
    if len(told) < _LINUX_SENT + 4:
        return None
    has_duplicates = len(told) >= _LINUX_DUPLICATES + 4
    again, sent = _u32(told, _LINUX_RETRANSMITTED), _u32(told, _LINUX_SENT)
    return SegmentCounts(sent, max(again - (_u32(told, _LINUX_DUPLICATES) if has_duplicates else 0), 0))


def macos_counts(told: bytes) -> SegmentCounts | None:
    """Read a `tcp_connection_info`. Old versions count no packets that were sent again, only their bytes."""
    if len(told) < _MACOS_RETRANSMITTED + 8:
        return None
    return SegmentCounts(*(struct.unpack_from("=Q", told, place)[0] for place in (_MACOS_SENT, _MACOS_RETRANSMITTED)))


def _u32(told: bytes, place: int) -> int:
    return int.from_bytes(told[place : place + 4], sys.byteorder)
