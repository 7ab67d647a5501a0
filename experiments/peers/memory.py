"""What this process occupies, where the kernel tells (Linux)."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def resident_bytes() -> int | None:
    """Physical memory in use now."""
    return _field("VmRSS:")


def peak_bytes() -> int | None:
    """The most that was in use since `reset_peak`."""
    return _field("VmHWM:")


def reset_peak() -> bool:
    """Start anew from what is in use now; False where that is not allowed."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _field(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)
