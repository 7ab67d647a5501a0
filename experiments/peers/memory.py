"""What this process occupies, where the kernel tells (Linux).

Freed memory may stay with the C library, which gives it out again: it belongs to nobody, and how much it is depends on
what was there before. So it goes back to the kernel before a peak is sought. The kernel counts pages on each core and
adds up now and then, and Python's own small objects come and go: figures are good to some pages at best.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def peak_bytes() -> int | None:
    """The most that was in use since `reset_peak`."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def reset_peak() -> bool:
    """Start anew from what is in use now; False where that is not allowed."""
    _trim()
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)
