"""`hcsim run` with something to learn, and `hcsim evaluate`."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from hcsim.cli.app import app
from hcsim.cli.training import chosen_device
from hcsim.config import Training
from hcsim.launch.real import seconds_by_device
from hcsim.real.hardware import best_torch_device, check_torch_device
from hcsim.training.tasks import task
from tests.cli.test_cli_real import LIMIT_S, free_peers, rank
from tests.torch_backend.ranks import Meeting, Ranks

SMALL = ("--task", "convex", "--set", "steps=6")


def hcsim(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def sets(**settings: object) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def parameters(output: str) -> list[str]:
    return re.findall(r"^parameters sha256 ([0-9a-f]{64})$", output, re.MULTILINE)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("strategy", ["ddp", "local_sgd:2", "diloco:3", "parameter_server"])
@pytest.mark.parametrize("compressor", ["none", "topk:0.1+ef", "int8+ef", "powersgd:1+ef"])
def test_a_simulated_cluster_learns_and_says_what_it_came_to(strategy: str, compressor: str) -> None:
    result = hcsim("run", "four-macs-1gbe", *SMALL, "--strategy", strategy, "--compressor", compressor)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"convex by {strategy}, compressor {compressor}, 4 ranks, four-macs-1gbe")
    assert len(parameters(result.stdout)) == 1, "all ranks hold the same"
    assert re.search(r"^trace sha256 [0-9a-f]{64}$", result.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "compressor"),
    [("ddp", "int8+ef"), ("ddp", "powersgd:2+ef"), ("diloco:2", "topk:0.1+ef"), ("parameter_server", "none")],
)
def test_both_worlds_end_with_the_same_parameters(ranks: Ranks, strategy: str, compressor: str) -> None:
    job = ("--task", "digits", *sets(steps=4, batch=4, strategy=strategy, compressor=compressor))
    virtual = hcsim("run", "two-macs-wifi", *job)
    real = ranks.run(trained_for_real, free_peers(2), job, size=2, backend="")
    assert [code for code, _ in real] == [0, 0], real
    for _, output in real:
        assert parameters(output) == parameters(virtual.stdout) != []


def trained_for_real(meeting: Meeting, peers: str, job: Sequence[str]) -> tuple[int, str]:
    """In a process that has torch already."""
    result = hcsim("rank", "--peers", peers, "--rank", str(meeting.rank), *job, "--set", "device=cpu")
    return result.exit_code, result.output


@pytest.mark.slow
def test_commands_of_their_own_train_together_too() -> None:
    job = ("--task", "digits", *sets(steps=2, batch=4, strategy="local_sgd:2", compressor="int8+ef"))
    peers, cpu = free_peers(2), sets(device="cpu")
    with rank(0, peers, *job, *cpu) as zero, rank(1, peers, *job, *cpu) as one:
        told = [process.communicate(timeout=LIMIT_S) for process in (zero, one)]
    assert [process.returncode for process in (zero, one)] == [0, 0], told
    virtual = hcsim("run", "two-macs-wifi", *job)
    assert [parameters(output) for output, _ in told] == [parameters(virtual.stdout)] * 2
    assert parameters(virtual.stdout) != []


def test_a_saved_model_scores_as_it_did_in_training(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    trained = hcsim("run", "four-macs-1gbe", "--task", "digits", "--steps", "10", "--save", str(file))
    assert trained.exit_code == 0, trained.output
    scored = hcsim("evaluate", str(file))
    assert scored.exit_code == 0, scored.output
    loss = re.search(r"held-out loss (\S+)", scored.stdout)
    assert loss is not None
    assert loss[1] in trained.stdout
    assert parameters(scored.stdout) == parameters(trained.stdout)


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    hcsim("run", "four-macs-1gbe", *SMALL, "--save", str(file))
    whole = file.read_bytes()
    for damaged, complaint in (
        (whole[:-7], "not a model that was saved whole"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "SHA-256 differs"),
        (b"", "not a model that was saved whole"),
        (whole.replace(b"hcsim model 1", b"other model 1"), "did not save this model"),
    ):
        file.write_bytes(damaged)
        result = hcsim("evaluate", str(file))
        assert result.exit_code == 2
        assert complaint in result.output
    assert "no such file" in hcsim("evaluate", str(tmp_path / "nothing")).output
    assert "is a directory" in hcsim("evaluate", str(tmp_path)).output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--task", "digitz"), "did you mean digits?"),
        (("--task", "digits", "--strategy", "ddq"), "there is no strategy"),
        (("--task", "digits", "--compressor", "topk:2"), "expected a ratio above 0 and up to 1"),
        (("--task", "digits", "--set", "algorithm=rung"), "did you mean ring?"),
        (("--task", "digits", "--set", "repeat=3"), "--set repeat: only where nothing is learned"),
        (("--task", "digits", "--set", "job.repeat=3"), "--set job.repeat: only where nothing is learned"),
        (("--task", "gpt2", "--save", "model"), "nothing to save"),
        (("--task", "digits", "--save", "/no/where/model"), "there is no folder"),
        (("--save", "model"), "--save: only where something is learned"),
        (("--task", "digits", "--steps", "0"), "--steps = 0: expected a whole number, at least 1"),
        (("--task", "digits", "--set", "device=cpu"), "--set device: only with --real"),
        (("--task", "convex", "--strategy", "hierarchical"), "here is only one"),
        (("--task", "convex", "--set", "lr=inf"), "--set lr = "),
        (("--task", "convex", "--save", "/"), "this is a folder"),
        (("--task", "convex", "--save", "/dev/fd/model"), "nothing can be written in /dev/fd"),
        (("--task", "convex", "--strategy", "local_sgd:"), '"local_sgd" knows every=8'),
        (("--task", "convex", "--strategy", "parameter_server", "--set", "algorithm=ring"), "does without all-reduces"),
    ],
)
def test_a_mistake_is_told_in_a_line_before_anything_runs(arguments: tuple[str, ...], complaint: str) -> None:
    result = hcsim("run", "four-macs-1gbe", *arguments)
    assert result.exit_code == 2
    assert complaint in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("device", ["bogus", "cuda", "mps"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    result = hcsim("rank", "--peers", free_peers(2), "--rank", "0", "--task", "digits", "--set", f"device={device}")
    assert result.exit_code == 2
    assert f'device "{device}"' in result.output


def test_the_device_that_is_taken_by_itself_computes() -> None:
    check_torch_device("auto")
    assert torch.ones(3, device=best_torch_device()).sum() == 3


def test_auto_takes_the_device_on_which_a_step_takes_least_and_tells_the_times() -> None:
    told: list[str] = []
    assert chosen_device({"cpu": 0.002, "mps": 0.0105}, told.append) == "cpu"
    assert chosen_device({"cpu": 0.25, "mps": 0.0105}, told.append) == "mps"
    assert told == [
        "device cpu: a step takes 2 ms on cpu, 10.5 ms on mps",
        "device mps: a step takes 250 ms on cpu, 10.5 ms on mps",
    ]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("batch", [None, 4, (2, 8)])
def test_a_step_is_timed_on_each_device_that_can_take_one(batch: int | tuple[int, ...] | None) -> None:
    settings = Training(task="digits", batch=batch)
    seconds = asyncio.run(seconds_by_device(["cpu", "fpga"], settings, task("digits")))
    assert list(seconds) == ["cpu"]  # torch has no kernels for the other
    assert seconds["cpu"] > 0


@pytest.mark.slow
def test_real_ranks_with_unlike_settings_are_told_so() -> None:
    peers, job = free_peers(2), (*SMALL, "--set", "device=cpu")
    with rank(0, peers, *job, "--set", "lr=0.1") as zero, rank(1, peers, *job, "--set", "lr=0.2") as one:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in (zero, one)]
    assert [process.returncode for process in (zero, one)] == [2, 2]
    assert all("lr is 0.1 on rank 0 and 0.2 on rank 1" in error for error in errors)


def test_a_task_of_shapes_cannot_be_trained_for_real() -> None:
    result = hcsim("rank", "--peers", free_peers(2), "--rank", "0", "--task", "gpt2")
    assert result.exit_code == 2
    assert "it can be simulated, or timed with --set device=sleep:M4, not trained" in result.output


def test_a_scenario_may_say_what_is_learned(tmp_path: Path) -> None:
    file = tmp_path / "learn.toml"
    file.write_text(
        """
        name = "learn"
        [[medium]]
        kind = "ethernet"
        name = "switch"
        rate = "1 Gb/s"
        latency = "0.2 ms"
        [[node]]
        name = "mini"
        count = 2
        machine = "M4"
        links = ["switch"]
        [training]
        task = "convex"
        strategy = "local_sgd:2"
        steps = 4
        batch = [8, 24]
        bucket = "1 KiB"
        """
    )
    result = hcsim("run", str(file), "--compressor", "fp16")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("convex by local_sgd:2, compressor fp16, 2 ranks, learn")


@pytest.mark.slow
def test_the_shipped_cluster_comes_together_again_after_its_faults_and_ends() -> None:
    command = [sys.executable, "-c", "from hcsim.cli import main; main()", "run", "four-macs-churn"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    views = [line for line in ended.stderr.splitlines() if "joined)" in line]
    assert all(name in views[-1] for name in ("mini-1", "mini-2", "mini-3", "mini-4"))
    assert "35 steps" in ended.stdout


def test_of_many_evaluations_twenty_are_shown_and_the_last_one_is_among_them() -> None:
    result = hcsim("run", "two-macs-wifi", "--task", "convex", *sets(steps=61, evaluate_every=1))
    assert result.exit_code == 0, result.output
    rows = [int(step) for step in re.findall(r"^ +(\d+) +[\d.]+ m?s .*[\d.]+ [KM]iB *$", result.stdout, re.MULTILINE)]
    assert rows == [(i + 1) * 61 // 20 for i in range(20)]
    assert rows[-1] == 61
    assert "20 of 61 evaluations are shown" in result.stdout


def test_members_that_come_and_go_are_told_with_the_simulated_time() -> None:
    """The twentieth second of the scenario's lid is that of its message."""
    result = hcsim("run", "four-macs-churn", "--task", "resnet50")
    assert re.search(r"^ *30\.000 s  mini-2: left out by the others", result.output, re.MULTILINE), result.output


def test_nodes_say_that_the_machines_form_a_cluster() -> None:
    result = hcsim("run", "four-macs-1gbe", *SMALL, "--nodes", "2")
    assert result.exit_code == 0, result.output
    assert "--nodes makes the machines find each other as a cluster: work begins with 2 of 4 machines" in result.stderr
    assert "as a cluster" not in hcsim("run", "four-macs-1gbe", *SMALL).stderr


def test_batch_sizes_of_unlike_machines_are_a_list_without_brackets() -> None:
    shares = hcsim("run", "four-macs-1gbe", *SMALL, *sets(batch="13,8,3,2"))
    assert shares.exit_code == 0, shares.output
    assert parameters(shares.stdout) == parameters(
        hcsim("run", "four-macs-1gbe", *SMALL, *sets(batch="[13, 8, 3, 2]")).stdout
    )
    too_few = hcsim("run", "four-macs-1gbe", *SMALL, *sets(batch="13,8,3"))
    assert "batch = [13, 8, 3]: 3 batch sizes for 4 ranks" in too_few.stderr
