"""What comes out of a compressor, against what went in."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_tensors import ALL, EXACT, LOW_RANK, QUANTISED, SPARSE, quick, tensors

from hcsim.compressors import draws
from hcsim.compressors.base import Array, Ident
from hcsim.compressors.encoding import CHUNK
from hcsim.compressors.registry import make

OF = Ident("layer.weight", 3)
LARGEST = np.finfo(np.float32).max


def decoded(spec: str, tensor: Array, of: Ident = OF) -> Array:
    out = np.full_like(tensor, np.nan)
    compressor = make(spec, seed=1, rank=0)
    compressor.decode(compressor.encode(tensor, of), out, of)
    return out


def bits(array: Array) -> list[int]:
    return np.ascontiguousarray(array).view(np.uint32).reshape(-1).tolist()


def finite(tensor: Array) -> Array:
    """Small enough that sums over a tensor are finite."""
    return tensor * np.float32(1e-4) if np.abs(tensor).max(initial=0) > 1e34 else tensor


@pytest.mark.parametrize("spec", EXACT)
@given(tensor=tensors())
@quick
def test_an_exact_compressor_gives_back_every_bit(spec, tensor):
    assert bits(decoded(spec, tensor)) == bits(tensor)


@pytest.mark.parametrize("spec", SPARSE[:3])
@given(tensor=tensors())
@quick
def test_top_k_sends_the_largest_and_of_equals_the_first(spec, tensor):
    count = min(tensor.size, max(1, math.ceil(Fraction(spec.partition(":")[2]) * tensor.size)))
    flat = tensor.reshape(-1).astype(np.float64)
    largest = sorted(range(flat.size), key=lambda i: (-abs(flat[i]), i))[:count]
    expected = np.zeros(flat.size, np.float32)
    expected[largest] = tensor.reshape(-1)[largest]
    assert bits(decoded(spec, tensor)) == bits(expected)


@pytest.mark.parametrize("fill", ["normal", "mostly zero", "constant", "few values", "steep"])
def test_top_k_is_exact_where_it_guesses_a_threshold(fill):
    source = np.random.default_rng(5)
    x = source.standard_normal(300_000).astype(np.float32)
    x = {
        "normal": x,
        "mostly zero": np.where(source.random(x.size) < 0.002, x, 0),
        "constant": np.full_like(x, 2),
        "few values": np.rint(x),
        "steep": np.where(np.arange(x.size) % 5 == 0, x * 1e6, x),
    }[fill].astype(np.float32)
    expected = np.zeros_like(x)
    largest = np.argsort(-np.abs(x), kind="stable")[:3000]
    expected[largest] = x[largest]
    np.testing.assert_array_equal(decoded("topk:0.01", x), expected)


@pytest.mark.parametrize("spec", ["topk:0.07", "randomk:0.07"])
@pytest.mark.parametrize(("elements", "count"), [(0, 0), (1, 1), (14, 1), (100, 7), (101, 8)])
def test_the_number_of_elements_sent_is_exact_decimal_arithmetic(spec, elements, count):
    """In floats 0.07 · 100 is a little more than 7."""
    assert np.count_nonzero(decoded(spec, np.ones(elements, np.float32))) == count


@pytest.mark.parametrize(("spec", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@given(tensor=tensors())
@quick
def test_a_cast_rounds_as_torch_does_and_saturates(spec, dtype, tensor):
    limit = torch.finfo(dtype).max
    expected = torch.from_numpy(tensor).to(dtype).to(torch.float32).clamp(-limit, limit).numpy()
    assert bits(decoded(spec, tensor)) == bits(expected)


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_a_cast_beyond_the_range_is_the_largest_value(spec):
    limit = torch.finfo(torch.float16 if spec == "fp16" else torch.bfloat16).max
    out = decoded(spec, np.array([LARGEST, -LARGEST, 1, -2], np.float32))
    assert out.tolist() == [limit, -limit, 1, -2]


@pytest.mark.parametrize("block", [0, 16, 256])
@given(tensor=tensors())
@quick
def test_int8_errs_by_half_a_scale_at_most(block, tensor):
    flat = tensor.reshape(-1).astype(np.float64)
    error = np.abs(decoded(f"int8:block={block}" if block else "int8", tensor).reshape(-1) - flat)
    for lo in range(0, flat.size, block or max(1, flat.size)):
        part = slice(lo, lo + block if block else None)
        scale = np.abs(flat[part]).max() / 127 * (1 + 2**-15)
        assert error[part].max() <= max(scale / 2 * (1 + 1e-4), 1.6e-36)


@pytest.mark.parametrize("block", [16, 256])
@given(tensor=tensors())
@quick
def test_int4_errs_by_half_a_scale_at_most(block, tensor):
    flat = tensor.reshape(-1).astype(np.float64)
    error = np.abs(decoded(f"int4:block={block}", tensor).reshape(-1) - flat)
    for lo in range(0, flat.size, block):
        scale = np.abs(flat[lo : lo + block]).max() / 7 * (1 + 2**-15)
        assert error[lo : lo + block].max() <= max(scale / 2 * (1 + 1e-4), 1.6e-36)


def test_int2_errs_on_normal_numbers_as_the_best_quantiser_of_four_equal_steps_does():
    """Max, "Quantizing for minimum distortion" (1960), table II: 0.1188 of the variance."""
    x = np.random.default_rng(6).standard_normal(1 << 20).astype(np.float32)
    assert np.mean((decoded("int2:block=32768", x) - x) ** 2) == pytest.approx(0.1188, rel=0.01)
    assert np.mean((decoded("int2", x) - x) ** 2) < 0.1188


@given(tensor=tensors())
@quick
def test_int2_keeps_signs_and_has_two_magnitudes_in_each_block(tensor):
    out = decoded("int2:block=16", tensor).reshape(-1)
    assert ((out < 0) == (tensor.reshape(-1) < 0))[out != 0].all()
    for lo in range(0, out.size, 16):
        magnitudes = np.unique(np.abs(out[lo : lo + 16]))
        assert magnitudes.size <= 2
        assert magnitudes[-1] in (magnitudes[0], 3 * magnitudes[0])


@given(tensor=tensors())
@quick
def test_stochastic_int8_rounds_to_a_neighbour(tensor):
    flat = tensor.reshape(-1).astype(np.float64)
    scale = np.abs(flat).max(initial=0) / 127 * (1 + 2**-15)
    error = np.abs(decoded("int8:stochastic", tensor).reshape(-1) - flat)
    assert error.max(initial=0) <= max(scale * (1 + 1e-4), 1.6e-36)


def test_stochastic_int8_is_right_on_average_and_each_rank_draws_its_own():
    x = np.array([127.0, 0.25, -0.75, 3.5, -126.9] * 200, np.float32)
    steps = 400
    mean = np.zeros(x.size)
    out = np.empty_like(x)
    ranks = [make("int8:stochastic", seed=7, rank=rank) for rank in range(2)]
    for step in range(steps):
        ranks[0].decode(ranks[0].encode(x, Ident("x", step)), out, Ident("x", step))
        mean += out / steps
    assert np.abs(mean - x).max() < 5 * 0.5 / math.sqrt(steps)
    assert np.abs((mean - x).reshape(-1, 5).mean(axis=0)).max() < 5 * 0.5 / math.sqrt(200 * steps)
    assert ranks[0].encode(x, OF).tobytes() != ranks[1].encode(x, OF).tobytes()
    assert ranks[0].encode(x, OF).tobytes() != ranks[0].encode(x, Ident(OF.name, 4)).copy().tobytes()


@given(tensor=tensors())
@quick
def test_one_bit_keeps_signs_and_the_mean_magnitude(tensor):
    out = decoded("onebit", tensor).astype(np.float64)
    mean = np.abs(tensor.astype(np.float64)).mean() if tensor.size else 0.0
    assert (np.signbit(out) == (tensor < 0)).all()
    assert np.abs(np.abs(out) - mean).max(initial=0) <= max(mean * 2**-12, 1e-45)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("spec", [*EXACT, *SPARSE[:3], *QUANTISED])
@given(tensor=tensors())
@quick
def test_encoding_what_was_decoded_changes_nothing_more(spec, tensor):
    once = decoded(spec, tensor)
    np.testing.assert_array_equal(decoded(spec, once), once)


@pytest.mark.parametrize("spec", [*EXACT, *SPARSE[:3], *QUANTISED])
def test_tensors_of_many_chunks_are_the_same_as_small_ones(spec):
    """Kernels work on chunks; their seams, and a last chunk that is not full, must not show."""
    x = np.random.default_rng(3).standard_normal(2 * CHUNK + 41).astype(np.float32)
    once = decoded(spec, x)
    np.testing.assert_array_equal(decoded(spec, once), once)
    if spec in EXACT:
        np.testing.assert_array_equal(once, x)
    elif spec in QUANTISED and spec != "onebit":
        assert np.abs(once - x).max() < (0.65 if "int4" in spec else 0.05)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("spec", ALL)
@given(tensor=tensors())
@quick
def test_the_size_is_known_before(spec, tensor):
    compressor = make(spec, seed=1, rank=0)
    if compressor.sized:
        assert compressor.encode(finite(tensor) / 100, OF).size == compressor.size_bytes(tensor.shape)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("spec", ALL)
@given(tensor=tensors())
@quick
def test_adding_and_subtracting_are_decoding_and_then_arithmetic(spec, tensor):
    tensor = finite(tensor) / 100
    compressor = make(spec, seed=1, rank=0)
    payload = compressor.encode(tensor, OF)
    # Misaligned and read-only, as it may lie within a message.
    message = np.concatenate((np.zeros(1, np.uint8), payload))
    message.flags.writeable = False
    start = np.linspace(-1, 1, tensor.size, dtype=np.float32).reshape(tensor.shape)
    out, more, less = np.empty_like(tensor), start.copy(), start.copy()
    compressor.decode(message[1:], out, OF)
    compressor.add(message[1:], more, OF)
    compressor.subtract(message[1:], less, OF)
    if spec in LOW_RANK:  # a product of a few rows may be rounded in another order
        size = np.abs(tensor).max(initial=0)
        np.testing.assert_allclose(more, start + out, rtol=1e-5, atol=1e-5 * size)
        np.testing.assert_allclose(less, start - out, rtol=1e-5, atol=1e-5 * size)
    else:
        np.testing.assert_array_equal(more, start + out)
        np.testing.assert_array_equal(less, start - out)


@pytest.mark.parametrize("spec", [spec + suffix for spec in ALL for suffix in ("", "+ef")])
def test_the_order_in_which_tensors_are_encoded_does_not_matter(spec):
    source = np.random.default_rng(2)
    model = {f"w{i}": source.standard_normal((20 + i, 30)).astype(np.float32) for i in range(4)}
    forwards, backwards = make(spec, seed=1, rank=0), make(spec, seed=1, rank=0)
    for step in range(3):
        one = {name: forwards.encode(x, Ident(name, step)).tobytes() for name, x in model.items()}
        other = {name: backwards.encode(x, Ident(name, step)).tobytes() for name, x in reversed(model.items())}
        assert one == other
        forwards.commit(step)
        backwards.commit(step)


@pytest.mark.parametrize("spec", ALL)
def test_the_input_stays_as_it_is_and_other_payloads_too(spec):
    x = np.random.default_rng(2).standard_normal((30, 40)).astype(np.float32)
    kept = x.copy()
    x.flags.writeable = False
    compressor = make(spec, seed=1, rank=0)
    payload = compressor.encode(x, Ident("a"))
    before = payload.tobytes()
    compressor.encode(x[::-1].copy(), Ident("b"))
    assert payload.tobytes() == before
    np.testing.assert_array_equal(x, kept)


@given(st.integers(0, 5), st.integers(0, 60))
@quick
def test_a_random_sample_has_distinct_places_in_order(seed, elements):
    chooser = draws.Chooser()
    for count in (0, elements // 10, elements // 2, elements - elements // 5, elements):
        chosen = chooser.choice(draws.bits(seed, "test", count), elements, count).numbers()
        assert len(chosen) == len(np.unique(chosen)) == count
        assert (np.diff(chosen) > 0).all()
        assert ((chosen >= 0) & (chosen < elements)).all()


def test_random_k_is_unbiased_without_feedback():
    x = np.random.default_rng(4).standard_normal(50).astype(np.float32)
    compressor = make("randomk:0.2", seed=9, rank=0)
    steps, mean, out = 1500, np.zeros(50), np.empty_like(x)
    for step in range(steps):
        compressor.decode(compressor.encode(x, Ident("x", step)), out, Ident("x", step))
        mean += out / steps
    deviation = np.abs(x) * math.sqrt((1 / 0.2 - 1) / steps)
    assert (np.abs(mean - x) < 4.5 * deviation).all()
