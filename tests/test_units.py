from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcsim.units import (
    RATE,
    SIZE,
    TIME,
    BitRate,
    ByteRate,
    Bytes,
    FlopRate,
    Flops,
    PositiveBytes,
    PositiveSeconds,
    PositiveShare,
    Seconds,
    Share,
    SignedSeconds,
    decode_quantity,
    parse_quantity,
    quantity_text,
)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Seconds, "0.15 ms", 0.00015),
        (Seconds, "33s", 33.0),
        (Seconds, " 5 min ", 300.0),
        (Seconds, "7 µs", 7e-6),
        (Seconds, "0 s", 0.0),
        (SignedSeconds, "-2.5 h", -9000.0),
        (BitRate, "2.5 Gb/s", 2.5e9),
        (BitRate, "100 MB/s", 8e8),
        (BitRate, "1 b/s", 1.0),
        (BitRate, "1 MiB/s", 8 * 2**20),
        (ByteRate, "400 GB/s", 4e11),
        (Bytes, "4 MiB", 4 * 2**20),
        (Bytes, "4 MB", 4_000_000),
        (Bytes, "1.5 KiB", 1536),
        (Bytes, "1e3 B", 1000),
        (Flops, "200 GFLOP", 2e11),
        (FlopRate, "10.6 TFLOPS", 1.06e13),
        (Share, "0.12 %", 0.0012),
        (Share, 1, 1.0),
        (Share, 0, 0.0),
        (PositiveShare, 0.65, 0.65),
    ],
)
def test_text_becomes_a_number_in_the_base_unit(kind: type, text: object, value: float) -> None:
    decoded = decode_quantity(kind, text)
    assert decoded == value
    assert type(decoded) is kind


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (Seconds, "3 MiB", "valid units: ns, us"),
        (Seconds, "3", "needs a unit"),
        (Seconds, 0.15, "text with a unit"),
        (Seconds, True, "text with a unit"),
        (Seconds, "fast", 'such as "0.15 ms"'),
        (Seconds, "", 'such as "0.15 ms"'),
        (Seconds, "nan s", 'such as "0.15 ms"'),
        (Seconds, "inf s", 'such as "0.15 ms"'),
        (Seconds, "1e9999999 s", "valid units"),
        (Seconds, "1e999 s", "too large"),
        (Seconds, "100000000000 h", "too large"),
        (Seconds, "-1 ms", "cannot be negative"),
        (PositiveSeconds, "0 s", "more than zero"),
        (PositiveSeconds, "1e-999 s", "more than zero"),
        (BitRate, "0 Gb/s", "more than zero"),
        (BitRate, "1e-300 b/s", "a rate must be at least 1 b/s"),
        (BitRate, "0.0009 kb/s", "a rate must be at least 1 b/s"),
        (BitRate, "1 gb/s", "did you mean Gb/s or GB/s?"),
        (BitRate, "1 Gbps", "did you mean Gb/s?"),
        (BitRate, "1 GB", "Mb/s are megabits, MB/s megabytes: both are accepted for a rate"),
        (ByteRate, "400 Gb/s", "GB/s are gigabytes"),
        (Bytes, "4 Mb", "Mb would be megabits"),
        (Bytes, "4 mib", "did you mean MiB?"),
        (Bytes, "0.3 B", "whole number"),
        (PositiveBytes, "0 B", "more than zero"),
        (Flops, "1 GFLOPS", "would be a speed"),
        (FlopRate, "1 GFLOP", "would be an amount of work"),
        (Share, math.nan, "from 0 to 1"),
        (Share, 1.01, "from 0 to 1"),
        (Share, 10**400, "from 0 to 1"),
        (Share, "-1 %", "from 0 to 1"),
        (Share, "0.5", "from 0 to 1"),
        (Share, True, "from 0 to 1"),
        (PositiveShare, 0, "from more than 0 to 1"),
    ],
)
def test_what_has_no_meaning_is_refused_with_what_would_be_valid(kind: type, text: object, says: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is what is tested)
        decode_quantity(kind, text)
    assert says in str(caught.value)


@given(st.floats(min_value=1e-6, max_value=1e6), st.sampled_from([*TIME.units]))
def test_a_time_is_its_number_times_its_unit(number: float, unit: str) -> None:
    expected = number * float(TIME.units[unit])
    assert float(parse_quantity(f"{number!r} {unit}", TIME)) == pytest.approx(expected, rel=1e-15)


@given(st.integers(min_value=0, max_value=2**60), st.sampled_from([*SIZE.units]))
def test_a_whole_size_is_exact(number: int, unit: str) -> None:
    assert decode_quantity(Bytes, f"{number} {unit}") == number * int(SIZE.units[unit])


@given(st.text(max_size=12))
def test_any_text_is_a_rate_or_a_value_error(text: str) -> None:
    try:
        rate_bps = parse_quantity(text, RATE)
    except ValueError:
        return
    assert any(text.rstrip().endswith(unit) for unit in RATE.units)
    assert math.isfinite(rate_bps)


@given(st.sampled_from([Seconds, BitRate, ByteRate, FlopRate]), st.floats(1.0, 1e9) | st.integers(1, 10**9).map(float))
def test_a_quantity_is_read_back_as_it_was_written(kind: type, value: float) -> None:
    assert decode_quantity(kind, quantity_text(value, kind.dimension)) == value


@given(st.integers(0, 2**50))
def test_a_size_is_read_back_as_it_was_written(value: int) -> None:
    assert decode_quantity(Bytes, quantity_text(value, SIZE)) == value


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (Seconds, 0.00015, "150 us"),
        (Seconds, 60.0, "1 min"),
        (Seconds, 0.0, "0 s"),
        (BitRate, 2.5e9, "2.5 Gb/s"),
        (ByteRate, 1.013e11, "101.3 GB/s"),
        (Bytes, 4 * 2**20, "4 MiB"),
        (Bytes, 24 * 2**30, "24 GiB"),
        (FlopRate, 3.2e12, "3.2 TFLOPS"),
    ],
)
def test_a_quantity_is_written_as_a_person_would(kind: type, value: float, text: str) -> None:
    assert quantity_text(value, kind.dimension) == text
