"""Packets of multicast DNS, as a stranger on the local network forges them."""

from __future__ import annotations

import socket
import struct

GROUP = ("224.0.0.251", 5353)
_TYPE = b"\x06_hcsim\x04_tcp\x05local\x00"
_PTR, _SRV, _TXT, _A = 12, 33, 16, 1


def announcement(name: str, ip: str, port: int, properties: dict[str, str], ttl_s: int = 4500) -> bytes:
    """A response that says all about one service of ours: pointer, place, properties and address. TTL 0: a goodbye."""
    label = name.encode()
    instance = bytes([len(label)]) + label + _TYPE
    server = bytes([len(label)]) + label + b"\x05local\x00"
    text = b"".join(bytes([len(each)]) + each for each in (f"{k}={v}".encode() for k, v in properties.items()))
    records = (
        _record(_TYPE, _PTR, 1, ttl_s, instance),
        _record(instance, _SRV, 0x8001, ttl_s, struct.pack("!HHH", 0, 0, port) + server),
        _record(instance, _TXT, 0x8001, ttl_s, text or b"\x00"),
        _record(server, _A, 0x8001, ttl_s, socket.inet_aton(ip)),
    )
    return struct.pack("!6H", 0, 0x8400, 0, len(records), 0, 0) + b"".join(records)


def ghost(number: int, namespace: str, ip: str, port: int = 9) -> bytes:
    """A node of the cluster that does not exist."""
    node = f"{number:032x}"
    properties = {"node": node, "namespace": namespace, "boot": "1", "at": f"{ip}:{port}"}
    return announcement(f"ghost-{number:08x}", ip, port, properties)


def sender(interface: str) -> socket.socket:
    """A socket that sends to everybody on the network of the interface with that address, from there."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((interface, 0))
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(interface))
    return sock


def _record(name: bytes, kind: int, of: int, ttl_s: int, data: bytes) -> bytes:
    return name + struct.pack("!HHIH", kind, of, ttl_s, len(data)) + data
