"""Check whether a machine can take part in a cluster: what stands in the way, and the remedy in one line.

Each check takes a `System`, which answers what the operating system knows. Tests give recorded answers of other
machines. A finding is `good`, a `warning` (work goes on, slower or less safely), `bad` (work will fail), or `skipped`.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import msgspec

from hcsim.cluster.messages import MemberFacts, StatusReply
from hcsim.cluster.probe import DeviceSpeed, measure_speed
from hcsim.cluster.status_client import StatusClient
from hcsim.config import CATALOGUE, Cluster
from hcsim.errors import HcsimError
from hcsim.loops import how_to_build, missing_loops
from hcsim.real.hardware import best_torch_device, installed_versions, system_name, this_chip, training_step_error
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.interfaces import host_name, leads_out, list_interfaces, output_of, reachable_at
from hcsim.real.process import reachable_descriptors
from hcsim.real.sockets import LOCAL_NETWORK
from hcsim.real.ssh import NOT_FOUND, SSH_FAILED, start_ssh
from hcsim.runtime.host import Interface, Lan, Medium, Service

CheckState = Literal["good", "warning", "bad", "skipped"]

OLDEST_PYTHON = (3, 11)
OLDEST_MACOS = 14
FEWEST_DESCRIPTORS = 1024
LONGEST_SOCKET_PATH = {"darwin": 103, "linux": 107}
OUR_SOCKET_NAME = 40
"""Characters that our Unix sockets add to the temporary folder."""
SHARE_OF_PROFILE = 0.4
"""Of the catalogue's peak; a machine below it is hot, throttled or busy."""
MOST_SKEW_S = 5.0
LOOK_S = 3.0
FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one check."""

    check: str
    state: CheckState
    found: str
    remedy: str = ""


class DoctorFacts(MemberFacts, frozen=True, kw_only=True):
    """What is compared between machines."""

    name: str
    announced: str = ""
    """The name by which this machine announced itself during its checks."""
    sees: tuple[str, ...] = ()
    """Such names that came to it."""
    looked_s: tuple[float, float] = (0.0, 0.0)
    """From when until when it looked for them, by its wall clock."""


class HealthReport(msgspec.Struct, frozen=True):
    """One machine's findings, as `hcsim doctor --json` prints them."""

    facts: DoctorFacts
    findings: tuple[CheckResult, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is bad."""
        return all(finding.state != "bad" for finding in self.findings)


class System(Protocol):
    """What the checks ask of the operating system."""

    platform: str
    """`sys.platform`."""

    def output(self, *command: str) -> str:
        """Return the standard output of a command, or nothing if it fails."""

    def interfaces(self) -> tuple[Interface, ...]:
        """Return the network interfaces, fastest medium first."""

    def has_module(self, name: str) -> bool:
        """Return whether a module is installed."""

    def descriptors(self) -> tuple[int, int]:
        """Return the soft and the hard limit of open files."""

    def temporary_folder(self) -> str:
        """Return the folder of Unix sockets."""

    def bind(self, host: str, port: int) -> str:
        """Bind a TCP port for a moment; return why that failed, or nothing."""


class ThisSystem:
    """The machine that this process runs on."""

    platform = sys.platform

    def output(self, *command: str) -> str:
        return output_of(*command)

    def interfaces(self) -> tuple[Interface, ...]:
        return list_interfaces()

    def has_module(self, name: str) -> bool:
        return find_spec(name) is not None

    def descriptors(self) -> tuple[int, int]:
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def temporary_folder(self) -> str:
        return tempfile.gettempdir()

    def bind(self, host: str, port: int) -> str:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((host, port))
                tried.listen(1)
            except OSError as error:
                return error.strerror or str(error)
        return ""


def check_system(system: System) -> CheckResult:
    """The operating system is new enough, and Python runs natively."""
    if system.platform != "darwin":
        return CheckResult("system", "good", f"{platform.system()} {platform.release()}, {platform.machine()}")
    version = system.output("sw_vers", "-productVersion").strip()
    major = re.match(r"\d+", version)
    if major and int(major.group()) < OLDEST_MACOS:
        what = f"System Settings › General › Software Update: torch needs macOS {OLDEST_MACOS}"
        return CheckResult("system", "bad", f"macOS {version}", what)
    if system.output("sysctl", "-n", "sysctl.proc_translated").strip() == "1":
        what = "install a Python for arm64 (python.org, or Homebrew in /opt/homebrew) and make the environment anew"
        return CheckResult(
            "system", "bad", f"macOS {version}, but this Python is for Intel and runs under Rosetta", what
        )
    return CheckResult("system", "good", f"macOS {version or 'of an unknown version'}, {platform.machine()}")


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> CheckResult:
    """Python is new enough."""
    found = "Python " + ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        return CheckResult("python", "bad", found, f"install Python {needed} or newer and make the environment anew")
    return CheckResult("python", "good", f"{found} in {sys.prefix}")


def check_loops(system: System) -> CheckResult:
    """The compiled inner loops were built when hcsim was installed."""
    if missing := missing_loops(system.has_module):
        return CheckResult("compiled loops", "warning", missing, how_to_build(system.platform))
    return CheckResult("compiled loops", "good", "all are there")


def check_power(system: System) -> CheckResult:
    """The machine does not fall asleep or slow down while it works."""
    if system.platform != "darwin":
        return CheckResult("power", "skipped", "only macOS tells")
    settings, source = system.output("pmset", "-g"), system.output("pmset", "-g", "batt")
    if not settings:
        return CheckResult("power", "skipped", "pmset does not answer")
    if "Battery Power" in source:
        return CheckResult(
            "power", "warning", "runs on its battery, and macOS slows it down", "connect the power adapter"
        )
    if re.search(r"^\s*(?:lowpowermode|powermode)\s+1\b", settings, re.MULTILINE):
        what = "System Settings › Battery (or Energy): Low Power Mode: Never"
        return CheckResult("power", "warning", "Low Power Mode is on", what)
    sleep = re.search(r"^\s*sleep\s+(\d+)(.*)$", settings, re.MULTILINE)
    if sleep is None or sleep.group(1) == "0":
        return CheckResult("power", "good", "on mains power, and never sleeps")
    if "prevented by" in sleep.group(2):
        return CheckResult(
            "power", "good", f"on mains power; sleep is{sleep.group(2).strip(' ()').removeprefix('sleep')}"
        )
    found = f"falls asleep after {sleep.group(1)} min without input; hcsim keeps it awake while it works (caffeinate)"
    return CheckResult("power", "good", f"on mains power; {found}")


def check_firewall(system: System) -> CheckResult:
    """The application firewall lets other machines connect to this Python."""
    if system.platform != "darwin":
        return CheckResult("firewall", "skipped", "checked from the other machines: hcsim doctor --hosts")
    state = system.output(FIREWALL, "--getglobalstate")
    if not state:
        return CheckResult("firewall", "skipped", f"{FIREWALL} does not answer")
    if "State = 0" in state or "disabled" in state.lower():
        return CheckResult("firewall", "good", "off")
    if "State = 2" in state or "ENABLED" in system.output(FIREWALL, "--getblockall").upper().replace("DISABLED", ""):
        what = "System Settings › Network › Firewall › Options: do not block all incoming connections"
        return CheckResult("firewall", "bad", "blocks all incoming connections", what)
    python = os.path.realpath(sys.executable)
    answer = system.output(FIREWALL, "--getappblocked", python).lower()
    if "permitted" in answer or "allowed" in answer:
        return CheckResult("firewall", "good", "on, and lets connections to this Python in")
    what = f"sudo {FIREWALL} --add {python} --unblockapp {python}"
    if "blocked" in answer:
        return CheckResult("firewall", "bad", "on, and blocks connections to this Python", what)
    return CheckResult("firewall", "warning", "on, and will ask when the first machine connects", what)


def check_ports(system: System, cluster: Cluster) -> list[CheckResult]:
    """Our ports are free, on all addresses and on each."""
    addresses = [address for each in system.interfaces() for address in each.addresses if ":" not in address]
    found = []
    for what, port in (("discovery_port", cluster.discovery_port), ("gradient_port", cluster.gradient_port)):
        taken = {host: why for host in ("0.0.0.0", *addresses) if (why := system.bind(host, port))}
        if not taken:
            found.append(CheckResult(f"port {port}", "good", "free"))
            continue
        host, why = next(iter(taken.items()))
        owner = _owner(system.output("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN"))
        where = "" if host == "0.0.0.0" else f" at {host}"
        remedy = f"end it, or give the cluster another port: --set cluster.{what}=PORT on all machines"
        found.append(
            CheckResult(f"port {port}", "bad", f"taken{where} by {owner or 'another program'} ({why})", remedy)
        )
    return found


def _owner(listing: str) -> str:
    """The first listener of `lsof`'s listing."""
    for line in listing.splitlines()[1:]:
        if len(words := line.split()) > 1:
            return f"{words[0]} (process {words[1]})"
    return ""


def check_interfaces(system: System) -> list[CheckResult]:
    """Which interfaces there are, which others would use and why, and whether the fastest wire is used."""
    interfaces = [each for each in system.interfaces() if each.medium is not Medium.LOOPBACK]
    usable = [each for each in interfaces if leads_out(each)]
    if not usable:
        what = "connect a cable, or join a Wi-Fi network"
        return [CheckResult("network", "bad", "no interface has an address: no other machine can be reached", what)]
    first = usable[0]
    told = [f"{_describe(usable[0])} is used first, as the fastest medium here"]
    told += [f"then {_describe(each)}" for each in usable[1:]]
    told.append(f"offered to others in this order: {', '.join(reachable_at(usable))}")
    told += [f"not offered: {_describe(each)}, {_WHY_NOT[each.medium]}" for each in interfaces if not leads_out(each)]
    found = [CheckResult("network", "good", "; ".join(told))]
    if first.medium is Medium.WIFI:
        what = "connect a cable: Ethernet carries several times as much, and Thunderbolt more"
        found.append(CheckResult("network", "warning", f"{first.name} (Wi-Fi) is the fastest way to others", what))
    found += _check_default_route(system, usable)
    for each in usable:
        if each.medium is Medium.ETHERNET and each.rate_bps and each.rate_bps < 1e9:
            what = "another cable or switch port: it should be 1 Gb/s at least"
            found.append(CheckResult("network", "warning", f"{each.name} has only {each.rate_bps / 1e6:g} Mb/s", what))
        if each.medium is Medium.THUNDERBOLT and any(address.startswith("169.254.") for address in each.addresses):
            found.append(
                CheckResult(
                    "network",
                    "warning",
                    f"{each.name} (Thunderbolt) has a self-assigned address, which macOS may route another way",
                    "networksetup -setmanual 'Thunderbolt Bridge' 10.0.42.1 255.255.255.0 (.2, .3 … on the others)",
                )
            )
    return found


_WHY_NOT = {
    Medium.TUNNEL: "it leads through another interface",
    Medium.VIRTUAL: "it stays within this machine",
}


def _check_default_route(system: System, usable: Sequence[Interface]) -> list[CheckResult]:
    """The system does not prefer Wi-Fi to a wire in the same network, whose packets it would then send by Wi-Fi."""
    if system.platform == "darwin":
        chosen = re.search(r"^\s*interface: (\S+)", system.output("route", "-n", "get", "default"), re.MULTILINE)
        remedy = "System Settings › Network › … › Set Service Order: Ethernet and Thunderbolt above Wi-Fi"
    else:
        chosen = re.search(r"^default .*?\bdev (\S+)", system.output("ip", "route", "show", "default"), re.MULTILINE)
        remedy = "give the wire's route a smaller metric: nmcli connection modify NAME ipv4.route-metric 50"
    preferred = next((each for each in usable if chosen and each.name == chosen[1]), None)
    wire = next((each for each in usable if each.medium is Medium.ETHERNET), None)
    if preferred is None or preferred.medium is not Medium.WIFI or wire is None:
        return []
    found = f"{preferred.name} (Wi-Fi) is preferred to {_describe(wire)}: to a network of both, packets leave by Wi-Fi"
    return [CheckResult("network", "warning", found, remedy)]


def _describe(interface: Interface) -> str:
    rate = f" {interface.rate_bps / 1e9:g} Gb/s" if interface.rate_bps else ""
    return f"{interface.name} ({interface.medium.value}{rate})"


def check_limits(system: System) -> list[CheckResult]:
    """Enough descriptors, and short enough paths of Unix sockets."""
    soft, hard = system.descriptors()
    most = reachable_descriptors(soft, hard)
    found = [CheckResult("descriptors", "good", f"{most}" if most >= 0 else "no limit")]
    if 0 <= most < FEWEST_DESCRIPTORS:
        remedy = f"raise the hard limit, which is {hard}: ulimit -Hn, as an administrator"
        found = [CheckResult("descriptors", "warning", f"{most} at once: 32 machines use up to 400", remedy)]
    folder, longest = system.temporary_folder(), LONGEST_SOCKET_PATH.get(system.platform, 103)
    if len(os.fsencode(folder)) + OUR_SOCKET_NAME > longest:
        what = "set TMPDIR to a shorter folder, such as /tmp"
        told = f"{folder} is too long for Unix sockets: hcsim makes its own in /tmp, and data loaders may fail"
        found.append(CheckResult("temporary folder", "warning", told, what))
    return found


async def check_announcing(
    lan: Lan, name: str, look_s: float, until: Awaitable[object] | None = None
) -> tuple[CheckResult, tuple[str, ...]]:
    """What this machine announces by that name comes back to it; the names that other machines announce.

    It looks for that long, and until that is done: the reports of the others."""
    port = Cluster().discovery_port
    seen: dict[str, None] = {}
    remedy = "allow multicast in the firewall and the router (UDP 5353); or name the others: [cluster] peers"
    try:
        async with asyncio.timeout(10):
            name = await lan.advertise(Service(name, f"{reachable_at(list_interfaces())[0]}:{port}", {"checks": "1"}))
        looking = asyncio.create_task(_look(lan, seen))
        await asyncio.wait([looking], timeout=look_s)
        if until is not None:
            await until
        if looking.done():
            await looking  # it only ends by an error
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        async with asyncio.timeout(10):
            await lan.withdraw(name)
    except (HcsimError, OSError, TimeoutError) as error:
        return CheckResult("multicast", "bad", f"announcing failed: {error or 'no answer'}", remedy), ()
    others = tuple(each for each in seen if each != name)
    if name not in seen:
        return CheckResult("multicast", "bad", "our own announcement does not come back", remedy), others
    return CheckResult("multicast", "good", "our own announcement comes back"), others


async def _look(lan: Lan, seen: dict[str, None]) -> None:
    async for sighting in lan.browse():
        if not sighting.gone:
            seen[sighting.service.name] = None


async def check_device(device: str) -> list[CheckResult]:
    """A small training step gives the right gradient, and the speed is that of the chip."""
    async with RealHost(RealOptions("doctor", device=device)) as host:
        try:
            wrong = await asyncio.to_thread(training_step_error, device)
            speed = await measure_speed(host)
        except Exception as error:
            return [CheckResult(f"device {device}", "bad", f"a training step failed: {error}", _TORCH_REMEDY)]
    if wrong:
        return [CheckResult(f"device {device}", "bad", wrong, _TORCH_REMEDY)]
    return [judged_speed(device, this_chip().name, speed)]


_TORCH_REMEDY = "update macOS and torch; meanwhile `--device cpu`"


def judged_speed(device: str, chip: str, speed: DeviceSpeed) -> CheckResult:
    """The measured speed beside the catalogue's, where the chip is in it and its GPU was measured."""
    told = f"{speed.flops / 1e9:,.0f} GFLOP/s, {speed.memory_Bps / 1e9:.0f} GB/s"
    profile = CATALOGUE.get(chip.removeprefix("Apple ")) if device == "mps" else None
    if profile is None:
        return CheckResult(f"device {device}", "good", f"{chip}: a training step is right; {told}")
    share = speed.flops / profile.peak_flops
    told = f"{chip}: {told}, {share:.0%} of its peak"
    if share < SHARE_OF_PROFILE:
        what = "let it cool down, end what else computes, and look at its power settings"
        return CheckResult(f"device {device}", "warning", told, what)
    return CheckResult(f"device {device}", "good", told)


def facts_of(system: System, announced: str, sees: Sequence[str], looked_s: tuple[float, float]) -> DoctorFacts:
    """What the machines of a cluster compare."""
    versions = installed_versions(system.has_module)
    return DoctorFacts(
        system_name(), this_chip().name, versions, time.time(),
        name=host_name(), announced=announced, sees=tuple(sees), looked_s=looked_s,
    )  # fmt: skip


async def examine(
    system: System, device: str = "auto", look_s: float = LOOK_S, until: Awaitable[object] | None = None
) -> HealthReport:
    """Run all checks of one machine, which announces itself until that is done: the reports of the others."""
    cluster, announced = Cluster(), f"{host_name()}-doctor-{secrets.token_hex(3)}"
    async with RealHost(RealOptions(host_name())) as host:
        began_s = time.time()
        multicast, sees = await check_announcing(host.lan, announced, look_s, until)
        looked_s = began_s, time.time()
    findings = [check_system(system), check_python(), check_loops(system), check_power(system), check_firewall(system)]
    findings += [*check_ports(system, cluster), *check_interfaces(system), multicast, *check_limits(system)]
    if not system.has_module("torch"):
        findings.append(CheckResult("device", "bad", "torch is not installed", "pip install torch"))
    else:
        findings += await check_device(await asyncio.to_thread(best_torch_device) if device == "auto" else device)
    return HealthReport(facts_of(system, announced, sees, looked_s), tuple(findings))


# Other machines, through ssh.

Ask = Callable[[str], Coroutine[Any, Any, tuple[int, str]]]
"""Run `hcsim doctor --json` at a host: its exit status and its output."""


async def ask_by_ssh(host: str, program: str, look: str) -> tuple[int, str]:
    command = (program, "doctor", "--json", "--look", look)
    process = await start_ssh(host, command, stdin=asyncio.subprocess.DEVNULL)
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, output.decode(errors="replace")


def _ssh_remedy(host: str, output: str, system: str) -> str:
    if "No route to host" in output and system == "darwin":
        return LOCAL_NETWORK
    if "resolve hostname" in output:
        return f"in a home network machines are called NAME.local: --hosts {host.removesuffix('.local')}.local"
    if "Permission denied" in output or "Host key verification" in output:
        return f"log in once by hand (ssh {host}), then ssh-copy-id {host}"
    return f"on {host}: System Settings › General › Sharing › Remote Login; is it awake, and in this network?"


def why_no_report(host: str, status: int, output: str, system: str = sys.platform) -> CheckResult:
    """Why a command through ssh gave no report."""
    last = (output.strip().splitlines() or ["nothing was said"])[-1][:200]
    if status == SSH_FAILED:
        return CheckResult(host, "bad", f"ssh failed: {last}", _ssh_remedy(host, output, system))
    if status == NOT_FOUND:
        remedy = "put hcsim on the PATH of a shell that is not interactive (~/.zshenv), or name it with --program"
        return CheckResult(host, "bad", "hcsim was not found there", remedy)
    return CheckResult(host, "bad", f"gave no report: {last}", f"ssh {host} hcsim --version")


async def examine_host(
    host: str, ask: Ask, system: str = sys.platform, wait_s: float = 120.0
) -> tuple[HealthReport | None, list[CheckResult]]:
    """Another machine's report, and what is to be said about how it came."""
    if shutil.which("ssh") is None:
        return None, [CheckResult(host, "bad", "there is no ssh here", "install OpenSSH")]
    began_s = time.time()
    try:
        async with asyncio.timeout(wait_s):
            status, output = await ask(host)
    except TimeoutError:
        return None, [CheckResult(host, "bad", f"did not answer within {wait_s:g} s", f"ssh {host} hcsim doctor")]
    try:
        report = msgspec.json.decode(output[output.index("{") : output.rindex("}") + 1], type=HealthReport)
    except (ValueError, msgspec.MsgspecError):
        return None, [why_no_report(host, status, output, system)]
    # Its clock was read between our question and its answer.
    ahead_s, behind_s = report.facts.time_s - time.time(), began_s - report.facts.time_s
    skew_s = max(ahead_s, behind_s)
    if skew_s > MOST_SKEW_S:
        what = "set the time automatically: System Settings › General › Date & Time, or `timedatectl set-ntp true`"
        side = "ahead of" if skew_s == ahead_s else "behind"
        return report, [CheckResult("clock", "bad", f"{skew_s:.0f} s {side} this machine's", what)]
    return report, []


def _unlike_versions(versions: Mapping[str, Mapping[str, str]]) -> list[CheckResult]:
    found = []
    for name in sorted({name for each in versions.values() for name in each}):
        by_version: dict[str, list[str]] = {}
        for host, each in versions.items():
            by_version.setdefault(each.get(name, "missing"), []).append(host)
        if len(by_version) == 1:
            continue
        told = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in by_version.items())
        state: CheckState = "bad" if name == "hcsim" else "warning"
        remedy = f"pip install the same {name} everywhere"
        if name == "BLAS":
            remedy = "their results differ in the last bits; to have them alike, install numpy the same way everywhere"
        found.append(CheckResult(f"version of {name}", state, told, remedy))
    return found


