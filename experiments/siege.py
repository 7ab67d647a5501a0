"""What a stranger on the local network can cost a cluster that trains: `python -m experiments.siege` (Linux, root).

Three machines in network namespaces train while a fourth one, which does not know the secret, besieges them in one
way after the other. The table says, for each siege, how many steps per second there were, relative to the calm time
before it, and the most descriptors and memory that a machine had, and the lines that it wrote meanwhile. All machines
share this one's processors, and to send a flood takes a part of them: in the calm time before a flood the stranger
sends the same packets to a port where nobody listens.
"""

from __future__ import annotations

import argparse
import itertools
import re
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hcsim.real.keys import load_node_key, load_secret
from tests.real.forged import GROUP, announcement, ghost, sender
from tests.real.namespaces import Machine, Process, ip, lan, obstacle
from tests.real.together import join
from tests.real.together import members as newest_members

MEMBERS = ("a", "b", "c")
STRANGER = "s"
CONTROL, GRADIENTS, METRICS = 52415, 52416, 9100
RATE = 1000
"""Packets a second."""
CONNECTIONS = 400
"""Of one siege, at each port."""
SOURCES = 100
"""Addresses of a stranger that has many."""
DESCRIPTORS = 256
"""As many as a machine may have: fewer than there are connections in a siege."""
JOB = """
name = "siege"
seed = 1
[cluster]
preset = "low_latency"
nodes = 3
[training]
task = "convex"
algorithm = "ring"
steps = 1000000
evaluate_every = 10
"""


class Target(NamedTuple):
    """What a stranger knows: addresses, and what members announce to everybody."""

    ours: str
    addresses: tuple[str, ...]
    nodes: tuple[str, ...]
    namespace: str
    port: int
    """Where a flood goes."""


class Sample(NamedTuple):
    """How a member stands."""

    at_s: float
    step: int
    descriptors: int
    memory_mb: float
    lines: int


Siege = Callable[[Target], None]


def flood(packets: Iterator[bytes], target: Target, sources: Sequence[str]) -> None:
    """Send at `RATE`, from these addresses in turn, for ever (until killed)."""
    socks = [sender(source) for source in sources]
    began_s = time.monotonic()
    for number, packet in enumerate(packets):
        socks[number % len(socks)].sendto(packet, (GROUP[0], target.port))
        ahead_s = began_s + number / RATE - time.monotonic()
        if ahead_s > 0.005:
            time.sleep(ahead_s)


def ghosts(target: Target) -> Iterator[bytes]:
    """Nodes that do not exist, at addresses of this network where nobody is."""
    for number in itertools.count(1):
        yield ghost(number, target.namespace, f"10.99.0.{100 + number % 100}", 1 + number % 60000)


def claims(target: Target) -> Iterator[bytes]:
    """The members themselves, at other addresses, and their goodbyes."""
    for number in itertools.count(1):
        node = target.nodes[number % len(target.nodes)]
        where = f"10.99.0.{100 + number % 100}"
        said = {"node": node, "namespace": target.namespace, "boot": f"{number:x}", "at": f"{where}:{CONTROL}"}
        name = f"{MEMBERS[number % len(MEMBERS)]}-{node[:8]}"
        yield announcement(name, where, CONTROL, said, 0 if number % 3 == 0 else 4500)


def many_sources(target: Target) -> tuple[str, ...]:
    """Give this machine more addresses."""
    sources = tuple(f"10.99.1.{number}" for number in range(1, SOURCES + 1))
    for source in sources:
        ip("addr", "replace", f"{source}/16", "dev", "eth0")
    return sources


def hold(target: Target, ports: Sequence[int], talk: Callable[[socket.socket], None]) -> None:
    """Open connections to all members, keep them as long as they let us, and open new ones in their place."""
    places = [(address, port) for address in target.addresses for port in ports]
    held: dict[tuple[str, int], list[socket.socket]] = {place: [] for place in places}
    while True:
        for place, socks in held.items():
            for sock in [sock for sock in socks if _ended(sock)]:
                sock.close()
                socks.remove(sock)
            for _ in range(min(20, CONNECTIONS - len(socks))):
                sock = socket.socket()
                sock.settimeout(0.2)
                try:
                    sock.connect(place)
                    talk(sock)
                except OSError:
                    sock.close()
                    break
                socks.append(sock)
        time.sleep(0.05)


