"""`hcsim run --real --hosts`: the others are started from here. ssh is a script that enters a namespace instead."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hcsim.config import Cluster, Training, parse_scenario, write_job
from hcsim.config.cluster import Heartbeat
from hcsim.units import PositiveBytes, PositiveSeconds
from tests.real.namespaces import Process
from tests.real.together import Together, digest, plan, said, together

pytestmark = pytest.mark.slow

SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
if [ ! -d {folder}/$host ]; then echo "ssh: Could not resolve hostname $host" >&2; exit 255; fi
exec ip netns exec {prefix}-$host unshare --uts env HCSIM_HOME={folder}/$host \\
    sh -c "echo $host > /proc/sys/kernel/hostname; $*"
"""
HCSIM = """#!/bin/sh
exec {python} -c 'import hcsim.cli; hcsim.cli.main()' "$@"
"""


@pytest.fixture
def ab(tmp_path: Path) -> Iterator[Together]:
    with together(tmp_path, "ab") as cluster:
        prefix = cluster.lan["a"].namespace.removesuffix("-a")
        for name, text in (("ssh", SSH), ("hcsim", HCSIM)):
            program = tmp_path / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(text.format(folder=tmp_path, prefix=prefix, python=sys.executable))
            program.chmod(0o755)
        yield cluster


def start(cluster: Together, hosts: str, *more: str) -> Process:
    a = cluster.lan["a"]
    programs = a.folder.parent / "bin"
    command = ("env", f"PATH={programs}:/usr/sbin:/usr/bin:/sbin:/bin", str(programs / "hcsim"), "run", "--real")
    job = str(cluster.write(2, 30))
    return a.start(*command, job, "--set", "name=a", "--set", "device=cpu", "--hosts", hosts, *more)


def test_the_other_machine_is_started_trains_with_us_and_its_words_are_marked(ab: Together) -> None:
    here = start(ab, "b")
    assert here.ends() == 0, here.text
    told = [said(line) for line in here.lines]
    assert [line for line in told if line.startswith("b: parameters sha256")] == [
        f"b: parameters sha256 {digest(here)}"
    ]
    ((_, names),) = plan(here)
    assert sorted(names) == ["a", "b"]
    assert ab.reference(plan(here)) == digest(here)


def test_a_hostfile_names_this_machine_too_and_the_lines_of_all_are_kept_in_one_file(
    ab: Together, tmp_path: Path
) -> None:
    hosts, log = tmp_path / "hosts.json", tmp_path / "all.log"
    hosts.write_text(json.dumps([{"ssh": name, "ips": [ab.lan[name].ip]} for name in ("a", "b")]))
    here = start(ab, str(hosts), "--set", f"log={log}")
    assert here.ends() == 0, here.text
    assert "starting on b" in [said(line) for line in here.lines]
    for name in ("a", "b"):
        assert f" at {ab.lan[name].ip}" in here.text, "each is reached where the file says, and only there"
    assert ab.reference(plan(here)) == digest(here)
    kept = [line.partition(" ")[2] for line in log.read_text().splitlines()]
    assert {line.partition(": ")[0] for line in kept} == {"a", "b"}
    assert f"b: parameters sha256 {digest(here)}" in kept
    assert any(line.startswith("a: view ") for line in kept)


def test_an_interrupt_here_ends_the_other_machine_too(ab: Together) -> None:
    here = start(ab, "b", "--steps", "100000")
    here.says("step 5 of")
    here.send(signal.SIGINT)
    assert here.ends() == 0, here.text
    assert "b: parameters sha256" in here.text
    assert "b: leaving after this step; whoever started us has gone" in here.text


def test_a_host_that_ssh_does_not_reach_ends_the_run_with_the_reason(ab: Together) -> None:
    here = start(ab, "nowhere")
    assert here.ends() == 1
    assert "ssh does not get to nowhere: ssh: Could not resolve hostname nowhere" in here.text
    assert "Traceback" not in here.text


def test_a_host_without_hcsim_is_named(ab: Together) -> None:
    here = start(ab, "b", "--set", "remote_hcsim=/nowhere/hcsim")
    assert here.ends() == 1
    assert "b has no program '/nowhere/hcsim'" in here.text


def test_a_host_that_has_not_joined_says_so_and_nobody_waits_for_it(ab: Together) -> None:
    (ab.lan["b"].folder / "clusters" / "home").unlink()
    here = start(ab, "b")
    assert here.ends() == 1
    assert "b cannot take part: error: this machine has joined no cluster" in here.text


def test_a_job_that_was_written_reads_as_the_same() -> None:
    cluster = Cluster(
        nodes=3, peers=("a:1", "[fd::1]:2"), discover=False, quorum="any", preset="wifi",
        heartbeat=Heartbeat(interval_s=PositiveSeconds(0.25), phi=3.5),
    )  # fmt: skip
    training = Training(
        task="text", batch=(3, 4), lr=0.1, clip=2.0, bucket_bytes=PositiveBytes(1000), scale_lr=True,
        timeout_s=PositiveSeconds(0.5), compressor="topk:0.01+ef",
    )  # fmt: skip
    read = parse_scenario(write_job("job", 5, cluster, training), "job")
    assert (read.seed, read.cluster, read.training) == (5, cluster, training)
