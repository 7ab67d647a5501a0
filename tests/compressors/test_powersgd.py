"""PowerSGD, factor by factor, against the same in float64 written from the paper."""

from __future__ import annotations

import contextlib
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_tensors import exchanged, quick

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, Ident
from hcsim.compressors.kernels import plain
from hcsim.compressors.powersgd import PowerSGD
from hcsim.errors import CompressionError, UsageError


def gradients(ranks: int, steps: int, shape: tuple[int, ...] = (12, 5, 4), seed: int = 0) -> list[list[Array]]:
    """By step and rank; steps resemble each other, as they do in training."""
    draws = np.random.default_rng(seed)
    common = draws.standard_normal(shape)
    return [
        [(common + 0.3 * draws.standard_normal(shape)).astype(np.float32) for _ in range(ranks)] for _ in range(steps)
    ]


def orthonormal(p: np.ndarray) -> np.ndarray:
    """Gram and Schmidt's."""
    columns: list[np.ndarray] = []
    for column in p.T:
        for other in columns:
            column = column - (other @ column) * other
        columns.append(column / np.linalg.norm(column))
    return np.stack(columns, axis=1)


def first_factor(matrix: np.ndarray, rank: int, of: Ident) -> np.ndarray:
    """P of a first step, as it is sent."""
    return next(PowerSGD(rank, seed=4).rounds(matrix, of)).reshape(rank, -1)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("rank", [1, 3])
def test_warm_started_steps_agree_with_a_reference(ranks, rank):
    each = [PowerSGD(rank, seed=4) for _ in range(ranks)]
    q: np.ndarray | None = None
    for step, inputs in enumerate(gradients(ranks, 5)):
        of = Ident("conv.weight", step)
        matrices = [x.reshape(12, 20).astype(np.float64) for x in inputs]
        if q is None:
            # What the first step begins with.
            q = first_factor(np.eye(20, dtype=np.float32), rank, of).T.astype(np.float64)
        p = orthonormal(sum(m @ q for m in matrices))
        q = sum(m.T @ p for m in matrices)
        for total in exchanged(each, inputs, of):
            np.testing.assert_allclose(total.reshape(12, 20), p @ q.T, rtol=1e-4, atol=1e-4)
        for compressor in each:
            compressor.commit(step)
            kept = compressor.state()["shared/q/conv.weight"].T
            # A column and its negative are the same direction.
            expected = q / np.abs(q).max(axis=0) * np.sign((q * kept).sum(axis=0))
            np.testing.assert_allclose(kept, expected, rtol=1e-3, atol=1e-3)


def test_all_ranks_hold_the_same_bits():
    each = [PowerSGD(2, seed=4) for _ in range(3)]
    for step, inputs in enumerate(gradients(3, 3)):
        totals = exchanged(each, inputs, Ident("w", step))
        assert len({total.tobytes() for total in totals}) == 1
        for compressor in each:
            compressor.commit(step)


class Backwards:
    """The loops of another processor: its products are added from the other end, in float64."""

    @staticmethod
    def dots(thin: Array, matrix: Array, out: Array, rank: int) -> None:
        out[:] = (thin.astype(np.float64)[:, ::-1] @ matrix.astype(np.float64).T[::-1]).reshape(out.shape)

    @staticmethod
    def sums(thin: Array, matrix: Array, out: Array, rank: int) -> None:
        out[:] = (thin.astype(np.float64)[:, ::-1] @ matrix.astype(np.float64)[::-1]).reshape(out.shape)

    outer = staticmethod(plain.outer)


@pytest.mark.parametrize("rank", [1, 3, 9])
def test_ranks_on_unlike_processors_hold_the_same_bits(rank):
    loops = [kernels, plain, Backwards]
    each = [PowerSGD(rank, seed=4, loops=one) for one in loops]
    alone = [PowerSGD(rank, seed=4, loops=one) for one in loops]
    for step, inputs in enumerate(gradients(3, 4, shape=(40, 60))):
        of = Ident("w", step)
        totals = exchanged(each, inputs, of)
        assert len({total.tobytes() for total in totals}) == 1
        factors = [next(one.rounds(inputs[0].copy(), of)) for one in alone]
        assert len({factor.tobytes() for factor in factors}) > 1, "these processors are alike"
        for one in each:
            one.commit(step)
        assert len({one.state()["shared/q/w"].tobytes() for one in each}) == 1


