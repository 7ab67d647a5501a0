"""The TCP settings of this machine's system, as a scenario has them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

from hcsim.config import Tcp
from hcsim.units import PositiveBytes

_LINUX = Path("/proc/sys/net/ipv4")


def system_tcp(settings: Path = _LINUX, *, system: str = sys.platform) -> Tcp:
    """Return how large the system lets a connection's buffers grow, and how it controls congestion.

    On Linux the last figures of `tcp_wmem` and `tcp_rmem` count, the latter by half: the other half is for what the
    system itself needs for packets. On macOS `net.inet.tcp.autosndbufmax` and `autorcvbufmax` count. What cannot be
    read stays as it is by default."""
    if system == "darwin":
        send, receive = (_sysctl(f"net.inet.tcp.{name}") for name in ("autosndbufmax", "autorcvbufmax"))
        return _tcp(send, receive, "cubic")
    send, receive = (_last_figure(settings / name) for name in ("tcp_wmem", "tcp_rmem"))
    control = _text(settings / "tcp_congestion_control")
    return _tcp(send, receive // 2, "bbr" if control.startswith("bbr") else "cubic")


def _tcp(send_bytes: int, receive_bytes: int, congestion: Literal["cubic", "bbr"]) -> Tcp:
    usual = Tcp()
    return Tcp(
        window_bytes=PositiveBytes(receive_bytes) if receive_bytes else usual.window_bytes,
        send_buffer_bytes=PositiveBytes(send_bytes) if send_bytes else usual.send_buffer_bytes,
        autotune=True,
        piggyback=True,
        congestion=congestion,
    )


def _sysctl(name: str) -> int:
    try:
        said = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False).stdout
    except OSError:
        return 0
    return int(said) if said.strip().isdecimal() else 0


def _last_figure(path: Path) -> int:
    figures = _text(path).split()
    return int(figures[-1]) if figures and figures[-1].isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
