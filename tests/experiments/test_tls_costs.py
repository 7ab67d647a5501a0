"""What TLS costs on a stream."""

from __future__ import annotations

import pytest

from experiments import tls


@pytest.mark.slow
def test_a_stream_is_measured_both_ways_beside_the_cipher() -> None:
    plaintext, secure = tls.measure(None, rounds=1, frames=2)
    assert (plaintext["way"], plaintext["over_bound"], plaintext["over_plaintext"]) == ("plaintext", 1.0, 1.0)
    assert secure["bound_ns_per_byte"] > plaintext["cpu_ns_per_byte"]
    assert min(plaintext["gigabytes_per_s"], secure["gigabytes_per_s"]) > 0