def _ended(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def client_hello() -> bytes:
    """The first message of a TLS client."""
    written = ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    try:
        context.wrap_bio(ssl.MemoryBIO(), written).do_handshake()
    except ssl.SSLWantReadError:
        return written.read()
    raise AssertionError


def say(data: bytes) -> Callable[[socket.socket], None]:
    """Have a connection begin with this."""
    return lambda sock: sock.sendall(data)


BAD_HTTP = (
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\x00\x1b[2J: y\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00" * 20,
    b"GET " + b"/" * 20000 + b" HTTP/1.1\r\n\r\n",
    b"POST /metrics HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"GET /metrics HTTP/9.9\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
)


def malformed(target: Target) -> None:
    """Requests that are none, to the metrics ports."""
    for number in itertools.count():
        for address in target.addresses:
            with socket.socket() as sock:
                sock.settimeout(0.2)
                try:
                    sock.connect((address, METRICS))
                    sock.sendall(BAD_HTTP[number % len(BAD_HTTP)])
                    sock.recv(1000)
                except OSError:
                    pass


SIEGES: dict[str, Siege] = {
    f"{RATE} ghosts/s": lambda target: flood(ghosts(target), target, [target.ours]),
    f"{RATE} ghosts/s, {SOURCES} sources": lambda target: flood(ghosts(target), target, many_sources(target)),
    f"{RATE} claims and goodbyes/s": lambda target: flood(claims(target), target, [target.ours]),
    "idle connections": lambda target: hold(target, (CONTROL, GRADIENTS, METRICS), lambda sock: None),
    "half-open TLS": lambda target: hold(target, (CONTROL, GRADIENTS), say(client_hello())),
    "malformed HTTP": malformed,
}


class Besieged:
    """The members' processes, and what is read from them."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = processes

    @property
    def leader(self) -> Process:
        """Of the newest view."""
        name = newest_members(self._processes[0])[0]
        return next(process for process in self._processes if process.machine.name == name)

    def samples(self) -> list[Sample]:
        """One of each member."""
        return [_sample(process) for process in self._processes]

    def during(self, seconds: float) -> tuple[float, list[Sample], list[Sample]]:
        """Steps per second in that time, and the members before it and at their largest."""
        first = largest = self.samples()
        while (now := self.samples())[0].at_s < first[0].at_s + seconds:
            pairs = zip(largest, now, strict=True)
            largest = [Sample(*map(max, one, other)) for one, other in pairs]
            time.sleep(0.2)
        steps = max(each.step for each in now) - max(each.step for each in first)  # whoever leads tells of them
        return (
            steps / (now[0].at_s - first[0].at_s),
            first,
            [Sample(*map(max, one, other)) for one, other in zip(largest, now, strict=True)],
        )

    def check(self) -> None:
        """All live, and have shown no traceback."""
        for process in self._processes:
            assert process.running, process.text[-4000:]
            assert "Traceback" not in process.text, process.text[-4000:]


def _sample(process: Process) -> Sample:
    steps = [int(found[1]) for line in process.lines[-200:] if (found := re.search(r"step (\d+) of", line))]
    lines = sum("step" not in line for line in process.lines)
    return Sample(time.monotonic(), steps[-1] if steps else 0, process.descriptors, process.memory_mb, lines)


def start(machine: Machine, job: Path) -> Process:
    """Have a machine take part, with few descriptors."""
    return machine.start(
        "prlimit", f"--nofile={DESCRIPTORS}", sys.executable, "-c", "import hcsim.cli; hcsim.cli.main()",
        "run", "--real", str(job), "--set", f"name={machine.name}", "--set", "device=cpu",
        "--set", f"metrics={METRICS}",
    )  # fmt: skip


def study(names: Sequence[str], seconds: float, folder: Path) -> None:
    """Besiege a cluster in these ways and print a row for each."""
    with lan(folder, [*MEMBERS, STRANGER]) as machines:
        members = [machines[name] for name in MEMBERS]
        join(*members)
        job = folder / "job.toml"
        job.write_text(JOB)
        cluster = Besieged(processes := [start(machine, job) for machine in members])
        processes[0].says("training begins")
        cluster.leader.says("step 20 of")
        namespace = load_secret(members[0].folder, "home").namespace.hex()
        nodes = [load_node_key(machine.folder).node_id for machine in members]
        stranger = machines[STRANGER]
        known = [stranger.ip, ",".join(machine.ip for machine in members), ",".join(nodes), namespace]
        print(f"| siege | steps/s calm | steps/s | of calm | descriptors | new | MB | new | lines |\n|{'---|' * 9}")
        for name in names:
            command = [sys.executable, "-m", "experiments.siege", "--stranger", name, *known]
            aside = [stranger.start(*command, str(GROUP[1] + 1))] if "/s" in name else []
            time.sleep(1.0)
            calm, *_ = cluster.during(seconds)
            for process in aside:
                process.kill()
            besieger = stranger.start(*command, str(GROUP[1]))
            time.sleep(1.0)
            besieged, before, largest = cluster.during(seconds)
            besieger.kill()
            cluster.check()
            new = [
                [after - ours for ours, after in zip(*pair, strict=True)] for pair in zip(before, largest, strict=True)
            ]
            print(
                f"| {name} | {calm:.1f} | {besieged:.1f} | {besieged / calm:.0%} "
                f"| {max(each.descriptors for each in largest)} | {max(each[2] for each in new)} "
                f"| {max(each.memory_mb for each in largest):.0f} | {max(each[3] for each in new):.0f} "
                f"| {max(each[4] for each in new)} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each siege lasts, and the calm before it")
    parser.add_argument("--only", help="sieges whose name contains this")
    parser.add_argument("--stranger", nargs=6, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.stranger:
        name, ours, addresses, nodes, namespace, port = asked.stranger
        SIEGES[name](Target(ours, tuple(addresses.split(",")), tuple(nodes.split(",")), namespace, int(port)))
        return
    if why_not := obstacle():
        sys.exit(why_not)
    with tempfile.TemporaryDirectory(prefix="hcsim-siege-") as folder:
        study([name for name in SIEGES if (asked.only or "") in name], asked.seconds, Path(folder))


if __name__ == "__main__":
    main()
