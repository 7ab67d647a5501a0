"""Training with fixed ranks, in a virtual cluster or as one of several real ranks; and `hcsim evaluate`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile

from hcsim.cli import screen
from hcsim.cli.ranks import ManualRank, for_real, joined
from hcsim.cli.recording import Recording, RecordingFiles, recording, show_run, tell_failures, tell_fingerprint
from hcsim.cli.twin import ChosenTwin, MeasuredRun, compare, names_of_peers, show_uncertainty
from hcsim.config import Scenario, Training
from hcsim.errors import ConfigError
from hcsim.launch.virtual import Outcome, simulate_training
from hcsim.runtime.channel import Phantom
from hcsim.training.model_file import load_model, save_model
from hcsim.training.run import Point, Report, Run, leading
from hcsim.training.strategies import SingleMachine, check_training, strategy
from hcsim.training.tasks import task
from hcsim.training.trainer import train
from hcsim.transport.groups import Wire
from hcsim.twin.prediction import PredictedRun


class ConsoleReporter:
    """Shows the first rank's progress, or that of the only one that trains, and saves the model at the end."""

    def __init__(self, progress: screen.ProgressLine, save: Path | None, *, one_trains: bool = False) -> None:
        self._progress = progress
        self._save = save
        self._one_trains = one_trains

    def point(self, rank: int, point: Point) -> None:
        """Show a rank's progress."""
        if rank == 0 or self._one_trains:
            self._progress.point(point)

    def finished(self, run: Run) -> None:
        """Save the model of a rank that has finished."""
        parameters = run.parameters
        if (
            self._save is not None
            and parameters is not None
            and run.group.rank == run.lead
            and not isinstance(parameters, Phantom)
        ):
            settings = run.settings
            about = {"strategy": settings.strategy, "compressor": settings.compressor, "steps": str(settings.steps)}
            save_model(self._save, run.task, parameters, about)
            screen.note(f"saved to {self._save}")


def train_virtual(
    scenario: Scenario,
    settings: Training,
    wire: Wire,
    files: RecordingFiles,
    save: Path | None,
    bands: int | None = None,
) -> bool:
    """Train a simulated cluster and show the outcome. Return whether all ranks finished."""
    check(settings, len(scenario.nodes), len(scenario.homes), save)
    with screen.ProgressLine("step", settings.steps, simulated=True) as progress, recording(files) as record:
        one_trains = isinstance(strategy(settings.strategy), SingleMachine)
        onlooker = ConsoleReporter(progress, save, one_trains=one_trains)
        outcome = simulate_training(scenario, settings, wire=wire, sink=record.sink, observer=onlooker)
        record.keep(outcome.metrics)
    run = PredictedRun(settings, wire)
    healthy = tell_outcome(scenario, settings, "rank", outcome, run, bands)
    show_report(files, record, scenario, run, outcome, bands)
    show_run(record, files)
    return healthy


def show_report(
    files: RecordingFiles,
    record: Recording,
    scenario: Scenario,
    run: PredictedRun,
    outcome: Outcome[Report],
    bands: int | None,
) -> None:
    """Write the report of a virtual training, if one was requested."""
    if files.report is not None:
        from hcsim.cli.report import report_training

        report_training(files, record, scenario, run, outcome, bands)


def tell_outcome(
    scenario: Scenario, settings: Training, each: str, outcome: Outcome[Report], run: PredictedRun, bands: int | None
) -> bool:
    """Show the outcome of a virtual training. Return whether none of its ranks or nodes failed."""
    names = [node.name for node in scenario.nodes]
    reports = [result for result in outcome.results if isinstance(result, Report)]
    where = f"{screen.counted(len(names), each)}, {scenario.name}, simulated"
    screen.training_report(settings, where, reports, simulated=True)
    if reports:
        show_uncertainty(scenario, run, leading(reports).points, outcome.events, bands)
    healthy = tell_failures(names, outcome.results)
    tell_fingerprint(outcome)
    return healthy


def train_real(
    settings: Training,
    seed: int,
    place: ManualRank,
    wire: Wire,
    device: str,
    save: Path | None,
    twin: ChosenTwin | None = None,
) -> bool:
    """Train as one rank of a real group, and show the outcome. The first rank compares it with the twin's
    prediction."""
    from hcsim.real.interfaces import host_name

    rank, ranks = place.rank, len(place.peers)
    check(settings, ranks, 1, save)
    if save is not None and rank != 0:
        raise ConfigError("--save: rank 0 saves the model; all ranks end with the same one")
    check_for_real(settings, device)
    with screen.ProgressLine("step", settings.steps) as progress, recording(place.files, real=True) as record:
        if device == "auto":
            device = asyncio.run(fastest_device(settings, progress.news))
        onlooker = ConsoleReporter(progress, save)

        async def trained() -> tuple[Report, str]:
            async with joined(place, settings.timeout_s, wire, progress, device, record.sink) as group:
                return await train(group, settings, seed, onlooker), for_real(group)

        report, where = asyncio.run(trained())
    screen.training_report(settings, f"rank {rank} of {ranks}, {where}", [report])
    show_run(record, place.files)
    if save is not None and not report.points:
        screen.note("not saved: another rank is faster, and has trained alone")
    if twin is not None and rank == 0:
        names = names_of_peers(place.peers, host_name())
        compare(twin, MeasuredRun(settings, seed, wire, names, rank, device, report.points))
    return True


def check_for_real(settings: Training, device: str) -> None:
    """Reject a device that is not here, and a task without data where something is computed."""
    from hcsim.real.hardware import SLEEP, check_device

    check_device(device)
    if task(settings.task).phantom and not device.startswith(SLEEP):
        raise ConfigError(
            f"{settings.task} has shapes and no data: it can be simulated, or timed with --set device=sleep:M4, "
            "not trained"
        )


async def fastest_device(settings: Training, tell: Callable[[str], None]) -> str:
    """Return the device on which a step takes the least time. A small model may be faster on the processor than on a
    GPU, for which each operation has to be prepared."""
    from hcsim.launch.real import seconds_by_device
    from hcsim.real.hardware import best_torch_device

    there = list(dict.fromkeys(("cpu", best_torch_device())))
    if len(there) == 1:
        return there[0]
    seconds = await seconds_by_device(there, settings, task(settings.task))
    return chosen_device(seconds, tell) if seconds else "cpu"


def chosen_device(seconds: Mapping[str, float], tell: Callable[[str], None]) -> str:
    """Return the device of the shortest time, and report all of them."""
    chosen = min(seconds, key=seconds.__getitem__)
    each = ", ".join(f"{screen.duration(spent_s)} on {device}" for device, spent_s in seconds.items())
    tell(f"device {chosen}: a step takes {each}")
    return chosen


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
    """Reject, before anything is started, what cannot be trained or saved."""
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
