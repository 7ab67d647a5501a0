"""The random choice of elements: the same with compiled and plain loops, and all that it says is taken and checked."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import pytest
from sample_tensors import COMPILED_LOOPS, LOOPS

from hcsim.compressors import draws, kernels
from hcsim.compressors.base import Array, Ident
from hcsim.compressors.kernels import plain
from hcsim.compressors.kernels.plain import Words
from hcsim.compressors.registry import make
from hcsim.errors import CompressionError

LARGEST = np.finfo(np.float32).max


def chosen(choose, count: int, population: int, room: int) -> tuple[Words, Words]:
    """The bits, in memory that was used before, and where the stream then is."""
    seen = np.full(-(-population // 64), 2**64 - 1, np.uint64)
    stream = np.array([count, 2, population, 4], np.uint64)
    choose(stream, count, population, seen, np.full(room, 7, np.uint32))
    return seen, stream


@cache
def plainly_chosen(count: int, population: int) -> tuple[Words, Words]:
    """What all compiled loops are compared with; the plain one needs no room."""
    return chosen(plain.choose, count, population, 0)


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
    expected, expected_stream = plainly_chosen(count, population)
    assert np.array_equal(seen, expected)
    assert stream.tolist() == expected_stream.tolist()
    assert int.from_bytes(seen.tobytes(), "little").bit_count() == count


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("elements", "count", "digest"), [
    (1000, 10, "64f85ed6cddf62dd"), (1000, 990, "b50e7e347990b175"),
    (10_000_000, 100_000, "40f9fcc187eb7c99"), (10_000_000, 9_900_000, "286ed5e1f0418a6a"),
])  # fmt: skip
def test_ranks_of_all_versions_choose_alike(elements, count, digest):
    places = np.sort(draws.Chooser().choice(draws.bits(3, "randomk", "w", 5), elements, count).numbers())
    assert hashlib.sha256(places.astype("<i8").tobytes()).hexdigest()[:16] == digest


def test_a_choice_does_not_show_what_was_chosen_before():
    chooser = draws.Chooser()
    for elements, count in ((9_000_000, 90_000), (100, 99), (9_000_001, 10), (300, 3)):
        again = chooser.choice(draws.bits(1, elements), elements, count).numbers()
        assert np.array_equal(again, draws.Chooser().choice(draws.bits(1, elements), elements, count).numbers())


def listed(choose_few, count: int, population: int, room: int) -> tuple[bool, list[int], list[int]]:
    """Whether there was room enough, the list, in memory that was used before, and where the stream then is."""
    places, stream = np.full(max(room, count), 7, np.uint32), np.array([count, 2, population, 4], np.uint64)
    done = choose_few(stream, count, population, places)
    return done, places[:count].tolist(), stream.tolist()


@cache
def plainly_listed(count: int, population: int) -> tuple[bool, list[int], list[int]]:
    return listed(plain.choose_few, count, population, 0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loops", COMPILED_LOOPS)
@pytest.mark.parametrize(("population", "count"), [
    (1, 0), (1, 1), (70, 20), (65_536, 60_000), (65_537, 30_000), (200_000, 100_000), (9_000_000, 250_000),
    (1 << 26, 5000), (1 << 26, 0),
])  # fmt: skip
def test_a_list_has_the_numbers_that_would_be_marked_in_the_order_of_their_blocks(loops, population, count):
    """Also where nearly all are chosen, so that most are drawn several times."""
    done, places, stream = listed(loops.choose_few, count, population, 3 * count + 200_000)
    assert done
    assert (True, places, stream) == plainly_listed(count, population)
    seen, expected_stream = plainly_chosen(count, population)
    assert np.array_equal(bits_of(places, population), seen)
    assert stream == expected_stream.tolist()
    assert (np.diff(np.array(places, np.int64) >> 16) >= 0).all()


@pytest.mark.parametrize("loops", COMPILED_LOOPS)
def test_a_list_that_finds_no_room_says_so(loops):
    assert not listed(loops.choose_few, 100_000, 9_000_000, 100_000)[0]  # the blocks do not get equally many
    assert not listed(loops.choose_few, 70_000, 70_000, 70_000)[0]


@pytest.mark.skipif(not kernels.COMPILED, reason="the plain loop finds room anywhere")
def test_without_room_the_plain_loop_makes_the_same_list(monkeypatch):
    source, calls = draws.bits(5, "w"), []
    expected = draws.Chooser().choice(source, 9_000_000, 90_000).numbers()
    monkeypatch.setattr(draws.kernels, "choose_few", lambda *_: calls.append(1))
    assert np.array_equal(draws.Chooser().choice(source, 9_000_000, 90_000).numbers(), expected)
    assert calls


@pytest.mark.parametrize("loops", LOOPS)
def test_what_is_listed_is_taken_and_multiplied_and_nothing_else_is_looked_at(loops):
    x = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    x[[3, 999]] = np.nan, np.inf
    for places in ([], [0], [998, 4, 4], list(range(4, 999))):
        out = np.full(len(places) + 1, 5, np.float32)
        largest = loops.take_listed(x, np.array(places, np.uint32), 1.5, out[:-1])
        np.testing.assert_array_equal(out[:-1], x[places] * np.float32(1.5))
        assert largest == np.abs(out[:-1]).max(initial=0)
        assert out[-1] == 5
    for place, expected in ((3, np.nan), (999, np.inf)):
        found = loops.take_listed(x, np.array([5, place, 7], np.uint32), 1, np.empty(3, np.float32))
        assert np.array_equal(found, expected, equal_nan=True)


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


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("spec", ["randomk:0.01", "randomk:0.01+ef", "randomk:0.9"])
def test_a_large_tensor_is_encoded_with_the_elements_that_are_decoded(spec):
    x = np.random.default_rng(1).standard_normal((3001, 2801)).astype(np.float32)
    compressor, out, of = make(spec, seed=1, rank=0), np.empty_like(x), Ident("w", 3)
    compressor.decode(compressor.encode(x, of), out, of)
    count = -(-x.size // 100) if "0.01" in spec else -(-x.size * 9 // 10)
    factor = np.float32(1 if spec.endswith("+ef") else x.size / count)
    assert np.count_nonzero(out) == count
    np.testing.assert_array_equal(out[out != 0], x[out != 0] * factor)


LARGE = (3001, 2801)


def large(at: int, value: float) -> Array:
    x = np.ones(LARGE, np.float32)
    x.reshape(-1)[at] = value
    return x


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_of_a_large_tensor_what_is_sent_is_refused_and_what_is_not_goes_unseen(value):
    compressor, of, out = make("randomk:0.01", seed=1, rank=0), Ident("w", 3), np.empty(LARGE, np.float32)
    compressor.decode(compressor.encode(np.ones(LARGE, np.float32), of), out, of)
    sent, unsent = int(np.flatnonzero(out)[500]), int(np.flatnonzero(out == 0)[500])
    with pytest.raises(CompressionError, match=f"^w: element {sent} of the tensor is {value}"):
        compressor.encode(large(sent, value), of)
    before = out.copy()
    compressor.decode(compressor.encode(large(unsent, value), of), out, of)
    assert np.array_equal(out, before)


@pytest.mark.parametrize("spec", ["randomk:0.01+ef", "randomk:0.1"])
def test_of_a_large_tensor_of_which_the_rest_is_kept_or_read_all_is_looked_at(spec):
    compressor, of = make(spec, seed=1, rank=0), Ident("w", 3)
    for at in (0, 4_000_000, 3001 * 2801 - 1):
        with pytest.raises(CompressionError, match=f"^w: element {at} of the tensor is nan"):
            compressor.encode(large(at, np.nan), of)


@pytest.mark.parametrize("spec", ["randomk:0.01", "randomk:0.01+ef"])
def test_the_sum_of_large_tensors_refuses_a_nan_anywhere(spec):
    compressor, of = make(spec, seed=1, rank=0), Ident("w", 3)
    for at in (0, 4_000_000, 3001 * 2801 - 1):
        with pytest.raises(CompressionError, match=f"^w: element {at} of the tensor is nan"):
            next(compressor.rounds(large(at, np.nan), of))
