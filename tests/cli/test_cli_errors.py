"""What a person is told who typed something wrong: what is wrong and what would be valid, in a line."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app

REAL = ("run", "--real", "--peers", "localhost:52416,localhost:52417")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run",), ["give a scenario", "four-macs-1gbe", "Four Mac minis"]),
        (("run", "two-mac-wifi"), ["no such file", "did you mean two-macs-wifi", "Two MacBooks"]),
        (("run", "two-macs-wifi", "--size", "64 Mb"), ["--size", "did you mean MB", "megabits"]),
        (("run", "two-macs-wifi", "--size", "64"), ["--size", "needs a unit", "MiB"]),
        (("run", "two-macs-wifi", "--algorithm", "rnig"), ["did you mean ring", "halving_doubling"]),
        (("run", "two-macs-wifi", "--operation", "allreduce"), ["--operation", "did you mean all_reduce"]),
        (("run", "two-macs-wifi", "--dtype", "float8"), ["--dtype", "bfloat16"]),
        (("run", "two-macs-wifi", "--repeat", "0"), ["--repeat", "at least 1"]),
        (("run", "two-macs-wifi", "--timeout", "1 day"), ["--timeout", "min"]),
        (("run", "two-macs-wifi", "--segment", "1 GiB"), ["--segment", "16 MiB"]),
        (("run", "two-macs-wifi", "--stripes", "0"), ["--stripes"]),
        (("run", "two-macs-wifi", "--trace", "/nowhere/at/all"), ["/nowhere/at/all", "cannot be written"]),
        (("run", "two-macs-wifi", "--rank", "1", "--insecure"), ["--rank, --insecure", "--real"]),
        (("run", "four-macs-1gbe", "--algorithm", "hierarchical"), ["several homes"]),
        (("run", "--real"), ["--peers"]),
        (("run", "--real", "--task", "convex", "--name", "two\nlines"), ["--name", "can read"]),
        (("run", "--real", "--task", "convex", "--name", " "), ["--name", "can read"]),
        (("run", "--real", "--task", "convex", "--at", "127.0.0.1:9000"), ["--at", "discovery_port"]),
        (("run", "--real", "--peers", "a,,b", "--rank", "0"), ["--peers"]),
        (("run", "--real", "--peers", "localhost:x,localhost", "--rank", "0"), ["'localhost:x'", "host:port"]),
        (("run", "--real", "--peers", "localhost,localhost", "--rank", "0"), ["localhost:52416", "twice"]),
        (("run", "--real", "--peers", "localhost:0,localhost", "--rank", "0"), ["localhost:0", "which port that is"]),
        (("run", "--real", "--peers", f"localhost,h:{'1' * 5000}", "--rank", "0"), ["is not an address"]),
        (("run", "--real", "--peers", "http://a:1,b", "--rank", "0"), ["'http://a:1'", "ws, wss, grpc"]),
        (("run", "--real", "--peers", "localhost,localhost:99999", "--rank", "0"), ["'localhost:99999'", "host:port"]),
        (("run", "--real", "--peers", "192.0.2.1,localhost", "--rank", "0", "--insecure"), ["192.0.2.1", "our own"]),
        ((*REAL,), ["--rank", "0 to 1"]),
        ((*REAL, "--rank", "2"), ["--rank", "0 to 1"]),
        ((*REAL, "--rank", "0", "--seed", "3"), ["--seed", "virtual"]),
        ((*REAL, "--rank", "0", "--tls-key", "me.key"), ["--tls-cert", "--tls-ca"]),
        ((*REAL, "--rank", "0", "--algorithm", "hierarchical"), ["groups"]),
        ((*REAL, "--rank", "0", "--metrics-port", "mini..local:9400"), ["mini..local:9400", "no host's name"]),
        (
            ("run", "two-macs-wifi", "--trace", "/nowhere/at/../x", "--metrics", "/nowhere/x"),
            ["--trace, --metrics", "its own"],
        ),
        (
            ("run", "two-macs-wifi", "--task", "convex", "--save", "/nowhere/x", "--trace", "/nowhere/x"),
            ["--save, --trace", "its own"],
        ),
        (("run", "--real", "--peers", "192.0.2.1,192.0.2.2", "--rank", "0"), ["192.0.2.1", "plaintext"]),
        (("run", "--real", "--peers", "localhost,192.0.2.2", "--rank", "0"), ["192.0.2.2", "plaintext", "insecure"]),
        (("run", "--real", "--peers", "192.0.2.1,localhost", "--rank", "1"), ["192.0.2.1", "plaintext", "insecure"]),
        (("run", "--real", "--peers", "ws://[2001:db8::1],localhost", "--rank", "1"), ["2001:db8::1", "plaintext"]),
        (("run", "eight-macs-2.5gbe", *REAL[1:], "--rank", "0"), ["phantom"]),
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
    result = CliRunner().invoke(app, ["run", "--real", "--peers", "mini.invalid,localhost", "--rank", "1"])
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


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no device that is full")
@pytest.mark.parametrize("option", [None, "--trace", "--metrics"])
def test_a_full_disk_is_told_plainly(option: str | None) -> None:
    with Path("/dev/full").open("w") as full:
        if option is None:
            ended = hcsim_process("scenarios", stdout=full)
        else:
            ended = hcsim_process("run", "two-macs-wifi", option, "/dev/full", stdout=subprocess.DEVNULL)
    assert ended.returncode in (1, 2)
    assert "cannot be written: No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


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


def test_a_device_may_take_several_outputs() -> None:
    outputs = ("--trace", os.devnull, "--metrics", os.devnull)
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


def test_a_closed_standard_input_is_an_empty_one() -> None:
    ended = hcsim_process("run", "-", stdout=subprocess.DEVNULL, preexec_fn=lambda: os.close(0))
    assert ended.returncode == 2
    assert "standard input" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_more_than_fits_the_memory_is_told_plainly() -> None:
    ended = hcsim_process("run", "two-macs-wifi", "--size", "1000000 TB", stdout=subprocess.DEVNULL)
    assert ended.returncode == 1
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
