"""What Macs from M1 to M5 answered to `sysctl` and `pmset`, as their owners published it, and what is made of it."""

from __future__ import annotations

import pytest

from hcsim.cluster.probe import DeviceSpeed
from hcsim.doctor import check_power, judged_speed
from hcsim.real.hardware import parse_sysctl
from hcsim.runtime.host import Chip
from tests.test_doctor import BATTERY, MAINS, PMSET, Recorded

GIB = 1 << 30


@pytest.mark.parametrize(
    ("listing", "chip", "in_catalogue"),
    [
        ("machdep.cpu.brand_string: Apple M1\nhw.memsize: 8589934592\n", Chip("Apple M1", 8 * GIB), True),
        ("hw.memsize: 17179869184\nmachdep.cpu.brand_string: Apple M1 Pro\n", Chip("Apple M1 Pro", 16 * GIB), True),
        ("machdep.cpu.brand_string: Apple M2 Pro\nhw.memsize: 17179869184\n", Chip("Apple M2 Pro", 16 * GIB), True),
        ("machdep.cpu.brand_string: Apple M3\nhw.memsize: 25769803776\n", Chip("Apple M3", 24 * GIB), True),
        ("machdep.cpu.brand_string: Apple M3 Pro\nhw.memsize: 38654705664\n", Chip("Apple M3 Pro", 36 * GIB), True),
        ("machdep.cpu.brand_string: Apple M4 Max\nhw.memsize: 68719476736\n", Chip("Apple M4 Max", 64 * GIB), True),
        (
            "hw.model: Mac17,4\nhw.memsize: 17179869184\nhw.physicalcpu: 10\nhw.logicalcpu: 10\n"
            "machdep.cpu.brand_string: Apple M5\n",
            Chip("Apple M5", 16 * GIB), True,
        ),
        ("machdep.cpu.brand_string: Apple M5 Pro\nhw.memsize: 51539607552\n", Chip("Apple M5 Pro", 48 * GIB), True),
        (
            "hw.perflevel0.physicalcpu: 12\nhw.perflevel1.physicalcpu: 6\nhw.memsize: 137438953472\n"
            "machdep.cpu.brand_string: Apple M5 Max\nkern.version: Darwin Kernel Version 25.4.0\n",
            Chip("Apple M5 Max", 128 * GIB), True,
        ),
        (
            "machdep.cpu.brand_string: Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz\nhw.memsize: 17179869184\n",
            Chip("Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", 16 * GIB), False,
        ),
        ("machdep.cpu.brand_string: Apple processor\n", Chip("Apple processor", None), False),  # a virtual machine
        ("machdep.cpu.brand_string: Apple M1 \nhw.memsize: 17179869184\n", Chip("Apple M1", 16 * GIB), True),
    ],
    ids=lambda value: value.name if isinstance(value, Chip) else "",
)  # fmt: skip
def test_a_chip_is_read_and_found_in_the_catalogue(listing: str, chip: Chip, in_catalogue: bool) -> None:
    assert parse_sysctl(listing) == chip
    told = judged_speed("mps", chip.name, DeviceSpeed(1e15, 1e12)).found
    assert ("of its peak" in told) == in_catalogue


# A Mac mini that its owner keeps awake, with High Power Mode, which newer Macs have by this name.
HIGH_POWER = """\
System-wide power settings:
 SleepDisabled\t\t1
Currently in use:
 standby              0
 Sleep On Power Button 1
 SleepServices        0
 hibernatefile        /var/vm/sleepimage
 powernap             0
 networkoversleep     0
 disksleep            0
 sleep                0 (sleep prevented by sharingd, powerd, caffeinate, mds_stores, coreaudiod, caffeinate)
 hibernatemode        0
 ttyskeepawake        1
 displaysleep         0 (display sleep prevented by caffeinate, caffeinate)
 tcpkeepalive         1
 powermode            2
 womp                 1
"""
# A MacBook of 2021 to 2024 at work, and one with an Intel processor, on which there is neither mode.
KEPT_AWAKE = "1 (sleep prevented by caffeinate, caffeinate, runningboardd)"
INTEL = """\
System-wide power settings:
Currently in use:
 lidwake              1
 autopoweroff         1
 standbydelayhigh     86400
 autopoweroffdelay    28800
 standbydelaylow      10800
 standby              1
 proximitywake        0
 ttyskeepawake        1
 hibernatemode        3
 gpuswitch            2
 powernap             1
 hibernatefile        /var/vm/sleepimage
 highstandbythreshold 50
 displaysleep         28
 sleep                1 (sleep prevented by sharingd)
 acwake               0
 halfdim              1
 tcpkeepalive         1
 disksleep            0
"""
CHARGING = "Now drawing from 'AC Power'\n -InternalBattery-0 (id=23265379)\t80%; AC attached; not charging\n"


@pytest.mark.parametrize(
    ("settings", "source", "state", "found"),
    [
        (HIGH_POWER, MAINS, "good", "never sleeps"),
        (HIGH_POWER.replace("powermode            2", "powermode            1"), MAINS, "warning", "Low Power Mode"),
        (PMSET.format(sleep=KEPT_AWAKE, low=0), CHARGING, "good", "prevented by caffeinate, caffeinate, runningboardd"),
        (PMSET.format(sleep=KEPT_AWAKE, low=1), CHARGING, "warning", "Low Power Mode"),
        (PMSET.format(sleep=KEPT_AWAKE, low=0), BATTERY, "warning", "battery"),
        (INTEL, MAINS, "good", "prevented by sharingd"),
    ],
)
def test_power_settings_are_read(settings: str, source: str, state: str, found: str) -> None:
    result = check_power(Recorded({("pmset", "-g"): settings, ("pmset", "-g", "batt"): source}))
    assert result.state == state
    assert found in result.found
