"""The order of a ring, against trying them all."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcsim.collectives.cost import Links
from hcsim.collectives.ring_order import EXACT_UP_TO, order_over, ring_order
from hcsim.errors import UsageError

Matrix = list[list[float]]


def quality(ring: tuple[int, ...], bandwidth: Matrix, cost: Matrix) -> tuple[float, float]:
    links = list(zip(ring, ring[1:] + ring[:1], strict=True))
    return min(bandwidth[a][b] for a, b in links), -sum(cost[a][b] for a, b in links)


@st.composite
def matrices(draw: st.DrawFn, values: st.SearchStrategy[float]) -> tuple[Matrix, Matrix]:
    n = draw(st.integers(3, 6))
    row = st.lists(values, min_size=n, max_size=n)
    bandwidth, latency = (draw(st.lists(row, min_size=n, max_size=n)) for _ in range(2))
    return bandwidth, latency


@pytest.mark.slow
@settings(max_examples=150)
@given(matrices(st.sampled_from([1.0, 2.5, 10.0, 40.0]) | st.integers(1, 50).map(float)), st.booleans())
def test_no_other_order_is_better(given_: tuple[Matrix, Matrix], by_latency: bool) -> None:
    bandwidth, latency = given_
    cost = latency if by_latency else [[1 / speed for speed in row] for row in bandwidth]
    found = ring_order(bandwidth, latency if by_latency else None)
    best = max(quality((0, *rest), bandwidth, cost) for rest in permutations(range(1, len(bandwidth))))
    assert found[0] == 0
    assert sorted(found) == list(range(len(bandwidth)))
    assert quality(found, bandwidth, cost) == pytest.approx(best)


def cables(n: int, ring: list[int]) -> Matrix:
    """Fast links along one ring, in one direction, and slow ones everywhere else."""
    bandwidth = [[1.0] * n for _ in range(n)]
    for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
        bandwidth[a][b] = 10.0
    return bandwidth


def test_the_direction_of_a_link_counts() -> None:
    assert ring_order(cables(5, [0, 3, 1, 4, 2])) == (0, 3, 1, 4, 2)
    assert ring_order(cables(10, [0, 9, 8, 7, 6, 5, 4, 3, 2, 1])) == (0, 9, 8, 7, 6, 5, 4, 3, 2, 1)


@pytest.mark.parametrize("n", [EXACT_UP_TO + 1, 16, 32])
def test_a_large_ring_crosses_between_two_homes_only_twice(n: int) -> None:
    homes = [rank * 7 % 5 % 2 for rank in range(n)]
    bandwidth = [[100.0 if a == b else 1.0 for b in homes] for a in homes]
    found = ring_order(bandwidth)
    crossings = sum(homes[a] != homes[b] for a, b in zip(found, found[1:] + found[:1], strict=True))
    assert sorted(found) == list(range(n))
    assert found[0] == 0
    assert crossings == 2


@pytest.mark.parametrize("n", [EXACT_UP_TO + 1, 20])
def test_a_large_ring_avoids_a_few_slow_links(n: int) -> None:
    bandwidth = [[1.0 if (a + 1) % n == b or (b + 1) % n == a else 10.0 for b in range(n)] for a in range(n)]
    found = ring_order(bandwidth)
    assert min(bandwidth[a][b] for a, b in zip(found, found[1:] + found[:1], strict=True)) == 10.0


@pytest.mark.parametrize("seed", range(5))
def test_a_large_ring_is_far_better_than_the_order_of_ranks(seed: int) -> None:
    """Among 24 random links into each rank, one in the upper half is easily found."""
    generator = Random(seed)
    bandwidth = [[generator.random() for _ in range(24)] for _ in range(24)]
    cost = [[1 / speed for speed in row] for row in bandwidth]
    found = ring_order(bandwidth)
    assert sorted(found) == list(range(24))
    assert quality(found, bandwidth, cost) > (0.5, -24 / 0.5)


def test_links_that_do_not_exist_are_avoided() -> None:
    assert ring_order([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]) == (0, 2, 1)


def test_one_and_two_ranks() -> None:
    assert ring_order([[0.0]]) == (0,)
    assert ring_order([[0.0, 1.0], [1.0, 0.0]]) == (0, 1)


@pytest.mark.parametrize("bad", [[], [[1.0, 2.0]], [[1.0], [1.0]]])
def test_what_is_not_square_is_refused(bad: Matrix) -> None:
    with pytest.raises(UsageError):
        ring_order(bad)


@pytest.mark.slow
@settings(max_examples=150)
@given(matrices(st.integers(10**6, 10**9).map(float)))
def test_over_measured_links_no_order_that_is_nearly_as_fast_moves_a_chunk_sooner(
    given_: tuple[Matrix, Matrix],
) -> None:
    bandwidth, latency = given_
    latency = [[value * 1e-12 for value in row] for row in latency]
    found = order_over(Links(tuple(map(tuple, latency)), tuple(map(tuple, bandwidth))))
    chunk_s = [[a + 2**20 / b for a, b in zip(*rows, strict=True)] for rows in zip(latency, bandwidth, strict=True)]
    rings = [(0, *rest) for rest in permutations(range(1, len(bandwidth)))]
    best = max(quality(ring, bandwidth, chunk_s)[0] for ring in rings)
    good = [quality(ring, bandwidth, chunk_s) for ring in rings]
    speed, cost = quality(found, bandwidth, chunk_s)
    assert speed >= 0.8 * best * (1 - 1e-9)
    assert cost == pytest.approx(max(cost for speed, cost in good if speed >= 0.8 * best))
