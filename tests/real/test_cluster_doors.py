"""Who a real cluster shows itself to, and who it does not let in; and what it says about itself when it is asked."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hcsim.real.keys import load_node_key, load_secret
from tests.real.namespaces import Machine, Process
from tests.real.together import SLOW_KBIT, Together, join, members, together

pytestmark = pytest.mark.slow

BROWSE = """
import json, time
from zeroconf import IPVersion, ServiceBrowser, Zeroconf
found = {}
class Listener:
    def add_service(self, zc, kind, name):
        info = zc.get_service_info(kind, name)
        if info:
            found[name] = [info.parsed_addresses(IPVersion.V4Only), info.parsed_addresses(IPVersion.V6Only), info.port]
    update_service = remove_service = lambda *_: None
zc = Zeroconf()
ServiceBrowser(zc, "_hcsim._tcp.local.", Listener())
for _ in range(600):
    if len(found) >= 2:
        break
    time.sleep(0.1)
zc.close()
print(json.dumps(found))
"""
PLAINTEXT = """
import socket
with socket.create_connection(("{ip}", 52415), timeout=60) as caller:
    caller.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    caller.settimeout(60)
    answer = caller.recv(4096)
print("alert" if answer[:1] == bytes([21]) else answer)
"""


@contextmanager
def training(folder: Path) -> Iterator[tuple[Together, list[Process]]]:
    """a and b train, slowly; s is on the same switch and has a cluster of its own."""
    with together(folder, "abs") as cluster:
        stranger = cluster.lan["s"]
        (stranger.folder / "clusters" / "home").unlink()
        join(stranger)
        cluster.write(2, 100_000)
        processes = cluster.start("a", "b")
        processes[0].says("training begins")
        cluster.lan["b"].slow(SLOW_KBIT)
        yield cluster, processes


def done(machine: Machine, *command: str, status: int = 0) -> str:
    process = machine.start(*command)
    assert process.ends() == status, process.text
    assert "Traceback" not in process.text
    return process.text


def hcsim(machine: Machine, *arguments: str, status: int = 0) -> str:
    process = machine.hcsim(*arguments)
    assert process.ends() == status, process.text
    assert "Traceback" not in process.text
    return process.text


def test_a_running_cluster_is_seen_asked_and_closed_to_strangers(tmp_path: Path) -> None:
    with training(tmp_path) as (cluster, (a, b)):
        stranger = cluster.lan["s"]

        # Any program on the network sees who is there, with all addresses.
        seen = json.loads(done(stranger, sys.executable, "-c", BROWSE).splitlines()[-1])
        for machine in (a.machine, b.machine):
            name = f"{machine.name}-{load_node_key(machine.folder).node_id[:8]}._hcsim._tcp.local."
            assert seen[name] == [[machine.ip], [machine.ip6], 52415]
        assert load_secret(a.machine.folder, "home").phrase() not in json.dumps(seen)

        # A member is told who leads, and how they are connected: through the network's announcements or by address.
        for given in ((), ("--peer", a.machine.ip, "--look", "10 ms")):
            told = hcsim(b.machine, "cluster", "status", *given)
            leader, other = members(a)
            assert re.search(rf"^ {leader} +\w+ +leads", told, re.MULTILINE)
            assert re.search(rf"^ {other} +\w+ +member", told, re.MULTILINE)
            ends = rf"{re.escape(a.machine.ip)} +{re.escape(b.machine.ip)}"
            assert re.search(rf"^ a +b +{ends} +\w+ +[\d.]+ (ms|µs|s) +[\d.]+", told, re.MULTILINE), told

        # A stranger is not, by the same ways.
        assert "no node of the cluster 'home' answers" in hcsim(stranger, "cluster", "status", status=1)
        refused = hcsim(stranger, "cluster", "status", "--peer", a.machine.ip, "--look", "10 ms", status=1)
        assert "hcsim cluster join" in refused
        seen_by_a = a.says(f"a call was not taken: {re.escape(stranger.ip)}.*hcsim cluster join")

        # Nor is one that does not even encrypt.
        assert done(stranger, sys.executable, "-c", PLAINTEXT.format(ip=a.machine.ip)) == "alert"
        a.says(f"{re.escape(stranger.ip)}.* speaks plaintext where TLS is needed", seen_by_a)

        # It would train with them, and hears why it does not; they go on.
        cluster.write(2, 10, f'peers = ["{a.machine.ip}"]')
        (outside,) = cluster.start("s")
        outside.says(f"{re.escape(a.machine.ip)}:52415 was not reached: we refused .*hcsim cluster join")
        (leader,) = [process for process in (a, b) if process.machine.name == members(a)[0]]
        leader.says("step .* of", len(leader.lines))
        assert "view" not in outside.text
        told = [line for line in a.lines if "a call was not taken" in line and "plaintext" not in line]
        assert len(told) == 1, "the same refusal is told once"

        # The leader goes for good: the other waits for it until a member, and no stranger, says that it need not.
        (other,) = [process for process in (a, b) if process is not leader]
        leader.kill()
        seen = other.says("cannot decide alone.* hcsim cluster forget NAME")
        at_the_other = ("--peer", other.machine.ip, "--look", "10 ms")
        gone = leader.machine.name
        assert "hcsim cluster join" in hcsim(stranger, "cluster", "forget", gone, *at_the_other, status=1)
        assert "nobody waits for 'x'" in hcsim(other.machine, "cluster", "forget", "x", *at_the_other, status=1)
        here = other.machine.name
        assert f"{here} answers" in hcsim(other.machine, "cluster", "forget", here, *at_the_other, status=1)
        assert f"{here} will go on without it" in hcsim(other.machine, "cluster", "forget", gone, *at_the_other)
        other.says("1 member", seen)


def test_what_people_read_when_something_is_missing(tmp_path: Path) -> None:
    with together(tmp_path, "ab") as cluster:
        job = str(cluster.write(2, 10))
        (tmp_path / "b" / "clusters" / "home").unlink()
        assert "hcsim cluster create" in hcsim(cluster.lan["b"], "run", "--real", job, status=2)
        (a,) = cluster.start("a")
        a.says("waiting for 1 other node")
        a.says("a is node")
        again = hcsim(cluster.lan["a"], "run", "--real", job, "--set", "device=cpu", status=2)
        assert "52415" in again
        assert "does hcsim run here already?" in again


def test_whoever_waits_alone_and_is_interrupted_ends_at_once(tmp_path: Path) -> None:
    with together(tmp_path, "a") as cluster:
        cluster.write(2, 10)
        (alone,) = cluster.start("a")
        alone.says("a is node")
        alone.send(signal.SIGINT)
        assert alone.ends() == 1
        assert "left before training began" in alone.text
