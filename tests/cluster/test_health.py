from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcsim.cluster.health import FailureDetector
from hcsim.config import Heartbeat, parse_scenario
from hcsim.config.cluster import PRESETS
from hcsim.errors import ConfigError
from hcsim.units import PositiveSeconds

EVERY_SECOND = Heartbeat(interval_s=PositiveSeconds(1), timeout_s=PositiveSeconds(10), failures=8)


def beating(times_s: list[float], policy: Heartbeat = EVERY_SECOND) -> FailureDetector:
    pulse = FailureDetector(0.0, policy)
    for time_s in times_s:
        pulse.beat(time_s)
    return pulse


@given(st.lists(st.floats(0.5, 1.5), min_size=5, max_size=40), st.floats(0, 8))
def test_phi_is_the_surprise_of_a_normal_variable(intervals_s, silence_s):
    times_s = [sum(intervals_s[: n + 1]) for n in range(len(intervals_s))]
    pulse = beating(times_s)
    spread_s = max(statistics.pstdev(intervals_s), 0.25)
    tail = 1 - statistics.NormalDist(statistics.fmean(intervals_s), spread_s).cdf(silence_s)
    if tail > 1e-12:
        assert pulse.phi(times_s[-1] + silence_s) == pytest.approx(-math.log10(tail), rel=1e-3, abs=1e-6)


def test_phi_goes_on_rising_where_the_tail_is_too_small_for_a_float():
    pulse = beating([float(n) for n in range(1, 21)])
    surprises = [pulse.phi(20.0 + silence_s) for silence_s in range(1, 60)]
    assert surprises == sorted(surprises)
    assert all(math.isfinite(phi) for phi in surprises)


def test_a_steady_peer_is_suspected_soon_and_a_shaky_one_later():
    steady = beating([float(n) for n in range(1, 21)])
    shaky = beating([n + 0.9 * (n % 2) for n in range(1, 21)])

    def suspected_after_s(pulse: FailureDetector, last_s: float) -> float:
        return next(s / 10 for s in range(200) if pulse.suspected(last_s + s / 10))

    assert suspected_after_s(steady, 20.0) < suspected_after_s(shaky, 20.0) < EVERY_SECOND.timeout_s


@pytest.mark.parametrize("preset", PRESETS)
def test_nobody_is_suspected_while_its_heartbeats_come_as_agreed(preset):
    policy = PRESETS[preset]
    pulse = FailureDetector(0.0, policy)
    for n in range(1, 100):
        assert not pulse.suspected(n * policy.interval_s)
        pulse.beat(n * policy.interval_s)


@pytest.mark.parametrize("preset", PRESETS)
def test_silence_beyond_the_timeout_is_suspected_without_any_rhythm(preset):
    policy = PRESETS[preset]
    assert "silent" in FailureDetector(0.0, policy).suspected(float(policy.timeout_s))


@pytest.mark.parametrize("failures", [2, 3, 5])
def test_so_many_missed_heartbeats_are_enough_and_one_fewer_is_not(failures):
    pulse = FailureDetector(
        7.0, Heartbeat(interval_s=PositiveSeconds(0.5), timeout_s=PositiveSeconds(60), failures=failures)
    )
    due_s = 7.0 + failures * 0.5
    assert not pulse.suspected(due_s - 1e-6)
    assert pulse.suspected(due_s) == f"{failures} heartbeats overdue"


def test_at_home_three_missed_heartbeats_are_the_timeout():
    home = PRESETS["home"]
    assert home.failures * home.interval_s == home.timeout_s == 15


def test_one_heartbeat_that_is_late_cannot_be_made_a_failure():
    with pytest.raises(ConfigError, match="failures"):
        parse_scenario('name = "x"\ncluster = { heartbeat = { failures = 1 } }\n', "x")


def test_a_refused_connection_is_believed_at_once_until_there_is_a_sign_of_life():
    pulse = beating([1.0, 2.0])
    pulse.refused()
    assert "nobody is there" in pulse.suspected(2.1)
    pulse.sign(2.2)
    assert not pulse.suspected(2.3)


def test_time_in_which_we_could_not_hear_is_no_silence_and_no_rhythm():
    heard, excused = beating([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), beating([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    excused.excuse(100.0, 106.5)
    assert excused.silence_s(106.5) == heard.silence_s(6.5) == 0.5
    for pulse, now in ((heard, 7.0), (excused, 107.0)):
        pulse.beat(now)
    assert excused.phi(109.0) == heard.phi(9.0) > 0
    excused.excuse(100.0, 107.5)  # it was heard since
    assert excused.silence_s(108.0) == 0.5


def test_latency_is_an_exponential_moving_average_of_round_trips():
    pulse = FailureDetector(0.0, EVERY_SECOND)
    for round_trip_s in (0.010, 0.020, 0.010):
        pulse.echoed(round_trip_s)
    assert pulse.latency_s == pytest.approx(0.8 * (0.8 * 0.010 + 0.2 * 0.020) + 0.2 * 0.010)
