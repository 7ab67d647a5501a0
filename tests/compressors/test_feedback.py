"""Error feedback: nothing is lost, and nothing counts before its step does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from sample_tensors import ALL, EXACT, LINEAR, SPARSE, exchanged, quick, tensors

from hcsim.compressors.base import Array, Ident, PayloadKind
from hcsim.compressors.feedback import ErrorFeedback
from hcsim.compressors.registry import make
from hcsim.errors import CompressionError, UsageError

RESIDUAL = "own/residual/"


def gradient(step: int, shape: tuple[int, ...] = (25, 30), rank: int = 0) -> Array:
    return np.random.default_rng([step, rank]).standard_normal(shape).astype(np.float32)


def sent(compressor: ErrorFeedback, tensor: Array, of: Ident) -> Array:
    out = np.empty_like(tensor)
    compressor.decode(compressor.encode(tensor, of), out, of)
    return out


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("spec", [*EXACT, *SPARSE])
@given(tensor=tensors())
@quick
def test_input_is_decoded_plus_residual_to_the_bit(spec, tensor):
    compressor = make(spec + "+ef", seed=1, rank=0)
    decoded = sent(compressor, tensor, Ident("w", 0))
    compressor.commit(0)
    residual = compressor.state()[RESIDUAL + "w"]
    np.testing.assert_array_equal(decoded + residual, tensor)
    assert ((decoded == 0) | (residual == 0)).all()


@pytest.mark.parametrize("spec", ALL)
def test_over_all_steps_everything_is_sent_or_still_owed(spec):
    compressor = make(spec + "+ef", seed=1, rank=0)
    total_in, total_out = np.zeros((25, 30)), np.zeros((25, 30))
    for step in range(12):
        total_in += gradient(step)
        total_out += sent(compressor, gradient(step), Ident("w", step))
        compressor.commit(step)
    np.testing.assert_allclose(total_out + compressor.state()[RESIDUAL + "w"], total_in, atol=2e-4)


@pytest.mark.parametrize("spec", LINEAR)
@pytest.mark.parametrize("ranks", [1, 3])
def test_over_all_ranks_and_rounds_too(spec, ranks):
    each = [make(spec + "+ef", seed=1, rank=rank) for rank in range(ranks)]
    total_in, total_out = np.zeros((25, 30)), np.zeros((25, 30))
    for step in range(10):
        inputs = [gradient(step, rank=rank) for rank in range(ranks)]
        total_in += sum(inputs)
        totals = exchanged(each, inputs, Ident("w", step))
        assert len({total.tobytes() for total in totals}) == 1
        total_out += totals[0]
        for compressor in each:
            compressor.commit(step)
    owed = sum(compressor.state()[RESIDUAL + "w"] for compressor in each)
    np.testing.assert_allclose(total_out + owed, total_in, atol=1e-3)


@pytest.mark.parametrize("spec", ["topk:0.1", "int8", "onebit", "powersgd:2"])
def test_a_constant_gradient_arrives_on_average(spec):
    """Without feedback top-k would send the same elements for ever."""
    x = gradient(0)
    compressor = make(spec + "+ef", seed=1, rank=0)
    mean = np.zeros(x.shape)
    for step in range(200):
        mean += sent(compressor, x, Ident("w", step)) / 200
        compressor.commit(step)
    assert np.abs(mean - x).mean() < 0.1


@pytest.mark.parametrize("spec", [spec + "+ef" for spec in ALL])
def test_an_abandoned_step_leaves_no_trace(spec):
    tried, straight = make(spec, seed=1, rank=0), make(spec, seed=1, rank=0)
    for step in range(4):
        if step in (0, 2):
            tried.encode(gradient(90 + step), Ident("w", step))
            tried.encode(gradient(90 + step), Ident("only in the aborted step", step))
            tried.abandon(step)
        one, other = (c.encode(gradient(step), Ident("w", step)).tobytes() for c in (tried, straight))
        assert one == other
        for compressor in (tried, straight):
            compressor.commit(step)
    assert {key: array.tobytes() for key, array in tried.state().items()} == {
        key: array.tobytes() for key, array in straight.state().items()
    }


@pytest.mark.parametrize("spec", [spec + "+ef" for spec in ALL])
def test_a_step_tried_again_starts_from_the_same_residual(spec):
    compressor = make(spec, seed=1, rank=0)
    compressor.encode(gradient(0), Ident("w", 0))
    compressor.commit(0)
    first = compressor.encode(gradient(1), Ident("w", 1)).tobytes()
    assert compressor.encode(gradient(1), Ident("w", 1)).tobytes() == first


def test_a_step_that_is_neither_committed_nor_abandoned_is_not_forgotten_silently():
    compressor = make("topk:0.1+ef", seed=1, rank=0)
    compressor.encode(gradient(0), Ident("w", 0))
    with pytest.raises(UsageError, match="step 1 began, but step 0 was neither committed nor abandoned"):
        compressor.encode(gradient(1), Ident("w", 1))


@pytest.mark.parametrize("spec", [spec + "+ef" for spec in ALL])
def test_state_moves_to_another_object(spec):
    before, after = make(spec, seed=1, rank=0), make(spec, seed=1, rank=0)
    for step in range(3):
        before.encode(gradient(step), Ident("w", step))
        before.commit(step)
    after.restore(before.state())
    assert after.encode(gradient(3), Ident("w", 3)).tobytes() == before.encode(gradient(3), Ident("w", 3)).tobytes()


def test_a_state_is_a_copy_and_holds_only_what_was_committed():
    compressor = make("topk:0.1+ef", seed=1, rank=0)
    compressor.encode(gradient(0), Ident("w", 0))
    assert compressor.state() == {}
    compressor.commit(0)
    state = compressor.state()
    state[RESIDUAL + "w"].fill(9)
    assert not (compressor.state()[RESIDUAL + "w"] == 9).any()


@pytest.mark.parametrize(("spec", "key"), [
    ("topk:0.1+ef", "shared/q/w"), ("topk:0.1", RESIDUAL + "w"), ("powersgd:2", RESIDUAL + "w"), ("none", "x"),
])  # fmt: skip
def test_another_compressors_state_is_refused(spec, key):
    with pytest.raises(UsageError, match=key):
        make(spec, seed=1, rank=0).restore({key: np.zeros(3, np.float32)})


def test_a_residual_of_another_shape_is_refused():
    compressor = make("topk:0.1+ef", seed=1, rank=0)
    compressor.restore({RESIDUAL + "w": np.zeros(3, np.float32)})
    with pytest.raises(UsageError, match=r"^w: what is remembered of it has the shape \(3,\), not \(4,\)"):
        compressor.encode(np.zeros(4, np.float32), Ident("w"))


def test_pieces_of_a_tensor_and_a_second_encoding_are_kept_account_of():
    """As an aggregator does it: encode slices itself, keep both errors, and still nothing is lost."""
    compressor = make("int8+ef", seed=1, rank=0)
    assert isinstance(compressor, ErrorFeedback)
    total_in, delivered = np.zeros(100), np.zeros(100)
    for step in range(6):
        x = gradient(step, (100,))
        total_in += x
        of = Ident("w", step)
        compensated = compressor.compensated(x, of)
        first = np.empty_like(x)
        for lo, hi in ((0, 40), (40, 100)):
            piece = Ident(f"w[{lo}:{hi}]", step)
            compressor.inner.decode(compressor.inner.encode(compensated[lo:hi], piece), first[lo:hi], piece)
        second = first.copy()
        piece = Ident("w[40:100]", step)
        compressor.inner.decode(compressor.inner.encode(first[40:] * np.float32(0.7), piece), second[40:], piece)
        compressor.keep(compensated - first + (first - second), of)
        delivered += second
        compressor.commit(step)
    np.testing.assert_allclose(delivered + compressor.state()[RESIDUAL + "w"], total_in, atol=1e-4)


def test_what_does_not_fit_is_not_kept():
    compressor = make("int8+ef", seed=1, rank=0)
    assert isinstance(compressor, ErrorFeedback)
    of = Ident("w", 0)
    with pytest.raises(UsageError, match="nothing was proposed"):
        compressor.keep(np.zeros(5, np.float32), of)
    compressor.compensated(np.zeros(5, np.float32), of)
    with pytest.raises(UsageError, match="shape"):
        compressor.keep(np.zeros(4, np.float32), of)


def test_a_residual_that_overflows_is_refused_by_name():
    compressor = make("fp16+ef", seed=1, rank=0)
    for step in range(2):
        huge = np.full(4, 3e38, np.float32)
        if step:
            with pytest.raises(CompressionError, match=r"^w: element 0 of the tensor is inf"):
                compressor.encode(huge, Ident("w", step))
        else:
            compressor.encode(huge, Ident("w", step))
            compressor.commit(step)


@pytest.mark.parametrize("spec", ALL)
def test_feedback_changes_neither_kind_nor_bytes(spec):
    plain, wrapped = make(spec, seed=1, rank=0), make(spec + "+ef", seed=1, rank=0)
    assert (plain.kind, plain.sized) == (wrapped.kind, wrapped.sized)
    assert plain.size_bytes((20, 30)) == wrapped.size_bytes((20, 30))
    assert wrapped.encode_work((20, 30)).moved_bytes > plain.encode_work((20, 30)).moved_bytes > 0
    if plain.kind is PayloadKind.LINEAR:
        assert plain.round_bytes((20, 30)) == wrapped.round_bytes((20, 30))


def test_feedback_is_not_wrapped_twice():
    with pytest.raises(UsageError, match="has error feedback already"):
        ErrorFeedback(make("fp16+ef", seed=1, rank=0))
