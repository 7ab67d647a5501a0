"""`hcsim rank`: two processes on loopback."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app

LIMIT_S = 240
JOB = ("--set", "size=3000 B", "--set", "repeat=2", "--operation", "all_gather")


def free_peers(count: int) -> str:
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return ",".join(f"127.0.0.1:{sock.getsockname()[1]}" for sock in socks)


@contextmanager
def rank(number: int, peers: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    start = "from hcsim.cli import main; main()"
    command = [sys.executable, "-c", start, "rank", "--peers", peers, "--rank", str(number), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def results(output: str) -> list[str]:
    return re.findall(r"^result sha256 .*$", output, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "carrier"), [("", "shared memory"), ("ws://", "WebSocket")])
def test_both_worlds_come_to_the_same_result(scheme: str, carrier: str) -> None:
    peers = ",".join(f"{scheme}{peer}" for peer in free_peers(2).split(","))
    with rank(0, peers, *JOB) as zero, rank(1, peers, *JOB) as one:
        table, errors = zero.communicate(timeout=LIMIT_S)
        other_table, other_errors = one.communicate(timeout=LIMIT_S)
    assert (zero.returncode, one.returncode) == (0, 0), errors + other_errors
    assert table.startswith(f"all_gather of 2.93 KiB float32, 2 ranks, for real, rank 0 over {carrier}\n")
    assert table.count("exact") == 2
    assert other_table == table.replace(", rank 0 over ", ", rank 1 over ")
    virtual = CliRunner().invoke(app, ["bench", "two-macs-wifi", *JOB])
    assert results(table) == results(virtual.stdout) != []


@pytest.mark.slow
def test_ranks_with_unlike_jobs_are_told_so_though_each_would_only_wait_for_the_other() -> None:
    peers = free_peers(2)
    small = ("--set", "size=1 KiB")
    with rank(0, peers, *small) as zero, rank(1, peers, *small, "--operation", "broadcast") as one:
        _, errors = zero.communicate(timeout=LIMIT_S)
        _, other_errors = one.communicate(timeout=LIMIT_S)
    assert (zero.returncode, one.returncode) == (2, 2)
    for told in (errors, other_errors):
        assert "unlike settings: operation is all_reduce on rank 0 and broadcast on rank 1" in told


@pytest.mark.slow
def test_who_waits_says_for_whom_and_gives_up_in_time() -> None:
    ours, theirs = free_peers(2).split(",")
    with rank(0, f"{ours},{theirs}", "--wait", "200 ms") as zero:
        output, errors = zero.communicate(timeout=LIMIT_S)
    assert zero.returncode == 1
    assert output == ""
    assert f"waiting for rank 1 at {theirs}" in errors
    assert f"error: gave up waiting for rank 1 at {theirs}" in errors
    assert "are here" not in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_who_waits_says_at_once_and_in_the_end_whom_it_has_turned_away() -> None:
    peers = free_peers(2)
    host, port = peers.split(",")[0].split(":")
    with rank(0, peers, "--wait", "3 s") as zero:
        assert zero.stderr is not None
        assert zero.stderr.readline().startswith("waiting for rank 1")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n".ljust(100))
            said = zero.stderr.readline()
        _, errors = zero.communicate(timeout=LIMIT_S)
    assert re.fullmatch(r"a caller was refused: 127\.0\.0\.1:\d+ does not speak hcsim: .*\n", said)
    assert zero.returncode == 1
    assert f"rank 1 did not call within 3 s; {said}" in errors


@pytest.mark.slow
def test_everybody_knows_for_whom_all_wait() -> None:
    peers = free_peers(3)
    names = peers.split(",")
    with rank(0, peers, *JOB) as zero, rank(1, peers, *JOB) as one:
        assert one.stderr is not None
        assert one.stderr.readline() == f"waiting for rank 0 at {names[0]}\n"
        assert one.stderr.readline() == f"waiting for rank 2 at {names[2]}\n"
        with rank(2, peers, *JOB) as two:
            for process in (zero, one, two):
                _, errors = process.communicate(timeout=LIMIT_S)
                assert process.returncode == 0, errors
                assert "all ranks are here" in errors


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to a child")
def test_an_interrupt_ends_it_cleanly() -> None:
    with rank(0, free_peers(2)) as zero:
        assert zero.stderr is not None
        assert zero.stderr.readline().startswith("waiting for rank 1")
        zero.send_signal(signal.SIGINT)
        _, errors = zero.communicate(timeout=LIMIT_S)
    assert zero.returncode == 130
    assert errors == "interrupted\n"
