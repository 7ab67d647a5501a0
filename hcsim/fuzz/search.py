"""A parallel search over many seeds: an append-only record of its trials, and its findings.

Each line of the record is one seed's trial, written when the trial is over, so an interrupted search
resumes with the seeds that are missing. The first line identifies the generator of the scenarios; another
generator draws others.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import TypeVar

import msgspec

from hcsim.config import write_scenario
from hcsim.errors import ConfigError
from hcsim.fuzz.generate import scenario_of
from hcsim.fuzz.invariants import Breach
from hcsim.fuzz.shrink import shrink
from hcsim.fuzz.trial import Trial, run_trial, trial_of, write_finding
from hcsim.pool import Pool, TaskFunction
from hcsim.pool.open import open_pool

T = TypeVar("T")

LONGEST_S = 600.0
"""Real time. A trial that takes longer is counted as one that does not end."""


class Finding(msgspec.Struct, frozen=True):
    """A small scenario that breaks an invariant."""

    seed: int
    invariant: str
    nodes: int
    faults: int
    steps: int
    runs: int
    """The number of runs that shrinking took."""
    text: str


class _TooLong(SystemExit):
    """The simulated event loop does not catch this, as it does not catch a `KeyboardInterrupt`."""


def judge(seed: int) -> Trial:
    """Return the trial of a seed. A simulator that fails or does not end is a finding too."""

    def too_long(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        return trial_of(seed)
    except _TooLong:
        return _failed(seed, f"the run did not end within {LONGEST_S:g} s of real time")
    except (Exception, SystemExit) as error:
        return _failed(seed, f"the run ended with {error!r}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _failed(seed: int, why: str) -> Trial:
    scenario = scenario_of(seed)
    training = scenario.training
    method = f"{training.strategy}, {training.compressor}" if training is not None else ""
    return Trial(seed, len(scenario.nodes), method, 0.0, 0, {}, [], "", [Breach("runs_come_to_an_end", why)], "")


def reduce(seed: int, invariant: str) -> Finding:
    shrunk = shrink(scenario_of(seed), invariant)
    small = shrunk.scenario
    text = write_finding(small, run_trial(small).breaches, invariant)
    steps = small.training.steps if small.training is not None else 0
    return Finding(seed, invariant, len(small.nodes), len(small.faults), steps, shrunk.runs, text)


class _Asked(msgspec.Struct):
    seed: int
    invariant: str = ""


def answer_trial(task: bytes) -> bytes:
    """In a worker: judge a seed."""
    return msgspec.json.encode(judge(msgspec.json.decode(task, type=_Asked).seed))


def answer_finding(task: bytes) -> bytes:
    """In a worker: make the scenario of a finding small."""
    asked = msgspec.json.decode(task, type=_Asked)
    return msgspec.json.encode(reduce(asked.seed, asked.invariant))


class TrialPool:
    """Processes that run trials and shrink findings, here or on a Dask cluster. With one local worker, the current
    process does the work."""

    def __init__(self, workers: int, dask: str | None = None) -> None:
        self._pool = None if workers == 1 and dask is None else open_pool(workers, dask)

    def __enter__(self) -> TrialPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    def judged(self, seeds: Iterator[int]) -> Iterator[Trial]:
        """Yield trials as they finish. Seeds are taken only as fast as workers are free."""
        if self._pool is None:
            return map(judge, seeds)
        return self._answers(self._pool, answer_trial, map(_Asked, seeds), Trial)

    def reduced(self, wanted: list[tuple[int, str]]) -> Iterator[Finding]:
        """Yield small scenarios for these seeds and invariants, as they are found."""
        if self._pool is None:
            return (reduce(seed, invariant) for seed, invariant in wanted)
        return self._answers(self._pool, answer_finding, (_Asked(*each) for each in wanted), Finding)

    def _answers(self, pool: Pool, function: TaskFunction, asked: Iterator[_Asked], of: type[T]) -> Iterator[T]:
        with closing(pool.run(function, map(msgspec.json.encode, asked))) as over:
            for each in over:
                if each.answer is None:
                    raise ConfigError(f"a process of the search was killed (is there enough memory?): {each.error}")
                yield msgspec.json.decode(each.answer, type=of)


class TrialLog:
    """The trials of a search in a file, one per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.trials: dict[int, Trial] = {}
        try:
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            self._read(lines)
            self._file = path.open("ab")
            whole = sum(len(line) for line in lines if line.endswith(b"\n"))
            self._file.truncate(whole)  # the search was interrupted in the midst of a line
            if not lines:
                self._write(msgspec.json.encode({"generator": generator()}))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None

    def _read(self, lines: list[bytes]) -> None:
        if not lines:
            return
        try:
            drawn_by = msgspec.json.decode(lines[0], type=dict[str, str]).get("generator")
            trials = [msgspec.json.decode(line, type=Trial) for line in lines[1:] if line.endswith(b"\n")]
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._path} is no record of a search: {error}") from None
        if drawn_by != generator():
            raise ConfigError(f"{self._path} is of another version, which drew other scenarios: give another file")
        self.trials = {trial.seed: trial for trial in trials}

    def add(self, trial: Trial) -> None:
        self.trials[trial.seed] = trial
        self._write(msgspec.json.encode(trial))

    def _write(self, line: bytes) -> None:
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be written: {error.strerror}") from None

    def close(self) -> None:
        self._file.close()


def generator() -> str:
    """Return an identifier of the generator, derived from the scenarios that it draws."""
    drawn = "".join(write_scenario(scenario_of(seed)) for seed in range(8))
    return hashlib.sha256(drawn.encode()).hexdigest()[:16]


def save_finding(folder: Path, finding: Finding) -> Path:
    path = folder / f"{finding.invariant}-seed-{finding.seed}.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(finding.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
