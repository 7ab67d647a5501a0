"""Prices are the textbook's where the textbook has one, and sensible where it has none."""

from __future__ import annotations

import pytest

from hcsim.collectives.algorithms import PLANNERS, plans
from hcsim.collectives.cost import Links, closed_form, price
from hcsim.collectives.plan import Recv, Reduce, Rounds, Send, Shape
from hcsim.collectives.verify import PlanError
from hcsim.errors import UsageError

UNCUT = 1 << 50
REGIMES = [(1e-3, 1e6), (1e-6, 1e9), (1e-3, 1e9), (0.0, 1e8)]


def links(world: int, **fields: float) -> Links:
    return Links(((1.0,) * world,) * world, ((100.0,) * world,) * world, **fields)


@pytest.mark.parametrize("algorithm", ["ring", "centralized", "direct", "recursive_doubling", "halving_doubling"])
@pytest.mark.parametrize("world", [1, 2, 4, 8, 16, 32])
def test_uncut_messages_cost_the_closed_form(algorithm: str, world: int) -> None:
    made = plans("all_reduce", algorithm, Shape(world=world, length=100 * world))
    for alpha_s, beta_bytes in REGIMES:
        wanted = closed_form(algorithm, world, 400 * world, alpha_s, beta_bytes)
        assert price(made, Links.uniform(world, alpha_s, beta_bytes), 4, UNCUT) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("algorithm", ["ring", "centralized", "direct"])
@pytest.mark.parametrize("world", [3, 5, 6, 7, 9, 13, 17, 21])
def test_some_closed_forms_hold_for_any_world(algorithm: str, world: int) -> None:
    made = plans("all_reduce", algorithm, Shape(world=world, length=100 * world, root=world - 1))
    for alpha_s, beta_bytes in REGIMES:
        wanted = closed_form(algorithm, world, 400 * world, alpha_s, beta_bytes)
        assert price(made, Links.uniform(world, alpha_s, beta_bytes), 4, UNCUT) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("world", "arity"), [(1, 2), (3, 2), (7, 2), (15, 2), (31, 2), (4, 3), (13, 3), (5, 4), (21, 4)]
)
def test_in_a_full_tree_it_does_not_matter_whether_children_are_served_together_or_in_turn(
    world: int, arity: int
) -> None:
    made = plans("all_reduce", "tree", Shape(world=world, length=100 * world, arity=arity, root=world - 1))
    for alpha_s, beta_bytes in REGIMES:
        wanted = closed_form("tree", world, 400 * world, alpha_s, beta_bytes, arity)
        assert price(made, Links.uniform(world, alpha_s, beta_bytes), 4, UNCUT) == pytest.approx(wanted, rel=1e-9)


def test_gathering_along_a_tree_takes_a_latency_per_level_and_each_byte_once() -> None:
    for operation in ("gather", "scatter"):
        made = plans(operation, "tree", Shape(world=8, counts=(100,) * 8, root=5))
        assert price(made, Links.uniform(8, 10.0, 100.0), 1, UNCUT) == pytest.approx(3 * 10 + 7)


def test_a_full_tree_costs_its_height_twice() -> None:
    assert closed_form("tree", 13, 100, 1.0, 100.0, 3) == pytest.approx(2 * 2 * (1 + 3))


@pytest.mark.parametrize(("algorithm", "world"), [("recursive_doubling", 6), ("halving_doubling", 3), ("magic", 4)])
def test_a_closed_form_is_refused_where_there_is_none(algorithm: str, world: int) -> None:
    with pytest.raises(UsageError, match=algorithm):
        closed_form(algorithm, world, 100, 1.0, 1.0)


def test_cut_messages_are_passed_on_while_they_arrive() -> None:
    """Down a chain of two links, in ten segments: the second link runs one segment behind the first."""
    chain: list[Rounds] = [
        ((Send(1, 0, 1000),), ()),
        ((Recv(0, 0, 1000),), (Send(2, 0, 1000),)),
        ((), (Recv(1, 0, 1000),)),
    ]
    assert price(chain, links(3), 1, UNCUT) == pytest.approx(2 * (1 + 10))
    assert price(chain, links(3), 1, 100) == pytest.approx(2 * 1 + 10 + 1)


