"""`hcsim doctor` names what is wrong with a machine, and finds nothing on a healthy one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest

from hcsim.cluster.probe import DeviceSpeed
from hcsim.config import Cluster
from hcsim.doctor import (
    FIREWALL,
    Ask,
    CheckResult,
    DoctorFacts,
    HealthReport,
    ThisSystem,
    check_announcing,
    check_device,
    check_firewall,
    check_interfaces,
    check_limits,
    check_loops,
    check_ports,
    check_power,
    check_python,
    check_system,
    compare,
    examine_host,
    judged_speed,
)
from hcsim.loops import LOOPS
from hcsim.runtime.host import Interface, Medium, Service, Sighting

PMSET = """\
System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                {sleep}
 hibernatemode        3
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
 lowpowermode         {low}
 womp                 1
"""
MAINS = "Now drawing from 'AC Power'\n"
BATTERY = """\
Now drawing from 'Battery Power'
 -InternalBattery-0 (id=4653155)\t87%; discharging; 6:12 remaining present: true
"""


class Recorded:
    """A Mac of which some answers were recorded; whatever was not is as on a healthy one."""

    platform = "darwin"

    def __init__(
        self,
        outputs: Mapping[tuple[str, ...], str] = {},
        interfaces: tuple[Interface, ...] = (Interface("en0", Medium.ETHERNET, 1e9, ("192.0.2.7",)),),
        missing: tuple[str, ...] = (),
        descriptors: tuple[int, int] = (10240, -1),
        folder: str = "/tmp",
        taken: Mapping[tuple[str, int], str] = {},
    ) -> None:
        self._outputs = {
            ("sw_vers", "-productVersion"): "15.3.1\n",
            ("sysctl", "-n", "sysctl.proc_translated"): "0\n",
            ("pmset", "-g"): PMSET.format(sleep="0", low=0),
            ("pmset", "-g", "batt"): MAINS,
            (FIREWALL, "--getglobalstate"): "Firewall is disabled. (State = 0)\n",
            **outputs,
        }
        self._interfaces, self._missing, self._descriptors = interfaces, missing, descriptors
        self._folder, self._taken = folder, taken

    def output(self, *command: str) -> str:
        known = [start for start in self._outputs if command[: len(start)] == start]
        return self._outputs[max(known, key=len)] if known else ""

    def interfaces(self) -> tuple[Interface, ...]:
        return self._interfaces

    def has_module(self, name: str) -> bool:
        return name not in self._missing

    def descriptors(self) -> tuple[int, int]:
        return self._descriptors

    def temporary_folder(self) -> str:
        return self._folder

    def bind(self, host: str, port: int) -> str:
        return self._taken.get((host, port), "")


def all_of(system: Recorded) -> list[CheckResult]:
    single = [check(system) for check in (check_system, check_loops, check_power, check_firewall)]
    return [*single, *check_ports(system, Cluster()), *check_interfaces(system), *check_limits(system)]


def test_a_healthy_mac_has_nothing_to_mend() -> None:
    found = all_of(Recorded())
    assert {finding.state for finding in found} == {"good"}
    assert not any(finding.remedy for finding in found)


def test_what_a_node_sees_to_itself_is_no_fault() -> None:
    """It keeps its machine awake, and raises the number of its open files."""
    sleepy = Recorded({("pmset", "-g"): PMSET.format(sleep="10", low=0)}, descriptors=(256, -1))
    found = {finding.check: finding for finding in all_of(sleepy)}
    assert {finding.state for finding in found.values()} == {"good"}
    assert "after 10 min" in found["power"].found
    assert "hcsim keeps it awake" in found["power"].found
    assert found["descriptors"].found == "10240"


WIFI = Interface("en0", Medium.WIFI, None, ("192.0.2.7",))
SLOW = Interface("en4", Medium.ETHERNET, 100e6, ("192.0.2.8",))
FAST = Interface("en5", Medium.ETHERNET, 2.5e9, ("192.0.2.9",))
MACHINES = Interface("bridge100", Medium.VIRTUAL, None, ("192.168.64.1",))
TUNNEL = Interface("utun4", Medium.TUNNEL, None, ("198.51.100.2",))
ROUTE = """\
   route to: default
destination: default
       mask: default
    gateway: 192.0.2.1
  interface: {device}
      flags: <UP,GATEWAY,DONE,STATIC,PRCLONING,GLOBAL>
