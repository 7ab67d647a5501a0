"""Loss, jitter, stalls, queues and lines between homes: what is fitted is what the virtual home has."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcsim.config import Ethernet, Wifi, load_scenario, parse_scenario
from hcsim.config.table import Table
from hcsim.twin.file import TwinFile
from hcsim.twin.home import Fit, fitted, predicted_s
from hcsim.twin.links import Calls, Flow, Pace, Sending, Surveyed
from hcsim.twin.quality import Survey, percentile
from tests.twin.test_links import BASIS, surveyed

GOODPUT = (1500 - 52) / (1500 + 38)


def nodes(**media: str) -> str:
    return "\n".join(
        f'[[node]]\nname = "{name}"\nmachine = "ideal"\nlinks = ["{medium}"]' for name, medium in media.items()
    )


TWO_HOMES = f"""
name = "two-homes"
[[medium]]
kind = "ethernet"
name = "lan"
rate = "200 Mb/s"
[[medium]]
kind = "ethernet"
name = "other"
rate = "200 Mb/s"
home = "cabin"
[[wan]]
home = "home"
up = "40 Mb/s"
down = "100 Mb/s"
latency = "6 ms"
buffer = "256 KiB"
[[wan]]
home = "cabin"
up = "20 Mb/s"
down = "60 Mb/s"
latency = "8 ms"
buffer = "128 KiB"
{nodes(a="lan", b="lan", c="other")}
"""


def test_machines_far_from_each_other_get_homes_with_lines(tmp_path: Path) -> None:
    home = parse_scenario(TWO_HOMES, "two-homes")
    found = surveyed(home, Pace(alone_s=1.0, together_s=0.3, paced_s=0.3, calls=20))
    names = [node.name for node in home.nodes]
    fit = fitted(Survey(found, names, {}, home.tcp, BASIS), {"c": "cabin"})
    assert fit.homes == {"a": "home", "b": "home", "c": "cabin"}
    lines = {line.home: line for line in fit.wan}
    assert lines["home"].up_bps == pytest.approx(40e6, rel=0.02)
    assert lines["cabin"].up_bps == pytest.approx(20e6, rel=0.02)
    assert sum(line.latency_s for line in fit.wan) == pytest.approx(14e-3, rel=0.05)
    buffers = {"home": 256 << 10, "cabin": 128 << 10}
    for name, size_bytes in buffers.items():
        assert lines[name].buffer_bytes == pytest.approx(size_bytes, rel=0.1)
        assert lines[name].buffer_basis is not None
        assert lines[name].buffer_basis.kind == "measured"
    twin = TwinFile(tmp_path / "twin.toml")
    twin.put_links(fit, dict.fromkeys(names, "ideal"))
    twin.put_links(fit, dict.fromkeys(names, "ideal"))
    again = load_scenario(tmp_path / "twin.toml")
    assert again.wan == fit.wan
    measured_s = sorted(found.held_out_s)[len(found.held_out_s) // 2]
    assert predicted_s(again, names, found.held_out_bytes) == pytest.approx(measured_s, rel=0.05)


def test_loss_jitter_and_stalls_of_the_air_are_found() -> None:
    air = 'kind = "wifi"\nname = "air"\nphy_rate = "200 Mb/s"\nlatency = "1.2 ms"\njitter = "1 ms"\nloss = "0.3 %"'
    gate = 'gate_every = "1 s"\ngate_min = "0.15 s"\ngate_max = "0.25 s"'
    home = parse_scenario(f'name = "air"\n[[medium]]\n{air}\n{gate}\n{nodes(a="air", b="air")}', "air")
    found = surveyed(home, Pace(alone_s=0.4, together_s=0.3, paced_s=2.0, calls=200))
    fit = fitted(Survey(found, ["a", "b"], {}, home.tcp, BASIS), {})
    [medium] = fit.media
    assert isinstance(medium, Wifi)
    assert medium.loss == pytest.approx(0.003, rel=0.2)
    assert medium.latency_s == pytest.approx(1.2e-3, rel=0.25)
    assert medium.jitter_s == pytest.approx(1e-3, rel=0.25)
    assert medium.gate_every_s == pytest.approx(1.0, rel=0.5)
    assert 0.05 < medium.gate_min_s < 0.2 < medium.gate_max_s < 0.26
    assert any("stalls" in note for note in fit.notes)


def measured(waits_s: float, *, lost: int, again: int = 0) -> Fit:
    """What follows of three machines on ports of 100 Mb/s, if two flows into one make round trips wait so long."""
    rate_Bps, idle_s, pairs = 12e6, (1e-3, 1.1e-3) * 10, [(i, j) for i in range(3) for j in range(3) if i != j]
    flows = [Flow("alone", 0, *pair, rate_Bps, 0.0, True) for pair in pairs]
    flows += [Flow("both ways", 1, *pair, rate_Bps, 0.0, True) for pair in pairs]
    flows += [Flow("two into one", 2 + j, i, j, rate_Bps / 2, 0.0, True) for i, j in pairs]
    sendings = [Sending("alone", 0, *pair, idle_s, 1.0, 10_000, lost) for pair in pairs]
    sendings += [Sending("paced", 0, *pair, idle_s, 1.0, 10_000, again) for pair in pairs]
    full_s = tuple(1e-3 + waits_s * (0.7 + 0.03 * i) for i in range(11)) * 5
    sendings += [Sending("two into one", 2 + j, i, j, full_s, 1.0, 10_000, lost) for i, j in pairs]
    found = Surveyed(tuple(flows), tuple(Calls(*pair, idle_s, 0.1) for pair in pairs), tuple(sendings))
    home = parse_scenario(TWO_HOMES, "home")
    return fitted(Survey(found, "abc", {}, home.tcp, BASIS), {})


@pytest.mark.parametrize(("lost", "kind"), [(50, "measured"), (0, "estimated")])
def test_a_queue_is_as_long_as_it_delays_and_at_least_so_long_if_nothing_was_dropped(lost: int, kind: str) -> None:
    [switch] = measured(20e-3, lost=lost).media
    assert isinstance(switch, Ethernet)
    assert switch.queue_bytes == pytest.approx(20e-3 * 12e6, rel=0.1)
    assert isinstance(switch.queue_basis, Table)
    assert switch.queue_basis.kind == kind
    assert switch.loss == 0


def test_without_a_delay_under_load_there_is_no_queue() -> None:
    [switch] = measured(0.0, lost=0).media
    assert isinstance(switch, Ethernet)
    assert switch.queue_bytes is None


def test_what_is_lost_far_below_the_rate_is_lost_by_the_line_and_shows_no_full_queue() -> None:
    [switch] = measured(20e-3, lost=50, again=50).media
    assert isinstance(switch, Ethernet)
    assert switch.loss == pytest.approx(0.005)
    assert switch.queue_basis is not None
    assert switch.queue_basis.kind == "estimated"


def test_a_percentile_of_one_sample_is_that_sample() -> None:
    assert percentile((3.0,), 99) == 3.0
    assert percentile(range(101), 90) == 90
