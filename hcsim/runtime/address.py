"""Addresses as people write them: host:port, or [v6]:port."""

from __future__ import annotations

from typing import Any

from hcsim.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not bracketed):
        raise ConfigError(f"{address!r} is not an address: write host:port, or [::1]:port for IPv6")
    return host.strip("[]"), int(port)


def join_address(sockaddr: tuple[Any, ...]) -> str:
    """The text of a socket's address."""
    host, port = sockaddr[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
