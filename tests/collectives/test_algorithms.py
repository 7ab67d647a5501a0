"""Every algorithm of every operation, for shapes that nobody would think of, proved and computed."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hcsim.collectives.algorithms import PLANNERS, algorithms, buffer_elements, plan, plans, ring
from hcsim.collectives.algorithms.hierarchical import CROSS, LOCAL
from hcsim.collectives.plan import Finish, Plan, Recv, Reduce, Rounds, Send, Shape, offsets
from hcsim.collectives.schedule import forward_stages, schedule, summary
from hcsim.collectives.verify import verify
from hcsim.errors import UsageError

PAIRS = [(operation, algorithm) for operation in PLANNERS for algorithm in PLANNERS[operation]]
Ints = NDArray[np.int64]
SPOILED = -(1 << 50)


@pytest.fixture(autouse=True, scope="module")
def small_chunks():
    """Lengths here are short, and a chunked ring shall have portions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "CHUNK", 3)
        yield


@st.composite
def partitions(draw: st.DrawFn, world: int) -> tuple[tuple[int, ...], ...]:
    ranks = draw(st.permutations(range(world)))
    cuts = sorted(draw(st.sets(st.integers(1, world - 1)))) if world > 1 else []
    return tuple(tuple(ranks[a:b]) for a, b in zip([0, *cuts], [*cuts, world], strict=True))


@st.composite
def shape_lists(draw: st.DrawFn, operation: str, max_world: int = 17) -> list[Shape]:
    """One shape per rank; sizes are often smaller than the world, and often zero."""
    world = draw(st.integers(1, max_world))
    sizes = st.integers(0, 5) | st.integers(0, 1000)
    if operation == "all_to_all":
        sent = [tuple(draw(st.lists(sizes, min_size=world, max_size=world))) for _ in range(world)]
        return [Shape(world=world, sent=sent[r], received=tuple(row[r] for row in sent)) for r in range(world)]
    shape = Shape(
        world=world,
        length=draw(sizes),
        counts=tuple(draw(st.lists(sizes, min_size=world, max_size=world))),
        root=draw(st.integers(0, world - 1)),
        arity=draw(st.integers(2, 5)),
        order=draw(st.just(()) | st.permutations(range(world)).map(tuple)),
        groups=draw(partitions(world)),
        local=draw(st.sampled_from(sorted(LOCAL))),
        cross=draw(st.sampled_from(sorted(CROSS))),
    )
    return [shape] * world


