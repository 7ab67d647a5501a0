"""Programs on other machines that do not even begin. ssh is a script that ends by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hcsim.real.ssh import remotes

SIGN = "..."


def outcome(folder: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> tuple[str, list[str]]:
    """Why it did not begin, as far as that is known when it has ended, and what was told meanwhile."""
    ssh = folder / "ssh"
    ssh.write_text(f"#!/bin/sh\n{does}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    told: list[str] = []

    async def start() -> str:
        async with remotes(told.append, SIGN, 60.0) as started:
            await started.start("mini", ("hcsim", "run"), "job\n")
            await asyncio.wait([started.failed], timeout=0.0 if "read" in does else 60.0)
        return str(started.failed.result()) if started.failed.done() else ""

    return asyncio.run(start()), told


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("echo Killed; exit 137", "hcsim did not begin on mini: it ended with status 137: Killed"),
        ("exit 1", "hcsim did not begin on mini: it ended with status 1 and gave no reason"),
        ("echo maintenance; exit 0", "hcsim did not begin on mini: it ended with status 0: maintenance"),
        ("echo no such file; exit 2", "mini cannot take part: no such file"),
    ],
)
def test_one_that_ends_before_it_has_begun_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, why: str
) -> None:
    assert outcome(tmp_path, monkeypatch, does)[0] == why


def test_one_that_was_let_go_need_not_have_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, told = outcome(tmp_path, monkeypatch, "while read line; do :; done; exit 3")
    assert failed == ""
    assert told == ["mini: ended with status 3"]


SEVERAL = """
for host; do case $host in mini|air|studio) break;; esac; done
case $host in
    mini) echo "no such file"; exit 2;;
    air) echo "ssh: Could not resolve hostname air"; exit 255;;
    studio) echo "..."; while read line; do :; done;;
esac
"""


def test_of_several_machines_each_that_has_not_begun_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\n{SEVERAL}")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    told: list[str] = []

    async def start() -> str:
        async with remotes(told.append, SIGN, 60.0) as started:
            await started.start_all(dict.fromkeys(("mini", "studio", "air"), ("hcsim", "run")), "job\n")
            return str(await asyncio.wait_for(started.failed, 60.0))

    assert asyncio.run(start()).splitlines() == [
        "2 of 3 machines have not begun:",
        "  mini cannot take part: no such file",
        "  ssh does not get to air: ssh: Could not resolve hostname air; try `ssh air true` until that works",
    ]
    assert told[0] == "starting on mini, studio, air"
    assert "studio: has begun (1 of 3)" in told
    assert "mini: has not begun: mini cannot take part: no such file" in told
