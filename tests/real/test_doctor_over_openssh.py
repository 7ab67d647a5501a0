"""`hcsim doctor --hosts` examines machines through OpenSSH and finds out which of them do not hear each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hcsim.doctor import CheckResult, HealthReport
from tests.real.namespaces import Process
from tests.real.secure_shell import SecureShell
from tests.real.together import Together, together


class Reports(msgspec.Struct):
    """What `--json` prints."""

    machines: dict[str, HealthReport]
    between: list[CheckResult]


@pytest.fixture
def ab(tmp_path: Path) -> Iterator[tuple[Together, SecureShell]]:
    with together(tmp_path, "ab") as cluster:
        yield cluster, SecureShell(*cluster.lan)


def examine(cluster: Together, shell: SecureShell, hosts: str) -> Process:
    search = f"PATH={shell.programs}:/usr/bin:/bin:/usr/sbin:/sbin"
    words = ("--hosts", hosts, "--device", "cpu", "--look", "6 s", "--json")
    return cluster.lan["a"].start("env", search, str(shell.programs / "hcsim"), "doctor", *words)


def read(here: Process) -> Reports:
    text = "\n".join(here.lines)
    return msgspec.json.decode(text[text.index("{") :], type=Reports)


@pytest.mark.slow
def test_two_machines_are_examined_and_one_that_drops_multicast_is_found(ab: tuple[Together, SecureShell]) -> None:
    cluster, shell = ab
    healthy = examine(cluster, shell, "b")
    assert healthy.ends() == 0, healthy.text
    found = read(healthy)
    assert [*found.machines] == ["here", "b"]
    assert [finding.check for finding in found.between] == ["versions"]

    for machine in cluster.lan:  # both: a query that gets through is answered by unicast
        machine.drop_multicast()
    deaf = examine(cluster, shell, "b")
    assert deaf.ends() == 1, deaf.text
    found = read(deaf)
    wrong = {finding.found for finding in found.between if finding.state == "bad"}
    assert wrong == {"here does not hear b", "b does not hear here"}


@pytest.mark.slow
def test_a_machine_that_ssh_does_not_reach_is_named(ab: tuple[Together, SecureShell]) -> None:
    cluster, shell = ab
    shell.servers["b"].kill()
    here = examine(cluster, shell, "b")
    assert here.ends() == 1, here.text
    (finding,) = [finding for finding in read(here).between if finding.check == "b"]
    assert "Connection refused" in finding.found
    assert "Remote Login" in finding.remedy
