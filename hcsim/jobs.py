"""The job of a group in one run: a scenario's `[job]`, the same program on virtual and on real machines.

Each repeat has four parts: the inputs are made, the machine computes (if the job says so), the ranks meet
at a barrier, and the collective runs. Its time is that of the slowest rank, from the rank's own exit from
the barrier; ranks leave the barrier a few latencies apart at most.

Inputs are small whole numbers that every dtype holds exactly. They are drawn independently for each rank
and laid out with a prime period, so a part that arrives at the wrong place, twice or not at all changes the
result. The expected result of every rank is computed from one period of each rank's input, and is compared
bit by bit. The digest of a repeat covers all ranks' results, so it does not depend on whether the run is
virtual.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from hcsim import rng
from hcsim.collectives.algorithms import algorithms
from hcsim.collectives.arithmetic import dtype_named
from hcsim.collectives.buffers import Array, Data
from hcsim.collectives.group import Group
from hcsim.collectives.plan import Shape, split
from hcsim.collectives.select import choose
from hcsim.config import Job
from hcsim.errors import ConfigError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import Work
from hcsim.units import did_you_mean

_PERIOD = 251
_ADDENDS = 64
"""The number of ranks with a value above zero at one place: 64 values of at most 3 add up to what bfloat16
still holds."""
_FIGURES = struct.Struct("!ddqq32s")


class JobRepeat(msgspec.Struct, frozen=True):
    """One repeat, combined over all ranks."""

    number: int
    algorithm: str
    compute_s: float
    """The time of the computation before the collective, on the slowest rank."""
    seconds: float
    """The time of the collective, on the slowest rank."""
    sent_bytes: int
    """The payload that the busiest rank sent."""
    wrong: int | None
    """Elements that differ from the exact result, on all ranks; None for phantoms."""
    sha256: str | None
    """The digest of the results of all ranks, in their order."""


RepeatObserver: TypeAlias = Callable[[JobRepeat], None]


def check_job(job: Job) -> None:
    """Reject an algorithm that the operation does not have, and a size that the job cannot have."""
    names = ("auto", *algorithms(job.operation))
    if job.algorithm not in names:
        hint = did_you_mean(job.algorithm, names)
        raise ConfigError(
            f'algorithm = "{job.algorithm}": {job.operation} has no such algorithm{hint}; it has {", ".join(names)}'
        )
    if job.size_bytes > sys.maxsize:
        raise ConfigError(f'job.size = "{job.size_bytes} B": this is more than can be addressed, {sys.maxsize} B')
    element_bytes = dtype_named(job.dtype).itemsize
    if job.payload == "data" and job.size_bytes % element_bytes:
        below = job.size_bytes - job.size_bytes % element_bytes
        raise ConfigError(
            f'job.size = "{job.size_bytes} B": no whole number of {job.dtype}, which have {element_bytes} B each; '
            f"{below} B and {below + element_bytes} B are"
        )


async def run_job(group: Group, job: Job, observe: RepeatObserver) -> list[JobRepeat]:
    """Run the job on this rank. The observer is called after each repeat."""
    algorithm = _resolved(group, job)
    laps = []
    for number in range(1, job.repeat + 1):
        with group.host.interval("repeat", number):
            lap = await _repeat(group, job, algorithm, number)
        laps.append(lap)
        observe(lap)
    return laps


async def _repeat(group: Group, job: Job, algorithm: str, number: int) -> JobRepeat:
    host = group.host
    start, expected = _EXERCISES[job.operation](group, _Inputs(job, group.size))
    began_s = host.clock.elapsed()
    if job.compute is not None:
        work = Work(flops=job.compute)
        with host.interval("compute", "", work.figures):
            await host.device.run(work, lambda: None)
    computed_s = host.clock.elapsed()
    await group.barrier()
    sent_before, started_s = group.bytes_sent, host.clock.elapsed()
    result = await start(algorithm=algorithm)
    ended_s, sent_bytes = host.clock.elapsed(), group.bytes_sent - sent_before
    wrong, digest = compare_to_expected(_parts(result), expected())
    ours = _FIGURES.pack(computed_s - began_s, ended_s - started_s, sent_bytes, wrong, digest)
    reports = await group.all_gather(np.frombuffer(ours, np.uint8))
    figures = [_FIGURES.unpack(bytes(report)) for report in reports if not isinstance(report, Phantom)]
    computes_s, times_s, sent, wrongs, digests = zip(*figures, strict=True)
    verified = job.payload == "data"
    return JobRepeat(
        number,
        algorithm,
        max(computes_s),
        max(times_s),
        max(sent),
        sum(wrongs) if verified else None,
        hashlib.sha256(b"".join(digests)).hexdigest() if verified else None,
    )


def _resolved(group: Group, job: Job) -> str:
    """Return the algorithm's name, chosen as the group chooses it if the job leaves it open."""
    if job.algorithm != "auto":
        return job.algorithm
    length = _Inputs(job, group.size).length
    sizes = tuple(hi - lo for lo, hi in pairwise(split(length, group.size)))
    counts = (length,) * group.size if job.operation in ("all_gather", "gather") else sizes
    shape = Shape(world=group.size, length=length, counts=counts, groups=group.options.groups)
    element_bytes = 1 if job.payload == "phantom" else dtype_named(job.dtype).itemsize
    return choose(job.operation, shape, element_bytes, group.options.links)