def test_every_processor_comes_to_these_bits():
    """From the sums that crossed the wire: what is computed from them is what a Mac and a PC must have in common."""
    draws = np.random.default_rng(5)

    def numbers(size: int) -> Array:
        return (draws.integers(-(2**20), 2**20, size) / 2**17).astype(np.float32)

    digest = hashlib.sha256()
    for rank, rows, columns in ((1, 30, 40), (4, 50, 1100), (9, 33, 70)):
        compressor, tensor = PowerSGD(rank, seed=1), np.zeros((rows, columns), np.float32)
        rounds = compressor.rounds(tensor, Ident("w", 0))
        next(rounds)
        p = numbers(rank * rows)
        p[-rows:] = p[:rows]  # columns that depend on each other too
        rounds.send(p)
        with pytest.raises(StopIteration):
            rounds.send(numbers(rank * columns))
        compressor.commit(0)
        digest.update(tensor.tobytes())
        digest.update(compressor.state()["shared/q/w"].tobytes())
    assert digest.hexdigest()[:16] == "35a3e8b4d6038add"


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 9]), st.integers(-149, 127), st.integers(0, 276))
@quick
def test_columns_are_orthonormal_whatever_their_magnitudes(seed, rank, exponent, spread):
    draws = np.random.default_rng(seed)
    magnitudes = np.ldexp(1.0, np.clip(exponent + draws.integers(-spread, spread + 1, (rank, 40)), -149, 127))
    p = (draws.uniform(-1, 1, (rank, 40)) * magnitudes).astype(np.float32)
    rounds = PowerSGD(rank, seed=4).rounds(np.eye(40, dtype=np.float32), Ident("w"))
    next(rounds)
    found = rounds.send(p.reshape(-1)).reshape(rank, 40)  # times the identity
    np.testing.assert_allclose(found.astype(np.float64) @ found.T, np.eye(rank), atol=1e-6)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4, 9]), st.integers(-149, 127), st.integers(0, 276))
@quick
def test_what_is_decoded_is_finite_or_refused(seed, rank, exponent, spread):
    draws = np.random.default_rng(seed)
    shape = (24, 40)
    magnitudes = np.ldexp(1.0, np.clip(exponent + draws.integers(-spread, spread + 1, shape), -149, 127))
    x = (draws.uniform(-1.99, 1.99, shape) * magnitudes).astype(np.float32)
    compressor, out = PowerSGD(rank, seed=0), np.empty(shape, np.float32)
    with contextlib.suppress(CompressionError) if np.abs(x).max() > 1e36 else contextlib.nullcontext():
        payload = compressor.encode(x, Ident("w"))
        out.fill(np.nan)
        compressor.decode(payload, out, Ident("w"))
        assert np.isfinite(out).all()
    size = rank * sum(shape)
    magnitudes = np.ldexp(1.0, np.clip(exponent + draws.integers(-spread, spread + 1, size), -149, 127))
    factors = (draws.uniform(-1.99, 1.99, size) * magnitudes).astype(np.float32)
    forged = PowerSGD(rank, seed=0).encode(np.ones(shape, np.float32), Ident("w")).copy()
    forged[-factors.nbytes :] = factors.view(np.uint8)
    p, q = factors[: rank * 24].reshape(rank, 24), factors[rank * 24 :].reshape(rank, 40)
    exact = p.T.astype(np.float64) @ q.astype(np.float64)
    if np.abs(exact).max() > 3.41e38:
        with pytest.raises(CompressionError, match="too large for float32"):
            compressor.decode(forged, out, Ident("w"))
    elif np.abs(exact).max() < 3.39e38:
        compressor.decode(forged, out, Ident("w"))
        assert np.isfinite(out).all()


def test_what_was_sent_and_what_is_left_add_up():
    """Over all ranks: the total and what each is left with are all that went in."""
    each = [PowerSGD(2, seed=4) for _ in range(3)]
    inputs = gradients(3, 1)[0]
    left, totals = [x.copy() for x in inputs], [np.empty_like(x) for x in inputs]
    rounds = [c.rounds(x, Ident("w"), t) for c, x, t in zip(each, left, totals, strict=True)]
    p = np.sum([next(r) for r in rounds], axis=0)
    q = np.sum([r.send(p.copy()) for r in rounds], axis=0)
    for r in rounds:
        with pytest.raises(StopIteration):
            r.send(q.copy())
    np.testing.assert_allclose(totals[0] + sum(left), sum(inputs), atol=1e-5)
    assert np.abs(left[0]).max() > 0.01