def all_plans(operation: str, algorithm: str, shapes: list[Shape]) -> list[Rounds]:
    return [plan(operation, algorithm, rank, shape).by_rank() for rank, shape in enumerate(shapes)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
@settings(max_examples=40)
@given(data=st.data())
def test_every_plan_is_proved_correct(operation: str, algorithm: str, data: st.DataObject) -> None:
    shapes = data.draw(shape_lists(operation))
    made = all_plans(operation, algorithm, shapes)
    verify(operation, made, shapes)
    assert len({len(rounds) for rounds in made}) == 1


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
@settings(max_examples=10)
@given(data=st.data())
def test_only_a_barrier_sends_empty_messages(operation: str, algorithm: str, data: st.DataObject) -> None:
    made = all_plans(operation, algorithm, data.draw(shape_lists(operation)))
    ranges = [(action.lo, action.hi) for rounds in made for actions in rounds for action in actions]
    assert all((lo == hi) == (operation == "barrier") for lo, hi in ranges)


def interpret(made: list[Rounds], buffers: list[Ints], divide_by: int) -> None:
    """Perform plans on real numbers, round by round; within a round all sends come first on every rank.

    To finish is to divide, or by 0 to spoil."""
    for s in range(max(len(rounds) for rounds in made)):
        sent = {}
        for rank, rounds in enumerate(made):
            kinds = [isinstance(action, Send) for action in rounds[s]]
            assert kinds == sorted(kinds, reverse=True)
            for action in rounds[s]:
                if isinstance(action, Send):
                    sent[rank, action.peer] = buffers[rank][action.lo : action.hi].copy()
        for rank, rounds in enumerate(made):
            for action in rounds[s]:
                target = buffers[rank][action.lo : action.hi]
                if isinstance(action, Recv):
                    target[:] = sent.pop((action.peer, rank))
                elif isinstance(action, Reduce):
                    target += sent.pop((action.peer, rank))
                elif isinstance(action, Finish):
                    target[:] = target // divide_by if divide_by else SPOILED
        assert not sent


def passing_on(made: list[Rounds]) -> list[Rounds]:
    """The plans of ranks that keep nothing of what they only pass on: each spoils its range once it has been sent."""
    spoiled = []
    for rounds in made:
        found = forward_stages(Plan(rounds))
        spoils = {}
        for step, stage in enumerate(found):
            if stage is not None and stage.forwarded:
                assert found[step + 1] is not None
                take, first = stage.take, rounds[step + 1][0]
                assert take in rounds[step]
                assert isinstance(first, Send)
                assert (first.lo, first.hi) == (take.lo, take.hi)
                if not stage.kept:
                    spoils[step + 1] = Finish(take.lo, take.hi)
        spoiled.append(
            tuple(
                (actions[0], spoils[step], *actions[1:]) if step in spoils else actions
                for step, actions in enumerate(rounds)
            )
        )
    return spoiled


def inputs(sizes: list[int]) -> list[Ints]:
    """Numbers that differ everywhere and whose sum over the ranks has no accidental zeros."""
    generator = np.random.default_rng(7)
    return [generator.integers(1, 1 << 40, size, dtype=np.int64) for size in sizes]


def reduction_shape(world: int, length: int) -> Shape:
    return Shape(
        world=world,
        length=length,
        counts=tuple((length + 2 * rank) % 5 for rank in range(world)),
        root=world // 2,
        order=tuple(reversed(range(world))),
        groups=((world - 1,), tuple(range(world - 1))) if world > 1 else ((0,),),
    )


def expected(operation: str, shape: Shape, before: list[Ints]) -> list[tuple[int, slice, Ints]]:
    """What numpy says: rank, range, values."""
    world, parts = shape.world, offsets(shape.counts)
    part = [slice(parts[r], parts[r + 1]) for r in range(world)]
    whole = slice(None)
    mean = sum(before[1:], before[0]) // world
    gathered = np.concatenate([before[r][part[r]] for r in range(world)]) if before[0].size == parts[-1] else mean
    return {
        "all_reduce": [(r, whole, mean) for r in range(world)],
        "reduce": [(shape.root, whole, mean)],
        "broadcast": [(r, whole, before[shape.root]) for r in range(world)],
        "all_gather": [(r, whole, gathered) for r in range(world)],
        "gather": [(shape.root, whole, gathered)],
        "reduce_scatter": [(r, part[r], mean[part[r]]) for r in range(world)],
        "scatter": [(r, part[r], before[shape.root][part[r]]) for r in range(world)],
    }[operation]


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize(("operation", "algorithm"), [p for p in PAIRS if p[0] not in ("all_to_all", "barrier")])
@pytest.mark.parametrize("world", range(1, 10))
def test_numbers_come_out_as_numpy_has_them(operation: str, algorithm: str, world: int) -> None:
    for length in (0, 1, 7, 40):
        shape = reduction_shape(world, length)
        buffers = inputs([buffer_elements(operation, shape)] * world)
        wanted = expected(operation, shape, [buffer.copy() for buffer in buffers])
        interpret(plans(operation, algorithm, shape), buffers, world)
        for rank, where, values in wanted:
            np.testing.assert_array_equal(buffers[rank][where], values)


def without_finish(made: list[Rounds]) -> list[Rounds]:
    return [tuple(tuple(a for a in actions if not isinstance(a, Finish)) for actions in rounds) for rounds in made]


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize(("operation", "algorithm"), [p for p in PAIRS if p[0] not in ("all_to_all", "barrier")])
@pytest.mark.parametrize("world", range(1, 10))
def test_who_keeps_nothing_of_what_it_passes_on_ends_with_the_same(operation: str, algorithm: str, world: int) -> None:
    for length in (0, 1, 7, 40):
        shape = reduction_shape(world, length)
        kept = inputs([buffer_elements(operation, shape)] * world)
        spoiled = [buffer.copy() for buffer in kept]
        made = without_finish(plans(operation, algorithm, shape))
        before = [buffer.copy() for buffer in kept]
        interpret(made, kept, 1)
        interpret(passing_on(made), spoiled, 0)
        for rank, where, _ in expected(operation, shape, before):
            np.testing.assert_array_equal(spoiled[rank][where], kept[rank][where])


@pytest.mark.parametrize("world", range(3, 10))
def test_a_ring_passes_on_all_but_the_first_and_the_last_of_what_comes_and_keeps_no_sum_that_is_not_whole(
    world: int,
) -> None:
    shape = reduction_shape(world, 40)
    made = plans("all_reduce", "ring", shape)
    for rounds, whole in (*product(made, [True]), *product(without_finish(made), [False])):
        found = forward_stages(Plan(rounds))
        assert [stage.forwarded for stage in found] == [True] * (2 * world - 3) + [False]
        assert [stage.kept for stage in found] == [False] * (world - 2) + [True] * world
        assert [stage.finishes for stage in found] == [whole and step == world - 2 for step in range(2 * world - 2)]


@pytest.mark.parametrize("world", range(1, 10))
def test_all_to_all_delivers_uneven_parts_in_the_order_of_senders(world: int) -> None:
    sent = [tuple((3 * i + 2 * j) % 4 for j in range(world)) for i in range(world)]
    shapes = [Shape(world=world, sent=sent[r], received=tuple(row[r] for row in sent)) for r in range(world)]
    given_ = inputs([sum(row) for row in sent])
    buffers = [
        np.concatenate([own, np.zeros(sum(s.received), np.int64)]) for own, s in zip(given_, shapes, strict=True)
    ]
    cuts = [offsets(row) for row in sent]
    for rank, shape in enumerate(shapes):
        own = given_[rank][cuts[rank][rank] : cuts[rank][rank + 1]]
        at = cuts[rank][-1] + offsets(shape.received)[rank]
        buffers[rank][at : at + own.size] = own
    interpret(all_plans("all_to_all", "pairwise", shapes), buffers, 1)
    for rank in range(world):
        wanted = np.concatenate([given_[peer][cuts[peer][rank] : cuts[peer][rank + 1]] for peer in range(world)])
        np.testing.assert_array_equal(buffers[rank][cuts[rank][-1] :], wanted)


@pytest.mark.parametrize("algorithm", sorted(PLANNERS["all_reduce"]))
@pytest.mark.parametrize("world", range(1, 10))
def test_all_ranks_of_an_all_reduce_hold_the_same_bits(algorithm: str, world: int) -> None:
    generator = np.random.default_rng(world)
    buffers = [generator.normal(size=23) * 10.0 ** generator.integers(-9, 9, 23) for _ in range(world)]
    made = plans("all_reduce", algorithm, reduction_shape(world, 23))
    interpret(without_finish(made), buffers, 1)
    assert {buffer.tobytes() for buffer in buffers} == {buffers[0].tobytes()}


def test_a_ring_sends_only_to_the_next_rank_in_its_order() -> None:
    order = (2, 0, 3, 1)
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        made = plans(operation, "ring", Shape(world=4, length=40, counts=(10, 10, 10, 10), order=order))
        for rank, rounds in enumerate(made):
            following = order[(order.index(rank) + 1) % 4]
            assert {a.peer for actions in rounds for a in actions if isinstance(a, Send)} == {following}


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
def test_the_ranks_of_a_ring_have_their_rounds_in_common(operation: str) -> None:
    shape = Shape(world=64, length=6400, counts=(100,) * 64, order=tuple(range(63, -1, -1)))
    made = [plan(operation, "ring", rank, shape) for rank in range(64)]
    assert sum(len(one.rounds) for one in made) >= 64 * 63
    apart = {id(actions): None for one in made for actions in one.rounds if not isinstance(actions[-1], Finish)}
    assert len(apart) <= 2 * 64


def test_what_is_received_twice_into_one_range_within_a_round_keeps_its_order() -> None:
    rounds = ((Recv(1, 0, 4), Recv(2, 2, 6), Recv(3, 6, 8)),)
    assert summary(rounds).deferred == {(0, 1)}


@given(world=st.integers(2, 40), beyond=st.integers(0, 100), data=st.data())
def test_a_planner_says_of_its_plan_what_one_would_find_out(world: int, beyond: int, data: st.DataObject) -> None:
    shape = Shape(world=world, length=world + beyond, order=tuple(data.draw(st.permutations(range(world)))))
    for rank in range(world):
        made = plan("all_reduce", "ring", rank, shape)
        assert made.summary == summary(made.rounds)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
@settings(max_examples=10)
@given(data=st.data())
def test_what_is_executed_names_the_ranks_that_were_proved(operation: str, algorithm: str, data: st.DataObject) -> None:
    shapes = data.draw(shape_lists(operation, max_world=9))
    members = [10 * rank for rank in data.draw(st.permutations(range(len(shapes))))]
    segment = data.draw(st.sampled_from([1, 3, 1000]))
    for rank, shape in enumerate(shapes):
        made = plan(operation, algorithm, rank, shape)
        named = Plan(made.among(members).by_rank(), in_step=made.in_step)
        ours, plain = schedule(made.among(members), segment), schedule(named, segment)
        assert (ours.peers, ours.lanes) == (plain.peers, plain.lanes)
        assert [stage and stage[2:] for stage in ours.forward_stages] == [
            stage and stage[2:] for stage in plain.forward_stages
        ]
        assert (ours.scratch, ours.deferred, ours.sent) == (plain.scratch, plain.deferred, plain.sent)
        assert ours.plan.by_rank() == plain.plan.rounds
        assert set(ours.peers) <= set(members) - {members[rank]}


def test_a_ring_all_reduce_finishes_each_element_on_one_rank_only() -> None:
    made = plans("all_reduce", "ring", Shape(world=5, length=13))
    finishes = sorted((a.lo, a.hi) for p in made for actions in p for a in actions if isinstance(a, Finish))
    assert finishes == [(0, 3), (3, 6), (6, 9), (9, 11), (11, 13)]


def test_only_leaders_speak_across_groups() -> None:
    groups = ((4, 0), (1, 2, 5), (3,))
    made = plans("all_reduce", "hierarchical", Shape(world=6, length=8, groups=groups, local="ring", cross="tree"))
    group_of = {rank: group for group in groups for rank in group}
    for rank, rounds in enumerate(made):
        peers = {a.peer for actions in rounds for a in actions if not isinstance(a, Finish)}
        assert all(group_of[peer] == group_of[rank] or {rank, peer} <= {4, 1, 3} for peer in peers)


@pytest.mark.parametrize(
    ("operation", "algorithm", "rank", "shape", "said"),
    [
        ("sum", "ring", 0, Shape(world=2), "all_to_all"),
        ("gather", "ring", 0, Shape(world=2), "tree, centralized"),
        ("barrier", "tree", 0, Shape(world=2), "dissemination"),
        ("all_reduce", "ring", 2, Shape(world=2), "rank 2"),
        ("all_gather", "ring", 0, Shape(world=2), "counts"),
        ("all_to_all", "pairwise", 0, Shape(world=2, sent=(1, 1)), "received"),
        ("all_to_all", "pairwise", 0, Shape(world=2, sent=(1, 1), received=(2, 1)), "itself"),
        ("all_reduce", "hierarchical", 0, Shape(world=2), "groups"),
        ("all_reduce", "hierarchical", 0, Shape(world=2, groups=((0, 1),), local="halving_doubling"), "ring, tree"),
        ("all_reduce", "hierarchical", 0, Shape(world=2, groups=((0, 1),), cross="hierarchical"), "halving_doubling"),
    ],
)
def test_what_has_no_meaning_is_refused(operation: str, algorithm: str, rank: int, shape: Shape, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(operation, algorithm, rank, shape)


@pytest.mark.parametrize(
    "fields",
    [
        {"world": 0},
        {"world": 2, "root": 2},
        {"world": 2, "length": -1},
        {"world": 2, "arity": 1},
        {"world": 2, "counts": (1,)},
        {"world": 2, "counts": (1, -1)},
        {"world": 3, "order": (0, 2, 2)},
        {"world": 3, "groups": ((0, 1), (1, 2))},
        {"world": 2, "groups": ((0, 1), ())},
    ],
)
def test_an_impossible_shape_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Shape(**fields)


def test_every_operation_has_an_algorithm() -> None:
    assert all(algorithms(operation) for operation in PLANNERS)
