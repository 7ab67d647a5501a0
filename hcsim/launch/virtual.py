"""Simulated clusters with a fixed set of ranks: a program, or a training, on every host of a scenario."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import msgspec

from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config import Scenario, Training, load_scenario
from hcsim.errors import ConfigError
from hcsim.launch import DEFAULT_PORT
from hcsim.telemetry.metrics import HostMetrics
from hcsim.telemetry.trace import Sink
from hcsim.transport.groups import GroupMembership, Wire
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.link_load import LinkLoad, loads
from hcsim.virtual.world import World

if TYPE_CHECKING:
    from hcsim.training.run import Observer, Report
    from hcsim.training.task import Task

T = TypeVar("T")
Program: TypeAlias = Callable[[Group], Coroutine[Any, Any, T]]


class Outcome(msgspec.Struct, Generic[T], frozen=True):
    """The result of a simulated run."""

    results: list[T | BaseException]
    """By rank: the return value of the program, or the exception that ended it."""
    seconds: float
    trace_sha256: str
    """The run's fingerprint: runs of the same scenario and program have the same digest."""
    events: int
    metrics: Mapping[str, HostMetrics]
    loads: tuple[LinkLoad, ...] = ()
    """What the links carried, if the run was recorded."""

    def values(self) -> list[T]:
        """Return the results of all ranks, or raise the first failure."""
        for result in self.results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in self.results if not isinstance(result, BaseException)]


def simulate(
    scenario: Scenario | str | Path,
    program: Program[T],
    *,
    options: Options | None = None,
    wire: Wire | None = None,
    sink: Sink | None = None,
) -> Outcome[T]:
    """Run a program on every host of a scenario (a file, or the name of a shipped one)."""
    world = World(load_scenario(scenario), sink=sink)
    names = [host.name for host in world.hosts]
    addresses = tuple(f"{name}:{DEFAULT_PORT}" for name in names)

    async def on_host(host: VirtualHost) -> T:
        us = GroupMembership(names.index(host.name), addresses, wire=wire or Wire())
        async with await Group.open(host, us, options) as group:
            return await program(group)

    return outcome_of(world, world.run_on_all(on_host))


def outcome_of(world: World, results: list[T | BaseException]) -> Outcome[T]:
    metrics = world.tell_metrics()
    seconds = world.loop.time()
    carried = loads(world, seconds) if world.trace.is_kept else ()
    return Outcome(results, seconds, world.trace.digest(), world.trace.count, metrics, carried)


def simulate_training(
    scenario: Scenario | str | Path,
    settings: Training | None = None,
    *,
    wire: Wire | None = None,
    sink: Sink | None = None,
    observer: Observer | None = None,
    what: Task | None = None,
) -> Outcome[Report]:
    """Train on every host of a scenario, by `settings` or else by the scenario's `[training]`.

    `what` is a custom task that replaces the one that these name."""
    from hcsim.training.observers import HistoryObserver, recorded
    from hcsim.training.trainer import train

    loaded = load_scenario(scenario)
    chosen = settings or loaded.training or Training()
    refuse_tunnels(chosen)
    options = Options(timeout_s=chosen.timeout_s, groups=loaded.homes if len(loaded.homes) > 1 else ())

    async def program(group: Group) -> Report:
        watched = (
            observer if sink is None else HistoryObserver(recorded(group.host, chosen), group.host.clock, observer)
        )
        return await train(group, chosen, loaded.seed, watched, what)

    return simulate(loaded, program, options=options, wire=wire, sink=sink)


def refuse_tunnels(settings: Training) -> None:
    """Reject addresses that apply to a real parameter server only."""
    for name, address in (("server", settings.server), ("listen", settings.listen)):
        if address is not None and "://" in address:
            raise ConfigError(
                f'{name} = "{address}": there are no tunnels and proxies in a simulation; leave out server and listen'
            )