class _Inputs:
    """The inputs of all ranks, and their sum."""

    def __init__(self, job: Job, world: int) -> None:
        self.world = world
        self.phantom = job.payload == "phantom"
        self.dtype = np.dtype(np.uint8) if self.phantom else dtype_named(job.dtype)
        self.length = job.size_bytes // self.dtype.itemsize
        spread = -(-world // _ADDENDS)
        draws = [rng.stream(0, "job input", rank) for rank in range(world)]
        self._periods = np.array(
            [
                [draw.randint(1, 3) * ((place + rank) % spread == 0) for place in range(_PERIOD)]
                for rank, draw in enumerate(draws)
            ]
        )

    def of(self, rank: int, lo: int = 0, hi: int | None = None) -> Data:
        """Return a range of one rank's input."""
        return self._laid_out(self._periods[rank], lo, self.length if hi is None else hi)

    def total(self, lo: int = 0, hi: int | None = None) -> Data:
        """Return a range of the sum over all ranks."""
        return self._laid_out(self._periods.sum(axis=0), lo, self.length if hi is None else hi)

    def room(self, length: int) -> Data:
        """Return a buffer to receive into."""
        return Phantom(length) if self.phantom else np.zeros(length, self.dtype)

    def _laid_out(self, period: Array, lo: int, hi: int) -> Data:
        if self.phantom:
            return Phantom(hi - lo)
        # Integers that are too narrow wrap around, here as in the reduction.
        turned: Array = np.roll(period, -lo).astype(self.dtype)
        return np.resize(turned, hi - lo)


def _parts(result: object) -> list[Data]:
    if result is None:
        return []
    return result if isinstance(result, list) else [result]  # type: ignore[list-item]


def compare_to_expected(result: Sequence[Data], expected: Sequence[Data]) -> tuple[int, bytes]:
    """Return the number of wrong elements, and the digest of the result."""
    digest = hashlib.sha256()
    wrong = 0
    for got, want in zip(result, expected, strict=True):
        if not isinstance(got, Phantom) and not isinstance(want, Phantom):
            wrong += int(np.count_nonzero(got != want))
            digest.update(np.ascontiguousarray(got).view(np.uint8).data)
    return wrong, digest.digest()


class _Start(Protocol):
    def __call__(self, *, algorithm: str) -> Awaitable[Any]: ...


_Expected: TypeAlias = Callable[[], list[Data]]


def _all_reduce(group: Group, inputs: _Inputs) -> tuple[_Start, _Expected]:
    data = inputs.of(group.rank)
    return partial(group.all_reduce, data), lambda: [inputs.total()]


def _reduce(group: Group, inputs: _Inputs) -> tuple[_Start, _Expected]:
    data = inputs.of(group.rank)
    return (
        partial(group.reduce, data),
        lambda: [inputs.of(group.rank) if group.rank else inputs.total()],
    )


def _broadcast(group: Group, inputs: _Inputs) -> tuple[_Start, _Expected]:
    data = inputs.of(group.rank)
    return partial(group.broadcast, data), lambda: [inputs.of(0)]


def _all_gather(group: Group, inputs: _Inputs) -> tuple[_Start, _Expected]:
    data = inputs.of(group.rank)
    return (
        partial(group.all_gather, data),
        lambda: [inputs.of(rank) for rank in range(group.size)],
    )


def _gather(group: Group, inputs: _Inputs) -> tuple[_Start, _Expected]:
    data = inputs.of(group.rank)
    return (
        partial(group.gather, data),
        lambda: [] if group.rank else [inputs.of(rank) for rank in range(group.size)],
    )


def _scatter(group: Group, inputs: _Inputs) -> tuple[_Start, _Expected]:
    """The size is that of the root's buffer; a remainder that does not divide evenly is left out."""
    part = inputs.length // group.size
    parts = None if group.rank else [inputs.of(0, rank * part, (rank + 1) * part) for rank in range(group.size)]
    into = inputs.room(part)
    return (
        partial(group.scatter, parts, into),
        lambda: [inputs.of(0, group.rank * part, (group.rank + 1) * part)],
    )


def _reduce_scatter(group: Group, inputs: _Inputs) -> tuple[_Start, _Expected]:
    data = inputs.of(group.rank)
    lo, hi = split(inputs.length, group.size)[group.rank : group.rank + 2]
    return partial(group.reduce_scatter, data), lambda: [inputs.total(lo, hi)]


def _all_to_all(group: Group, inputs: _Inputs) -> tuple[_Start, _Expected]:
    """The size is that of one rank's buffer, its part for itself included."""
    cuts = list(pairwise(split(inputs.length, group.size)))
    data = [inputs.of(group.rank, lo, hi) for lo, hi in cuts]
    lo, hi = cuts[group.rank]
    return (
        partial(group.all_to_all, data, [hi - lo] * group.size),
        lambda: [inputs.of(rank, lo, hi) for rank in range(group.size)],
    )


def _barrier(group: Group, inputs: _Inputs) -> tuple[_Start, _Expected]:
    return lambda algorithm: group.barrier(), list


_EXERCISES: dict[str, Callable[[Group, _Inputs], tuple[_Start, _Expected]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}
"""By operation: how it is started, and the expected result of this rank. Rank 0 is the root."""
