"""The random choice of elements: the same with compiled and plain loops, and all that it says is taken and checked."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from sample_tensors import COMPILED_LOOPS, LOOPS

from hcsim.compressors import draws
from hcsim.compressors.base import Array, Ident
from hcsim.compressors.kernels import plain
from hcsim.compressors.kernels.plain import Words
from hcsim.compressors.registry import make

LARGEST = np.finfo(np.float32).max


def chosen(choose, count: int, population: int, room: int) -> tuple[Words, Words]:
    """The bits, in memory that was used before, and where the stream then is."""
    seen = np.full(-(-population // 64), 2**64 - 1, np.uint64)
    stream = np.array([count, 2, population, 4], np.uint64)
    choose(stream, count, population, seen, np.full(room, 7, np.uint32))
    return seen, stream


def bits_of(places: list[int], elements: int) -> Words:
    flags = np.zeros(-(-elements // 64) * 64, bool)
    flags[places] = True
    return np.packbits(flags, bitorder="little").view(np.uint64)


@pytest.mark.parametrize("loops", COMPILED_LOOPS)
@pytest.mark.parametrize("room", [0, 600, 60_000])
@pytest.mark.parametrize(("population", "count"), [
    (1, 0), (1, 1), (64, 64), (65, 30), (5000, 2500), ((1 << 23) + 1, 50_000), ((1 << 23) + 1000, 0),
    (9_000_000, 40_000), (70_000_000, 3000),
])  # fmt: skip
def test_the_choice_does_not_depend_on_how_it_is_marked(loops, population, count, room):
    """By pieces where there are many bits, whose room may run out; one by one where there are few."""
    seen, stream = chosen(loops.choose, count, population, room)
    expected, expected_stream = chosen(plain.choose, count, population, room)
    assert np.array_equal(seen, expected)
    assert stream.tolist() == expected_stream.tolist()
    assert int.from_bytes(seen.tobytes(), "little").bit_count() == count


@pytest.mark.parametrize(("elements", "count", "digest"), [
    (1000, 10, "64f85ed6cddf62dd"), (1000, 990, "b50e7e347990b175"),
    (10_000_000, 100_000, "40f9fcc187eb7c99"), (10_000_000, 9_900_000, "286ed5e1f0418a6a"),
])  # fmt: skip
def test_ranks_of_all_versions_choose_alike(elements, count, digest):
    places = draws.numbers(draws.Chooser().choice(draws.bits(3, "randomk", "w", 5), elements, count), count)
    assert hashlib.sha256(places.astype("<i8").tobytes()).hexdigest()[:16] == digest


def test_a_choice_does_not_show_what_was_chosen_before():
    chooser = draws.Chooser()
    for elements, count in ((9_000_000, 90_000), (100, 99), (9_000_001, 10), (300, 3)):
        again = chooser.choice(draws.bits(1, elements), elements, count)
        assert np.array_equal(again, draws.Chooser().choice(draws.bits(1, elements), elements, count))


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("elements", [1, 31, 63, 64, 65, 128, 300])
def test_what_is_marked_is_taken_and_multiplied(loops, elements):
    x = np.random.default_rng(elements).standard_normal(elements).astype(np.float32)
    for step in (1, 2, 7, 100):
        places = list(range(0, elements, step))
        out = np.full(len(places) + 1, 5, np.float32)
        largest = loops.take_marked(x, bits_of(places, elements), 1.5, out[:-1])
        np.testing.assert_array_equal(out[:-1], x[places] * np.float32(1.5))
        assert largest == np.abs(out[:-1]).max()
        assert out[-1] == 5


@pytest.mark.parametrize("loops", LOOPS)
def test_nothing_is_taken_of_nothing(loops):
    empty = np.zeros(0, np.float32)
    assert loops.take_marked(empty, np.zeros(0, np.uint64), 1, empty) == 0
    assert loops.take_marked(np.full(70, LARGEST), np.zeros(2, np.uint64), 9, empty) == 0


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("elements", [5, 64, 205])
def test_what_is_not_finite_is_found_wherever_it_is(loops, value, elements):
    x: Array = np.full(elements, LARGEST)
    seen, out = bits_of([2], elements), np.zeros(1, np.float32)
    for at in range(elements):
        x[at] = value
        assert np.isnan(loops.take_marked(x, seen, 1, out))
        assert np.isnan(loops.take_marked(x, np.zeros_like(seen), 1, out[:0]))
        x[at] = -LARGEST
        assert loops.take_marked(x, seen, 1, out) == LARGEST


@pytest.mark.parametrize("loops", LOOPS)
def test_only_what_is_taken_can_be_too_large(loops):
    x = np.ones(200, np.float32)
    x[[63, 199]] = LARGEST
    out = np.zeros(2, np.float32)
    assert loops.take_marked(x, bits_of([3, 150], 200), 100, out) == 100
    assert loops.take_marked(x, bits_of([3, 199], 200), 100, out) == np.inf


@pytest.mark.parametrize("spec", ["randomk:0.01", "randomk:0.01+ef", "randomk:0.9"])
def test_a_large_tensor_is_encoded_with_the_elements_that_are_decoded(spec):
    x = np.random.default_rng(1).standard_normal((3001, 2801)).astype(np.float32)
    compressor, out, of = make(spec, seed=1, rank=0), np.empty_like(x), Ident("w", 3)
    compressor.decode(compressor.encode(x, of), out, of)
    count = -(-x.size // 100) if "0.01" in spec else -(-x.size * 9 // 10)
    factor = np.float32(1 if spec.endswith("+ef") else x.size / count)
    assert np.count_nonzero(out) == count
    np.testing.assert_array_equal(out[out != 0], x[out != 0] * factor)