def test_the_messages_of_a_round_take_turns() -> None:
    """A tree in small segments costs about its arity, whatever its height."""
    made = plans("broadcast", "tree", Shape(world=15, length=100_000))
    free_of_latency = Links.uniform(15, 0.0, 100.0)
    assert price(made, free_of_latency, 1, 100) == pytest.approx(2000, rel=0.01)
    assert price(made, free_of_latency, 1, UNCUT) == pytest.approx(6000)


def test_an_element_is_added_after_it_arrived() -> None:
    made: list[Rounds] = [((Reduce(1, 0, 100),),), ((Send(0, 0, 100),),)]
    assert price(made, links(2), 1, UNCUT) == pytest.approx(2)
    assert price(made, links(2, reduce_Bps=50.0), 1, UNCUT) == pytest.approx(4)
    assert price(made, links(2, reduce_Bps=50.0), 1, 50) == pytest.approx(1 + 0.5 + 2)


def test_every_frame_has_its_overhead() -> None:
    made: list[Rounds] = [((Send(1, 0, 100),),), ((Recv(0, 0, 100),),)]
    assert price(made, links(2, overhead_s=0.25), 1, UNCUT) == pytest.approx(2.25)
    assert price(made, links(2, overhead_s=0.25), 1, 25) == pytest.approx(3)


def test_a_write_waits_until_the_old_values_have_left() -> None:
    """Rank 0 has 20 s of sending to do before its range may be overwritten."""
    slow = Links(((0.0,) * 3,) * 3, ((0.0, 5.0, 100.0), (100.0, 0.0, 100.0), (100.0, 100.0, 0.0)))
    made: list[Rounds] = [((Send(1, 0, 100), Recv(2, 0, 100)),), ((Recv(0, 0, 100),),), ((Send(0, 0, 100),),)]
    assert price(made, slow, 1, UNCUT) == pytest.approx(20 + 1)


def test_a_fast_rank_serves_slow_ones_side_by_side() -> None:
    """Rank 0 could send 100 bytes a second, which rank 3 alone can take; the others' 100 s overlap."""
    bandwidth = ((0.0, 1.0, 1.0, 100.0), *((1.0,) * 4,) * 3)
    made = plans("broadcast", "centralized", Shape(world=4, length=100))
    assert price(made, Links(((0.0,) * 4,) * 4, bandwidth), 1, UNCUT) == pytest.approx(101)


def test_a_barrier_waits_for_each_signal_before_the_next() -> None:
    made = plans("barrier", "dissemination", Shape(world=9))
    assert price(made, Links.uniform(9, 1.0, 1.0), 4, UNCUT) == pytest.approx(4)


@pytest.mark.parametrize("operation", [name for name in PLANNERS if name not in ("all_to_all", "barrier")])
def test_a_slower_link_never_makes_anything_cheaper(operation: str) -> None:
    shape = Shape(world=6, length=600, counts=(100,) * 6, groups=((0, 1), (2, 3, 4, 5)))
    fast, slow = Links.uniform(6, 1e-3, 1e5), Links.uniform(6, 2e-3, 5e4)
    for algorithm in PLANNERS[operation]:
        made = plans(operation, algorithm, shape)
        assert price(made, slow, 4, 100) == pytest.approx(2 * price(made, fast, 4, 100))


def test_what_cannot_be_priced_is_refused() -> None:
    waiting: list[Rounds] = [((Recv(1, 0, 1),),), ((Recv(0, 0, 1),),)]
    with pytest.raises(PlanError, match="wait"):
        price(waiting, links(2), 1, 1)
    with pytest.raises(UsageError, match="3 ranks"):
        price(waiting, links(3), 1, 1)
    with pytest.raises(UsageError, match="segment"):
        price(waiting, links(2), 4, 3)
    with pytest.raises(UsageError, match="square"):
        Links(((0.0,),), ((1.0, 1.0),))
    with pytest.raises(UsageError, match="above zero"):
        Links.uniform(2, 0.0, 0.0)
