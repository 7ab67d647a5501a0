"""The TCP settings of a system."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcsim.config import Tcp
from hcsim.twin.tcp import system_tcp


def test_the_largest_buffers_of_a_linux_system_count(tmp_path: Path) -> None:
    (tmp_path / "tcp_wmem").write_text("4096\t16384\t2097152\n")
    (tmp_path / "tcp_rmem").write_text("4096\t131072\t6291456\n")
    (tmp_path / "tcp_congestion_control").write_text("bbr\n")
    found = system_tcp(tmp_path, system="linux")
    assert (found.send_buffer_bytes, found.window_bytes, found.congestion) == (2097152, 3145728, "bbr")
    assert found.autotune
    assert found.piggyback


@pytest.mark.parametrize("text", [None, "", "many\n"])
def test_what_cannot_be_read_stays_as_it_is(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        for name in ("tcp_wmem", "tcp_rmem", "tcp_congestion_control"):
            (tmp_path / name).write_text(text)
    found = system_tcp(tmp_path, system="linux")
    assert (found.send_buffer_bytes, found.window_bytes) == (Tcp().send_buffer_bytes, Tcp().window_bytes)
    assert found.congestion == "cubic"


def test_this_machine_has_buffers() -> None:
    assert system_tcp().window_bytes >= 65536
