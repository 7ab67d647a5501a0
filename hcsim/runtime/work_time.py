"""How long a machine takes for an amount of work: in the simulator, and where real compute is slept for.

The time follows the roofline model of Williams, Waterman and Patterson ("Roofline: an insightful visual performance
model for multicore architectures", CACM 52:4, 2009): a kernel is bound either by arithmetic or by memory,

    T = max(FLOPs / (η_c · peak), bytes / (η_b · bandwidth)) / throttle + kernels · overhead.

η_c and η_b are the fractions of the data-sheet figures that are reached: by a whole training step, or, where the work
is known by kinds of kernels, by those of each kind. A fanless machine runs at its sustained rate from the start,
because training lasts much longer than its heat reserve. `overhead` is charged for each kernel launch.
"""

from __future__ import annotations

from hcsim.config import Machine
from hcsim.config.machine import BY_FLOPS, interpolated_s
from hcsim.errors import UsageError
from hcsim.runtime.host import KernelGroup, Work


def seconds(machine: Machine, work: Work, throttle: float = 1.0) -> float:
    """Return the duration of the work. `throttle` in (0, 1] is the remaining fraction of the machine's speed."""
    if not 0 < throttle <= 1:
        raise UsageError(f"a throttle of {throttle} is not in (0, 1]")
    steady = machine.sustained if machine.fanless else 1.0
    if work.groups and (machine.kernels or machine.efficiencies):
        return sum(group.count * _kernel_s(machine, group) for group in work.groups) / (throttle * steady)
    compute_s = work.flops / (machine.efficiency_compute * machine.peak_flops)
    memory_s = work.moved_bytes / (machine.efficiency_memory * machine.memory_Bps)
    return max(compute_s, memory_s) / (throttle * steady) + work.kernels * machine.overhead_s


def _kernel_s(machine: Machine, group: KernelGroup) -> float:
    """Return the measured time of one kernel of the group; where its kind was not measured, that of the roofline."""
    size = group.flops if group.kind in BY_FLOPS else group.moved_bytes
    same_kind = [curve for curve in machine.kernels if curve.kind == group.kind]
    if not same_kind:
        of_peak, of_bandwidth = _efficiencies(machine, group.kind)
        compute_s = group.flops / (of_peak * machine.peak_flops)
        memory_s = group.moved_bytes / (of_bandwidth * machine.memory_Bps)
        return max(compute_s, memory_s) + machine.overhead_s
    curve = next((curve for curve in same_kind if curve.dtype == group.dtype), same_kind[0])
    return interpolated_s(curve.points, size)


def _efficiencies(machine: Machine, kind: str) -> tuple[float, float]:
    """Return the shares of the peak and of the memory's bandwidth that a kernel of this kind reaches."""
    share = next((known.share for known in machine.efficiencies if known.kind == kind), None)
    if share is None:
        return machine.efficiency_compute, machine.efficiency_memory
    return (share, machine.efficiency_memory) if kind in BY_FLOPS else (machine.efficiency_compute, share)