"""
BRIDGE = Interface("bridge0", Medium.THUNDERBOLT, None, ("169.254.31.7",))


@pytest.mark.parametrize(
    ("system", "check", "state", "found", "remedy"),
    [
        (Recorded({("sw_vers", "-productVersion"): "13.6\n"}), "system", "bad", "macOS 13.6", "needs macOS 14"),
        (Recorded({("sysctl", "-n", "sysctl.proc_translated"): "1\n"}), "system", "bad", "Rosetta", "arm64"),
        (Recorded(missing=tuple(LOOPS)), "compiled loops", "warning", "compressors", "xcode-select --install"),
        (Recorded({("pmset", "-g", "batt"): BATTERY}), "power", "warning", "battery", "connect the power adapter"),
        (Recorded({("pmset", "-g"): PMSET.format(sleep="0", low=1)}), "power", "warning", "Low Power", "Never"),
        (
            Recorded(
                {
                    (FIREWALL, "--getglobalstate"): "Firewall is enabled. (State = 1)\n",
                    (FIREWALL, "--getblockall"): "Block all DISABLED! \n",
                    (FIREWALL, "--getappblocked"): "Incoming connection to the application is blocked\n",
                }
            ),
            "firewall", "bad", "blocks connections to this Python", "--unblockapp",
        ),
        (
            Recorded({(FIREWALL, "--getglobalstate"): "Firewall is enabled. (State = 1)\n",
                      (FIREWALL, "--getblockall"): "Block all ENABLED! \n"}),
            "firewall", "bad", "blocks all", "do not block all",
        ),
        (
            Recorded(
                {("lsof", "-nP", "-iTCP:52415"): "COMMAND PID USER FD TYPE NAME\nPython  4242 ann 9u IPv4 *:52415"},
                taken={("192.0.2.7", 52415): "Address already in use"},
            ),
            "port 52415", "bad", "taken at 192.0.2.7 by Python (process 4242)", "discovery_port=PORT",
        ),
        (Recorded(interfaces=(WIFI,)), "network", "warning", "Wi-Fi) is the fastest way", "connect a cable"),
        (Recorded(interfaces=(SLOW, WIFI)), "network", "warning", "en4 has only 100 Mb/s", "another cable"),
        (Recorded(interfaces=(BRIDGE, WIFI)), "network", "warning", "self-assigned", "networksetup -setmanual"),
        (
            Recorded({("route", "-n", "get", "default"): ROUTE.format(device="en0")}, interfaces=(FAST, WIFI)),
            "network", "warning", "en0 (Wi-Fi) is preferred to en5 (ethernet 2.5 Gb/s)", "Set Service Order",
        ),
        (Recorded(interfaces=(MACHINES, TUNNEL)), "network", "bad", "no other machine", "connect a cable"),
        (Recorded(interfaces=()), "network", "bad", "no interface has an address", "connect a cable"),
        (Recorded(descriptors=(256, 512)), "descriptors", "warning", "512 at once", "the hard limit, which is 512"),
        (Recorded(folder="/var/folders/" + "x" * 80), "temporary folder", "warning", "too long", "TMPDIR"),
    ],
)  # fmt: skip
def test_each_fault_is_named_with_its_remedy(system: Recorded, check: str, state: str, found: str, remedy: str) -> None:
    wrong = [finding for finding in all_of(system) if finding.state not in ("good", "skipped")]
    assert [finding.check for finding in wrong] == [check], "and no other alarm"
    assert wrong[0].state == state
    assert found in wrong[0].found
    assert remedy in wrong[0].remedy


def test_interfaces_are_listed_with_what_they_are_used_for() -> None:
    route = {("route", "-n", "get", "default"): ROUTE.format(device="en5")}
    (listed,) = check_interfaces(Recorded(route, interfaces=(FAST, WIFI, TUNNEL, MACHINES)))
    assert listed.state == "good"
    assert listed.found.split("; ") == [
        "en5 (ethernet 2.5 Gb/s) is used first, as the fastest medium here",
        "then en0 (wifi)",
        "offered to others in this order: 192.0.2.9, 192.0.2.7",
        "not offered: utun4 (tunnel), it leads through another interface",
        "not offered: bridge100 (virtual), it stays within this machine",
    ]


def test_an_old_python_is_named() -> None:
    assert check_python((3, 9, 6)).state == "bad"
    assert "3.11" in check_python((3, 9, 6)).remedy
    assert check_python().state == "good"


def test_a_port_that_a_program_holds_is_found_on_this_machine() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        assert ThisSystem().bind("127.0.0.1", port)
    assert not ThisSystem().bind("127.0.0.1", port)


class SilentLan:
    """A network that drops multicast: nothing comes back."""

    async def advertise(self, service: Service) -> str:
        return service.name

    async def withdraw(self, name: str) -> None:
        pass

    async def browse(self) -> AsyncIterator[Sighting]:
        await asyncio.Event().wait()
        yield Sighting(Service("never", "192.0.2.1:1"))

    async def close(self) -> None:
        pass


class EchoingLan(SilentLan):
    """One that carries it, with another machine in it."""

    async def browse(self) -> AsyncIterator[Sighting]:
        yield Sighting(Service("mini-2-doctor", "192.0.2.9:52415"))
        yield Sighting(self.announced)
        await asyncio.Event().wait()

    async def advertise(self, service: Service) -> str:
        self.announced = service
        return service.name


def test_dropped_multicast_is_named() -> None:
    finding, sees = asyncio.run(check_announcing(SilentLan(), "us", 0.05))
    assert (finding.state, sees) == ("bad", ())
    assert "[cluster] peers" in finding.remedy
    finding, sees = asyncio.run(check_announcing(EchoingLan(), "us", 0.05))
    assert (finding.state, sees) == ("good", ("mini-2-doctor",))


def test_a_slow_gpu_is_named() -> None:
    assert judged_speed("mps", "Apple M1 Max", DeviceSpeed(8e12, 300e9)).state == "good"
    slow = judged_speed("mps", "Apple M1 Max", DeviceSpeed(2e12, 300e9))
    assert slow.state == "warning"
    assert "19% of its peak" in slow.found
    assert judged_speed("cpu", "Apple M1 Max", DeviceSpeed(0.5e12, 60e9)).state == "good"


def test_this_machines_processor_takes_a_right_training_step() -> None:
    (finding,) = asyncio.run(check_device("cpu"))
    assert finding.state == "good"
    assert "GFLOP/s" in finding.found


def report(
    name: str, sees: tuple[str, ...], skew_s: float = 0.0, looked_s: tuple[float, float] = (1.0, 9.0), **versions: str
) -> HealthReport:
    known = {"hcsim": "0.1.0", "torch": "2.13.0", **versions}
    now_s = time.time() + skew_s
    facts = DoctorFacts(
        "Darwin 24", "Apple M4", known, now_s, name=name, announced=f"{name}-doctor", sees=sees, looked_s=looked_s
    )
    return HealthReport(facts, ())


def answer(status: int, output: str) -> Ask:
    async def ask(host: str) -> tuple[int, str]:
        return status, output

    return ask


def test_unlike_versions_and_machines_that_do_not_hear_each_other_are_named() -> None:
    alike = {"here": report("a", ("b-doctor",)), "b.local": report("b", ("a-doctor",))}
    assert [finding.state for finding in compare(alike)] == ["good"]
    found = compare({"here": report("a", ()), "b.local": report("b", ("a-doctor",), hcsim="0.0.9", torch="2.9.0")})
    assert [(finding.check, finding.state) for finding in found] == [
        ("version of hcsim", "bad"),
        ("version of torch", "warning"),
        ("multicast", "bad"),
    ]
    assert found[0].found == "0.1.0 on here; 0.0.9 on b.local"
    assert found[2].found == "here does not hear b.local"


def test_what_was_looked_for_too_briefly_is_named_as_not_checked() -> None:
    brief = {"here": report("a", (), looked_s=(1.0, 3.0)), "b": report("b", ("a-doctor",), looked_s=(2.0, 4.0))}
    _, finding = compare(brief)
    assert (finding.check, finding.state) == ("multicast", "skipped")
    assert finding.found == "not known whether here hears b: both looked for only 1.0 s together"
    assert "--look" in finding.remedy
    apart = {"here": report("a", (), looked_s=(1.0, 3.0)), "b": report("b", (), looked_s=(5.0, 9.0))}
    assert [finding.state for finding in compare(apart)[1:]] == ["skipped", "skipped"]


@pytest.mark.parametrize(
    ("status", "output", "found", "remedy"),
    [
        (127, "zsh:1: command not found: hcsim", "not found", "~/.zshenv"),
        (255, "ssh: connect to host b port 22: No route to host", "No route to host", "Local Network"),
        (255, "ssh: Could not resolve hostname b: nodename nor servname", "resolve", "b.local"),
        (255, "ann@b: Permission denied (publickey).", "Permission denied", "ssh-copy-id b"),
        (255, "ssh: connect to host b port 22: Connection refused", "refused", "Remote Login"),
        (2, "error: No such command 'doctor'.", "gave no report", "hcsim --version"),
        (0, msgspec.json.encode(report("b", (), 1e6)).decode(), " s ahead of this", "set the time"),
    ],
)
def test_why_another_machine_could_not_be_examined_is_named(status: int, output: str, found: str, remedy: str) -> None:
    _, (finding,) = asyncio.run(examine_host("b", answer(status, output), "darwin"))
    assert finding.state == "bad"
    assert found in finding.found
    assert remedy in finding.remedy


def test_a_machine_that_does_not_answer_is_named() -> None:
    async def ask(host: str) -> tuple[int, str]:
        await asyncio.Event().wait()
        raise AssertionError

    _, (finding,) = asyncio.run(examine_host("b", ask, "darwin", 0.01))
    assert "did not answer" in finding.found


def hcsim(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hcsim", *words], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_the_command_prints_a_report_that_programs_read(tmp_path: Path) -> None:
    ended = hcsim("doctor", "--json", "--device", "cpu", "--look", "0.3 s", folder=tmp_path)
    read = msgspec.json.decode(ended.stdout, type=HealthReport)
    assert ended.returncode == (0 if read.healthy else 1), ended.stderr
    checks = {finding.check for finding in read.findings}
    assert {"system", "python", "network", "multicast", "device cpu"} <= checks


@pytest.mark.slow
def test_bad_input_is_told_in_a_line(tmp_path: Path) -> None:
    for words in (("--device", "tpu"), ("--hosts", "-oProxyCommand=x"), ("--look", "soon")):
        ended = hcsim("doctor", *words, folder=tmp_path)
        assert ended.returncode == 2, words
        assert "Traceback" not in ended.stderr
        assert len(ended.stderr.splitlines()) == 1
