"""Ranks that run one program, in either world.

A program is `async def program(group)`; it never learns where it runs. `run` returns, by rank, what
the program returned or the exception that ended it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import runpy
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import settings

from hcsim import Group, Options, Outcome, Wire, real_group, simulate
from hcsim.cli import script
from hcsim.config import AnyFault
from hcsim.scripts.fork_server import START_METHOD
from hcsim.scripts.processes import RankProcesses
from hcsim.scripts.run import simulate_script
from tests.switches import on_switch
from tests.torch_backend.ranks import Ranks

Program = Callable[[Group], Awaitable[Any]]
GUARD_S = 90.0

# Hypothesis would fail an example for its 200 ms: that says something about the machine, and nothing about hcsim.
settings.register_profile("no wall clock", deadline=None)
settings.register_profile("quick", deadline=None, max_examples=20)
settings.load_profile("no wall clock")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What a shell starts in the background ignores interrupts, and so would everything that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "start ranks afresh instead of forking them, and give Unix sockets and pipes buffers as small as on macOS"
    parser.addoption("--like-a-mac", action="store_true", help=about)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.like_a_mac:
        folder = str(Path(__file__).parent / "like_a_mac")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        runpy.run_path(f"{folder}/sitecustomize.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: where a cluster waits for a dead member, another test can go on."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """What is imported here, all of torch with it, is garbage at no time: no garbage collection goes through it.

    And each worker begins at another place: in a fresh clone all would compile all files, one after the other."""
    config = session.config
    worker = getattr(config, "workerinput", None)
    if worker is not None and config.args == config.getini("testpaths"):
        here = Path(__file__).parent
        rooms = sorted(map(str, [*here.glob("[a-z]*/"), *here.glob("test_*.py")]))
        first = len(rooms) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args = rooms[first:] + rooms[:first]
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One order for all workers. Who takes ranks from a process that has torch comes first: one worker has them all.

    Of a test that has `quick_cases`, the other cases are slow, before anything asks."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick_cases") and not item.get_closest_marker("slow"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in families.values():
        mark = cases[0].get_closest_marker("quick_cases")
        assert mark is not None
        quick = {(2 * n + 1) * len(cases) // (2 * mark.args[0]) for n in range(mark.args[0])}
        for number, case in enumerate(cases):
            if number not in quick:
                case.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: (not {"ranks", "processes"} & set(getattr(item, "fixturenames", ())), item.path))


class Cluster(Protocol):
    def run(
        self, size: int, program: Program, *, options: Options | None = None, wire: Wire | None = None
    ) -> list[Any]: ...


class VirtualCluster:
    """Ideal machines on one ideal gigabit switch; they are called mac-0, mac-1, …"""

    def run(
        self, size: int, program: Program, *, options: Options | None = None, wire: Wire | None = None
    ) -> list[Any]:
        return self.outcome(size, program, options=options, wire=wire).results

    def outcome(
        self,
        size: int,
        program: Program,
        *,
        options: Options | None = None,
        wire: Wire | None = None,
        faults: Sequence[AnyFault] = (),
    ) -> Outcome[Any]:
        scenario = on_switch([f"mac-{rank}" for rank in range(size)], faults)
        return simulate(scenario, program, options=options, wire=wire)


class RealCluster:
    """Ranks as tasks of one process, over loopback."""

    def run(
        self, size: int, program: Program, *, options: Options | None = None, wire: Wire | None = None
    ) -> list[Any]:
        peers = free_addresses(size)

        async def on_rank(rank: int) -> Any:
            async with real_group(rank, peers, options=options, wire=wire) as group:
                return await program(group)

        async def main() -> list[Any]:
            async with asyncio.timeout(GUARD_S):
                return await asyncio.gather(*map(on_rank, range(size)), return_exceptions=True)

        return asyncio.run(main())


def free_addresses(count: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]


@pytest.fixture
def virtual() -> VirtualCluster:
    return VirtualCluster()


@pytest.fixture
def real() -> RealCluster:
    return RealCluster()


@pytest.fixture(params=[VirtualCluster, RealCluster], ids=["virtual", "real"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    return request.param()


@pytest.fixture
def addresses() -> Callable[[int], list[str]]:
    """Loopback addresses with free ports."""
    return free_addresses


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes of a torch program, started when the first test needs them."""
    processes = Ranks()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def processes(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    """Where the ranks of simulated scripts come from; torch is loaded there once for all of them."""
    with RankProcesses("spawn" if request.config.option.like_a_mac else START_METHOD) as shared:
        yield shared


@pytest.fixture
def ranks_at_hand(processes: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hcsim run SCRIPT` takes its ranks from there too."""
    monkeypatch.setattr(script, "simulate_script", partial(simulate_script, processes=processes))
