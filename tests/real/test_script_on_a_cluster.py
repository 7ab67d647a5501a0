"""A torch script on real machines that find each other: what it computes there is what it computes in simulation."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hcsim.scripts.processes import RankProcesses
from hcsim.scripts.run import simulate_script
from tests.real.namespaces import Process
from tests.real.together import Together, together
from tests.switches import on_switch

pytestmark = pytest.mark.slow

SCRIPT = """
import hashlib, sys, torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
replica = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(dist.get_rank())
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    replica(torch.randn(8, 32, generator=generator)).square().mean().backward()
    optimizer.step()
    print(f"step {step}", flush=True)
data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("learned", hashlib.sha256(data).hexdigest(), flush=True)
dist.destroy_process_group()
"""
FAILS = """
import sys, torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    sys.exit(3)
dist.barrier()
"""
WAITS = """
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
print("met", flush=True)
if dist.get_rank() == 0:
    dist.barrier()
dist.distributed_c10d._get_default_store().get("never")
"""
TOO_LONG = 100_000


@pytest.fixture
def ab(tmp_path: Path) -> Iterator[tuple[Together, Path]]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with together(tmp_path, "ab") as cluster:
        yield cluster, script


def start(cluster: Together, script: Path, steps: int) -> list[Process]:
    return [
        cluster.lan[name].hcsim("run", "--real", str(script), "--nodes", "2", "--set", f"name={name}", "--", str(steps))
        for name in "ab"
    ]


def learned(text: str) -> str:
    found = re.search(r"learned (\w+)", text)
    assert found is not None, text
    return found[1]


def test_a_script_learns_the_same_on_real_machines_and_on_simulated_ones(
    ab: tuple[Together, Path], processes: RankProcesses
) -> None:
    cluster, script = ab
    machines = start(cluster, script, 10)
    for process in machines:
        assert process.ends() == 0, process.text
    said: list[str] = []
    two = on_switch(["x", "y"])
    simulate_script(two, script, ["10"], say=lambda rank, stream, text: said.append(text), processes=processes)
    assert {learned(process.text) for process in machines} == {learned("".join(said))}


def test_when_the_script_fails_on_one_machine_the_other_does_not_wait_for_it(ab: tuple[Together, Path]) -> None:
    """It hears from the machine why, or before that from the script that it is leaving."""
    cluster, script = ab
    script.write_text(FAILS)
    processes = start(cluster, script, 0)
    assert [process.ends() for process in processes] == [1, 1], [process.text for process in processes]
    told = next(process.text for process in processes if "this machine is rank 0" in process.text)
    assert re.search(r"CallFailed: .*rank 1\)? (has left the group|failed: it ended with 3)", told), told


@pytest.mark.namespaces_long
def test_when_a_machine_dies_the_script_on_the_other_hears_which_and_ends(ab: tuple[Together, Path]) -> None:
    cluster, script = ab
    first, second = start(cluster, script, TOO_LONG)
    first.says("step 5")
    rank = 0 if "this machine is rank 0" in second.text else 1
    second.kill()
    assert first.ends() != 0
    assert re.search(rf"CallFailed: .*rank {rank}", first.text), first.text


@pytest.mark.namespaces_long
def test_when_a_cable_is_pulled_the_scripts_on_both_sides_hear_whom_they_have_lost(ab: tuple[Together, Path]) -> None:
    """One of them in a call, the other in the store; nothing tells either of them that its connection is gone."""
    cluster, script = ab
    script.write_text(WAITS)
    processes = start(cluster, script, 0)
    for process in processes:
        process.says("^met")
    cluster.lan["b"].unplug()
    for process in processes:
        assert process.ends() == 1
        other = 1 if "this machine is rank 0" in process.text else 0
        error = "CallFailed" if other else "DistNetworkError"
        assert re.search(rf"{error}: .*rank {other} \(\w\) was lost: silent for", process.text), process.text


@pytest.mark.namespaces_long
def test_an_interrupt_ends_the_script_and_leaves_nothing_behind(ab: tuple[Together, Path]) -> None:
    cluster, script = ab
    first, second = start(cluster, script, TOO_LONG)
    first.says("step 5")
    second.send(signal.SIGINT)
    assert second.ends() != 0
    assert first.ends() != 0
    assert "KeyboardInterrupt" in second.text
