"""What messages cost is found from the processor times of two ranks."""

from __future__ import annotations

import math

import pytest

from hcsim.config import Basis
from hcsim.twin.messages import TURNS, Times, costs_of, measure_messages


def basis(spread: float) -> Basis:
    return Basis("measured", "here", "2026-11-19", spread)


def made_of(sends: bool, *, per_byte_s: float, noise: float = 0.0) -> Times:
    """The times of a rank where an operation costs 100 µs, a send 20, a receive 30, and a stream has no operations."""
    of_streams_s = 20e-6 if sends else 30e-6
    fixed_s = {"centralized": 150e-6, "ring": 200e-6, "stream": of_streams_s}
    once = (
        fixed_s[turn.kind] + (per_byte_s * (turn.size_bytes - 64) if turn.kind == "stream" else 0) for turn in TURNS
    )
    return Times(tuple((each * (1 - noise), each, each * (1 + noise)) for each in once))


def test_costs_are_those_that_the_times_are_made_of() -> None:
    plain = [made_of(True, per_byte_s=1 / 4e9), made_of(False, per_byte_s=1 / 5e9)]
    tls = [made_of(True, per_byte_s=1 / 4e9 + 1 / 2e9), made_of(False, per_byte_s=1 / 5e9 + 1 / 1e9)]
    costs = costs_of(plain, tls, basis)
    assert (costs.send_s, costs.receive_s, costs.operation_s) == pytest.approx((20e-6, 30e-6, 100e-6), rel=1e-3)
    assert (costs.send_rate_Bps, costs.receive_rate_Bps) == pytest.approx((4e9, 5e9), rel=1e-3)
    assert (costs.tls_send_rate_Bps, costs.tls_receive_rate_Bps) == pytest.approx((2e9, 1e9), rel=1e-3)
    assert costs.basis == basis(0.0)


def test_the_spread_is_that_of_the_rounds() -> None:
    times = [made_of(True, per_byte_s=1e-9, noise=0.2), made_of(False, per_byte_s=1e-9, noise=0.1)]
    assert costs_of(times, times, basis).basis.spread == pytest.approx(0.16)


def test_encryption_that_costs_nothing_has_no_rate() -> None:
    times = [made_of(True, per_byte_s=1e-9), made_of(False, per_byte_s=1e-9)]
    assert costs_of(times, times, basis).tls_send_rate_Bps == math.inf


@pytest.mark.slow
def test_two_processes_of_this_machine_measure_each_other() -> None:
    costs = measure_messages(basis, rounds=2)
    for seconds in (costs.send_s, costs.receive_s, costs.operation_s):
        assert 0 <= seconds < 0.01
    assert costs.send_s + costs.operation_s > 0
    assert 1e6 < costs.send_rate_Bps < 1e12
    assert costs.tls_receive_rate_Bps < math.inf
    assert costs.basis.kind == "measured"
