"""What a person is told of the system's errors."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from hcsim.real.sockets import LOCAL_NETWORK, translated


def unreachable() -> OSError:
    return OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))


@pytest.mark.parametrize(
    "peer", ["127.0.0.1:52415", "203.0.113.1|127.0.0.1:52415", "mini.local:52415", "ws://[::1]:80/x"]
)
def test_macos_says_no_route_where_it_keeps_a_program_off_the_local_network(
    peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    told = str(translated(unreachable(), peer))
    assert told == f"the connection to {peer} failed: No route to host; if {peer} is on: {LOCAL_NETWORK}"


@pytest.mark.parametrize(
    ("platform", "peer", "error"),
    [
        ("linux", "127.0.0.1:52415", unreachable()),
        ("darwin", "203.0.113.1:52415", unreachable()),  # beyond a router, which may really have no route
        ("darwin", "a caller", unreachable()),
        ("darwin", "127.0.0.1:52415", OSError(errno.ENETUNREACH, "Network is unreachable")),
    ],
)
def test_no_other_error_is_explained_so(
    platform: str, peer: str, error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert str(translated(error, peer)) == f"the connection to {peer} failed: {error.strerror}"
