"""Machines, a medium and a process of one's own, for scenarios that a home has and the package has not.

plugins = ["neighbourhood.py"]
processes = ["neighbourhood.py:evening_backup"]
"""

from hcsim.config import Ethernet, Machine
from hcsim.plugins import NS, register_machine, register_medium
from hcsim.units import BitRate, ByteRate, FlopRate, Seconds

register_machine(Machine("Old Mini", FlopRate(0.8e12), ByteRate(34e9)))


class Powerline(Ethernet, frozen=True, tag="powerline"):
    """An adapter in the wall: a switch, to the simulator, that is slow and far away."""

    rate_bps: BitRate = BitRate(200e6)
    latency_s: Seconds = Seconds(3e-3)
    jitter_s: Seconds = Seconds(1e-3)


register_medium(Powerline)


def evening_backup(world):
    """Every two seconds, the first machine copies 100 MB to the second, and waits until they are there."""
    source, target = (host.name for host in world.hosts[:2])
    while True:
        yield world.env.timeout(2 * NS)
        yield world.transfer(source, target, 100_000_000)
