"""The state of this machine: free memory, temperature, power and heat limits, as far as it is told without root.

Linux tells them in /proc and /sys: thermal zones in thousandths of a degree, what a battery gives in millionths of a
watt, and the energy that the processor has used so far (powercap), which most systems show to root alone. macOS has
commands: `vm_stat` for memory, and `pmset -g therm` for the speed that is left because of heat. Temperatures and power
of Apple's chips need root there (`powermetrics`), so they are left out.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from hcsim.files import text_of
from hcsim.real.interfaces import output_of
from hcsim.runtime.host import Readings

_PLAUSIBLE_C = (1.0, 130.0)
"""Zones without a sensor say 0, or anything."""


class Sensors:
    """Reads the sensors. The processor's power is the energy used since the reading before, so the first has none."""

    def __init__(self, sys_folder: Path = Path("/sys"), proc_folder: Path = Path("/proc")) -> None:
        self._sys = sys_folder
        self._proc = proc_folder
        self._energy: tuple[float, int] | None = None
        """When the energy was read, on the monotonic clock, and how many microjoules it was."""

    def read(self) -> Readings:
        if sys.platform == "darwin":
            return parse_mac(output_of("vm_stat"), output_of("pmset", "-g", "therm"))
        free = re.search(r"^MemAvailable:\s*(\d+) kB$", text_of(self._proc / "meminfo"), re.MULTILINE)
        return Readings(
            free_bytes=1024 * int(free[1]) if free else None,
            temperature_c=self._hottest_c(),
            power_w=self._power_w(time.monotonic()),
        )

    def _hottest_c(self) -> float | None:
        found = [_number(zone / "temp") for zone in (self._sys / "class/thermal").glob("thermal_zone*")]
        low, high = _PLAUSIBLE_C
        return max((each / 1e3 for each in found if each is not None and low <= each / 1e3 <= high), default=None)

    def _power_w(self, now_s: float) -> float | None:
        """Return the power of the battery that drives this machine, or else of the processor packages."""
        supplies = sorted((self._sys / "class/power_supply").glob("*"))
        drawn = [_number(each / "power_now") for each in supplies if text_of(each / "status").strip() == "Discharging"]
        if known := [power for power in drawn if power]:
            return sum(known) / 1e6
        packages = (self._sys / "class/powercap").glob("intel-rapl:[0-9]*")
        used = [_number(each / "energy_uj") for each in packages if each.name.count(":") == 1]
        energies = [each for each in used if each is not None]
        before, self._energy = self._energy, (now_s, sum(energies)) if energies else None
        if before is None or self._energy is None or now_s <= before[0] or self._energy[1] < before[1]:
            return None  # the counters begin anew from time to time
        return (self._energy[1] - before[1]) / 1e6 / (now_s - before[0])


def parse_mac(vm_stat: str, therm: str) -> Readings:
    """Parse the output of `vm_stat` and of `pmset -g therm`."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = {name: int(count) for name, count in re.findall(r"^Pages ([a-z ]+):\s+(\d+)\.$", vm_stat, re.MULTILINE)}
    free = [pages[name] for name in ("free", "inactive", "speculative", "purgeable") if name in pages]
    limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", therm)
    return Readings(
        free_bytes=int(page[1]) * sum(free) if page and free else None,
        speed_limit=int(limit[1]) / 100 if limit else None,
    )


def _number(file: Path) -> int | None:
    text = text_of(file).strip()
    return int(text) if text.lstrip("-").isdecimal() else None
