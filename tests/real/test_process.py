"""A process at work keeps its machine awake, and may open enough files. `caffeinate` is a program of the test's."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from hcsim.cluster.coordinator import CoordinatorPolicy
from hcsim.engine.local import LocalEngine, NetworkSettings
from hcsim.launch.real import RealNode, real_group, real_member, serve_coordinator
from hcsim.real.keys import load_credentials, new_secret, save_secret
from hcsim.real.process import MOST_DESCRIPTORS, PowerAssertion, at_work, reachable_descriptors

CAFFEINATE = """#!/bin/sh
echo "$$ $@" >> "$(dirname "$0")/started"
trap 'exit 0' TERM
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    kill -0 "$3" || exit 0
    sleep 0.5 &
    wait $!
done
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the PATH."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


@pytest.fixture
def caffeinate(programs: Path) -> Path:
    """Where the program writes its process id and arguments whenever it is started."""
    program = programs / "caffeinate"
    program.write_text(CAFFEINATE, encoding="utf-8")
    program.chmod(0o755)
    return programs / "started"


def starts(record: Path, count: int = 1) -> list[list[str]]:
    """What was started, when it is that many."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        lines = [line.split() for line in record.read_text().splitlines()] if record.exists() else []
        if len(lines) >= count:
            return lines
        time.sleep(0.01)
    raise AssertionError(f"caffeinate was not started {count} times within 20 s")


def lives(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    return True


def ended(process: str) -> None:
    until = time.monotonic() + 5
    while lives(process):
        assert time.monotonic() < until, "caffeinate goes on"
        time.sleep(0.01)


def test_a_mac_stays_awake_while_it_works_and_no_longer(caffeinate: Path) -> None:
    said: list[str] = []
    with PowerAssertion().held(said.append, "darwin"):
        ((process, *arguments),) = starts(caffeinate)
        assert arguments == ["-is", "-w", str(os.getpid())]
        assert lives(process)
    assert not lives(process)
    assert said == ["this machine stays awake while it works, unless its lid is closed (caffeinate -is)"]


def test_several_parts_of_one_process_hold_it_once_until_the_last_ends(caffeinate: Path) -> None:
    said: list[str] = []
    assertion = PowerAssertion()
    with ExitStack() as last:
        with assertion.held(said.append, "darwin"):
            last.enter_context(assertion.held(said.append, "darwin"))
        ((process, *_),) = starts(caffeinate)
        assert lives(process)
        assert len(said) == 1
    assert not lives(process)
    with assertion.held(said.append, "darwin"):
        assert len(starts(caffeinate, 2)) == 2
    assert len(said) == 2


def test_without_the_program_work_goes_on_and_the_danger_is_named(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(programs))
    said: list[str] = []
    with PowerAssertion().held(said.append, "darwin"):
        pass
    assert said == [
        "this machine may fall asleep while it works: caffeinate cannot be started: No such file or directory"
    ]


def test_no_other_system_needs_it(caffeinate: Path) -> None:
    said: list[str] = []
    with PowerAssertion().held(said.append, "linux"):
        pass
    assert not said
    assert not caffeinate.exists()


Work = Callable[[Path], AbstractAsyncContextManager[object]]


def as_a_rank(home: Path) -> AbstractAsyncContextManager[object]:
    return real_group(0, ["127.0.0.1:0"])


def as_a_node(home: Path) -> AbstractAsyncContextManager[object]:
    save_secret(home, "home", new_secret())
    return real_member(RealNode(home))


@asynccontextmanager
async def as_a_coordinator(home: Path) -> AsyncIterator[None]:
    begun = asyncio.Event()
    serving = asyncio.create_task(
        serve_coordinator("127.0.0.1:0", CoordinatorPolicy(workers=1), lambda what: begun.set())
    )
    try:
        await begun.wait()
        yield
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("work", [as_a_rank, as_a_node, as_a_coordinator])
def test_ranks_nodes_and_coordinators_keep_their_machine_awake(
    work: Work, caffeinate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    async def main() -> str:
        async with asyncio.timeout(30):
            async with work(tmp_path / "key"):
                ((process, *_),) = await asyncio.to_thread(starts, caffeinate)
                assert lives(process)
            return process

    assert not lives(asyncio.run(main()))


FORKING = """
import os, sys
from hcsim.real.process import at_work
sys.platform = "darwin"
until = int(sys.argv[1])
with at_work():
    if os.fork():
        os.close(until)
        sys.stdin.read()
    else:
        sys.stdin.close()
        with at_work():
            os.read(until, 1)
"""


@pytest.mark.parametrize("first", ["parent", "child"])
def test_each_of_forked_processes_keeps_the_machine_awake_until_its_own_end(first: str, caffeinate: Path) -> None:
    until, child_ends = os.pipe()
    with (
        subprocess.Popen(
            [sys.executable, "-c", FORKING, str(until)], stdin=subprocess.PIPE, pass_fds=[until]
        ) as forking,
        ExitStack() as stack,
    ):
        os.close(until)
        assert forking.stdin is not None
        ends = {"child": stack.enter_context(os.fdopen(child_ends, "wb")), "parent": forking.stdin}
        of_process = {arguments[-1]: process for process, *arguments in starts(caffeinate, 2)}
        awake = {"parent": of_process.pop(str(forking.pid)), "child": next(iter(of_process.values()))}
        second = "child" if first == "parent" else "parent"
        ends[first].close()
        ended(awake[first])
        assert lives(awake[second])
        ends[second].close()
        ended(awake[second])


def test_a_process_whose_network_cannot_begin_lets_its_machine_sleep(
    caffeinate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    save_secret(tmp_path / "key", "home", new_secret())
    proved = load_credentials(tmp_path / "key", "home", "here")
    with monkeypatch.context() as context:
        context.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        with pytest.raises(OSError, match="gone"):
            LocalEngine(NetworkSettings(("127.0.0.1",), proved))
    with at_work():
        *_, (process, *_) = starts(caffeinate)
    ended(process)


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (256, -1, MOST_DESCRIPTORS),  # macOS
        (1024, 1048576, MOST_DESCRIPTORS),
        (1024, 4096, 4096),
        (256, 256, 256),
        (20000, 1048576, 20000),  # not lowered
        (-1, -1, -1),
    ],
)
def test_open_files_are_raised_as_far_as_needed_and_allowed(soft: int, hard: int, then: int) -> None:
    assert reachable_descriptors(soft, hard) == then


FEW = """
import resource
from hcsim.cluster.coordinator import CoordinatorPolicy
from hcsim.launch.real import RealNode, real_group, real_member, serve_coordinator
from hcsim.real.keys import new_secret, save_secret
from hcsim.real.process import raise_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
raise_descriptors()
raise_descriptors()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_process_gets_the_files_that_it_is_promised() -> None:
    told = subprocess.run([sys.executable, "-c", FEW], capture_output=True, text=True, check=True).stdout
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert tuple(map(int, told.split())) == (reachable_descriptors(256, hard), hard)
