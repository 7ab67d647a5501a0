"""Machines on a switch, within one: network namespaces, each with an address, a key and a home folder of its own.

The switch is a bridge in a namespace of its own, so nothing of this is seen by the machine that the tests run on, and
what is sent stays inside. A cable can be pulled or be made slow, and the switch can be cut in two. Everything is
removed at the end, whatever happened, and nothing else is touched: names begin with this process's number.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Thread
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 240.0
"""Nothing here takes so long unless it hangs, however busy the machine."""
SEGMENT_BYTES = 1448
"""What a TCP segment carries in a packet of 1500 bytes, with timestamps."""
_HEADERS = 66
PEAK = 1.25
"""How much faster than its rate a port may be to catch up after the system has looked at it too late."""
_BURST_PIECES = 4
"""How much there may be to catch up."""
_COUNTER = itertools.count()


class Process:
    """A command on one of the machines, and what it has said so far."""

    def __init__(self, machine: Machine, command: Sequence[str], typed: str | None) -> None:
        self.machine = machine
        self._popen = subprocess.Popen(
            [*machine.prefix, *command], stdin=subprocess.PIPE if typed is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=machine.environment, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.times_s: list[float] = []
        """When each was said, on the monotonic clock."""
        self._news = Condition()
        self._ended = False
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        if typed is not None:
            assert self._popen.stdin is not None
            self._popen.stdin.write(typed)
            self._popen.stdin.close()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def descriptors(self) -> int:
        """How many it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    @property
    def memory_mb(self) -> float:
        """How much of it is resident."""
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None, self.text[-4000:]
        return int(found[1]) / 1024

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with self._news:
                self.times_s.append(time.monotonic())
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def says(self, pattern: str, after: int = 0) -> int:
        """Wait for a line that matches, from line number `after` on; returns the number of the line behind it."""

        def found() -> int | None:
            return next((n + 1 for n, line in enumerate(self.lines) if n >= after and re.search(pattern, line)), None)

        with self._news:
            self._news.wait_for(lambda: found() is not None or self._ended, PATIENCE_S)
            number = found()
        assert number is not None, f"{self.machine.name} never said {pattern!r}, but:\n{self.text}"
        return number

    def send(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    @property
    def running(self) -> bool:
        return self._popen.poll() is None

    def ends(self) -> int:
        """Wait for its end; the exit status."""
        try:
            status = self._popen.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.machine.name} does not end; it said:\n{self.text}") from None
        self._reader.join()
        return status

    def kill(self) -> None:
        """At once, with all that it has started."""
        if self.running:
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._reader.join()
        assert self._popen.stdout is not None
        self._popen.stdout.close()


class Port(NamedTuple):
    """A port of a switch.

    Machines hand over segments as they cross a wire: through a bucket of tokens as small as a port's, the system's
    usual pieces of 64 KB do not pass, and a larger bucket lets short messages pass at any speed."""

    kbit: int
    queue_bytes: int
    """What comes while so much waits is dropped."""
    segments: int = 1
    """How many segments are handed over at once: with one, a processor handles 80,000 a second for each Gbit/s."""

    @property
    def piece_bytes(self) -> int:
        return self.segments * (SEGMENT_BYTES + _HEADERS)

    @property
    def burst_bytes(self) -> int:
        """What passes at the peak rate after a pause."""
        return _BURST_PIECES * self.piece_bytes


