"""How long a piece of work takes on a machine.

The roofline of Williams, Waterman and Patterson ("Roofline: an insightful visual performance
model for multicore architectures", CACM 52:4, 2009): a kernel is bound either by arithmetic or
by memory,

    T = max(FLOPs / (η_c · peak), bytes / (η_b · bandwidth)) / throttle + kernels · overhead.

η_c and η_b are the parts of the data-sheet figures that real kernels reach. A fanless machine
counts at its sustained rate from the start, because training lasts much longer than its
heat reserve. `overhead` is paid for each kernel that is launched.
"""

from __future__ import annotations

from hcsim.config import CATALOGUE, Machine, Node
from hcsim.errors import UsageError
from hcsim.runtime.device import Work


def machine_of(node: Node) -> Machine:
    """The node's own profile, or the one it names."""
    if isinstance(node.machine, Machine):
        return node.machine
    return CATALOGUE.named(node.machine)


def seconds(machine: Machine, work: Work, throttle: float = 1.0) -> float:
    """How long the work takes; `throttle` (0 to 1] is the part of its speed that the machine has left."""
    if not 0 < throttle <= 1:
        raise UsageError(f"a throttle of {throttle} is not in (0, 1]")
    compute_s = work.flops / (machine.efficiency_compute * machine.peak_flops)
    memory_s = work.moved_bytes / (machine.efficiency_memory * machine.memory_Bps)
    steady = machine.sustained if machine.fanless else 1.0
    return max(compute_s, memory_s) / (throttle * steady) + work.kernels * machine.overhead_s
