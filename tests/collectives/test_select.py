"""What is chosen when nobody says which algorithm."""

from __future__ import annotations

import itertools

import pytest
from msgspec.structs import replace

from hcsim.collectives.algorithms import PLANNERS, plans
from hcsim.collectives.algorithms.ring import CHUNK
from hcsim.collectives.cost import Links, price
from hcsim.collectives.plan import Shape
from hcsim.collectives.select import choose
from hcsim.collectives.verify import verify
from hcsim.errors import UsageError

MIB = 1 << 20


@pytest.mark.parametrize(
    ("world", "size_bytes", "wanted"),
    [
        (2, MIB - 4, "recursive_doubling"),
        (8, 4096, "recursive_doubling"),
        (8, MIB - 4, "halving_doubling"),
        (8, MIB, "ring"),
        (4, MIB, "ring"),
        (2, 64 * MIB, "ring"),
        (5, 4096, "direct"),
        (5, MIB, "ring"),
        (9, 4096, "tree"),
    ],
)
def test_with_nothing_measured_few_steps_for_short_and_few_bytes_for_long(
    world: int, size_bytes: int, wanted: str
) -> None:
    assert choose("all_reduce", Shape(world=world, length=size_bytes // 4), 4, None) == wanted


@pytest.mark.parametrize("world", range(2, 9))
@pytest.mark.parametrize("size_bytes", [64, 4096, 16 << 10, 64 << 10, 256 << 10, MIB, 16 * MIB])
def test_with_nothing_measured_it_is_never_far_from_the_cheapest_on_gigabit_ethernet(
    world: int, size_bytes: int
) -> None:
    shape, links = Shape(world=world, length=size_bytes // 4), Links.uniform(world, 1e-4, 117e6)
    prices = {
        name: price(plans("all_reduce", name, shape), links, 4, 8 * MIB)
        for name in PLANNERS["all_reduce"]
        if name != "hierarchical"
    }
    assert prices[choose("all_reduce", shape, 4, None)] < 1.7 * min(prices.values())


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("operation", list(PLANNERS))
@pytest.mark.parametrize("world", [1, 2, 6])
@pytest.mark.parametrize("part", [0, 3, MIB])
@pytest.mark.parametrize("measured", [False, True])
def test_what_is_chosen_can_be_planned(operation: str, world: int, part: int, measured: bool) -> None:
    parts = (part,) * world
    shape = Shape(world=world, length=part * world, counts=parts, sent=parts, received=parts)
    links = Links.uniform(world, 1e-4, 1e8) if measured else None
    verify(operation, plans(operation, choose(operation, shape, 4, links), shape), [shape] * world)


@pytest.mark.parametrize(
    ("world", "size_bytes", "wanted"),
    [
        (8, MIB, "ring"),
        (2, MIB, "ring"),
        (8, 4 * 8 * CHUNK, "ring"),
        (8, 4 * 8 * CHUNK + 4, "chunked_ring"),
        (2, 64 * MIB, "chunked_ring"),
    ],
)
def test_long_messages_take_the_ring_where_links_pass_on_what_comes(world: int, size_bytes: int, wanted: str) -> None:
    """Though others would be cheaper, as far as a price can tell."""
    shape = Shape(world=world, length=size_bytes // 4)
    links = replace(Links.uniform(world, 1.0, 4e9), pass_on=True)
    assert choose("all_reduce", shape, 4, links) == wanted
    assert choose("all_reduce", shape, 4, replace(links, pass_on=False)) not in ("ring", "chunked_ring")


def test_short_messages_other_operations_and_groups_go_by_price_wherever_links_pass_on() -> None:
    links = Links.uniform(8, 5e-3, 4e9)
    grouped = Shape(world=8, length=MIB, groups=((0, 1, 2, 3), (4, 5, 6, 7)))
    parts = (MIB,) * 8
    for operation, shape in (
        ("all_reduce", Shape(world=8, length=MIB // 4 - 1)),
        ("all_reduce", grouped),
        ("all_gather", Shape(world=8, counts=parts)),
        ("broadcast", Shape(world=8, length=MIB)),
    ):
        assert choose(operation, shape, 4, replace(links, pass_on=True)) == choose(operation, shape, 4, links)


def test_on_measured_links_the_cheapest_wins() -> None:
    links = Links.uniform(8, 1e-3, 1e8)
    for length in (1, 10_000, 1_000_000):
        shape = Shape(world=8, length=length)
        prices = {
            name: price(plans("all_reduce", name, shape), links, 4, MIB)
            for name in PLANNERS["all_reduce"]
            if name != "hierarchical"
        }
        assert prices[choose("all_reduce", shape, 4, links)] == min(prices.values())


def test_short_messages_take_few_steps_and_long_ones_move_few_bytes() -> None:
    short, long = Shape(world=6, length=1), Shape(world=6, length=MIB)
    assert choose("all_reduce", short, 4, Links.uniform(6, 1e-3, 1e9)) == "centralized"
    assert choose("all_reduce", long, 4, Links.uniform(6, 1e-3, 1e6)) == "ring"
    costly = Links.uniform(6, 1e-6, 1e6)
    prices = {name: price(plans("all_reduce", name, long), costly, 4, MIB) for name in ("ring", "tree", "centralized")}
    assert min(prices, key=lambda name: prices[name]) == "ring"


def test_a_long_message_goes_to_many_at_once_only_where_that_gains_much() -> None:
    long = Shape(world=8, length=4 * MIB)
    for latency_s, least_gain, gain, chosen in (
        (1e-3, 1.05, 1.5, {"ring"}),
        (5e-3, 3, 5, {"direct", "recursive_doubling"}),
    ):
        links = Links.uniform(8, latency_s, 2e9)
        ring_s, direct_s = (price(plans("all_reduce", name, long), links, 4, MIB) for name in ("ring", "direct"))
        assert least_gain < ring_s / direct_s < gain
        assert choose("all_reduce", long, 4, links) in chosen


def test_all_of_a_message_is_added_at_once_only_if_it_is_short_or_if_that_gains_much() -> None:
    """It lies beside the tensor then, and once more on every link."""
    for length, latency_s, gain, chosen in (
        (MIB // 8, 1e-4, 1.2, "recursive_doubling"),
        (MIB // 4, 1e-4, 1.2, "ring"),
        (MIB // 4, 5e-3, 1.8, "recursive_doubling"),
    ):
        shape, links = Shape(world=2, length=length), Links.uniform(2, latency_s, 4e9)
        once_s, twice_s = (
            price(plans("all_reduce", name, shape), links, 4, MIB) for name in ("recursive_doubling", "ring")
        )
        assert twice_s > gain * once_s
        assert choose("all_reduce", shape, 4, links) == chosen


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce"])
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("length", [MIB // 8, MIB // 4, 2 * MIB, 32 * MIB])
def test_what_is_chosen_never_takes_much_longer_than_the_quickest(operation: str, world: int, length: int) -> None:
    shape = Shape(world=world, length=length)
    for latency_s, bandwidth_Bps in itertools.product((1e-5, 1e-3, 3e-3, 5e-2), (1e7, 1e9, 1e10)):
        links = Links.uniform(world, latency_s, bandwidth_Bps)
        prices = {
            name: price(plans(operation, name, shape), links, 4, max(MIB, length * 4 // 64))
            for name in PLANNERS[operation]
            if name != "hierarchical"
        }
        assert prices[choose(operation, shape, 4, links)] <= 1.05 * 1.5 * min(prices.values())


def test_a_costly_frame_speaks_against_one_rank_that_sends_them_all() -> None:
    quick = Links.uniform(8, 1e-3, 1e9)
    costly = Links(quick.latency_s, quick.bandwidth_Bps, overhead_s=1e-3)
    assert choose("all_reduce", Shape(world=8, length=1), 4, quick) == "centralized"
    assert choose("all_reduce", Shape(world=8, length=1), 4, costly) == "recursive_doubling"


def test_two_homes_are_spanned_by_their_leaders() -> None:
    """The ranks of both homes are mixed, so whoever goes by rank alone crosses the slow link again and again."""
    home = [0, 1, 0, 1, 0, 1]
    latency = tuple(tuple(1e-4 if a == b else 5e-2 for b in home) for a in home)
    bandwidth = tuple(tuple(1e9 if a == b else 1e6 for b in home) for a in home)
    shape = Shape(world=6, length=250_000, groups=((0, 2, 4), (1, 3, 5)), cross="halving_doubling")
    links = Links(latency, bandwidth)
    # All but direct, which the model flatters here: it takes the pairs' links for independent of each other.
    names = [name for name in PLANNERS["all_reduce"] if name != "direct"]
    prices = {name: price(plans("all_reduce", name, shape), links, 4, MIB) for name in names}
    assert min(prices, key=lambda name: prices[name]) == "hierarchical"


def test_links_of_another_group_are_refused() -> None:
    with pytest.raises(UsageError, match="3 ranks"):
        choose("all_reduce", Shape(world=4, length=1), 4, Links.uniform(3, 1.0, 1.0))
