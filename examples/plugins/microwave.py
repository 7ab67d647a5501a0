"""A fault: a microwave oven, which drowns Wi-Fi for half of each period of the mains while it runs.

[[fault]]
kind = "microwave"
at = "2 s"
medium = "air"
duration = "90 s"
"""

from hcsim.config import LinkChange
from hcsim.plugins import NS, Fault, register_fault
from hcsim.units import PositiveSeconds, Seconds, Share

MAINS_HZ = 50


class Microwave(Fault, frozen=True, tag="microwave"):
    medium: str
    duration_s: PositiveSeconds
    loss: Share = Share(0.4)


def run_oven(fault, world):
    half_s = 0.5 / MAINS_HZ
    for _ in range(int(fault.duration_s * MAINS_HZ)):
        now_s, half = world.env.now / NS, PositiveSeconds(half_s)
        world.inject(LinkChange(at_s=Seconds(now_s), medium=fault.medium, loss=fault.loss, duration_s=half))
        yield world.env.timeout(round(2 * half_s * NS))


register_fault(Microwave, run_oven)
