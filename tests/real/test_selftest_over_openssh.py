"""`hcsim selftest --hosts` tests other machines through OpenSSH, and the network between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hcsim.selftest.runner import JoinedReport
from tests.real.namespaces import Process
from tests.real.secure_shell import SecureShell
from tests.real.together import Together, together

pytestmark = pytest.mark.slow


@pytest.fixture
def abc(tmp_path: Path) -> Iterator[tuple[Together, SecureShell]]:
    with together(tmp_path, "abc") as cluster:
        yield cluster, SecureShell(*cluster.lan)


def run_selftest(cluster: Together, shell: SecureShell, *words: str) -> Process:
    search = f"PATH={shell.programs}:/usr/bin:/bin:/usr/sbin:/sbin"
    return cluster.lan["a"].start("env", search, str(shell.programs / "hcsim"), "selftest", "clocks", *words)


def read(here: Process) -> JoinedReport:
    return msgspec.json.decode(here.text[here.text.index("\n{") :], type=JoinedReport)


def test_three_machines_have_the_simulated_bits_and_one_that_is_not_reached_is_named(
    abc: tuple[Together, SecureShell],
) -> None:
    cluster, shell = abc
    here = run_selftest(cluster, shell, "--hosts", "b,c", "--json")
    assert here.ends() == 0, here.text
    report = read(here)
    assert [[result.check for result in machine.results] for machine in report.machines] == [["clocks"]] * 3
    first, *links = report.between
    assert "collectives of 3 machines have the simulated bits, over TLS" in first.found
    assert [link.found.partition(":")[0] for link in links] == ["machine 2", "machine 3"]
    assert any(line.startswith("b: ✓ clocks") for line in here.lines)

    shell.servers["c"].kill()
    here = run_selftest(cluster, shell, "--hosts", "b,c")
    assert here.ends() == 1, here.text
    assert any(line.startswith("✗ c ") and "Connection refused" in line for line in here.lines)
    assert "collectives of 2 machines have the simulated bits, over TLS" in here.text
    assert "Traceback" not in here.text


def test_a_machine_without_hcsim_is_named(abc: tuple[Together, SecureShell]) -> None:
    cluster, shell = abc
    here = run_selftest(cluster, shell, "--hosts", "b", "--program", "/nowhere/hcsim")
    assert here.ends() == 1
    assert any(line.startswith("✗ b ") and "hcsim was not found there" in line for line in here.lines)