class Machine:
    """One of the machines."""

    def __init__(self, name: str, number: int, namespace: str, switch: str, folder: Path) -> None:
        self.name = name
        self.ip = f"10.99.0.{number + 1}"
        self.ip6 = f"fd99::{number + 1:x}"
        self.folder = folder
        self.namespace = namespace
        self._switch = switch
        self._port = f"port{number}"
        self._processes: list[Process] = []
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("COLUMNS", "HCSIM"))}
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        return {
            **kept, **single, "HCSIM_HOME": str(self.folder), "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip

    def connect(self) -> None:
        """Lay the cable, and give it its addresses."""
        ip("-n", self._switch, "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns",
           self.namespace)  # fmt: skip
        ip("-n", self._switch, "link", "set", self._port, "master", "whole", "up")
        ip("-n", self.namespace, "link", "set", "lo", "up")
        ip("-n", self.namespace, "addr", "add", f"{self.ip}/24", "dev", "eth0")
        ip("-n", self.namespace, "addr", "add", f"{self.ip6}/64", "dev", "eth0", "nodad")
        ip("-n", self.namespace, "link", "set", "eth0", "up")

    def start(self, *command: str, typed: str | None = None) -> Process:
        """Run a command here."""
        process = Process(self, command, typed)
        self._processes.append(process)
        return process

    def hcsim(self, *arguments: str, typed: str | None = None) -> Process:
        """Run hcsim here."""
        return self.start(sys.executable, "-c", "import hcsim.cli; hcsim.cli.main()", *arguments, typed=typed)

    def unplug(self) -> None:
        """The interface goes down."""
        ip("-n", self.namespace, "link", "set", "eth0", "down")

    def plug(self) -> None:
        """The interface comes up again, as it was."""
        ip("-n", self.namespace, "link", "set", "eth0", "up")
        ip("-n", self.namespace, "addr", "replace", f"{self.ip6}/64", "dev", "eth0", "nodad")

    def put_on(self, bridge: str) -> None:
        """Plug the cable into one of the switch's halves."""
        ip("-n", self._switch, "link", "set", self._port, "master", bridge)

    def slow(self, kbit: int, burst: str = "3kb", back_kbit: int | None = None, queue: str = "2s") -> None:
        """The cable carries so many kbit/s, each way; or so many away from the machine, and others back."""
        for end, rate in zip(self._cable, (kbit, back_kbit or kbit), strict=True):
            _shape(end, rate, ("burst", burst, "latency", queue))

    def shape(self, port: Port) -> None:
        """The machine's port, in both directions, becomes one of a switch."""
        for namespace, device in self._cable:
            ip("-n", namespace, "link", "set", device, "gso_max_size", str(port.segments * SEGMENT_BYTES + _HEADERS),
               "gso_max_segs", str(port.segments))  # fmt: skip
            peak = ("peakrate", f"{round(PEAK * port.kbit)}kbit", "mtu", str(port.piece_bytes))
            limits = ("burst", str(port.burst_bytes), "limit", str(port.queue_bytes))
            _shape((namespace, device), port.kbit, (*limits, *peak))

    def control_congestion(self, control: str) -> None:
        """Connections to the others have this congestion control."""
        subnet = f"{self.ip.rpartition('.')[0]}.0/24"
        ip("-n", self.namespace, "route", "change", subnet, "dev", "eth0", "src", self.ip, "congctl", control)

    @property
    def _cable(self) -> tuple[tuple[str, str], ...]:
        """Both ends: a namespace, and the device there."""
        return (self.namespace, "eth0"), (self._switch, self._port)

    def silence(self, port: int) -> None:
        """What this machine would send from or to that TCP port is lost."""
        for side in ("sport", "dport"):
            ip("-n", self.namespace, "rule", "add", "ipproto", "tcp", side, str(port), "blackhole")

    def unsilence(self, port: int) -> None:
        """That port works again."""
        for side in ("sport", "dport"):
            ip("-n", self.namespace, "rule", "delete", "ipproto", "tcp", side, str(port), "blackhole")

    def drop_multicast(self) -> None:
        """The switch passes no multicast on to this machine, as many access points do not."""
        run("ip", "netns", "exec", self._switch, "bridge", "link", "set", "dev", self._port, "mcast_flood", "off")

    def lose_share(self, share: float) -> None:
        """So much of what comes here by TCP is lost, at random."""
        if shutil.which("nft") is None:
            pytest.skip("losses at random: `nft` (nftables) is not here")
        drops = f"meta l4proto tcp numgen random mod 1000000 < {round(1e6 * share)} drop"
        table = f"table ip losses {{\n chain c {{\n type filter hook input priority 0;\n {drops}\n }}\n}}\n"
        run("ip", "netns", "exec", self.namespace, "nft", table)

    def congestion_control(self, name: str) -> None:
        """Use this one for new connections."""
        run(*self.prefix, "sh", "-c", f"echo {name} > /proc/sys/net/ipv4/tcp_congestion_control")

    def lose(self, other: Machine) -> None:
        """What this machine sends to another one is lost."""
        for address in (f"{other.ip}/32", f"{other.ip6}/128"):
            ip("-n", self.namespace, "route", "replace", "blackhole", address)

    def find(self, other: Machine) -> None:
        """It arrives again."""
        for address in (f"{other.ip}/32", f"{other.ip6}/128"):
            ip("-n", self.namespace, "route", "delete", "blackhole", address)

    def fast(self) -> None:
        """As fast as the machine allows."""
        for namespace, device in self._cable:
            run("ip", "netns", "exec", namespace, "tc", "qdisc", "del", "dev", device, "root")

    def end(self) -> None:
        for process in self._processes:
            process.kill()


class Lan:
    """The machines, and the switch between them."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self.machines = {machine.name: machine for machine in machines}

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.machines.values())

    def cut_off(self, *names: str) -> None:
        """These hear each other, and the rest hear each other."""
        for machine in self:
            machine.put_on("half" if machine.name in names else "whole")

    def heal(self) -> None:
        self.cut_off()

    def slow(self, kbit: int) -> None:
        self._all(lambda machine: machine.slow(kbit))

    def fast(self) -> None:
        self._all(Machine.fast)

    def _all(self, change: Callable[[Machine], None]) -> None:
        for machine in self:
            change(machine)


@contextmanager
def lan(folder: Path, names: Sequence[str]) -> Iterator[Lan]:
    """Machines of these names on one switch; their homes are in the folder."""
    why_not = obstacle()
    if why_not:
        pytest.skip(why_not)
    prefix = f"hcsim-{os.getpid()}-{next(_COUNTER)}"
    switch = f"{prefix}-switch"
    made: list[str] = []
    machines: list[Machine] = []
    try:
        for namespace in (switch, *(f"{prefix}-{name}" for name in names)):
            ip("netns", "add", namespace)
            made.append(namespace)
        for bridge in ("whole", "half"):
            ip("-n", switch, "link", "add", bridge, "type", "bridge", "mcast_snooping", "0")
            ip("-n", switch, "link", "set", bridge, "up")
        for number, name in enumerate(names):
            machines.append(Machine(name, number, f"{prefix}-{name}", switch, folder / name))
            machines[-1].connect()
        yield Lan(machines)
    finally:
        for namespace in made:
            _end_all(namespace)
        for machine in machines:
            machine.end()
        for namespace in made:
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


def _end_all(namespace: str) -> None:
    """Also what was started there in a session of its own, as a server does for whoever logs in."""
    inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in inside.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def obstacle() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces: only on Linux"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces: `ip` and `tc` (iproute2) are not here"
    if os.geteuid() != 0:
        return "network namespaces: only for root"
    name = f"hcsim-{os.getpid()}-may-we"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces: root may not make any here (a container without CAP_SYS_ADMIN?)"
    inside = [["link", "add", "x", "type", "bridge"], ["link", "add", "y", "type", "veth", "peer", "name", "z"]]
    done = [subprocess.run(["ip", "-n", name, *each], capture_output=True, check=False).returncode for each in inside]
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return "network namespaces: this kernel has no bridge or no veth" if any(done) else ""


def _shape(end: tuple[str, str], kbit: int, limits: Sequence[str]) -> None:
    """What is sent from a device passes a bucket of tokens."""
    namespace, device = end
    run("ip", "netns", "exec", namespace, "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate",
        f"{kbit}kbit", *limits)  # fmt: skip


def ip(*arguments: str) -> None:
    run("ip", *arguments)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
