"""`hcsim run --real --hosts` through OpenSSH: what starts, what ends with whom, and what is said when it cannot be."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.namespaces import PATIENCE_S, Machine, Process
from tests.real.secure_shell import SecureShell
from tests.real.together import Together, digest, plan, said, together

pytestmark = pytest.mark.slow

long = pytest.mark.namespaces_long
ENDLESS = ("--steps", "1000000")


@pytest.fixture
def abc(tmp_path: Path) -> Iterator[tuple[Together, SecureShell]]:
    with together(tmp_path, "abc") as cluster:
        yield cluster, SecureShell(*cluster.lan)


def start(cluster: Together, shell: SecureShell, hosts: str, *more: str) -> Process:
    """Train on a and on these, which are started from there."""
    search = f"PATH={shell.programs}:/usr/bin:/bin"
    job = str(cluster.write(1 + len(hosts.split(",")), 20))
    command = (str(shell.programs / "hcsim"), "run", "--real", job, "--set", "name=a", "--set", "device=cpu")
    return cluster.lan["a"].start("env", search, *command, "--hosts", hosts, *more)


def inside(machine: Machine, words: str) -> list[int]:
    """The processes on a machine whose command has these words."""
    listed = subprocess.run(["ip", "netns", "pids", machine.namespace], capture_output=True, text=True, check=True)
    commands = {int(pid): Path(f"/proc/{pid}/cmdline") for pid in listed.stdout.split()}
    return [pid for pid, path in commands.items() if path.exists() and words in path.read_text().replace("\0", " ")]


def ends_on(machine: Machine) -> None:
    """Wait until no hcsim runs there."""
    for pid in inside(machine, "hcsim.cli.main() run"):
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([process], [], [], PATIENCE_S)
        os.close(process)
        assert ended, f"hcsim still runs on {machine.name}"


def test_another_machine_trains_and_an_interrupt_here_ends_it(abc: tuple[Together, SecureShell]) -> None:
    cluster, shell = abc
    here = start(cluster, shell, "b", *ENDLESS)
    here.says("step 5 of")
    here.send(signal.SIGINT)
    assert here.ends() == 0, here.text
    # b hears of it a moment later, and may have taken a step of its own by then.
    told = [said(line) for line in here.lines]
    assert any(line.startswith("b: parameters sha256 ") for line in told)
    assert "b: leaving after this step; whoever started us has gone (once more to stop at once)" in told
    assert not inside(cluster.lan["b"], "hcsim.cli.main() run")
    assert "b: ..." not in told


@long
def test_three_machines_train_to_the_end_and_their_words_are_marked(abc: tuple[Together, SecureShell]) -> None:
    cluster, shell = abc
    here = start(cluster, shell, "b,c")
    assert here.ends() == 0, here.text
    assert digest(here) == cluster.reference(plan(here))
    for name in ("b", "c"):
        assert f"{name}: parameters sha256 {digest(here)}" in [said(line) for line in here.lines]


@long
def test_what_was_started_ends_when_we_are_killed(abc: tuple[Together, SecureShell]) -> None:
    cluster, shell = abc
    here = start(cluster, shell, "b,c", *ENDLESS)
    here.says("step 5 of")
    here.send(signal.SIGKILL)
    for name in ("b", "c"):
        ends_on(cluster.lan[name])


@long
def test_a_connection_that_is_cut_ends_what_was_started_there_in_an_orderly_way(
    abc: tuple[Together, SecureShell],
) -> None:
    cluster, shell = abc
    here = start(cluster, shell, "b,c", *ENDLESS)
    seen = here.says("step 5 of")
    (client,) = inside(cluster.lan["a"], f"-F {shell.config} -o BatchMode=yes -o ConnectTimeout=10 -o "
                       "ServerAliveInterval=5 b ")  # fmt: skip
    os.kill(client, signal.SIGKILL)
    here.says(r"view \d+: .*\(b left\)", seen)
    ends_on(cluster.lan["b"])
    here.says("training goes on", seen)
    assert not [line for line in here.lines if "was lost" in line]
    here.send(signal.SIGINT)
    assert here.ends() == 0, here.text


@long
def test_a_machine_that_falls_silent_is_left_out_and_what_was_started_there_ends(
    abc: tuple[Together, SecureShell],
) -> None:
    cluster, shell = abc
    here = start(cluster, shell, "b,c", *ENDLESS)
    seen = here.says("step 5 of")
    cluster.lan["b"].unplug()
    here.says("b was lost", seen)
    here.says("b: the connection to it is lost; what was started there ends by itself", seen)
    ends_on(cluster.lan["b"])
    assert here.running
    here.send(signal.SIGINT)
    assert here.ends() == 0, here.text


@pytest.mark.parametrize(
    ("hosts", "more", "told"),
    [
        ("b", ("--set", "remote_hcsim=/opt/hcsim"), "b has no program '/opt/hcsim': say what it is called there"),
        ("nowhere", (), "ssh does not get to nowhere: ssh: Could not resolve hostname nowhere"),
    ],
    ids=["no program", "no host"],
)
@long
def test_what_cannot_be_started_is_named(
    abc: tuple[Together, SecureShell], hosts: str, more: tuple[str, ...], told: str
) -> None:
    cluster, shell = abc
    here = start(cluster, shell, hosts, *more)
    assert here.ends() == 1
    assert told in here.lines[-1]
    assert "Traceback" not in here.text


@long
def test_keys_that_do_not_fit_are_named_in_the_words_of_ssh(abc: tuple[Together, SecureShell]) -> None:
    cluster, shell = abc
    shell.new_key()
    here = start(cluster, shell, "b")
    assert here.ends() == 1
    assert "ssh does not get to b: " in here.lines[-1]
    assert "Permission denied (publickey); try `ssh b true` until that works" in here.lines[-1]
    shell.forget_hosts()
    here = start(cluster, shell, "b")
    assert here.ends() == 1
    assert "ssh does not get to b: Host key verification failed; try `ssh b true` until that works" in here.lines[-1]


@long
def test_one_without_the_clusters_secret_says_so_and_nobody_waits_for_it(abc: tuple[Together, SecureShell]) -> None:
    cluster, shell = abc
    (cluster.lan["c"].folder / "clusters" / "home").unlink()
    here = start(cluster, shell, "b,c")
    assert here.ends() == 1
    assert "c cannot take part: error: this machine has joined no cluster" in here.text
    ends_on(cluster.lan["b"])
