"""Inputs, dealt out to processes in shards, and what became of them."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

from experiments.hostile.disk import file_parsers
from experiments.hostile.parsers import REFUSALS, Finding, Parse, Parser, pure_parsers
from experiments.hostile.ports import port_parsers
from hcsim.rng import stream
from hcsim.workers import starting

SHARD = 5_000
"""Inputs that a process takes at once."""
LONGEST_S = 10
"""Of a processor's time, for one input."""
MOST_BYTES = 64 << 20
"""By which an input may raise the most memory that the process ever had."""
ADDRESSES_BYTES = 4 << 30
"""Of memory that is asked for and perhaps never touched."""
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024


class Shard(NamedTuple):
    """Consecutive inputs of one parser."""

    name: str
    seed: int
    first: int
    last: int
    """Not included."""


class Tally(NamedTuple):
    """What became of inputs."""

    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    findings: Mapping[str, tuple[int, int]] = {}
    """By what was found: the first input, and how many there were."""

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        findings = dict(self.findings)
        for what, (number, count) in other.findings.items():
            first, before = findings.get(what, (number, 0))
            findings[what] = min(first, number), before + count
        sums = self.inputs + other.inputs, self.refused + other.refused, self.accepted + other.accepted
        return Tally(*sums, findings)


@cache
def by_name() -> Mapping[str, Parser]:
    """All parsers. Where gRPC is not installed, nobody listens for it."""
    ports = (each for each in port_parsers() if each.name != "gRPC port" or find_spec("grpc") is not None)
    return {parser.name: parser for parser in (*pure_parsers(), *file_parsers(), *ports)}


def shards(names: Sequence[str], seed: int, inputs: int) -> list[Shard]:
    """As many inputs, dealt to parsers by their shares."""
    total, dealt, found = sum(by_name()[name].share for name in names), 0, list[Shard]()
    for name in names:
        count = -(-inputs * by_name()[name].share // total)
        dealt += count
        found += [Shard(name, seed, lo, min(lo + SHARD, count)) for lo in range(0, count, SHARD)]
    return found


def run_all(wanted: Sequence[Shard], workers: int) -> Iterator[tuple[Shard, Tally]]:
    """Each as it is done. Where a process dies, its shards are tried again, each in a process of its own."""
    left = dict.fromkeys(wanted)
    try:
        for done in _run(wanted, workers):
            del left[done[0]]
            yield done
    except BrokenProcessPool:
        for shard in left:
            try:
                yield from _run([shard], 1)
            except BrokenProcessPool:
                yield shard, Tally(findings={"the process died": (shard.first, 1)})


def _run(wanted: Sequence[Shard], workers: int) -> Iterator[tuple[Shard, Tally]]:
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawning, _limit_memory) as pool:
        with starting():
            under_way = {pool.submit(run_shard, shard): shard for shard in wanted}
        for future in as_completed(under_way):
            yield under_way[future], future.result()


def _limit_memory() -> None:
    if sys.platform == "linux":  # elsewhere the libraries that are loaded take more addresses than that
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES_BYTES, ADDRESSES_BYTES))


def run_shard(shard: Shard) -> Tally:
    """Give a parser its inputs, in this process."""
    parser, tally = by_name()[shard.name], Tally()
    with parser.open() as parse:
        for data in parser.valid:  # what is loaded at the first use is no input's cost
            _outcome(parse, data)
        for number in range(shard.first, shard.last):
            tally = tally.plus(_judged(parse, _input(parser, shard.seed, number), number))
    return tally


def one_input(shard: Shard) -> tuple[bytes, Exception | None]:
    """A shard's first input, and what it raises."""
    parser = by_name()[shard.name]
    data = _input(parser, shard.seed, shard.first)
    with parser.open() as parse:
        return data, _outcome(parse, data)


def _input(parser: Parser, seed: int, number: int) -> bytes:
    return parser.mutation(stream(seed, parser.name, number), parser.valid)


def _judged(parse: Parse, data: bytes, number: int) -> Tally:
    peak = _peak_bytes()
    error = _outcome(parse, data)
    what = ""
    if isinstance(error, Finding):
        what = str(error)
    elif error is not None and not isinstance(error, REFUSALS):
        what = _told(error)
    elif (more := _peak_bytes() - peak) > MOST_BYTES:
        what = f"it takes {more >> 20} MiB of memory"
    if what:
        return Tally(1, findings={what: (number, 1)})
    return Tally(1, error is not None, error is None)


def _outcome(parse: Parse, data: bytes) -> Exception | None:
    try:
        with _hurrying():
            parse(data)
    except Exception as error:
        return error
    return None


@contextmanager
def _hurrying() -> Iterator[None]:
    """Interrupt what takes too much of a processor's time."""
    signal.signal(signal.SIGPROF, _too_slow)
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_slow(*_: object) -> None:
    raise Finding(f"it takes more than {LONGEST_S} s of a processor's time")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT


def _told(error: Exception) -> str:
    """Where it was raised says more than its text, which differs from input to input."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = next((frame for frame in reversed(frames) if "hcsim" in frame.filename), frames[-1])
    return f"{type(error).__name__} in {ours.name} ({ours.filename.rpartition('hcsim/')[2]}:{ours.lineno})"
