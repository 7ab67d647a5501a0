"""The soak's faults in network namespaces: machines on a switch with ports of 1 Gb/s."""

from __future__ import annotations

import math
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from experiments.soak.figures import Held
from experiments.soak.history import History, read_trace
from experiments.soak.job import NAMES, job
from experiments.soak.schedule import SLOW_KBIT, Planned, Profile, Strike, strikes
from experiments.soak.task import STEP_S
from tests.real.namespaces import Lan, Machine, Process, lan, run
from tests.real.together import digest, join

GRADIENTS = 52416
RATE_KBIT = 1_000_000
BURST = "512kb"
DISK = "24m"
"""Three checkpoints and a record need a third of it."""
LEAST_FREE_BYTES = 8 << 20
SPARE_DESCRIPTORS = 1
LOOK_S = 0.05
CHECK_S = 2.0
STANDSTILL_S = 120.0
SHARE = 0.7
"""Steps of the job, of those that would be done without faults and with nothing but computing. The faults end when
the steps do."""


class Broken(Exception):
    """An invariant does not hold."""


class Member:
    """One machine, the lives of its process, and its disk."""

    def __init__(self, machine: Machine, job: Path) -> None:
        self.machine = machine
        self.lives: list[Process] = []
        self.descriptors = 0
        self.memory_mb = 0.0
        self.traces: list[Path] = []
        self._job = job
        self.disk = machine.folder / "state"
        self._filler = self.disk / "filler"

    @property
    def process(self) -> Process:
        """The present life."""
        return self.lives[-1]

    def start(self) -> None:
        """Take part, again."""
        trace = self.machine.folder / f"trace-{len(self.lives)}.jsonl"
        self.traces.append(trace)
        ours = ("--set", f"name={self.machine.name}", "--state", str(self.disk), "--trace", str(trace))
        program = (sys.executable, "-m", "experiments.soak.member")
        self.lives.append(self.machine.start(*program, "run", "--real", str(self._job), "--set", "device=cpu", *ours))

    def look(self) -> None:
        """Note how much it holds at the most."""
        self.descriptors = max(self.descriptors, self.process.descriptors)
        self.memory_mb = max(self.memory_mb, self.process.memory_mb)

    def fill_disk(self) -> None:
        """Leave no room on it."""
        if shutil.disk_usage(self.disk).free < LEAST_FREE_BYTES:
            kept = {file.name: file.stat().st_size for file in self.disk.iterdir()}
            raise Broken(f"{self.machine.name} has filled its disk: {kept}")
        with self._filler.open("wb", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(1 << 16))

    def free_disk(self) -> None:
        """There is room again."""
        self._filler.unlink()

    def limit(self, descriptors: int | None) -> None:
        """Let the process open no more than that; None: as many as it likes."""
        soft = "unlimited" if descriptors is None else str(descriptors)
        hard = subprocess.run(
            ["prlimit", f"--pid={self.process.pid}", "--nofile", "--output=HARD", "--noheadings"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        run("prlimit", f"--pid={self.process.pid}", f"--nofile={hard if descriptors is None else soft}:{hard}")


class Cluster:
    """The members, and what is done to them."""

    def __init__(self, machines: Lan, job: Path) -> None:
        self.members = {machine.name: Member(machine, job) for machine in machines}

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def strike(self, strike: Strike) -> Callable[[], None]:
        """Do it; returns what undoes it."""
        member, other = self[strike.victim], self[strike.other]
        machine = member.machine
        match strike.kind:
            case "kill":
                member.process.kill()
                return member.start
            case "stop":
                member.process.send(signal.SIGSTOP)
                return lambda: member.process.send(signal.SIGCONT)
            case "cable pulled":
                machine.unplug()
                return machine.plug
            case "slow cable":
                machine.slow(SLOW_KBIT)
                return lambda: machine.slow(RATE_KBIT, BURST)
            case "silent port":
                machine.silence(GRADIENTS)
                return lambda: machine.unsilence(GRADIENTS)
            case "partition":
                machine.lose(other.machine)
                return lambda: machine.find(other.machine)
            case "full disk":
                member.fill_disk()
                return member.free_disk
            case "few descriptors":
                member.limit(member.process.descriptors + SPARE_DESCRIPTORS)
                return lambda: member.limit(None)
        raise AssertionError(strike.kind)

    @property
    def step(self) -> int:
        """The last one that a member told of."""
        return max(_last_step(member.process) for member in self)

    def held(self) -> Held:
        """What the members held at the most, and wrote."""
        lines = [line for member in self for life in member.lives for line in life.lines]
        return Held(
            max(member.descriptors for member in self),
            max(member.memory_mb for member in self),
            sum(_step_of(line) is None for line in lines) / len(self.members),
            sum("Traceback" in line for line in lines),
        )

    def check(self) -> None:
        """Nobody has ended by itself, or shown a traceback."""
        for member in self:
            if not member.process.running:
                raise Broken(f"{member.machine.name} ended:\n{member.process.text[-2000:]}")
            for life in member.lives:
                if "Traceback" in life.text:
                    raise Broken(f"{member.machine.name} showed a traceback:\n{life.text[-4000:]}")


class Outcome(NamedTuple):
    """What came of a run."""

    history: History
    plan: Planned
    digests: list[str | None]
    """Of all members' parameters."""
    held: Held


def soak(profile: Profile, periods: int, seed: int, preset: str, folder: Path) -> Outcome:
    """Run a cluster through so many periods and to its end."""
    schedule = strikes(profile, NAMES, periods, seed)
    steps = math.ceil(SHARE * periods * profile.period_s / STEP_S)
    file = folder / "job.toml"
    file.write_text(job(steps, preset))
    with lan(folder, NAMES) as machines, _disks(machines):
        join(*machines)
        for machine in machines:
            machine.slow(RATE_KBIT, BURST)
        cluster = Cluster(machines, file)
        for member in cluster:
            member.start()
        cluster["a"].process.says("training begins")
        origin_s = time.monotonic()
        count = _strike_all(cluster, schedule, origin_s, profile.period_s, steps, periods)
        _finish(cluster)
        events = [event for member in cluster for trace in member.traces for event in read_trace(trace)]
        digests: list[str | None] = [digest(member.process) for member in cluster]
        return Outcome(History(events), Planned(profile, schedule, count, origin_s), digests, cluster.held())


def _strike_all(
    cluster: Cluster, schedule: Sequence[Strike], origin_s: float, period_s: float, steps: int, periods: int
) -> int:
    """Carry out the schedule until the steps come to an end; returns how many periods there were."""
    due: list[tuple[float, int, Callable[[], None]]] = []
    waiting = list(schedule)
    enough, looked_s = period_s / STEP_S, 0.0
    while (now_s := time.monotonic() - origin_s) < periods * period_s:
        if waiting and now_s >= waiting[0].at_s:
            strike = waiting.pop(0)
            due.append((strike.at_s + strike.lasts_s, strike.number, cluster.strike(strike)))
            print(f"{now_s:7.1f} s: {strike.kind}, {strike.victim}, for {strike.lasts_s:.1f} s", flush=True)
        for each in [each for each in due if now_s >= each[0]]:
            due.remove(each)
            each[2]()
        if not due and cluster.step + enough > steps:
            return int(now_s / period_s)
        if not due and now_s >= looked_s + CHECK_S:
            looked_s = now_s
            cluster.check()
            for member in cluster:
                member.look()
        time.sleep(LOOK_S / 2)
    return periods


def _finish(cluster: Cluster) -> None:
    """Wait until all have done the last step; those that stand still for long never will."""
    step, since_s = cluster.step, time.monotonic()
    while any(member.process.running for member in cluster):
        if cluster.step > step:
            step, since_s = cluster.step, time.monotonic()
        if time.monotonic() > since_s + STANDSTILL_S:
            told = "\n".join(f"{member.machine.name}:\n{member.process.text[-2000:]}" for member in cluster)
            raise Broken(f"step {step} is the last for {STANDSTILL_S:g} s:\n{told}")
        time.sleep(LOOK_S)
    for member in cluster:
        if member.process.ends() != 0:
            raise Broken(f"{member.machine.name} failed:\n{member.process.text[-2000:]}")


@contextmanager
def _disks(machines: Lan) -> Iterator[None]:
    """A small disk for each machine's state."""
    mounted: list[Path] = []
    try:
        for machine in machines:
            disk = machine.folder / "state"
            disk.mkdir()
            run("mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(disk))
            mounted.append(disk)
        yield
    finally:
        for disk in mounted:
            subprocess.run(["umount", "--lazy", str(disk)], check=False)


def _last_step(process: Process) -> int:
    for line in reversed(process.lines[-100:]):
        if (step := _step_of(line)) is not None:
            return step
    return 0


def _step_of(line: str) -> int | None:
    """Return the step that a line of a member tells of, with the time of day before it."""
    found = re.match(r"(?:[\d:]{8} +)?step (\d+) ", line)
    return None if found is None else int(found[1])