def compare(reports: Mapping[str, HealthReport]) -> list[CheckResult]:
    """What machines that are to work together differ in."""
    found = _unlike_versions({host: report.facts.versions for host, report in reports.items()})
    if not found and len(reports) > 1:
        found.append(CheckResult("versions", "good", f"the same on {len(reports)} machines"))
    for host, report in reports.items():
        silent = [name for name, each in reports.items() if name != host and not _hears(report, each)]
        together_s = {name: _together_s(report, reports[name]) for name in silent}
        if unheard := [name for name in silent if together_s[name] > LOOK_S]:
            remedy = "the same network and no guest Wi-Fi or client isolation; or name the addresses: [cluster] peers"
            found.append(CheckResult("multicast", "bad", f"{host} does not hear {', '.join(unheard)}", remedy))
        if unsure := [name for name in silent if together_s[name] <= LOOK_S]:
            least_s = max(0.0, min(together_s[name] for name in unsure))
            told = f"not known whether {host} hears {', '.join(unsure)}: both looked for only {least_s:.1f} s together"
            found.append(CheckResult("multicast", "skipped", told, "look for longer: --look '10 s'"))
    return found


def _hears(one: HealthReport, other: HealthReport) -> bool:
    return other.facts.announced in one.facts.sees


def _together_s(one: HealthReport, other: HealthReport) -> float:
    """How long both looked and were announced."""
    (began_s, ended_s), (since_s, until_s) = one.facts.looked_s, other.facts.looked_s
    return min(ended_s, until_s) - max(began_s, since_s)


