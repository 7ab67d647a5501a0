"""Ranks that are all there from the start: a job or a training, in a scenario's virtual cluster or among real ranks
that were started by hand; and `hcsim evaluate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryFile

import msgspec

from hcsim.cli import screen
from hcsim.cli.recording import Files, recording, tell_fingerprint
from hcsim.collectives.group import Group
from hcsim.collectives.options import Options
from hcsim.collectives.startup import assemble
from hcsim.config import Job, Scenario, Training
from hcsim.errors import CollectiveError, CollectiveTimeout, ConfigError, HcsimError
from hcsim.jobs import Lap, check_job, run_job
from hcsim.launch import Outcome, real_group, simulate, simulate_training
from hcsim.real.device import best_torch_device, check_torch_device
from hcsim.real.tls import TlsFiles
from hcsim.runtime.channel import Phantom
from hcsim.training.agreement import agree
from hcsim.training.run import Point, Report, Run
from hcsim.training.saved import load_model, save_model
from hcsim.training.strategies import check_training, train
from hcsim.training.tasks import task
from hcsim.transport.wire import Wire

_GRACE_S = 1.0
"""The wait for a link ends before the operation that needs it does, and its error says more."""


class Place(msgspec.Struct, frozen=True):
    """Where a real rank stands."""

    peers: tuple[str, ...]
    given_rank: int | None
    tls: TlsFiles | None
    insecure: bool
    metrics_at: str | None = None

    @property
    def rank(self) -> int:
        """Which of the peers we are, if that was said."""
        rank, ranks = self.given_rank, len(self.peers)
        if rank is None or not 0 <= rank < ranks:
            given = "it was not given" if rank is None else f"it is {rank}"
            raise ConfigError(f"--rank says which of the {ranks} peers we are, from 0 to {ranks - 1}; {given}")
        return rank


def run_virtual(scenario: Scenario, wire: Wire, files: Files) -> bool:
    """Run, and show how it went; whether all ranks came to a result, and to the right one."""
    job = scenario.job
    check_job(job)
    options = Options(timeout_s=job.timeout_s, groups=_groups(scenario))
    laps: list[Lap] = []
    with screen.Progress("repeat", job.repeat) as progress, recording(files) as record:

        def observe(lap: Lap) -> None:
            if lap.number > len(laps):  # the first rank to know tells for all
                laps.append(lap)
                progress.lap(lap)

        async def program(group: Group) -> None:
            await assemble(group, job.timeout_s, lambda missing: None)
            await run_job(group, job, observe)

        outcome = simulate(scenario, program, options=options, wire=wire, sink=record.sink)
        record.keep(outcome.metrics)
    names = [node.name for node in scenario.nodes]
    screen.report(screen.title(job, len(names), scenario.name), job, len(names), laps)
    healthy = tell_failures(names, outcome.results)
    tell_fingerprint(outcome)
    return healthy and not any(lap.wrong for lap in laps)


def tell_failures(names: Sequence[str], results: Sequence[object]) -> bool:
    """Name every rank that failed; whether none did."""
    healthy = True
    for rank, (name, result) in enumerate(zip(names, results, strict=True)):
        if isinstance(result, BaseException):
            if not isinstance(result, HcsimError):
                raise result
            healthy = False
            screen.say(f"rank {rank} ({name}) failed: {result}")
    if any(isinstance(result, CollectiveTimeout) for result in results):
        screen.note('a large model on a slow link takes its time: --set timeout="5 min" allows more of it')
    return healthy


def _groups(scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    """Who is close to whom, for a hierarchical all_reduce: those in one home."""
    if scenario.job.algorithm != "hierarchical":
        return ()
    if len(scenario.homes) < 2:
        raise ConfigError(f"hierarchical goes over several homes, and all nodes of {scenario.name} are in one")
    return scenario.homes


def run_real(job: Job, place: Place, wire: Wire) -> bool:
    """Run, and show how it went; whether the result was right."""
    check_job(job)
    if job.algorithm == "hierarchical":
        raise ConfigError("hierarchical needs to know who is close to whom: use the library, with Options(groups=…)")
    ranks = len(place.peers)
    with screen.Progress("repeat", job.repeat) as progress:
        laps, where = asyncio.run(_run(job, place, wire, progress))
    screen.report(screen.title(job, ranks, where), job, ranks, laps)  # all ranks have told each other how it went
    return not any(lap.wrong for lap in laps)


async def _run(job: Job, place: Place, wire: Wire, progress: screen.Progress) -> tuple[list[Lap], str]:
    async with joined(place, job.timeout_s, wire, progress) as group:
        await agree(group, job)
        return await run_job(group, job, progress.lap), for_real(group, f"rank {group.rank} ")


class Onlooker:
    """Shows the first rank's progress, and saves its model at the end."""

    def __init__(self, progress: screen.Progress, save: Path | None) -> None:
        self._progress = progress
        self._save = save

    def point(self, rank: int, point: Point) -> None:
        """A rank has come this far."""
        if rank == 0:
            self._progress.point(point)

    def finished(self, run: Run) -> None:
        """A rank has come to the end."""
        parameters = run.learner.replica.parameters
        if self._save is not None and run.group.rank == 0 and not isinstance(parameters, Phantom):
            settings = run.settings
            about = {"strategy": settings.strategy, "compressor": settings.compressor, "steps": str(settings.steps)}
            save_model(self._save, run.task, parameters, about)
            screen.note(f"saved to {self._save}")