def test_a_matrix_of_low_rank_comes_out_whole():
    draws = np.random.default_rng(1)
    inputs = [(draws.standard_normal((30, 2)) @ draws.standard_normal((2, 40))).astype(np.float32)]
    (total,) = exchanged([PowerSGD(2, seed=0)], inputs, Ident("w"))
    np.testing.assert_allclose(total, inputs[0], atol=1e-4)


def test_repeated_steps_find_the_best_approximation():
    """The power iteration goes on over steps: the error falls to that of the singular value decomposition."""
    draws = np.random.default_rng(1)
    u, _, v = np.linalg.svd(draws.standard_normal((30, 40)), full_matrices=False)
    values = 0.6 ** np.arange(30)
    x = (u * values @ v).astype(np.float32)
    compressor = PowerSGD(3, seed=0)
    for step in range(15):
        (total,) = exchanged([compressor], [x], Ident("w", step))
        compressor.commit(step)
    assert np.linalg.norm(x - total) == pytest.approx(np.linalg.norm(values[3:]), rel=1e-3)


@pytest.mark.parametrize("fill", ["zero", "rank one", "one row", "tiny", "large"])
def test_degenerate_matrices_do_no_harm_and_are_recovered_from(fill):
    draws = np.random.default_rng(3)
    x = {
        "zero": np.zeros((20, 30)),
        "rank one": np.outer(np.arange(20), np.arange(30)),
        "one row": np.eye(20, 30, 5) * (np.arange(20) == 4)[:, None],
        "tiny": draws.standard_normal((20, 30)) * 1e-30,
        "large": draws.standard_normal((20, 30)) * 1e30,
    }[fill].astype(np.float32)
    compressor = PowerSGD(4, seed=0)
    for step in range(3):
        (total,) = exchanged([compressor], [x], Ident("w", step))
        compressor.commit(step)
        assert np.linalg.norm(x / max(1e-30, np.abs(x).max()) - total / max(1e-30, np.abs(x).max())) <= 21
    later = (draws.standard_normal((20, 4)) @ draws.standard_normal((4, 30))).astype(np.float32)
    for step in range(3, 6):
        (total,) = exchanged([compressor], [later], Ident("w", step))
        compressor.commit(step)
    np.testing.assert_allclose(total, later, atol=1e-3)


def test_an_abandoned_step_leaves_the_warm_start_as_it_was():
    inputs = gradients(1, 4)
    tried, straight = PowerSGD(2, seed=4), PowerSGD(2, seed=4)
    for step in range(3):
        if step == 1:
            exchanged([tried], inputs[3], Ident("w", step))
            tried.abandon(step)
        for each in (tried, straight):
            exchanged([each], inputs[step], Ident("w", step))
            each.commit(step)
    assert tried.state()["shared/q/w"].tobytes() == straight.state()["shared/q/w"].tobytes()


def test_a_second_step_before_the_first_is_decided_is_refused():
    compressor = PowerSGD(2, seed=4)
    exchanged([compressor], gradients(1, 1)[0], Ident("w", 0))
    with pytest.raises(UsageError, match="step 0 was neither committed nor abandoned"):
        exchanged([compressor], gradients(1, 1)[0], Ident("w", 1))


def test_sums_that_overflow_are_refused_by_name():
    rounds = PowerSGD(1, seed=0).rounds(np.ones((9, 9), np.float32), Ident("w"))
    factor = next(rounds)
    with pytest.raises(CompressionError, match=r"^w: the sum of a factor is too large"):
        rounds.send(np.full_like(factor, np.inf))


@pytest.mark.parametrize("shape", [(), (50,), (3, 4), (1, 100), (100, 1), (0, 5), (4, 2, 1)])
def test_what_factors_do_not_make_smaller_is_sent_as_it_is(shape):
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32).reshape(shape)
    compressor = PowerSGD(4, seed=0)
    assert compressor.round_bytes(shape) == (x.nbytes,)
    totals = exchanged([compressor, PowerSGD(4, seed=0)], [x, x], Ident("b"))
    np.testing.assert_array_equal(totals[0], 2 * x)
    assert compressor.state() == {}


def test_the_bytes_of_each_round_are_those_of_its_factor():
    rounds = PowerSGD(3, seed=0).rounds(np.ones((20, 5, 6), np.float32), Ident("w"))
    first = next(rounds)
    second = rounds.send(first)
    assert (first.nbytes, second.nbytes) == PowerSGD(3, seed=0).round_bytes((20, 5, 6)) == (240, 360)
