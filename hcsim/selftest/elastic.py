"""A cluster of three processes on this machine, one of which is killed and comes back.

It must end with the parameters of a simulated run with the same members at the same steps. What a real run had is in
what its nodes say: "view 7: a, c (b was lost)" and "view 7: training goes on after step 112".
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hcsim.config import Scenario, Training
from hcsim.real.keys import load_node_key, new_secret, save_secret
from hcsim.real.sockets import free_ports
from hcsim.selftest.arena import VirtualArena
from hcsim.selftest.contracts import ContractBroken, require
from hcsim.selftest.script import SEED, train

NAMES = ("a", "b", "c")
PACED = "paced"
"""The task of `hcsim.selftest.paced`, which the nodes' processes import."""
HURRY = "HCSIM_SELFTEST_HURRY"
"""The environment variable with the path of a file at which its steps take no more time."""
STEPS = 400
_EARLY = 5
"""The step after which a member is killed."""
_CLUSTER = "selftest"
_PATIENCE_S = 60.0
_POLL_S = 0.02
_LAST_LINES = 5


_TIME_OF_DAY = r"(?:\d\d:\d\d:\d\d +)?"


def plan_of(lines: Sequence[str]) -> list[tuple[int, list[str]]]:
    """Return who was there after so many steps, as a node told that was there all the time."""
    views = views_of(lines)
    steps: dict[int, list[str]] = {}
    for line in lines:
        if found := re.match(_TIME_OF_DAY + r"view (\d+): training (?:begins|goes on after step (\d+))", line):
            steps[int(found[2] or 0)] = views[int(found[1])]
    return sorted(steps.items())


def views_of(lines: Sequence[str]) -> dict[int, list[str]]:
    """Return the members of each view that a node has told of."""
    found = [re.match(_TIME_OF_DAY + r"view (\d+): ([\w, ]+) \(", line) for line in lines]
    return {int(each[1]): each[2].split(", ") for each in found if each is not None}


def digest_of(lines: Sequence[str]) -> str | None:
    """Return the digest of the parameters that a node ended with."""
    found = [re.match(r"parameters sha256 (\w+)", line) for line in lines]
    return next((each[1] for each in found if each is not None), None)


def reference(scenario: Scenario, settings: Training, plan: Sequence[tuple[int, Sequence[str]]]) -> str:
    """Return the digest of the parameters that a simulated cluster ends with, with these members after so many
    steps."""
    (step, first), *later = plan
    require(step == 0, "a node that was there all the time tells who began")
    return train(scenario, settings, first=first, plan=later).sha256()


class _Node:
    """One member's process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.lines: list[str] = []
        self._reading = asyncio.create_task(self._read(), name=f"output of {name}")

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip())

    async def says(self, words: str) -> None:
        """Wait until it has said that."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not any(re.search(words, line) for line in self.lines):
                    if self._reading.done():
                        raise ContractBroken(f"member {self.name} ended too early: {self._last()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise ContractBroken(f"member {self.name} did not say {words!r} in time: {self._last()}") from None

    async def ends(self) -> None:
        """Wait until it has ended, successfully."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._reading
                status = await self.process.wait()
        except TimeoutError:
            raise ContractBroken(f"member {self.name} does not end: {self._last()}") from None
        require(status == 0, f"member {self.name} ends well, and not with status {status}: {self._last()}")
        require(not any("Traceback" in line for line in self.lines), f"no traceback of {self.name}: {self._last()}")

    async def kill(self) -> None:
        """End it at once, and take its exit status."""
        with suppress(ProcessLookupError):
            self.process.kill()
        require(await self.process.wait() == -signal.SIGKILL, f"member {self.name} can be killed")
        await self._reading

    def end_now(self) -> None:
        """End it, if it runs."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()

    def _last(self) -> str:
        return " | ".join(self.lines[-_LAST_LINES:]) or "it said nothing"


class _Cluster:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.hurry = folder / "hurry"
        ports = free_ports(2 * len(NAMES))
        self._ports = {name: (ports.pop(), ports.pop()) for name in NAMES}
        self.started: list[_Node] = []
        secret = new_secret()
        for name in NAMES:
            (folder / name).mkdir()
            load_node_key(folder / name)
            save_secret(folder / name, _CLUSTER, secret)

    async def start(self, name: str) -> _Node:
        """Start a member."""
        folder = self._folder / name
        discovery, gradients = self._ports[name]
        peers = [f"127.0.0.1:{self._ports[other][0]}" for other in NAMES if other != name]
        job = folder / "job.toml"
        job.write_text(_JOB.format(discovery=discovery, gradients=gradients, peers=peers), encoding="utf-8")
        settings = {"name": name, "machine.cluster": _CLUSTER, "at": "127.0.0.1", "device": "cpu"}
        given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hcsim", "run", "--real", str(job), "--plugin", "hcsim.selftest.paced",
            "--state", str(folder / "state"), *given,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "HCSIM_HOME": str(folder), HURRY: str(self.hurry), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        node = _Node(name, process)
        self.started.append(node)
        return node


_JOB = f"""
name = "selftest"
seed = {SEED}
[cluster]
nodes = {len(NAMES)}
discover = false
discovery_port = {{discovery}}
gradient_port = {{gradients}}
peers = {{peers}}
[training]
task = "{PACED}"
algorithm = "ring"
steps = {STEPS}
evaluate_every = {_EARLY}
"""


def check_elastic() -> str:
    """Train, kill a member, start it again, and compare what all end with."""
    with tempfile.TemporaryDirectory(prefix="hcsim-") as name:
        first, second, third, again = asyncio.run(_train(Path(name)))
        checkpoints = list(Path(name, first.name, "state").glob("checkpoint*"))
    require(checkpoints, "the leader with a folder for its state keeps a checkpoint there")
    history = plan_of(first.lines)
    members = [names for _, names in history]
    require(any(second.name not in names for names in members), "the others went on without the member that was killed")
    require(second.name in members[-1], "the member that was killed is admitted again")
    digests = {node.name: digest_of(node.lines) for node in (first, third, again)}
    require(len({*digests.values()}) == 1, f"all members end with the same parameters: {digests}")
    settings = Training(task="convex", algorithm="ring", steps=STEPS, evaluate_every=_EARLY)
    expected = reference(VirtualArena(NAMES).scenario(), settings, history)
    require(digests[first.name] == expected, "they end with the parameters of a simulated run with the same members")
    left, returned = history[1][0], history[-1][0]
    return (
        f"one of three was killed after step {left} and is back after step {returned}; {STEPS} steps end with the "
        f"simulated parameters ({expected[:8]})"
    )


async def _train(folder: Path) -> tuple[_Node, _Node, _Node, _Node]:
    """Return the members by rank, and the one at rank 1 once more, as it came back."""
    cluster = _Cluster(folder)
    try:
        nodes = [await cluster.start(name) for name in NAMES]
        for node in nodes:
            await node.says("training begins")
        order = [*views_of(nodes[0].lines).values()][-1]
        first, second, third = sorted(nodes, key=lambda node: order.index(node.name))
        await first.says(f"step {_EARLY} of")  # the first alone scores the model and tells of it
        await second.kill()
        await first.says("training goes on")
        again = await cluster.start(second.name)
        await again.says("training goes on")
        cluster.hurry.touch()
        for node in (first, third, again):
            await node.ends()
    finally:
        for node in cluster.started:
            node.end_now()
        await asyncio.gather(*(node.process.wait() for node in cluster.started))
    return first, second, third, again
