"""Who gets which samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcsim.errors import UsageError
from hcsim.rng import generator
from hcsim.training.data import Batches, dealt
from hcsim.training.tasks import task

SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=6).filter(any)
SAMPLES = st.integers(1, 60)
STEPS = st.integers(0, 30)


@pytest.mark.slow
@given(SAMPLES, SIZES, st.integers(0, 5), STEPS)
def test_all_ranks_together_see_what_one_process_sees_in_the_same_order(
    samples: int, sizes: list[int], seed: int, step: int
) -> None:
    together = Batches(samples, sizes, seed)
    alone = Batches(samples, [sum(sizes)], seed)
    parts = [together.batch(step, rank) for rank in range(len(sizes))]
    assert np.concatenate(parts).tolist() == alone.batch(step, 0).tolist()
    assert tuple(map(len, parts)) == together.counts(step)


@pytest.mark.slow
@given(SAMPLES, SIZES, st.integers(0, 3))
def test_an_epoch_has_every_sample_once(samples: int, sizes: list[int], epoch: int) -> None:
    batches = Batches(samples, sizes, seed=3)
    first = epoch * batches.steps_per_epoch
    seen = [
        batches.batch(step, rank)
        for step in range(first, first + batches.steps_per_epoch)
        for rank in range(len(sizes))
    ]
    assert sorted(np.concatenate(seen).tolist()) == list(range(samples))


@given(SAMPLES, SIZES)
def test_full_batches_have_the_sizes_asked_for(samples: int, sizes: list[int]) -> None:
    batches = Batches(samples, sizes, seed=0)
    for step in range(samples // sum(sizes)):
        assert batches.counts(step) == tuple(sizes)


@given(st.integers(0, 100), SIZES)
def test_a_short_batch_is_dealt_out_as_evenly_as_the_sizes_allow(count: int, sizes: list[int]) -> None:
    shares = dealt(count, sizes)
    assert sum(shares) == count
    for share, size in zip(shares, sizes, strict=True):
        assert abs(share - count * size / sum(sizes)) < 1
        assert size > 0 or share == 0


def test_epochs_differ_and_seeds_differ() -> None:
    batches = Batches(100, [100], seed=1)
    first, second = batches.batch(0, 0), batches.batch(1, 0)
    assert first.tolist() != second.tolist()
    assert first.tolist() != Batches(100, [100], seed=2).batch(0, 0).tolist()


@given(SAMPLES, SIZES)
def test_shards_share_nothing_and_leave_nothing_out(samples: int, sizes: list[int]) -> None:
    batches = Batches(samples, sizes, seed=9)
    shards = [batches.shard(rank) for rank in range(len(sizes))]
    assert sorted(np.concatenate(shards).tolist()) == list(range(samples))
    assert tuple(map(len, shards)) == dealt(samples, sizes)


@pytest.mark.slow
@given(SAMPLES, SIZES, st.integers(0, 2))
def test_a_worker_of_its_own_goes_through_its_shard_by_epochs(samples: int, sizes: list[int], epoch: int) -> None:
    batches = Batches(samples, sizes, seed=9)
    for rank, size in enumerate(sizes):
        shard = batches.shard(rank).tolist()
        per_epoch = -(-len(shard) // size) if size else 0
        own = [batches.own(rank, epoch * per_epoch + number) for number in range(per_epoch)]
        assert all(0 < len(batch) <= size for batch in own)
        assert sorted(sample for batch in own for sample in batch.tolist()) == sorted(shard)


def test_a_worker_without_a_shard_gets_empty_batches() -> None:
    assert len(Batches(3, [1, 0], seed=0).own(1, 5)) == 0


def test_a_phantom_task_has_counts_and_nothing_to_shuffle() -> None:
    batches = Batches.of(task("resnet50"), [32, 64], seed=0)
    assert batches.counts(0) == (32, 64)
    assert len(batches.batch(7, 1)) == 64
    last = batches.steps_per_epoch - 1
    assert sum(batches.counts(last)) == 1_281_167 - last * 96


def test_nobody_can_write_to_the_shared_order() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Batches(10, [5], seed=0).batch(0, 0)[0] = 3


@pytest.mark.parametrize(("samples", "sizes"), [(0, [1]), (5, []), (5, [0, 0]), (5, [3, -1])])
def test_batches_that_cannot_be_are_refused(samples: int, sizes: list[int]) -> None:
    with pytest.raises(UsageError, match="cannot be dealt out"):
        Batches(samples, sizes, seed=0)


def test_a_named_stream_of_arrays_depends_on_its_whole_name() -> None:
    draws = [generator(*name).random() for name in [(1, "a"), (1, "b"), (2, "a"), (1, "a", 1)]]
    assert len(frozenset(draws)) == 4
    assert generator(1, "a").random() == draws[0]
