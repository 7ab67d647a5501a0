"""Clusters that train in namespaces, and what they should have learned.

A reference run in the virtual world has the same members at the same steps, by agreement and without faults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hcsim.config import load_scenario
from hcsim.real.keys import load_node_key, new_secret, save_secret
from hcsim.selftest.elastic import digest_of, plan_of, reference, views_of
from hcsim.selftest.script import SEED
from tests.real.namespaces import Lan, Machine, Process, lan
from tests.switches import on_switch

SLOW_KBIT = 256
"""A step of the job then takes about a quarter of a second, nearly all of it in the reduction."""
JOB = f"""
name = "in-namespaces"
seed = {SEED}
[cluster]
preset = "low_latency"
[training]
task = "convex"
algorithm = "ring"
evaluate_every = 5
"""


class Together:
    """Machines of one cluster, with a job."""

    def __init__(self, machines: Lan, folder: Path) -> None:
        self.lan = machines
        self._job = folder / "job.toml"

    def write(self, nodes: int, steps: int, *more: str, strategy: str = "ddp") -> Path:
        """The job: with how many it begins, and how long it is."""
        training = ["[training]", f"steps = {steps}", f'strategy = "{strategy}"']
        text = JOB.replace("[training]", "\n".join([f"nodes = {nodes}", *more, *training]))
        self._job.write_text(text)
        return self._job

    def start(self, *names: str) -> list[Process]:
        """Have these machines take part."""
        return [
            self.lan[name].hcsim("run", "--real", str(self._job), "--set", f"name={name}", "--set", "device=cpu")
            for name in names
        ]

    def reference(self, plan: Sequence[tuple[int, Sequence[str]]]) -> str:
        """The parameters' digest, had these been there after so many steps."""
        settings = load_scenario(str(self._job)).training
        assert settings is not None
        return reference(on_switch([*self.lan.machines]), settings, plan)


@contextmanager
def together(folder: Path, names: str) -> Iterator[Together]:
    """Machines that have joined one cluster."""
    with lan(folder, names) as machines:
        join(*machines)
        yield Together(machines, folder)


def join(*machines: Machine) -> None:
    """Make a new cluster of these."""
    secret = new_secret()
    for machine in machines:
        load_node_key(machine.folder)
        save_secret(machine.folder, "home", secret)


def members(process: Process) -> list[str]:
    """Of the newest view that a node has told of."""
    return [*views_of(process.lines).values()][-1]


def plan(witness: Process) -> list[tuple[int, list[str]]]:
    """Who was there after so many steps, as a node saw it that was there all the time."""
    return plan_of(witness.lines)


def said(line: str) -> str:
    """A message without the time of day before it."""
    return re.sub(r"^\d\d:\d\d:\d\d +", "", line)


def digest(process: Process) -> str:
    """Of the parameters that a node ended with."""
    found = digest_of(process.lines)
    assert found is not None, process.text
    return found
