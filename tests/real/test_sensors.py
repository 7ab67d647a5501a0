"""What the system tells of a machine's state, as Linux and macOS write it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hcsim.real.sensors import Sensors, parse_mac
from hcsim.runtime.host import Readings

GIB = 2**30
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               65536.
Pages active:                            300000.
Pages inactive:                           65536.
Pages speculative:                            0.
Pages wired down:                        100000.
Pages purgeable:                              0.
"Translation faults":                 123456789.
"""
THERM = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
2026-11-19 10:00:00 +0000 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 74
"""


def test_macos_tells_free_memory_and_the_limit_of_heat() -> None:
    assert parse_mac(VM_STAT, THERM) == Readings(free_bytes=2 * GIB, speed_limit=0.74)
    assert parse_mac("", "Note: No thermal warning level has been recorded\n") == Readings()


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A Linux machine with two sensors, one of which is broken, and a processor that counts its energy."""
    files = {
        "proc/meminfo": "MemTotal: 4194304 kB\nMemAvailable: 2097152 kB\n",
        "sys/class/thermal/thermal_zone0/temp": "61234\n",
        "sys/class/thermal/thermal_zone1/temp": "-274000\n",
        "sys/class/thermal/thermal_zone2/temp": "48000\n",
        "sys/class/powercap/intel-rapl:0/energy_uj": "1000000\n",
        "sys/class/powercap/intel-rapl:0:0/energy_uj": "999\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has other sensors")
def test_linux_tells_memory_temperature_and_power(board: Path) -> None:
    sensors = Sensors(board / "sys", board / "proc")
    first = sensors.read()
    assert first == Readings(free_bytes=2 * GIB, temperature_c=61.234)
    energy = board / "sys/class/powercap/intel-rapl:0/energy_uj"
    energy.write_text("3000000\n")
    power_w = sensors.read().power_w
    assert power_w is not None
    assert power_w > 0
    energy.write_text("5\n")
    assert sensors.read().power_w is None, "the counter has begun anew"
    battery = board / "sys/class/power_supply/BAT0"
    battery.mkdir(parents=True)
    (battery / "status").write_text("Discharging\n")
    (battery / "power_now").write_text("12500000\n")
    assert sensors.read().power_w == 12.5


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has other sensors")
def test_a_machine_that_tells_nothing_has_no_readings(tmp_path: Path) -> None:
    assert Sensors(tmp_path, tmp_path).read() == Readings()