# The members of a running cluster, through their own answers.


def compare_members(survey: StatusClient, now_s: float) -> list[CheckResult]:
    """What stands between the members of a running cluster. `now_s` is the wall clock when the asking host's clock
    shows zero."""
    told = {each.status.us.name: each for each in survey.told.values()}
    found = [
        CheckResult(member.name, "bad", "is a member, and does not answer", f"on {member.name}: hcsim doctor")
        for member in survey.awaited()
    ]
    facts = {name: each.facts for name, each in told.items() if each.facts is not None}
    if silent := [name for name in told if name not in facts]:
        what = f"{', '.join(silent)}: tells no versions"
        found.append(CheckResult("versions", "warning", what, "install the same hcsim everywhere"))
    unlike = _unlike_versions({name: each.versions for name, each in facts.items()})
    found += unlike or [CheckResult("versions", "good", f"the same on {len(facts)} machines")]
    at_s = {each.status.us.name: survey.told_at_s[node] + now_s for node, each in survey.told.items()}
    found += _unlike_clocks({name: each.time_s - at_s[name] for name, each in facts.items()})
    found += [*_unheard(told), *_unconnected(told)]
    return found


def _unlike_clocks(ahead_s: Mapping[str, float]) -> list[CheckResult]:
    """How far each clock is ahead of this machine's."""
    if not ahead_s:
        return []
    remedy = "set the time automatically: System Settings › General › Date & Time, or `timedatectl set-ntp true`"
    found = []
    for name, each_s in ahead_s.items():
        if abs(each_s) > MOST_SKEW_S:
            side = "ahead of" if each_s > 0 else "behind"
            found.append(CheckResult("clock", "bad", f"{name}: {abs(each_s):.0f} s {side} this machine's", remedy))
    worst_s = max(map(abs, ahead_s.values()))
    return found or [CheckResult("clocks", "good", f"at most {worst_s:.1f} s apart from this machine's")]


