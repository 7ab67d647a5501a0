"""What a person is told who typed something wrong: what is wrong and what would be valid, in a line."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app

PEERS = ("rank", "--peers", "localhost:52416,localhost:52417")
VIRTUAL = ("run", "two-macs-wifi")
LEARNED = (*VIRTUAL, "--task", "convex", "--set")
MEMBER = ("run", "--real", "--task", "convex", "--set")


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run",), ["give a scenario", "four-macs-1gbe", "Four Mac minis"]),
        (("bench",), ["give a scenario", "four-macs-1gbe", "Four Mac minis"]),
        (("run", "two-mac-wifi"), ["no such file", "did you mean two-macs-wifi", "Two MacBooks"]),
        (("bench", "two-macs-wifi", "--size", "64 Mb"), ["--size", "did you mean MB", "megabits"]),
        (("bench", "two-macs-wifi", "--size", "64"), ["--size", "needs a unit", "MiB"]),
        (("bench", "two-macs-wifi", "--algorithm", "rnig"), ["did you mean ring", "halving_doubling"]),
        (("bench", "two-macs-wifi", "--operation", "allreduce"), ["--operation", "did you mean all_reduce"]),
        (("bench", "two-macs-wifi", "--dtype", "float8"), ["--dtype", "bfloat16"]),
        (("bench", "two-macs-wifi", "--repeat", "0"), ["--repeat", "at least 1"]),
        (("bench", "two-macs-wifi", "--set", "lr=3"), ["--set lr: only with `hcsim run`"]),
        (("bench", "two-macs-wifi", "--set", "quorum=any"), ["--set quorum: only with `hcsim run`"]),
        (("bench", "two-macs-wifi", "--size", "1 KiB", "--set", "size=2 KiB"), ["--size, --set size", "given twice"]),
        ((*VIRTUAL, "--set", "timeout=1 day"), ["--set timeout", "min"]),
        ((*VIRTUAL, "--set", "size=64"), ["--set size", "needs a unit", "MiB"]),
        ((*VIRTUAL, "--set", "segment=1 GiB"), ["--set segment", "16 MiB"]),
        ((*VIRTUAL, "--set", "stripes=0"), ["--set stripes = 0", "at least 1"]),
        ((*VIRTUAL, "--set", "stripes"), ["--set stripes: give KEY=VALUE", "hcsim list settings"]),
        ((*VIRTUAL, "--set", "=3"), ["--set =3: give KEY=VALUE"]),
        ((*VIRTUAL, "--set", "tcp..window=3"), ["give KEY=VALUE"]),
        ((*VIRTUAL, "--set", "bach=3"), ["--set bach: there is no such setting (did you mean batch?)", "segment"]),
        ((*VIRTUAL, "--set", "name=mini"), ["--set name: only with --real"]),
        ((*VIRTUAL, "--set", "quorum=any"), ["--set quorum: only where something is learned"]),
        ((*VIRTUAL, "--trace", "/nowhere/at/all"), ["/nowhere/at/all", "cannot be written"]),
        ((*VIRTUAL, "--hosts", "a", "--state", "s"), ["--hosts, --state", "--real"]),
        ((*LEARNED, "training=3"), ["--set training: this is a table", "--set training.KEY=VALUE"]),
        ((*LEARNED, "bach=3"), ["--set bach: there is no such setting (did you mean batch?)", "momentum"]),
        ((*LEARNED, "training.bach=3"), ["[training] has no such key (did you mean batch?)", "momentum"]),
        ((*LEARNED, "trainin.lr=3"), ["--set trainin.lr: there is no such setting (did you mean training?)"]),
        ((*LEARNED, "batch=many"), ['--set batch = "many"', "expected a whole number, a list of them"]),
        ((*LEARNED, "batch=8,many"), ['--set batch[1] = "many"', "a whole number"]),
        ((*LEARNED, "scale_lr=yes"), ['--set scale_lr = "yes"', "true or false"]),
        ((*LEARNED, "optimizer=adam"), ["--set optimizer", "did you mean adamw?", "sgd"]),
        ((*LEARNED, "ack_share=2"), ["--set ack_share", "from 0 to 1"]),
        ((*LEARNED, "lr.high=2"), ["--set lr: expected a number"]),
        ((*LEARNED, "lr=1", "--set", "training.lr=2"), ["--set lr, --set training.lr: this is given twice"]),
        ((*LEARNED, "lr=1", "--set", "lr=2"), ["--set lr: this is given twice"]),
        ((*LEARNED, "heartbeat.beat=1"), ["--set heartbeat.beat: unknown key", "interval, timeout"]),
        ((*LEARNED, "heartbeat.interval=1 h"), ["--set heartbeat", "longer than the interval"]),
        ((*LEARNED, "heartbeat=1"), ["--set heartbeat = 1: expected a table"]),
        ((*LEARNED, "discovery_port=52416"), ["--set discovery_port", "both 52416"]),
        (("run", "four-macs-1gbe", "--set", "algorithm=hierarchical"), ["several homes"]),
        (("bench", "four-macs-1gbe", "--algorithm", "hierarchical"), ["several homes"]),
        (("run", "--real"), ["--task", "[training]", "hcsim rank --peers"]),
        (("run", "--real", "--task", "convex", "--set", "repeat=2"), ["--set repeat", "nothing is learned"]),
        ((*MEMBER, "name=two\nlines"), ["--set name", "can read"]),
        ((*MEMBER, "name= "), ["--set name", "can read"]),
        ((*MEMBER, "at=127.0.0.1:9000"), ["--set at", "discovery_port"]),
        ((*MEMBER, "tcp.window=1 MiB"), ["--set tcp.window: only in a virtual run"]),
        ((*MEMBER, "remote_hcsim=h"), ["--set remote_hcsim: only with --hosts"]),
        (("rank",), ["--peers", "mini.local,studio.local"]),
        (("rank", "--peers", "a,,b", "--rank", "0"), ["--peers"]),
        (("rank", "--peers", "localhost:x,localhost", "--rank", "0"), ["'localhost:x'", "host:port"]),
        (("rank", "--peers", "localhost,localhost", "--rank", "0"), ["localhost:52416", "twice"]),
        (("rank", "--peers", "localhost:0,localhost", "--rank", "0"), ["localhost:0", "which port that is"]),
        (("rank", "--peers", f"localhost,h:{'1' * 5000}", "--rank", "0"), ["is not an address"]),
        (("rank", "--peers", "http://a:1,b", "--rank", "0"), ["'http://a:1'", "ws, wss, grpc"]),
        (("rank", "--peers", "localhost,localhost:99999", "--rank", "0"), ["'localhost:99999'", "host:port"]),
        (("rank", "--peers", "192.0.2.1,localhost", "--rank", "0", "--insecure"), ["192.0.2.1", "our own"]),
        (PEERS, ["--rank", "0 to 1"]),
        ((*PEERS, "--rank", "2"), ["--rank", "0 to 1"]),
        ((*PEERS, "--rank", "0", "--seed", "3"), ["--seed: only where something is learned"]),
        ((*PEERS, "--rank", "0", "--save", "model"), ["--save: only where something is learned"]),
        ((*PEERS, "--rank", "0", "--wait", "5"), ["--wait", "needs a unit"]),
        ((*PEERS, "--rank", "0", "--tls-key", "me.key"), ["--tls-cert", "--tls-ca"]),
        ((*PEERS, "--rank", "0", "--set", "algorithm=hierarchical"), ["groups"]),
        ((*PEERS, "--rank", "0", "--set", "metrics=mini..local:9400"), ["mini..local:9400", "no host's name"]),
        ((*PEERS, "--rank", "0", "--set", "device=cpu"), ["--set device: only where something is learned"]),
        ((*PEERS, "--rank", "0", "--set", "name=mini"), ["--set name: only with `hcsim run --real`"]),
        ((*PEERS, "--rank", "0", "--set", "quorum=any"), ["--set quorum: only with `hcsim run --real`"]),
        ((*PEERS, "--rank", "0", "--task", "convex", "--operation", "reduce"), ["--operation", "nothing is learned"]),
        (
            (*VIRTUAL, "--trace", "/nowhere/at/../x", "--set", "metrics=/nowhere/x"),
            ["--trace, --set metrics", "its own"],
        ),
        (
            (*VIRTUAL, "--task", "convex", "--save", "/nowhere/x", "--trace", "/nowhere/x"),
            ["--save, --trace", "its own"],
        ),
        (("rank", "--peers", "192.0.2.1,192.0.2.2", "--rank", "0"), ["192.0.2.1", "plaintext"]),
        (("rank", "--peers", "localhost,192.0.2.2", "--rank", "0"), ["192.0.2.2", "plaintext", "insecure"]),
        (("rank", "--peers", "192.0.2.1,localhost", "--rank", "1"), ["192.0.2.1", "plaintext", "insecure"]),
        (("rank", "--peers", "ws://[2001:db8::1],localhost", "--rank", "1"), ["2001:db8::1", "plaintext"]),
        (("rank", "eight-macs-2.5gbe", *PEERS[1:], "--rank", "0"), ["phantom"]),
        ((*PEERS, "--rank", "0", "--task", "resnet50", "--set", "device=cpu"), ["no data", "device=sleep:M4"]),
        ((*PEERS, "--rank", "0", "--task", "convex", "--set", "device=sleep:M44"), ["sleep:M44", "did you mean M4?"]),
        (("rank", "train.py"), ["train.py: a script is run by `hcsim run train.py`"]),
        (("bench", "train.py"), ["train.py: a script is run by `hcsim run train.py`"]),
        ((*VIRTUAL, "more"), ["-- more: only with a script"]),
        ((*VIRTUAL, "--set"), ["'--set' requires an argument"]),
        (("list", "scenario"), ["there is no such list (did you mean scenarios?)", "settings"]),
    ],
)
def test_it_is_told_plainly(arguments: tuple[str, ...], told: list[str]) -> None:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == 2, result.output
    for words in told:
        assert words in result.stderr
    assert "rror:" in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_name_beyond_this_machine_is_refused_like_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        return known("192.0.2.1" if host == "mini.invalid" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    result = CliRunner().invoke(app, ["rank", "--peers", "mini.invalid,localhost", "--rank", "1"])
    assert result.exit_code == 2, result.output
    assert "error: 192.0.2.1 is not the loopback" in result.stderr


def test_a_broken_file_is_told_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[[node]]\nname = "mini"\nmashine = "M4"\n')
    result = CliRunner().invoke(app, ["run", str(file)])
    assert result.exit_code == 2
    assert "node[0].mashine" in result.stderr
    assert "machine" in result.stderr


def hcsim_process(*arguments: str, **channels: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hcsim", *arguments]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **channels)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no device that is full")
@pytest.mark.parametrize("option", [(), ("--trace", "/dev/full"), ("--set", "metrics=/dev/full")])
def test_a_full_disk_is_told_plainly(option: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        if not option:
            ended = hcsim_process("list", "scenarios", stdout=full)
        else:
            ended = hcsim_process("run", "two-macs-wifi", *option, stdout=subprocess.DEVNULL)
    assert ended.returncode in (1, 2)
    assert "cannot be written: No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_program_whose_output_nobody_reads_ends_as_one_in_a_pipeline_does() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as unread:
        ended = hcsim_process("list", "scenarios", stdout=unread)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.slow
def test_a_disk_that_is_full_ends_a_cluster_with_nothing_more_to_say(tmp_path: Path) -> None:
    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 * 1024, 16 * 1024))

    trace = tmp_path / "trace.jsonl"
    command = ("run", "four-macs-churn", "--task", "convex", "--steps", "60", "--trace", str(trace))
    ended = hcsim_process(*command, stdout=subprocess.DEVNULL, preexec_fn=little_room)
    assert ended.returncode == 2
    said = ended.stderr.splitlines()
    assert said[-1] == f"error: {trace}: cannot be written: File too large"
    assert all(line.startswith("mini-1: ") for line in said[:-1])


@pytest.mark.slow
def test_a_device_may_take_several_outputs() -> None:
    outputs = ("--trace", os.devnull, "--set", f"metrics={os.devnull}")
    assert hcsim_process("run", "two-macs-wifi", *outputs, stdout=subprocess.DEVNULL).returncode == 0


def test_an_interrupt_before_anything_has_begun_shows_no_traceback() -> None:
    interrupted = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from hcsim.cli import main
main()
"""
    ended = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.slow
def test_a_closed_standard_input_is_an_empty_one() -> None:
    ended = hcsim_process("run", "-", stdout=subprocess.DEVNULL, preexec_fn=lambda: os.close(0))
    assert ended.returncode == 2
    assert "standard input" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_more_than_fits_the_memory_is_told_plainly() -> None:
    """Where the system allows less than is free."""
    limit = partial(resource.setrlimit, resource.RLIMIT_AS, (1 << 30, 1 << 30))
    job = ("bench", "two-macs-wifi", "--size", "800 MB")
    ended = hcsim_process(*job, stdout=subprocess.DEVNULL, preexec_fn=limit)
    assert ended.returncode == 1, ended.stderr
    assert "not enough memory" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_model_does_not_replace_what_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    arguments = ["run", "two-macs-wifi", "--task", "convex", "--steps", "1", "--save", str(pipe)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "no file" in result.stderr
    assert pipe.is_fifo()
