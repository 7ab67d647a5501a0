"""A switch of our own between network namespaces, for what the queues of the system cannot do: air that stations share,
delays, jitter and losses.

The switch is a process (`switch.c`) that owns a tap device in each namespace. A frame takes a route of pipes, each with
a rate, a queue and a delay. Some pipes are wires; others are the queues of stations and of an access point, which
contend for their air. Packets have 1500 bytes and checksums, as on a wire, since tap devices have no offloads.

Namespaces have no names. They end with the switch and with what runs in them, and the switch ends when its stdin does,
so that nothing is left even if the lab is killed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from hcsim.errors import HcsimError
from tests.real.namespaces import obstacle as namespace_obstacle

_SOURCE = Path(__file__).with_name("switch.c")
_TUN = Path("/dev/net/tun")
_END_TIMEOUT_S = 10.0
_TX_QUEUE_FRAMES = 4000
"""What the switch has not read yet. It may only drop what its own queues have no room for."""
_SUBNET = "10.99.0.0/24"
NS = 1e9


class Air(msgspec.Struct, frozen=True):
    """One channel, for which stations and their access point contend."""

    overhead_s: float
    """Of a transmission opportunity: contention, preamble and acknowledgement."""
    aggregate_bytes: int
    """What a transmission opportunity carries at most."""


class Pipe(msgspec.Struct, frozen=True):
    """A queue with a line behind it, or a queue of a node that contends for air."""

    rate_bps: float
    queue_bytes: int
    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Mean of an exponential extra delay. Frames keep their order."""
    jitter_every_s: float = 5e-3
    """How long an extra delay lasts: what holds up one packet holds up those behind it."""
    loss: float = 0.0
    """Probability per frame."""
    air: int | None = None
    """Which air; None: a wire."""
    node: int = 0
    """The queues of one node take turns when it wins the air."""

    @property
    def line(self) -> str:
        times = (self.delay_s, self.jitter_s, self.jitter_every_s)
        in_ns = " ".join(str(round(time_s * NS)) for time_s in times)
        air = -1 if self.air is None else self.air
        return f"pipe {self.rate_bps:.0f} {self.queue_bytes} {in_ns} {self.loss!r} {air} {self.node}"


class Plan(msgspec.Struct, frozen=True):
    """All that a switch knows."""

    ports: int
    pipes: tuple[Pipe, ...]
    routes: Mapping[tuple[int, int], tuple[int, ...]]
    """The pipes from one port to another."""
    airs: tuple[Air, ...] = ()
    seed: int = 1

    @property
    def text(self) -> str:
        """The plan as the switch reads it."""
        lines = [f"seed {self.seed}", *(f"air {air.overhead_s * NS:.0f} {air.aggregate_bytes}" for air in self.airs)]
        lines += [pipe.line for pipe in self.pipes]
        lines.append(f"ports {self.ports}")
        lines += [f"route {here} {there} {' '.join(map(str, way))}" for (here, there), way in self.routes.items()]
        return "\n".join(lines) + "\n"


class Frame(NamedTuple):
    """A frame of a replay: when it comes to the switch or leaves it."""

    at_s: float
    source: int
    target: int
    size_bytes: int


class Station(NamedTuple):
    """A namespace at a port of the switch."""

    ip: str
    prefix: list[str]
    """What a command begins with to run there."""


class SwitchFailed(HcsimError):
    """The switch cannot be compiled or started."""


def obstacle() -> str:
    """Why there can be no tap devices here; empty if there can."""
    if why_not := namespace_obstacle():
        return why_not
    missing = [tool for tool in ("cc", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"the switch: {' and '.join(missing)} not found"
    return "" if _TUN.exists() else f"the switch: {_TUN} is not here"


def compiled(folder: Path) -> Path:
    """Compile the switch into the folder."""
    program = folder / "switch"
    command = ["cc", "-O2", "-o", program, _SOURCE, "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SwitchFailed(f"the switch does not compile: {done.stderr.strip()}")
    return program


def replay(program: Path, plan: Plan, frames: Sequence[Frame]) -> list[Frame]:
    """Return when frames leave a switch to which they come at these times, without any device. Needs no root."""
    lines = [f"frame {each.at_s * NS:.0f} {each.source} {each.target} {each.size_bytes}\n" for each in frames]
    done = subprocess.run(
        [program], input=plan.text + "".join(lines) + "replay\n", capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SwitchFailed(done.stderr.strip())
    words = (line.split() for line in done.stdout.splitlines() if not line.startswith("pipe"))
    return [Frame(int(at_ns) / NS, int(source), int(target), int(size)) for at_ns, source, target, size in words]


@contextmanager
def switched(plan: Plan, folder: Path, congestion: str) -> Iterator[list[Station]]:
    """Stations at the ports of a switch that works meanwhile. Their TCP has this congestion control."""
    if why_not := obstacle():
        raise SwitchFailed(why_not)
    switch = subprocess.Popen([compiled(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert switch.stdin is not None
    assert switch.stdout is not None
    with switch.stdin, switch.stdout:
        try:
            switch.stdin.write(f"{plan.text}go\n")
            switch.stdin.flush()
            spaces = switch.stdout.readline().split()
            if len(spaces) != plan.ports:
                raise SwitchFailed("the switch did not start")
            stations = [
                Station(f"10.99.0.{number + 1}", ["nsenter", f"--net=/proc/{switch.pid}/fd/{space}"])
                for number, space in enumerate(spaces)
            ]
            for number in range(plan.ports):
                _prepare(number, stations, congestion)
            yield stations
        finally:
            switch.stdin.close()
            try:
                switch.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                switch.kill()
                switch.wait()


def _prepare(number: int, stations: Sequence[Station], congestion: str) -> None:
    """Bring the interface up. Neighbours are known, and what a connection learns is not kept for the next one."""
    station = stations[number]
    neighbours = [
        f"neigh replace {other.ip} lladdr 02:00:00:00:00:{place:02x} dev eth0 nud permanent"
        for place, other in enumerate(stations)
        if place != number
    ]
    up = [
        "link set lo up",
        f"link set eth0 mtu 1500 txqueuelen {_TX_QUEUE_FRAMES} up",
        f"addr add {station.ip}/24 dev eth0",
        f"route change {_SUBNET} dev eth0 src {station.ip} congctl {congestion}",
    ]
    _run(station, "ip", "-batch", "-", typed="\n".join([*up, *neighbours]) + "\n")
    _run(station, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save")


def _run(station: Station, *command: str, typed: str = "") -> None:
    done = subprocess.run([*station.prefix, *command], input=typed, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SwitchFailed(f"{' '.join(command)}: {done.stderr.strip()}")