def _unheard(told: Mapping[str, StatusReply]) -> list[CheckResult]:
    found, names = [], {each.status.us.node: name for name, each in told.items()}
    for name, each in told.items():
        if each.heard is None:
            found.append(CheckResult("multicast", "skipped", f"{name} does not listen for announcements"))
            continue
        deaf = [other for node, other in names.items() if other != name and node not in each.heard]
        if deaf:
            remedy = "the same network and no guest Wi-Fi or client isolation; or name the addresses: [cluster] peers"
            found.append(CheckResult("multicast", "warning", f"{name} does not hear {', '.join(deaf)}", remedy))
    if not found and len(told) > 1:
        found.append(CheckResult("multicast", "good", f"all {len(told)} machines hear each other"))
    return found


_WIRED = (Medium.THUNDERBOLT, Medium.ETHERNET)


def _unconnected(told: Mapping[str, StatusReply]) -> list[CheckResult]:
    found = []
    for name, each in told.items():
        links = {link.node: link for link in each.links}
        for other, reply in told.items():
            link = links.get(reply.status.us.node)
            if other == name:
                continue
            if link is None or not link.address:
                remedy = "hcsim doctor on both: firewall and ports; or Local Network privacy of the program on macOS"
                found.append(CheckResult("connections", "bad", f"{name} has none to {other}", remedy))
            elif link.suspected:
                found.append(CheckResult("connections", "warning", f"{name} to {other}: {link.suspected}",
                                         f"look at {other}: is it awake, and its network well?"))  # fmt: skip
            elif _goes_by_air(link.ends[0] or "", each) and _has_wire(each) and _has_wire(reply):
                what = f"{name} to {other}: over Wi-Fi ({link.ends[0]}), though both have a wire"
                remedy = f"on {other}: --set at=ADDRESS with the address of its wire; are both in one network?"
                found.append(CheckResult("connections", "warning", what, remedy))
    if not found and len(told) > 1:
        found.append(CheckResult("connections", "good", f"each of {len(told)} machines reaches each other one"))
    return found


def _goes_by_air(address: str, told: StatusReply) -> bool:
    media = [interface.medium for interface in told.interfaces if address in interface.addresses]
    return media[:1] == [Medium.WIFI]


def _has_wire(told: StatusReply) -> bool:
    return any(interface.medium in _WIRED for interface in told.interfaces)
