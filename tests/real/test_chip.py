"""The chip and the memory, as the systems tell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcsim.real.hardware import parse_proc, parse_sysctl, this_chip
from hcsim.runtime.host import Chip

GIB = 1 << 30


def test_macos() -> None:
    listing = "machdep.cpu.brand_string: Apple M2 Ultra\nhw.memsize: 206158430208\n"
    assert parse_sysctl(listing) == Chip("Apple M2 Ultra", 192 * GIB)
    assert parse_sysctl("") == Chip("", None)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel\t\t: 85\nmodel name\t: Some Xeon @ 2.00GHz\n", "Some Xeon @ 2.00GHz"),
        ("processor\t: 0\nCPU part\t: 0xd0b\n\nModel\t\t: Some Board 5\n", "Some Board 5"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", ""),
    ],
)  # fmt: skip
def test_linux(cpuinfo: str, name: str) -> None:
    assert parse_proc(cpuinfo, "MemTotal:       16777216 kB\nMemFree:  1 kB\n") == Chip(name, 16 * GIB)
    assert parse_proc(cpuinfo, "") == Chip(name, None)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux has /proc")
def test_this_machine_has_as_much_memory_as_its_pages() -> None:
    import os

    chip = this_chip()
    assert chip.name
    assert chip.memory_bytes == pytest.approx(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), rel=0.01)
