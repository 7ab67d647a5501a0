"""What this machine is like, measured part by part: its kernels, what messages cost it, its compressors, and the speed
that it keeps.

The data-sheet figures of a measured machine are the best rates of its curves, with efficiencies of 1. They stand for
what no curve covers.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date

from msgspec.structs import replace

from hcsim.config.machine import Basis, KernelCurve, Machine
from hcsim.real.hardware import RealDevice, installed_versions, system_name, this_chip
from hcsim.runtime.host import Work
from hcsim.twin.codecs import measure_codec, usual_specs
from hcsim.twin.messages import measure_messages
from hcsim.twin.timing import displace, rounded, summary, timed
from hcsim.units import ByteRate, Bytes, FlopRate, PositiveShare, Seconds

KEPT = 0.95
"""A machine that keeps this share of its speed is not slowed down by heat: repeats differ by as much."""
_HEATED_SIZE = 1024
_HAND_OVERS = 200
_ROUGH_S = 0.2
_SUMMED, _SUM_BYTES = 1 << 22, 12
"""Elements of a large sum, and the bytes that it moves for each."""
SHORTEST_HEAT_S = 60.0
_FIRST_S, _LAST_SHARE = 10.0, 0.2
"""The speed at the beginning is that of the first seconds; the sustained one, that of the last part of the time."""

Tell = Callable[[str], None]


def measured_now(device: str) -> Callable[[float], Basis]:
    """Return what makes the provenance of a figure of this device from its spread."""
    versions = installed_versions()
    software = ", ".join(f"{name} {versions[name]}" for name in ("hcsim", "torch") if name in versions)
    source, today = f"{software} on {device}", date.today().isoformat()
    return lambda spread: Basis("measured", source, today, rounded(spread, 2))


def measured_between(count: int) -> Basis:
    """Return the provenance of links between so many machines."""
    version = installed_versions()["hcsim"]
    return Basis("measured", f"hcsim {version} over TLS between {count} machines", date.today().isoformat())


def measure_machine(name: str, device: str, before: Machine | None, heat_s: float, tell: Tell) -> Iterator[Machine]:
    """Measure this machine on a device of torch; yield what is known of it after each part.

    `before` is what was measured earlier, of which each part is kept until it has been measured again. With `heat_s`
    the machine is kept busy for so long, to find the speed that it sustains."""
    basis = measured_now(device)
    from hcsim.twin.kernels import measure_kernels  # torch takes seconds to load

    tell(f"kernels on {device}")
    machine = before
    for kernels in measure_kernels(device, basis):
        machine = with_kernels(name, machine, kernels.curves, device, basis)
        machine = replace(machine, step_s=Seconds(rounded(kernels.rest.step_s)), step_basis=basis(0.0))
        yield machine
    assert machine is not None
    tell("a device's thread")
    machine = replace(machine, hand_over_s=Seconds(hand_over_s(device)))
    tell("messages, plain and over TLS")
    machine = replace(machine, messages=measure_messages(basis))
    yield machine
    chosen = usual_specs()
    for number, spec in enumerate(chosen, start=1):
        tell(f"compressor {number} of {len(chosen)}: {spec}")
        others = tuple(codec for codec in machine.codecs if codec.compressor != spec)
        machine = replace(machine, codecs=(*others, measure_codec(spec, basis)))
        yield machine
    if heat_s > 0:
        share = sustained_share(device, heat_s, tell)
        machine = replace(machine, fanless=share < KEPT, sustained=PositiveShare(rounded(min(1.0, share), 2)))
        yield machine


def hand_over_s(device: str) -> float:
    """Return what it takes to have a device's thread do nothing, in between other work."""

    async def times() -> list[float]:
        here = RealDevice(device)
        lasted_s = []
        try:
            for _ in range(_HAND_OVERS):
                displace()
                began_s = time.perf_counter()
                await here.run(Work(), lambda: None)
                lasted_s.append(time.perf_counter() - began_s)
        finally:
            here.close()
        return lasted_s[1:]

    return summary(asyncio.run(times())).seconds


def rough_machine(name: str, device: str) -> Machine:
    """Return a machine of which only the rates of a large product and of a large sum are known, in a second."""
    here = RealDevice(device)
    try:
        product = timed(here.exercise("matmul", _HEATED_SIZE), _ROUGH_S)
        total = timed(here.exercise("axpy", _SUMMED), _ROUGH_S)
        smallest = timed(here.exercise("axpy", 1), _ROUGH_S)
    finally:
        here.close()
    found = measured_now(device)(max(product.spread, total.spread))
    return Machine(
        name,
        FlopRate(rounded(2 * _HEATED_SIZE**3 / product.seconds)),
        ByteRate(rounded(_SUM_BYTES * _SUMMED / total.seconds)),
        efficiency_compute=PositiveShare(1),
        efficiency_memory=PositiveShare(1),
        overhead_s=Seconds(smallest.seconds),
        basis=replace(found, source=f"{found.source}, {this_chip().name}, {system_name()}"),
        ram_bytes=_memory_bytes(),
        shares_processor=device == "cpu",
    )


def _memory_bytes() -> Bytes | None:
    """Return the machine's memory in whole megabytes."""
    memory_bytes = this_chip().memory_bytes
    return None if memory_bytes is None else Bytes(memory_bytes >> 20 << 20)


def with_kernels(
    name: str, before: Machine | None, kernels: tuple[KernelCurve, ...], device: str, basis: Callable[[float], Basis]
) -> Machine:
    """Return the machine with these curves, and with data-sheet figures that follow from them."""
    flops = max(size / each_s for curve in kernels if curve.kind == "matmul" for size, each_s in curve.points)
    largest = [curve.points[-1] for curve in kernels if curve.kind in ("copy", "elementwise")]
    memory_Bps = max(size / each_s for size, each_s in largest)
    launches_s = [curve.launch_s for curve in kernels if curve.launch_s]
    launch_s = statistics.median(launches_s or [min(each_s for curve in kernels for _, each_s in curve.points)])
    chip = this_chip()
    found = basis(max(curve.basis.spread for curve in kernels))
    return replace(
        before or Machine(name, FlopRate(1), ByteRate(1)),
        peak_flops=FlopRate(rounded(flops)),
        memory_Bps=ByteRate(rounded(memory_Bps)),
        efficiency_compute=PositiveShare(1),
        efficiency_memory=PositiveShare(1),
        overhead_s=Seconds(rounded(launch_s)),
        basis=replace(found, source=f"{found.source}, {chip.name}, {system_name()}"),
        ram_bytes=_memory_bytes(),
        kernels=kernels,
        shares_processor=device == "cpu",
    )


def sustained_share(device: str, lasts_s: float, tell: Tell) -> float:
    """Keep the device busy for so long; return the share of its first speed that it has at the end."""
    here = RealDevice(device)
    try:
        exercise = here.exercise("matmul", _HEATED_SIZE)
        exercise()
        began_s = time.monotonic()
        first = last = 0
        last_from_s = lasts_s * (1 - _LAST_SHARE)
        told_s = 0.0
        while (now_s := time.monotonic() - began_s) < lasts_s:
            if now_s - told_s >= 1:
                told_s = now_s
                tell(f"sustained speed: {now_s:.0f} of {lasts_s:.0f} s")
            exercise()
            first += now_s < _FIRST_S
            last += now_s >= last_from_s
    finally:
        here.close()
    return (last / (lasts_s - last_from_s)) / (first / _FIRST_S)
