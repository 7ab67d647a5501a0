"""A scripted membership source: which members each view has, and after which step it ends.

It stands in the virtual world beside the hosts and sees what happens to them. So it is the reference too: a run in
which members go at the same steps by agreement, and without faults, must come to the same parameters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from hcsim.cluster.diagnosis import ViewFailure
from hcsim.cluster.membership_source import MemberCheck
from hcsim.cluster.view import Member, View
from hcsim.config import AnyFault, Scenario, Training
from hcsim.errors import HcsimError
from hcsim.selftest.contracts import require
from hcsim.training.elastic import train as elastic
from hcsim.training.elastic.member import TrainingExtras
from hcsim.training.run import Point, Report, Run
from hcsim.transport.groups import Wire
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World

PORT = 52416
SEED = 7
NOTICED_S = 0.05
"""From a member's loss to the next view."""


class ScriptedCluster:
    """All that happens to the membership of one training."""

    def __init__(self, world: World, first: Sequence[str], homes: dict[str, str], lineage: str) -> None:
        self.world = world
        self.homes = homes
        self.lineage = lineage
        self.views: list[View] = []
        self.sources: dict[str, ScriptedSource] = {}
        self.done: list[str] = []
        self.outcomes: list[str] = []
        """What those who finished came to."""
        self.plan: list[tuple[int, Sequence[str]]] = []
        """After so many steps: these are the members."""
        self.reports: list[tuple[int, ViewFailure]] = []
        """What was said to be broken: epoch, rank, why."""
        self.steps: dict[tuple[str, int], int] = {}
        """By node and step, in which epoch it was applied."""
        self.on_step: Callable[[str, int], None] = lambda node, step: None
        self._over: dict[int, str] = {}
        self._changing = False
        self._entered = 0
        self.publish(first)

    def member(self, name: str) -> Member:
        return Member(f"id-{name}", 1, name, f"{name}:{PORT}", self.homes.get(name, ""))

    @property
    def names(self) -> list[str]:
        return [member.name for member in self.views[-1].members]

    def source(self, name: str) -> ScriptedSource:
        return self.sources.setdefault(name, ScriptedSource(self, name))

    def publish(self, names: Sequence[str]) -> None:
        """The next view. Members keep their order, newcomers come last."""
        old = self.names if self.views else []
        self.follow([name for name in old if name in names] + [name for name in names if name not in old])

    def follow(self, order: Sequence[str]) -> None:
        """The next view, with its members in this order."""
        self.views.append(View(self.lineage, len(self.views), tuple(map(self.member, order))))
        for source in self.sources.values():
            source.news()

    def end(self, reason: str) -> None:
        """The view is over at once, and no other follows."""
        self._changing = True
        for view in self.views:
            self._over.setdefault(view.epoch, reason)
        for source in self.sources.values():
            source.news()

    def lose(self, reason: str, without: Sequence[str] = ()) -> None:
        """The view is over at once; the next one has whoever is alive, is not done, and is not left out."""
        changing = self._changing
        self.end(reason)
        if not changing:
            env = self.world.env
            env.call_at(env.now_ns + round(NOTICED_S * 1e9), self._after_loss, tuple(without))

    def _after_loss(self, without: tuple[str, ...]) -> None:
        self._changing = False
        left = [n for n in self.names if n not in without and n not in self.done and self.world.host(n).alive]
        if left:
            self.publish(left)

    def over(self, epoch: int) -> str | None:
        return self._over.get(epoch)

    def broken(self, epoch: int, failure: ViewFailure) -> None:
        self.reports.append((epoch, failure))
        if epoch == self.views[-1].epoch:
            self.lose(f"broken: {failure.reason}")

    def left(self, name: str) -> None:
        if name in self.names:
            self.publish([other for other in self.names if other != name])

    def applied(self, node: str, step: int, epoch: int) -> None:
        self.steps.setdefault((node, step), epoch)
        self.reached(step)
        self.on_step(node, step)

    def entered(self, epoch: int) -> None:
        """A member follows that view; once all do, their first step begins."""
        self._entered += 1
        if self._entered == len(self.views[0].members):
            self.reached(0)

    def reached(self, step: int) -> None:
        """Members hear of the next view in the step before it, and go after that."""
        while self.plan and step + 1 >= self.plan[0][0]:
            self.follow(self.plan.pop(0)[1])

    def finished(self, name: str) -> None:
        self.done.append(name)


