"""The verifier finds what is wrong, and says where."""

from __future__ import annotations

import pytest

from hcsim.collectives.algorithms import plan, plans
from hcsim.collectives.plan import Finish, Recv, Reduce, Rounds, Send, Shape, split
from hcsim.collectives.verify import PlanError, verify
from hcsim.errors import UsageError

PAIR = Shape(world=2, length=6)


def refused(operation: str, made: list[Rounds], shape: Shape, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        verify(operation, made, [shape] * shape.world)


def all_reduce_of_two(*last: Finish) -> list[Rounds]:
    return [((Send(peer, 0, 6), Reduce(peer, 0, 6), *last),) for peer in (1, 0)]


@pytest.mark.parametrize("world", range(2, 10))
def test_a_ring_whose_gather_phase_reuses_the_scatter_phases_indices(world: int) -> None:
    """Every rank agrees with every other, and everything is wrong."""
    shape, cuts = Shape(world=world, length=4 * world), split(4 * world, world)
    broken = []
    for rank, rounds in enumerate(plans("all_reduce", "ring", shape)):
        sent = [(rank - s - 1) % world for s in range(world - 1)]
        gather = tuple(
            (
                Send((rank + 1) % world, cuts[c], cuts[c + 1]),
                Recv((rank - 1) % world, cuts[c - 1 if c else world - 1], cuts[c or world]),
            )
            for c in sent
        )
        broken.append(rounds[: world - 1] + gather)
    refused("all_reduce", broken, shape, r"rank \d+ ends with .* instead of finished")


def test_a_missing_contribution() -> None:
    shape = Shape(world=3, length=6)
    made = plans("reduce", "centralized", shape)
    made[0] = ((Recv(1, 0, 6), Reduce(2, 0, 6)),)
    refused("reduce", made, shape, r"rank 0 ends with inputs of ranks \[1, 2\] in \[0, 6\)")


def test_a_contribution_that_is_missing_in_part_of_the_range() -> None:
    made: list[Rounds] = [((Reduce(1, 0, 4), Finish(0, 4)),), ((Send(0, 0, 4),),)]
    refused("reduce", made, PAIR, r"rank 0 ends with inputs of ranks \[0\] in \[4, 6\)")


def test_a_doubled_contribution() -> None:
    made = [rounds + rounds for rounds in all_reduce_of_two()]
    refused("all_reduce", made, PAIR, r"rank \d, round 1: Reduce.* in \[0, 6\) combines")


def test_a_swapped_peer() -> None:
    shape = Shape(world=4, length=8)
    made = plans("all_reduce", "recursive_doubling", shape)
    made[0] = ((Send(2, 0, 8), *made[0][0][1:]), *made[0][1:])
    refused("all_reduce", made, shape, "round 0, rank 0 to rank 1: nothing is sent, 8 elements are expected")


def test_a_message_that_nobody_receives() -> None:
    refused("broadcast", [((Send(1, 0, 6),),), ()], PAIR, "6 elements are sent, nothing is expected")


def test_a_message_of_two_sizes() -> None:
    made: list[Rounds] = [((Send(1, 0, 6),),), ((Recv(0, 0, 5),),)]
    refused("broadcast", made, PAIR, "6 elements are sent, 5 elements are expected")


def test_two_messages_between_the_same_ranks_in_one_round() -> None:
    made: list[Rounds] = [((Send(1, 0, 3), Send(1, 3, 6)),), ((Recv(0, 0, 3), Recv(0, 3, 6)),)]
    refused("broadcast", made, PAIR, "rank 0, round 0: .* is the second message")


def test_a_message_in_another_round_than_its_receipt() -> None:
    refused("broadcast", [((), (Send(1, 0, 6),)), ((Recv(0, 0, 6),), ())], PAIR, "round 0")


def test_ranks_that_wait_for_each_other() -> None:
    shape = Shape(world=3, length=6)
    made: list[Rounds] = [((Recv((rank - 1) % 3, 0, 6), Send((rank + 1) % 3, 0, 6)),) for rank in range(3)]
    refused("broadcast", made, shape, "wait for each other for ever: rank 1 in round 0 for rank 0")


def test_a_missing_finish() -> None:
    refused(
        "all_reduce", all_reduce_of_two(), PAIR, r"rank 0 ends with inputs of ranks \[0, 1\] .* instead of finished"
    )


def test_a_second_finish() -> None:
    made = all_reduce_of_two(Finish(0, 6), Finish(4, 6))
    refused("all_reduce", made, PAIR, r"round 0: Finish.* finishes \[4, 6\), which holds finished")


def test_a_finish_before_the_sum_is_whole() -> None:
    made: list[Rounds] = [((Send(peer, 0, 6), Finish(0, 6), Reduce(peer, 0, 6)),) for peer in (1, 0)]
    refused("all_reduce", made, PAIR, r"rank 0, round 0: Finish.* holds inputs of ranks \[0\]")


def test_sending_what_was_never_written() -> None:
    made: list[Rounds] = [((Recv(1, 0, 6),),), ((Send(0, 0, 6),),)]
    refused("broadcast", made, PAIR, r"rank 1, round 0: Send.* nothing has been written")


def test_a_part_in_the_wrong_place() -> None:
    shape = Shape(world=2, counts=(3, 3))
    made: list[Rounds] = [((Recv(1, 0, 3),),), ((Send(0, 3, 6),),)]
    refused("gather", made, shape, r"rank 0 ends with inputs of ranks \[1\] from \+3 in \[0, 3\)")


def test_an_all_to_all_that_mixes_up_the_parts() -> None:
    shapes = [Shape(world=2, sent=(2, 2), received=(2, 2))] * 2
    made = [plan("all_to_all", "pairwise", rank, shapes[rank]).by_rank() for rank in range(2)]
    verify("all_to_all", made, shapes)
    made[0] = ((Send(1, 0, 2), made[0][0][1]),)
    with pytest.raises(PlanError, match=r"rank 1 ends with"):
        verify("all_to_all", made, shapes)


def test_a_barrier_that_is_left_too_early() -> None:
    shape = Shape(world=5)
    made = [rounds[:-1] for rounds in plans("barrier", "dissemination", shape)]
    refused("barrier", made, shape, "rank 0 leaves the barrier")


@pytest.mark.parametrize("action", [Send(0, 0, 6), Send(2, 0, 6), Send(1, 4, 7), Send(1, 4, 3), Finish(-1, 2)])
def test_an_action_that_cannot_be(action: Send | Finish) -> None:
    refused("all_reduce", [((action,),), ()], PAIR, "rank 0, round 0")


def test_length_does_not_matter_to_the_proof() -> None:
    shape = Shape(world=16, length=10**15)
    verify("all_reduce", plans("all_reduce", "ring", shape), [shape] * 16)


def test_only_operations_are_proved() -> None:
    with pytest.raises(UsageError, match="sum"):
        verify("sum", [(), ()], [PAIR, PAIR])


def test_as_many_plans_as_ranks() -> None:
    with pytest.raises(UsageError, match="1 plans"):
        verify("all_reduce", [()], [PAIR])
