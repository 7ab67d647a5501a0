"""`hcsim coordinator`: a process that workers meet at, and what a person is told."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.cluster.coordinator import CoordinatorClient
from hcsim.real.host import RealHost, RealOptions

LIMIT_S = 240


@pytest.mark.slow
def test_workers_meet_at_a_coordinator_that_is_a_process_of_its_own():
    start = "from hcsim.cli import main; main()"
    command = [sys.executable, "-u", "-c", start, "coordinator", "--listen", "127.0.0.1:0", "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = line.split()[2].rstrip(":")

            async def meet() -> list[str]:
                async with asyncio.timeout(LIMIT_S), RealHost(RealOptions("here")) as host:
                    one, other = [await CoordinatorClient.join(host, address, name, f"{name}:1") for name in ("a", "b")]
                    rosters = await asyncio.gather(one.ready(), other.ready())
                    await asyncio.gather(one.leave(), other.leave())
                    await one.close()
                    await other.close()
                    return [peer.worker for peer in rosters[0].peers]

            assert asyncio.run(meet()) == ["a", "b"]
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert "generation 1 begins, with 2 workers" in rest
    assert "b (rank 1) has left" in rest
    assert "Traceback" not in errors
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--workers", "0"), ["workers = 0"]),
        (("--workers", "2", "--least", "3"), ["least = 3"]),
        (("--workers", "2", "--begin", "3"), ["begin = 3", "1 to 2"]),
        (("--workers", "2", "--cluster", "home", "--insecure"), ["--cluster brings keys of its own"]),
        (("--workers", "2", "--cluster", "nowhere"), ["nowhere"]),
        (("--workers", "2", "--heartbeat", "0 s"), ["--heartbeat"]),
        (("--workers", "2", "--silence", "-1 s"), ["--silence"]),
        (("--workers", "2", "--silence", "1 s"), ["silence_s = 1", "2 s"]),
        (("--workers", "2", "--listen", "here"), ["'here' is not an address"]),
        (("--workers", "2", "--listen", "192.0.2.1:1"), ["plaintext"]),
        (("--workers", "2", "--tls-key", "me.key"), ["--tls-cert"]),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, told):
    result = CliRunner().invoke(app, ["coordinator", *arguments])
    assert result.exit_code == 2
    assert all(word in result.stderr for word in told)