def train_virtual(scenario: Scenario, settings: Training, wire: Wire, files: Files, save: Path | None) -> bool:
    """Train a simulated cluster, and show how it went; whether all ranks came to the end."""
    check(settings, len(scenario.nodes), len(scenario.homes), save)
    with screen.Progress("step", settings.steps) as progress, recording(files) as record:
        onlooker = Onlooker(progress, save)
        outcome = simulate_training(scenario, settings, wire=wire, sink=record.sink, observer=onlooker)
        record.keep(outcome.metrics)
    return tell_outcome(scenario, settings, "rank", outcome)


def tell_outcome(scenario: Scenario, settings: Training, each: str, outcome: Outcome[Report]) -> bool:
    """Show how a virtual training went; whether none of its ranks or nodes failed."""
    names = [node.name for node in scenario.nodes]
    reports = [result for result in outcome.results if isinstance(result, Report)]
    screen.training_report(settings, f"{screen.counted(len(names), each)}, {scenario.name}", reports)
    healthy = tell_failures(names, outcome.results)
    tell_fingerprint(outcome)
    return healthy


def train_real(settings: Training, seed: int, place: Place, wire: Wire, device: str, save: Path | None) -> bool:
    """Train as one rank of a real group, and show how it went."""
    rank, ranks = place.rank, len(place.peers)
    check(settings, ranks, 1, save)
    if save is not None and rank != 0:
        raise ConfigError("--save: rank 0 saves the model; all ranks end with the same one")
    check_torch_device(device)
    if task(settings.task).phantom:
        raise ConfigError(f"{settings.task} has shapes and no data: it can be simulated, not trained")
    with screen.Progress("step", settings.steps) as progress:
        report, where = asyncio.run(_train(settings, seed, place, wire, device, progress, save))
    screen.training_report(settings, f"rank {rank} of {ranks}, {where}", [report])
    return True


async def _train(
    settings: Training, seed: int, place: Place, wire: Wire, device: str, progress: screen.Progress, save: Path | None
) -> tuple[Report, str]:
    chosen = best_torch_device() if device == "auto" else device
    async with joined(place, settings.timeout_s, wire, progress, chosen) as group:
        return await train(group, settings, seed, Onlooker(progress, save)), for_real(group)


def evaluate_model(path: Path) -> None:
    """Score a saved model on the task's held-out data."""
    saved = load_model(path)
    score = saved.task.score(saved.parameters)
    screen.say(f"{path}: {saved.task.name}, trained by {saved.about.get('strategy', '?')}")
    if score is None:
        raise ConfigError(f"{saved.task.name} has no held-out data")
    screen.say(f"held-out loss {score.loss:.4f}")
    if score.accuracy is not None:
        screen.say(f"held-out accuracy {100 * score.accuracy:.2f} %")
    screen.say(f"parameters sha256 {saved.about['sha256']}")


def check(settings: Training, ranks: int, homes: int, save: Path | None) -> None:
    """Refuse, before anything is started, what cannot be trained or saved."""
    check_training(settings, ranks, homes)
    if save is not None:
        _check_saving(settings, save)


def _check_saving(settings: Training, save: Path) -> None:
    if task(settings.task).phantom:
        raise ConfigError(f"--save: {settings.task} has shapes and no parameters, so there is nothing to save")
    if save.is_dir():
        raise ConfigError(f"--save {save}: this is a folder; give the name of a file")
    if save.exists() and not save.is_file():
        raise ConfigError(f"--save {save}: it is there, and no file that a model could replace")
    if not save.parent.is_dir():
        raise ConfigError(f"--save {save}: there is no folder {save.parent}")
    try:
        with TemporaryFile(dir=save.parent):  # a model is written to a new file, which takes the old one's place
            pass
    except OSError as error:
        raise ConfigError(f"--save {save}: nothing can be written in {save.parent}: {error.strerror}") from None


@asynccontextmanager
async def joined(
    place: Place, timeout_s: float, wire: Wire, progress: screen.Progress, device: str = "cpu"
) -> AsyncIterator[Group]:
    """The group of all peers, once they are there; until then it says for whom it waits."""
    absent: list[str] = []

    def missing(ranks: list[int]) -> None:
        absent[:] = [f"rank {rank} at {place.peers[rank]}" for rank in ranks]
        progress.waiting(absent)

    async with real_group(
        place.rank,
        place.peers,
        options=Options(timeout_s=timeout_s),
        wire=wire,
        tls=place.tls,
        insecure=place.insecure,
        device=device,
        metrics_at=place.metrics_at,
        on_refused=progress.news,
    ) as group:
        try:
            await assemble(group, wire.connect_timeout_s + _GRACE_S, missing)
        except CollectiveError as error:
            if isinstance(error.__cause__, ConfigError):  # waiting longer would not have helped
                raise error.__cause__ from None
            raise HcsimError(f"gave up waiting for {', '.join(absent)}: {error}") from None
        yield group


def for_real(group: Group, who: str = "") -> str:
    """That it was, and by what way: who expected another sees why it took as long as it did."""
    return f"for real, {who}over {' and '.join(group.carriers)}" if group.carriers else "for real"
