"""When ranks exchange, and by what their samples weigh."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hcsim.errors import UsageError
from hcsim.training.periodic import PeriodicExchange, sample_weight


class Exchanges(PeriodicExchange):
    def __init__(self, every: int) -> None:
        super().__init__(every)
        self.samples: list[int] = []

    def _exchange(self, samples: int) -> None:
        self.samples.append(samples)


@given(st.integers(1, 7), st.lists(st.integers(0, 9), max_size=40))
def test_every_sample_is_exchanged_once_in_groups_of_so_many_steps(every: int, seen: list[int]) -> None:
    exchanges = Exchanges(every)
    due = [exchanges.step(samples) for samples in seen]
    assert due == [number % every == 0 for number in range(1, len(seen) + 1)]
    assert exchanges.steps == len(seen) % every
    exchanges.exchange()
    exchanges.exchange()
    assert exchanges.samples == [sum(seen[at : at + every]) for at in range(0, len(seen), every)]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9))
def test_weighted_changes_average_to_the_mean_over_all_samples(seen: list[int]) -> None:
    weights = [sample_weight(samples, sum(seen), len(seen)) for samples in seen]
    assert sum(weights) / len(seen) == pytest.approx(1.0 if sum(seen) else 0.0)


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="not every 0"):
        Exchanges(0)
