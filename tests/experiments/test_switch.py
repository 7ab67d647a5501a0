"""The switch of the lab: its lines and its air by the clock, and the same through real sockets."""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from experiments.fidelity.emulated import FRAME_BYTES, SharedAir, TwoHomes
from experiments.fidelity.switch import (
    Air,
    Frame,
    Pipe,
    Plan,
    Station,
    SwitchFailed,
    compiled,
    obstacle,
    replay,
    switched,
)
from hcsim.virtual.two_way_traffic import IDLE_ROUND_TRIPS

MBPS = 1e6
SLOW, FAST = 100 * MBPS, 300 * MBPS
_STREAM_S = 2.0
_SINK = """
import socket, time
listener = socket.create_server(("", 7000))
print("ready", flush=True)
connection, total = listener.accept()[0], 0
began = time.monotonic()
while time.monotonic() < began + 1: connection.recv(1 << 20)
began = time.monotonic()
while data := connection.recv(1 << 20): total += len(data)
print(total * 8 / (time.monotonic() - began))
"""
_SOURCE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 7000))
end = time.monotonic() + 1 + float(sys.argv[2])
while time.monotonic() < end: connection.sendall(bytes(1 << 16))
"""
_PEER = """
import socket, sys, threading, time
def received(size):
    while size: size -= len(connection.recv(min(size, 1 << 20)))
if sys.argv[1] == "listen":
    listener = socket.create_server(("", 7001))
    print("ready", flush=True)
    connection = listener.accept()[0]
else:
    connection = socket.create_connection((sys.argv[1], 7001))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(8):
    began = time.monotonic()
    sender = threading.Thread(target=connection.sendall, args=(bytes(int(sys.argv[2])),))
    sender.start()
    received(int(sys.argv[2]))
    sender.join()
    print(time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc)")
    return compiled(tmp_path_factory.mktemp("switch"))


def wire(pipe: Pipe, seed: int = 1) -> Plan:
    return Plan(2, (pipe,), {(0, 1): (0,)}, seed=seed)


def test_frames_leave_one_after_the_other_at_the_rate_of_a_line_and_after_its_delay(program: Path) -> None:
    plan = wire(Pipe(100 * MBPS, 1 << 20, delay_s=3e-3))
    left = replay(program, plan, [Frame(0.01, 0, 1, 1250)] * 3)
    assert [frame.at_s for frame in left] == pytest.approx([0.0131, 0.0132, 0.0133])


def test_frames_that_a_queue_has_no_room_for_are_dropped(program: Path) -> None:
    plan = wire(Pipe(100 * MBPS, 10_000))
    left = replay(program, plan, [*[Frame(0, 0, 1, 1000)] * 15, Frame(0.5, 0, 1, 1000)])
    assert len(left) == 11
    assert left[-1].at_s == pytest.approx(0.50008)


def test_a_frame_to_another_home_passes_all_of_its_lines(program: Path) -> None:
    homes = TwoHomes(20 * MBPS, 50 * MBPS, jitter_s=0.0)
    (left,) = replay(program, homes.plan(4), [Frame(0, 0, 3, FRAME_BYTES)])
    bits = 8 * FRAME_BYTES
    on_lines_s = 2 * bits / homes.local_bps + bits / homes.up_bps + bits / homes.down_bps
    assert left.at_s == pytest.approx(on_lines_s + 2 * homes.latency_s + homes.local_latency_s, abs=1e-8)


def test_jitter_has_its_mean_and_keeps_the_order(program: Path) -> None:
    plan = wire(Pipe(1000 * MBPS, 1 << 20, jitter_s=2e-3, jitter_every_s=0.0))
    apart = replay(program, plan, [Frame(0.05 * number, 0, 1, 125) for number in range(4000)])
    extra_s = [frame.at_s - 0.05 * number - 1e-6 for number, frame in enumerate(apart)]
    assert sum(extra_s) / len(extra_s) == pytest.approx(2e-3, rel=0.05)
    close = replay(program, plan, [Frame(1e-5 * size, 0, 1, size) for size in range(60, 1500)])
    assert [frame.size_bytes for frame in close] == list(range(60, 1500))


def test_the_seed_decides_which_frames_are_lost(program: Path) -> None:
    frames = [Frame(1e-3 * number, 0, 1, 100) for number in range(8_000)]
    times = [
        tuple(frame.at_s for frame in replay(program, wire(Pipe(SLOW, 1 << 20, loss=0.05), seed), frames))
        for seed in (1, 1, 2)
    ]
    assert 1 - len(times[0]) / len(frames) == pytest.approx(0.05, rel=0.15)
    assert times[0] == times[1] != times[2]


def test_a_slow_station_drags_all_others_down_to_its_own_rate(program: Path) -> None:
    """Each sends to a wired host, so that only they contend. Turns are equal, and the slow one's take longer."""
    air, frames = Air(150e-6, 15_000), 10
    plan = Plan(
        3,
        (Pipe(SLOW, 1 << 30, air=0, node=0), Pipe(FAST, 1 << 30, air=0, node=1)),
        {(0, 2): (0,), (1, 2): (1,)},
        (air,),
    )
    left = replay(program, plan, [Frame(0, station, 2, 1500) for _ in range(6_000) for station in (0, 1)])
    at_s = 1.0
    by_then = Counter(frame.source for frame in left if frame.at_s <= at_s)
    both_s = 2 * air.overhead_s + frames * 1500 * 8 * (1 / SLOW + 1 / FAST)
    for station in (0, 1):
        assert by_then[station] == pytest.approx(frames * at_s / both_s, rel=0.05)


