"""`hcsim run` with a cluster that forms itself and survives, in both worlds, with the same output."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path

import msgspec

from hcsim.cli import screen
from hcsim.cli.train import Onlooker, check
from hcsim.cli.virtual import Files, tell_failures, writable, write_metrics, writer
from hcsim.config import Cluster, Scenario, Training
from hcsim.errors import ConfigError
from hcsim.launch import RealNode, simulate_cluster, train_in_cluster
from hcsim.node import Plan
from hcsim.real.device import best_torch_device, check_torch_device
from hcsim.real.keys import load_secret
from hcsim.training.run import Point, Report
from hcsim.training.tasks import task
from hcsim.transport.mesh import Wire


class Member(Onlooker):
    """Shows how far the members have come; a step is told once, whoever tells it first."""

    def __init__(self, progress: screen.Progress, save: Path | None, *, only_first: bool) -> None:
        super().__init__(progress, save)
        self._only_first = only_first
        self._step = 0

    def point(self, rank: int, point: Point) -> None:
        """A member has come this far."""
        if point.step > self._step and (rank == 0 or not self._only_first):
            self._step = point.step
            self._progress.together(point)


def simulate_together(scenario: Scenario, settings: Training, wire: Wire, files: Files, save: Path | None) -> bool:
    """Train a virtual cluster, and show how it went; whether all that were there at the end came to it."""
    check(settings, len(scenario.nodes), len(scenario.homes), save)
    with ExitStack() as stack:
        progress = stack.enter_context(screen.Progress("step", settings.steps))
        sink = writer(files.trace, stack) if files.trace is not None else None
        figures = writable(files.metrics, stack) if files.metrics is not None else None
        onlooker = Member(progress, save, only_first=True)
        told: dict[str, None] = {}

        def tell(host: str, what: str) -> None:
            if what not in told:  # all members of a view have the same to say
                told[what] = None
                progress.news(f"{host}: {what}")

        outcome = simulate_cluster(scenario, settings, wire=wire, sink=sink, observer=onlooker, tell=tell)
        write_metrics(figures, outcome)
    names = [node.name for node in scenario.nodes]
    reports = [result for result in outcome.results if isinstance(result, Report)]
    screen.training_report(settings, f"{len(names)} nodes, {scenario.name}", reports)
    healthy = tell_failures(names, outcome.results)
    screen.say(f"virtual time {screen.duration(outcome.seconds)}, {outcome.events:,} events")
    screen.say(f"trace sha256 {outcome.trace_sha256}")
    return healthy


def train_together(
    node: RealNode, cluster: Cluster, settings: Training, seed: int, wire: Wire, save: Path | None
) -> bool:
    """Find the other machines, train with them, and show how it went."""
    check(settings, cluster.needed, 1, save)
    if task(settings.task).phantom:
        raise ConfigError(f"{settings.task} has shapes and no data: it can be simulated, not trained")
    check_torch_device(node.device)
    if node.device == "auto":
        node = msgspec.structs.replace(node, device=best_torch_device())
    load_secret(node.home, node.cluster)  # whoever has joined no cluster need not wait
    with screen.Progress("step", settings.steps) as progress:
        progress.waiting([f"{cluster.needed - 1} other nodes"] if cluster.needed > 1 else [])
        report = asyncio.run(_train(node, Plan(cluster, settings, seed, wire), progress, save))
    screen.training_report(settings, f"this node was rank {report.rank} at the end, over TCP", [report])
    return True


async def _train(node: RealNode, plan: Plan, progress: screen.Progress, save: Path | None) -> Report:
    leaving = asyncio.Event()
    loop = asyncio.get_running_loop()
    us = asyncio.current_task()
    assert us is not None

    def interrupted() -> None:
        if leaving.is_set():
            us.cancel()
            return
        leaving.set()
        progress.news("leaving after this step; the others go on (once more to stop at once)")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    onlooker = Member(progress, save, only_first=False)
    try:
        return await train_in_cluster(node, plan, observer=onlooker, tell=progress.news, leaving=leaving)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
