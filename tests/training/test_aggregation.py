"""Sums over a group, through every kind of compressor, against a plain sum in float64."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hcsim
from hcsim.collectives.group import Group
from hcsim.compressors.base import Array
from hcsim.compressors.registry import make
from hcsim.errors import CompressionError, NotFinite
from hcsim.rng import generator
from hcsim.training.aggregation import Aggregator, Hierarchical, OneLevel
from hcsim.training.layout import Layout
from hcsim.training.learner import TimeAccounting
from tests.training.clusters import quiet_cluster

LAYOUT = Layout.of(
    [[("first.weight", (24, 5)), ("first.bias", (24,))], [("second.weight", (3, 24)), ("second.bias", (3,))]]
)
EXACT = ("none", "zstd", "none+ef", "zstd+ef")
LOSSY = ("topk:0.1", "randomk:0.1", "fp16", "bf16", "int8", "int8:block=16", "int8:stochastic", "onebit", "powersgd:1")


def gradient(rank: int, step: int = 0) -> Array:
    return generator(7, "gradient", rank, step).standard_normal(LAYOUT.length, np.float32)


def totals(
    spec: str,
    ranks: int,
    steps: int = 1,
    *,
    bucket_bytes: int = 1 << 20,
    wrap: Callable[[Group], Aggregator] | None = None,
) -> tuple[list[list[Array]], list[Array]]:
    """By rank, the sum of each step, and what error feedback still owes after the last one."""

    async def program(group: Group) -> tuple[list[Array], Array]:
        compressor = make(spec, seed=3, rank=group.rank)
        aggregator = wrap(group) if wrap else OneLevel(group, TimeAccounting(group.host), compressor)
        sums = []
        for step in range(steps):
            flat = gradient(group.rank, step)
            for bucket in LAYOUT.buckets(bucket_bytes):
                await aggregator.total(flat, bucket, 1.0, step)
            compressor.commit(step)
            sums.append(flat)
        owed = np.zeros(LAYOUT.length, np.float32)
        state = compressor.state()
        for tensor in LAYOUT.tensors:
            if (residual := state.get(f"own/residual/{tensor.name}")) is not None:
                tensor.view(owed)[...] = residual
        return sums, owed

    results = hcsim.simulate(quiet_cluster(ranks), program).values()
    return [sums for sums, _ in results], [owed for _, owed in results]


def exact(ranks: int, step: int = 0) -> np.ndarray:
    return np.sum([gradient(rank, step).astype(np.float64) for rank in range(ranks)], axis=0)


@pytest.mark.parametrize("spec", EXACT)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_what_loses_nothing_gives_the_sum(spec: str, ranks: int) -> None:
    sums, _ = totals(spec, ranks)
    for theirs in sums:
        np.testing.assert_allclose(theirs[0], exact(ranks), rtol=1e-5, atol=1e-5)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("spec", [*EXACT, *LOSSY, *(f"{spec}+ef" for spec in LOSSY)])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_all_ranks_hold_the_same_bits(spec: str, bucket_bytes: int) -> None:
    sums, _ = totals(spec, 3, 2, bucket_bytes=bucket_bytes)
    for step in range(2):
        assert len({theirs[step].tobytes() for theirs in sums}) == 1


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("spec", [f"{spec}+ef" for spec in LOSSY])
@pytest.mark.parametrize("ranks", [1, 4])
def test_error_feedback_conserves_what_all_ranks_put_in(spec: str, ranks: int) -> None:
    """Sum of all gradients = sum of all that was delivered + what all ranks still owe."""
    steps = 5
    sums, owed = totals(spec, ranks, steps)
    delivered = np.sum([sums[0][step].astype(np.float64) for step in range(steps)], axis=0)
    put_in = np.sum([exact(ranks, step) for step in range(steps)], axis=0)
    still_owed = np.sum([residual.astype(np.float64) for residual in owed], axis=0)
    np.testing.assert_allclose(delivered + still_owed, put_in, atol=1e-4)
    assert np.abs(still_owed).max() > 1e-6, "a lossy compressor owes something"


@pytest.mark.parametrize("spec", ["fp16", "bf16", "int8", "int8:block=16"])
def test_what_is_quantised_twice_is_near_the_sum(spec: str) -> None:
    largest = max(np.abs(gradient(rank)).max() for rank in range(4))
    steps = {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254, "int8:block=16": 1 / 254}
    sums, _ = totals(spec, 4)
    np.testing.assert_allclose(sums[0][0], exact(4), atol=2 * 4 * largest * steps[spec])


@pytest.mark.slow
@given(st.integers(1, 6), st.sampled_from(["int8+ef", "topk:0.2+ef", "zstd", "powersgd:2"]), st.integers(1, 2000))
@settings(max_examples=25)
def test_buckets_of_any_size_give_every_rank_the_same(ranks: int, spec: str, bucket_bytes: int) -> None:
    sums, _ = totals(spec, ranks, bucket_bytes=bucket_bytes)
    assert len({theirs[0].tobytes() for theirs in sums}) == 1
    assert np.corrcoef(sums[0][0], exact(ranks))[0, 1] > 0.4


@pytest.mark.parametrize("spec", ["none", "int8+ef", "topk:0.5"])
def test_a_hierarchy_sums_over_all_and_compresses_between_homes_only(spec: str) -> None:
    homes = ((0, 1, 2), (3, 4))

    def wrap(group: Group) -> Aggregator:
        ours = next(home for home in homes if group.rank in home)
        near = group.subgroup(ours)
        if group.rank != ours[0]:
            return Hierarchical(near, None)
        speakers = group.subgroup([home[0] for home in homes])
        return Hierarchical(near, OneLevel(speakers, TimeAccounting(group.host), make(spec, seed=3, rank=group.rank)))

    sums, _ = totals("none", 5, wrap=wrap)
    assert len({theirs[0].tobytes() for theirs in sums}) == 1
    if spec == "none":
        np.testing.assert_allclose(sums[0][0], exact(5), rtol=1e-5, atol=1e-5)
    else:
        # Half of the largest elements are most of the sum, and eight bits are nearly all of it.
        assert np.corrcoef(sums[0][0], exact(5))[0, 1] > 0.9


@pytest.mark.slow
def test_stochastic_rounding_is_right_on_average_through_both_encodings() -> None:
    """The mean over many steps of one input. Were the sum rounded with the draws of its parts, it would be off."""
    steps, ranks = 300, 2

    async def program(group: Group) -> Array:
        compressor = make("int8:stochastic", seed=3, rank=group.rank)
        aggregator = OneLevel(group, TimeAccounting(group.host), compressor)
        mean = np.zeros(LAYOUT.length)
        for step in range(steps):
            flat = gradient(group.rank)
            await aggregator.total(flat, LAYOUT.buckets(1 << 20)[0], 1.0, step)
            mean += flat / steps
        return mean

    mean = hcsim.simulate(quiet_cluster(ranks), program).values()[0]
    scale = max(np.abs(exact(ranks)).max(), *(np.abs(gradient(rank)).max() for rank in range(ranks))) / 127
    error = np.sqrt(np.mean((mean - exact(ranks)) ** 2)) / scale
    assert error < 0.04  # three roundings of at most half a scale each: about 0.5 · √3 / √300


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("spec", ["none", "zstd", *LOSSY, *(f"{spec}+ef" for spec in LOSSY)])
@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_a_gradient_that_is_not_finite_is_refused_by_all_ranks_and_the_group_goes_on(spec: str, value: float) -> None:
    """3e38 is finite on every rank, and the sum is not: those that sum what they encode refuse it, too."""

    def program(*steps: int) -> Callable[[Group], Coroutine[Any, Any, tuple[str, bytes]]]:
        async def run(group: Group) -> tuple[str, bytes]:
            compressor, said = make(spec, seed=3, rank=group.rank), ""
            for step in steps:
                flat = gradient(group.rank)
                if step == 1 and (group.rank == 1 or value > 0):
                    flat[LAYOUT.tensors[0].span] = value
                try:
                    aggregator = OneLevel(group, TimeAccounting(group.host), compressor)
                    await aggregator.total(flat, LAYOUT.buckets(1 << 20)[0], 1.0, step)
                    compressor.commit(step)
                except NotFinite as error:
                    said = str(error)
                    compressor.abandon(step)
            return said, flat.tobytes()

        return run

    results = hcsim.simulate(quiet_cluster(3), program(0, 1, 2)).values()
    refused = {bool(said) for said, _ in results}
    assert len(refused) == 1, "some ranks know, and others do not"
    assert refused == {True} or np.isfinite(value)
    if refused == {True}:
        without = hcsim.simulate(quiet_cluster(3), program(0, 2)).values()
        assert [flat for _, flat in results] == [flat for _, flat in without]


@pytest.mark.parametrize("claimed", [40 << 30, -1])
def test_a_length_that_no_payload_can_have_is_refused_before_memory_is_taken(claimed: int) -> None:
    async def program(group: Group) -> None:
        if group.rank == 1:
            await group.all_gather(np.array([claimed] * group.size))
        else:
            aggregator = OneLevel(group, TimeAccounting(group.host), make("zstd", seed=3, rank=group.rank))
            await aggregator.total(gradient(group.rank), LAYOUT.buckets(1 << 20)[0], 1.0, 0)

    refused = hcsim.simulate(quiet_cluster(2), program).results[0]
    assert isinstance(refused, CompressionError)
    assert f"rank 1 announces {claimed} bytes" in str(refused)