def test_a_station_has_the_goodput_of_full_transmission_opportunities(program: Path) -> None:
    """A byte between two stations takes the air of both."""
    home, frames = SharedAir(SLOW, FAST, jitter_s=0.0, queue_bytes=1 << 30), 4200
    left = replay(program, home.plan(2), [Frame(0, 0, 1, FRAME_BYTES)] * frames)
    carried_bits = frames * 1448 * 8
    seconds = carried_bits / home.goodput_bps(SLOW) + carried_bits / home.goodput_bps(FAST)
    assert left[-1].at_s == pytest.approx(seconds, rel=0.01)


def test_a_plan_that_makes_no_sense_is_refused(program: Path) -> None:
    with pytest.raises(SwitchFailed, match="not understood"):
        replay(program, wire(Pipe(0.0, 1000)), [])


def round_trip_ms(source: Station, target: Station) -> float:
    said = subprocess.run(
        [*source.prefix, "ping", "-q", "-c", "20", "-i", "0.05", target.ip], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"= [\d.]+/([\d.]+)/", said)
    assert found is not None, said
    return float(found[1])


def stream_rates_bps(*pairs: tuple[Station, Station]) -> list[float]:
    """The rates of TCP streams that run at once, each to a station of its own, behind their first second."""
    sinks = [
        subprocess.Popen([*target.prefix, sys.executable, "-c", _SINK], stdout=subprocess.PIPE, text=True)
        for _, target in pairs
    ]
    for sink in sinks:
        assert sink.stdout is not None
        assert sink.stdout.readline() == "ready\n"
    sources = [
        subprocess.Popen([*source.prefix, sys.executable, "-c", _SOURCE, target.ip, str(_STREAM_S)])
        for source, target in pairs
    ]
    rates = [float(sink.communicate(timeout=60)[0]) for sink in sinks]
    assert [source.wait(60) for source in sources] == [0] * len(pairs)
    return rates


@pytest.mark.slow
def test_a_line_between_two_homes_has_the_rate_and_the_delay_that_were_asked_for(tmp_path: Path) -> None:
    _needs_taps()
    homes = TwoHomes(20 * MBPS, 50 * MBPS)
    with switched(homes.plan(2), tmp_path, "cubic") as (here, there):
        jitter_s = 2 * homes.jitter_s
        one_way_s = 2 * homes.latency_s + homes.local_latency_s + jitter_s
        assert round_trip_ms(here, there) == pytest.approx(2e3 * one_way_s, rel=0.1)
        (rate_bps,) = stream_rates_bps((here, there))
    assert rate_bps == pytest.approx(homes.up_bps * 1448 / FRAME_BYTES, rel=0.05)


@pytest.mark.slow
def test_hosts_that_send_each_other_data_wait_for_acknowledgements_as_long_as_the_model_says(tmp_path: Path) -> None:
    """Over a line whose queue holds little more than the line, the waiting is a quarter of the time."""
    _needs_taps()
    homes, size_bytes = (
        TwoHomes(10 * MBPS, 40 * MBPS, latency_s=15e-3, jitter_s=0.0, buffer_bytes=128 * 1024),
        512 * 1024,
    )
    with switched(homes.plan(2), tmp_path, "cubic") as (here, there):
        command = [*here.prefix, sys.executable, "-c", _PEER, "listen", str(size_bytes)]
        peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert peer.stdout is not None
        assert peer.stdout.readline() == "ready\n"
        said = subprocess.run(
            [*there.prefix, sys.executable, "-c", _PEER, here.ip, str(size_bytes)], capture_output=True, text=True,
            check=True, timeout=60,
        ).stdout  # fmt: skip
        peer.communicate(timeout=60)
    took_s = statistics.median(map(float, said.split()[2:]))
    goodput_Bps = homes.up_bps / 8 * 1448 / FRAME_BYTES
    round_trip_s = 2 * (2 * homes.latency_s + homes.local_latency_s)
    window_bytes = homes.buffer_bytes + goodput_Bps * round_trip_s
    idle_s = IDLE_ROUND_TRIPS * round_trip_s * size_bytes / window_bytes
    assert idle_s > 0.2 * took_s
    assert took_s == pytest.approx(size_bytes / goodput_Bps + round_trip_s / 2 + idle_s, rel=0.1)


@pytest.mark.slow
def test_a_stream_over_air_is_slowed_by_that_of_a_slow_station(tmp_path: Path) -> None:
    """Turns are equal, and those of the slow one take most of the air; with equal times half would be left."""
    _needs_taps()
    home = SharedAir(SLOW, FAST)
    with switched(home.plan(4), tmp_path, "cubic") as (slow, fast, one, other):
        (alone_bps,) = stream_rates_bps((fast, one))
        _, beside_bps = stream_rates_bps((slow, other), (fast, one))
    assert alone_bps == pytest.approx(home.goodput_bps(FAST) / 2, rel=0.15)
    assert beside_bps < 0.45 * alone_bps


@pytest.mark.slow
def test_the_switch_ends_with_the_lab_however_that_ends(tmp_path: Path) -> None:
    """A process that is killed cleans up nothing; what it started notices the end of its stdin."""
    _needs_taps()
    lab = """
import sys, time
from pathlib import Path
from experiments.fidelity.emulated import TwoHomes
from experiments.fidelity.switch import switched
with switched(TwoHomes(20e6, 50e6).plan(2), Path(sys.argv[1]), "cubic") as stations:
    print(stations[0].prefix[1], flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", lab, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    space = Path(process.stdout.readline().strip().removeprefix("--net="))
    assert space.exists()
    process.kill()
    process.communicate()
    until_s = time.monotonic() + 10
    while space.exists() and time.monotonic() < until_s:
        time.sleep(0.02)
    assert not space.exists()


def _needs_taps() -> None:
    if why_not := obstacle():
        pytest.skip(why_not)
    if shutil.which("ping") is None:
        pytest.skip("there is no ping")
