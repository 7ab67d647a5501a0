"""What this machine is built on: its chip and its memory, as macOS or Linux tell."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

from hcsim.runtime.device import Chip

_SYSCTL = ("sysctl", "machdep.cpu.brand_string", "hw.memsize")


def this_chip() -> Chip:
    """The chip and the memory of this machine; what the system does not tell is its architecture, and None."""
    if sys.platform == "darwin":
        found = parse_sysctl(_output_of(_SYSCTL))
    else:
        found = parse_proc(_text_of(Path("/proc/cpuinfo")), _text_of(Path("/proc/meminfo")))
    return found if found.name else Chip(platform.machine() or "unknown", found.memory_bytes)


def parse_sysctl(listing: str) -> Chip:
    """From the output of `sysctl machdep.cpu.brand_string hw.memsize`: one `name: value` a line."""
    values = dict(line.split(": ", 1) for line in listing.splitlines() if ": " in line)
    memory = values.get("hw.memsize", "").strip()
    return Chip(values.get("machdep.cpu.brand_string", "").strip(), int(memory) if memory.isdecimal() else None)


def parse_proc(cpuinfo: str, meminfo: str) -> Chip:
    """From /proc/cpuinfo and /proc/meminfo. ARM kernels name no model there; some boards do, as `Model`."""
    model = re.search(r"^(?:model name|Model|Hardware)\s*: *(\S.*?)\s*$", cpuinfo, re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB$", meminfo, re.MULTILINE)
    return Chip(model.group(1) if model else "", 1024 * int(memory.group(1)) if memory else None)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output_of(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