class ScriptedSource:
    """The membership source of one member."""

    def __init__(self, cluster: ScriptedCluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._epoch_s: dict[int, asyncio.Future[str]] = {}
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def us(self) -> Member:
        return self._cluster.member(self._name)

    identified = False
    ways = None

    async def view(self, after: int, outcome: str = "") -> View | None:
        while True:
            if outcome in self._cluster.outcomes:
                return None
            for view in self._cluster.views[after + 1 :]:
                if view.rank(self.us) is not None and self._cluster.over(view.epoch) is None:
                    return view
            news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(news)
            await news

    def over(self, epoch: int) -> asyncio.Future[str]:
        if epoch not in self._epoch_s:
            self._epoch_s[epoch] = asyncio.get_running_loop().create_future()
            self._cluster.entered(epoch)
            self.news()
        return self._epoch_s[epoch]

    def superseded(self, epoch: int) -> bool:
        return self._cluster.views[-1].epoch > epoch

    def broken(self, epoch: int, failure: ViewFailure) -> None:
        if not self.over(epoch).done():
            self._cluster.broken(epoch, failure)

    def surveyed(self, epoch: int) -> None:
        pass

    def check_with(self, check: MemberCheck | None) -> None:
        pass

    def preparing(self, epoch: int) -> bool:
        return False

    def finish(self, outcome: str) -> None:
        self._cluster.outcomes.append(outcome)
        for source in self._cluster.sources.values():
            source.news()

    def will_be_let_in(self, epoch: int) -> bool:
        return False

    async def leave(self) -> None:
        self._cluster.left(self._name)

    def news(self) -> None:
        """Tell those who wait; a crashed host's futures have nobody behind them."""
        waiting, self._waiting = self._waiting, []
        for news in waiting:
            if not news.done():
                news.set_result(None)
        for epoch, future in self._epoch_s.items():
            reason = self._cluster.over(epoch)
            if reason is not None and not future.done():
                future.set_result(reason)


class Watcher:
    """Tells the cluster of each step, and keeps the last parameters."""

    def __init__(self, cluster: ScriptedCluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self.points: list[Point] = []
        self.run: Run | None = None

    def point(self, rank: int, point: Point) -> None:
        self.points.append(point)
        self._cluster.applied(self._name, point.step, self._cluster.views[-1].epoch)

    def finished(self, run: Run) -> None:
        self.run = run


class ScriptedOutcome:
    """What became of each host."""

    def __init__(
        self, cluster: ScriptedCluster, results: dict[str, Report | BaseException], watchers: dict[str, Watcher]
    ):
        self.cluster = cluster
        self.results = results
        self.watchers = watchers
        self.digest = cluster.world.trace.digest()
        self.began: dict[int, int] = {}
        """By epoch, how many steps had been taken when its members were of one state."""

    def plan(self) -> list[tuple[int, list[str]]]:
        """Who was there after so many steps, as a script for a run without faults."""
        views = self.cluster.views
        changes = {step: [m.name for m in views[epoch].members] for epoch, step in sorted(self.began.items())}
        return sorted(changes.items())

    def sha256(self) -> str:
        """Return the parameters' digest, which must be one, of those who came to the end."""
        ends = {r.sha256 for n, r in self.results.items() if isinstance(r, Report) and n in self.cluster.done}
        require(len(ends) == 1, f"all who came to the end have the same parameters: {self.results}")
        (only,) = ends
        return str(only)

    def error(self, name: str) -> BaseException:
        error = self.results[name]
        if not isinstance(error, BaseException):
            raise TypeError(f"{name} ended without an error: {error}")
        return error


def train(
    scenario: Scenario,
    settings: Training,
    *,
    first: Sequence[str] = (),
    plan: Sequence[tuple[int, Sequence[str]]] = (),
    faults: Sequence[AnyFault] = (),
    prepare: Callable[[ScriptedCluster], None] = lambda cluster: None,
    lineage: str = "script",
    unlike: Mapping[str, Training] | None = None,
    **options: Any,
) -> ScriptedOutcome:
    """Train on the hosts of a scenario. `first` are the members of the first view (all hosts, if it is not given);
    `plan` says who is there after so many steps. Some may have settings `unlike` the others'. An option that is a
    function is asked for each host's own."""
    began: dict[int, int] = {}

    def sink(events: Sequence[Any]) -> None:
        began.update({event[3]: event[4] for event in events if event[1] == "synchronised"})

    world = World(replace(scenario, faults=(*scenario.faults, *faults)), sink=sink)
    homes = {name: str(number) for number, home in enumerate(_homes(scenario)) for name in home}
    cluster = ScriptedCluster(world, first or [host.name for host in world.hosts], homes, lineage)
    cluster.plan = list(plan)
    prepare(cluster)
    watchers = {host.name: Watcher(cluster, host.name) for host in world.hosts}

    async def program(host: VirtualHost) -> Report:
        own = {name: given(host) if callable(given) else given for name, given in options.items()}
        theirs = (unlike or {}).get(host.name, settings)
        wire = own.pop("wire", Wire())
        extras = TrainingExtras(watchers[host.name], **own)
        report = await elastic.follow(elastic.prepare(host, cluster.source(host.name), theirs, SEED, extras), wire)
        run = watchers[host.name].run
        if run is not None and run.step == theirs.steps:
            cluster.finished(host.name)
        return report

    async def watched() -> dict[str, Report | BaseException]:
        tasks = world.begin(program)
        while True:
            # Nobody waits for those who are in no view any more.
            if all(task.done() or name not in cluster.names for name, task in tasks.items()):
                break
            await asyncio.sleep(0.05)
            for name, task in tasks.items():
                lost = not world.host(name).alive or (task.done() and name not in cluster.done)
                if lost and name in cluster.names and cluster.over(cluster.views[-1].epoch) is None:
                    cluster.lose(f"{name} is lost", without=[name])
        results: dict[str, Report | BaseException] = {}
        for name, task in tasks.items():
            results[name] = (task.exception() or task.result()) if task.done() else HcsimError("out of every view")
            task.cancel()  # what comes of it at the world's end is of no interest
        return results

    async def limited() -> dict[str, Report | BaseException]:
        async with asyncio.timeout(3600):
            return await watched()

    outcome = ScriptedOutcome(cluster, world.run(limited()), watchers)
    outcome.began = began
    return outcome


def without_faults(faulty: ScriptedOutcome, scenario: Scenario, settings: Training, **options: Any) -> ScriptedOutcome:
    """The reference: the same members at the same steps, by agreement."""
    (step, first), *plan = faulty.plan()
    assert step == 0
    return train(scenario, settings, first=first, plan=plan, **options)


def _homes(scenario: Scenario) -> Sequence[Sequence[str]]:
    names = [node.name for node in scenario.nodes]
    return [[names[rank] for rank in home] for home in scenario.homes]
