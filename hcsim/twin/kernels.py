"""The time of kernels on this machine, against their size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hcsim.config.machine import Basis, KernelCurve
from hcsim.real.hardware import RealDevice
from hcsim.twin.timing import timed

_FLOAT_BYTES = 4


def measure_kernels(device: str, basis: Callable[[float], Basis]) -> tuple[KernelCurve, ...]:
    """Measure each kind of kernel on a device of torch. `basis` makes the provenance from the spread."""
    here = RealDevice(device)
    try:
        matmul = _curve(here, "matmul", {size: 2.0 * size**3 for size in (32, 64, 128, 256, 512, 1024, 2048)}, basis)
        axpy = _curve(here, "axpy", {4**n: 3.0 * _FLOAT_BYTES * 4**n for n in range(6, 13)}, basis)
    finally:
        here.close()
    return matmul, axpy


def _curve(
    device: RealDevice, kind: Literal["matmul", "axpy"], sizes: dict[int, float], basis: Callable[[float], Basis]
) -> KernelCurve:
    timings = {amount: timed(device.exercise(kind, size), 0.1) for size, amount in sizes.items()}
    points = tuple((amount, timing.seconds) for amount, timing in timings.items())
    spread = sorted(timing.spread for timing in timings.values())[len(timings) // 2]
    return KernelCurve("matmul" if kind == "matmul" else "elementwise", points, basis=basis(spread))
