"""Gradients as they travel: what was packed comes out, and nothing else is taken for a gradient."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from msgspec.structs import replace

from hcsim.compressors.encoding import HEADER_BYTES
from hcsim.compressors.registry import make
from hcsim.errors import CompressionError
from hcsim.rng import generator
from hcsim.runtime.channel import Phantom
from hcsim.training.layout import Layout
from hcsim.training.parameter_server.gradients import GradientCodec, mean_of_sums
from hcsim.training.parameter_server.messages import Push

LAYOUT = Layout.of([[("first.weight", (24, 5)), ("first.bias", (24,))], [("second.weight", (3, 24)), ("empty", (0,))]])
SPECS = ("none", "zstd", "topk:0.1", "randomk:0.1", "fp16", "bf16", "int8", "int8:block=16", "onebit", "powersgd:1",
         "topk:0.1+ef")  # fmt: skip


def packed(spec: str, number: int = 0) -> tuple[GradientCodec, np.ndarray, Push, np.ndarray]:
    gradients = GradientCodec(LAYOUT, make(spec, seed=3, rank=0))
    flat = generator(7, "gradient", number).standard_normal(LAYOUT.length, np.float32)
    sizes, data = gradients.pack(flat, 1, 4)
    assert not isinstance(data, Phantom)
    return gradients, flat, Push(1, 4, 16, gradients.compressor.spec, sizes), data


@pytest.mark.parametrize("spec", ["none", "zstd"])
def test_what_is_packed_without_loss_comes_out_as_it_was(spec: str):
    gradients, flat, push, data = packed(spec)
    assert gradients.objection(push) == ""
    assert np.array_equal(gradients.unpack(push, data), flat)


@pytest.mark.parametrize("spec", SPECS)
def test_the_receiver_decodes_what_the_sender_would(spec: str):
    gradients, _, push, data = packed(spec)
    receiver = GradientCodec(LAYOUT, make(spec, seed=3, rank=1))
    assert receiver.objection(push) == ""
    assert push.size_bytes == data.nbytes <= receiver.most_bytes
    assert np.array_equal(receiver.unpack(push, data), gradients.unpack(push, data))


@pytest.mark.parametrize("spec", SPECS)
def test_a_phantom_has_the_size_of_the_real_payload(spec: str):
    gradients, _, push, _ = packed(spec)
    sizes, phantom = gradients.pack(Phantom(LAYOUT.size_bytes), 1, 4)
    assert phantom.nbytes == sum(sizes)
    assert sizes == push.sizes or not gradients.compressor.sized


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=60)
@given(st.data())
def test_bytes_that_are_no_gradient_are_refused_or_are_one(spec: str, data: st.DataObject):
    """Whatever is sent in a payload's place, the server gets finite numbers or a named error, and nothing else."""
    gradients, _, push, good = packed(spec)
    bad = good.copy()
    for _ in range(data.draw(st.integers(1, 6))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, push.sizes[0]))
    sizes = push.sizes if gradients.compressor.sized else (cut, push.size_bytes - cut, *(0 for _ in push.sizes[2:]))
    try:
        found = gradients.unpack(replace(push, sizes=sizes), bad)
    except CompressionError:
        return
    assert np.isfinite(found).all()


def test_factors_whose_product_is_not_finite_are_refused():
    gradients, _, push, bad = packed("powersgd:1")
    factors = bad[HEADER_BYTES : push.sizes[0]]
    factors.view(np.float32)[:] = 1e38
    with pytest.raises(CompressionError, match="the product of the factors is too large"):
        gradients.unpack(push, bad)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"compressor": "gzip"}, "compressed with 'gzip'"),
        ({"sizes": ()}, "0 payloads for 4 tensors"),
        ({"sizes": (1, 2, 3, 4)}, "1 bytes for"),
        ({"sizes": (1 << 40, 1, 1, 1)}, "1099511627776 bytes for"),
    ],
)
@pytest.mark.parametrize("spec", ["none", "topk:0.1"])
def test_an_announcement_that_does_not_fit_the_model_is_refused_before_its_bytes_come(spec, change, reason):
    gradients, _, push, _ = packed(spec)
    assert reason in gradients.objection(replace(push, **change))


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=5),
    st.data(),
)
def test_sums_over_samples_become_the_mean_over_all_of_them(weights: list[int], data: st.DataObject):
    finite = st.floats(-(2.0**100), 2.0**100, width=32)
    terms = [data.draw(arrays(np.float32, 7, elements=finite)) for _ in weights]
    expected = np.sum(np.array(terms, np.float64), axis=0) / max(1, sum(weights))
    largest = max(float(np.abs(term).max()) for term in terms)
    found = np.empty(7, np.float32)
    mean_of_sums([(term.copy(), weight) for term, weight in zip(terms, weights, strict=True)], found)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * largest + 1e-37)


def test_a_mean_of_the_largest_numbers_is_finite():
    largest = np.full(3, np.finfo(np.float32).max, np.float32)
    found = np.empty(3, np.float32)
    mean_of_sums([(largest.copy(), 1), (largest.copy(), 1)], found)
    assert np.array_equal(found, largest)


@pytest.mark.parametrize("spec", ["topk:0.1+ef", "randomk:0.1+ef", "onebit+ef", "int8+ef", "powersgd:1+ef"])
def test_error_feedback_owes_sums_over_samples_whatever_the_batches(spec: str):
    """What was delivered and what is owed are all gradients times their samples, also where a batch was empty."""
    gradients = GradientCodec(LAYOUT, make(spec, seed=3, rank=0))
    put_in, delivered = np.zeros(LAYOUT.length), np.zeros(LAYOUT.length)
    for step, samples in enumerate((16, 3, 0, 40, 0, 1)):
        flat = generator(7, "gradient", step).standard_normal(LAYOUT.length, np.float32)
        put_in += samples * flat.astype(np.float64)
        sizes, data = gradients.pack(flat, samples, step)
        delivered += gradients.unpack(Push(step + 1, step, samples, gradients.compressor.spec, sizes), data)
        gradients.compressor.commit(step)
    residual = np.zeros(LAYOUT.length)
    for tensor in LAYOUT.tensors:
        residual[tensor.span] = gradients.compressor.state()[f"own/residual/{tensor.name}"].reshape(-1)
    np.testing.assert_allclose(delivered + residual, put_in, atol=1e-3)
