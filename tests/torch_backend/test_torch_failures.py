"""A rank is lost, late, or does something else: the others learn which one it was, and can go on without it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hcsim.torch_backend.work import CallFailed, CallTimedOut
from tests.torch_backend.models import STEPS, batch, compare, loss_of, made, optimizer_of, weights_of
from tests.torch_backend.ranks import Killed, Meeting, Ranks

LARGE = 2_000_000
"""Elements: more than sockets hold, so that the call cannot be over before its end is reached."""
LASTING = 25_000_000
"""So many that who starts it and dies is dead before it is over."""


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def seen(act: Callable[[], Any]) -> tuple[str, str]:
    """The class and the text of the error that it ends with."""
    try:
        act()
    except dist.DistBackendError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def without_last(us: Meeting) -> Meeting:
    return Meeting(us.rank, us.size - 1, us.backend or "hcsim", us.file + "-smaller")


def go_on(us: Meeting) -> list[float]:
    """What is left forms a group, and computes."""
    dist.destroy_process_group()
    without_last(us).init()
    tensor = torch.full((3,), us.rank + 1.0)
    dist.all_reduce(tensor)
    dist.barrier()
    return tensor.tolist()


def lose_in_all_reduce(us: Meeting) -> tuple[tuple[str, str], list[float]]:
    Meeting(us.rank, us.size, "hcsim", us.file).init()
    dist.barrier()
    work = dist.all_reduce(torch.ones(LASTING), async_op=True)
    if us.rank == us.size - 1:
        die()
    return seen(work.wait), go_on(us)


def lose_in_barrier(us: Meeting) -> tuple[tuple[str, str], list[float]]:
    Meeting(us.rank, us.size, "hcsim", us.file).init()
    dist.barrier()
    if us.rank == us.size - 1:
        die()
    return seen(dist.barrier), go_on(us)


def lose_before_the_first_call(us: Meeting) -> tuple[tuple[str, str], list[float]]:
    Meeting(us.rank, us.size, "hcsim", us.file).init()
    if us.rank == us.size - 1:
        die()
    return seen(lambda: dist.all_reduce(torch.ones(3))), go_on(us)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("lose", [lose_in_all_reduce, lose_in_barrier, lose_before_the_first_call])
@pytest.mark.parametrize("size", [2, 4])
def test_survivors_name_the_lost_rank_and_go_on(ranks: Ranks, lose: Callable[..., Any], size: int) -> None:
    *survivors, lost = ranks.answers(lose, size=size, backend="")
    assert lost == Killed()
    for (kind, text), result in survivors:
        assert kind == "CallFailed"
        assert f"rank {size - 1}" in text
        assert "destroy_process_group" in text
        assert result == [size * (size - 1) / 2] * 3


def lose_in_backward(us: Meeting) -> tuple[str, list[list[Tensor]]]:
    """The last rank dies in the backward pass of the third step; the rest repeats that step and goes on."""
    Meeting(us.rank, us.size, "hcsim", us.file).init()
    model, size, error = made(), us.size, ""
    optimizer = optimizer_of(model)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.002)
    history: list[list[Tensor]] = []
    while len(history) < STEPS:
        step = len(history)
        if step == 2 and us.rank == us.size - 1:
            model.second.weight.register_hook(lambda _: die())
        inputs, targets = batch(step, us.rank, size)
        optimizer.zero_grad()
        try:
            loss_of(parallel(inputs), targets).backward()
        except RuntimeError as lost:
            error, size = str(lost), size - 1
            go_on(us)
            parallel = DistributedDataParallel(model, bucket_cap_mb=0.002)
            continue
        optimizer.step()
        history.append(weights_of(model))
    return error, history


def emulated(before: int, after: int) -> list[list[Tensor]]:
    """One process that takes the shares of so many ranks in the first two steps, and then of so many."""
    model = made()
    optimizer = optimizer_of(model)
    history = []
    for step in range(STEPS):
        size = before if step < 2 else after
        optimizer.zero_grad()
        for rank in range(size):
            inputs, targets = batch(step, rank, size)
            (loss_of(model(inputs), targets) / size).backward()
        optimizer.step()
        history.append(weights_of(model))
    return history


@pytest.mark.slow
def test_training_goes_on_after_a_rank_died_in_its_backward_pass(ranks: Ranks) -> None:
    *survivors, lost = ranks.answers(lose_in_backward, size=3, backend="")
    assert lost == Killed()
    for error, history in survivors:
        assert "rank 2" in error
        compare(history, emulated(3, 2), exact=False)


def stay_away() -> tuple[str, str] | None:
    """Rank 1 does not come until the others have given up."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    assert group is not None
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().get("given up")
        return None
    try:
        return seen(lambda: dist.all_reduce(torch.ones(3), group=group))
    finally:
        dist.distributed_c10d._get_default_store().set("given up", "yes")


@pytest.mark.slow
def test_a_call_that_takes_too_long_names_who_is_waited_for(ranks: Ranks) -> None:
    first, away, second = ranks.run(stay_away, size=3)
    assert away is None
    # One of them waits for rank 1, the other perhaps for the one that does, and the first to give up tells the other.
    assert "rank 1" in first[1] + second[1]
    assert "CallTimedOut" in (first[0], second[0])
    for _, text in (first, second):
        assert "longer than 1 s" in text


def wait_shortly() -> str:
    work = dist.barrier(async_op=True) if dist.get_rank() == 0 else None
    store = dist.distributed_c10d._get_default_store()
    if work is None:
        store.get("waited")
        dist.barrier()
        return ""
    with pytest.raises(CallTimedOut) as caught:
        work.wait(timedelta(milliseconds=50))
    assert not work.is_completed()
    store.set("waited", "yes")
    work.wait()
    assert work.is_success()
    return str(caught.value)


def test_a_wait_that_ends_early_leaves_the_call_alone(ranks: Ranks) -> None:
    assert "goes on" in ranks.run(wait_shortly, size=2)[0]


def disagree(what: str) -> tuple[str, str]:
    us = dist.get_rank()
    kind = torch.float32 if us else torch.int32
    acts: dict[str, Callable[[], Any]] = {
        "shape": lambda: dist.all_reduce(torch.ones(3 + us)),
        "dtype": lambda: dist.all_reduce(torch.ones(4, dtype=kind)),
        "dtype of what is moved": lambda: dist.broadcast(torch.ones(4, dtype=kind), 0),
        "operation, where all wait": lambda: (
            dist.broadcast(torch.ones(4), 0) if us == 1 else dist.all_reduce(torch.ones(4))
        ),
        "root, where all wait": lambda: dist.broadcast(torch.ones(4), (us + 1) % 3),
        "reduction": lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if us else dist.ReduceOp.SUM),
    }
    # Who only sends is done with it, and learns it from the next call.
    return seen(lambda: [acts[what](), dist.barrier()])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "what",
    ["shape", "dtype", "dtype of what is moved", "operation, where all wait", "root, where all wait", "reduction"],
)
def test_ranks_that_disagree_are_all_told(ranks: Ranks, what: str) -> None:
    for kind, text in ranks.run(disagree, what, size=3):
        assert kind == "CallFailed"
        assert "another operation" in text


def destroy_in_one() -> tuple[str, str] | None:
    dist.barrier()
    if dist.get_rank() == 1:
        work = dist.all_reduce(torch.ones(LARGE), async_op=True)
        group = dist.group.WORLD
        assert group is not None
        group.abort()
        with pytest.raises(CallFailed):
            work.wait()
        return None
    return seen(lambda: [dist.all_reduce(torch.ones(LARGE)), dist.all_reduce(torch.ones(LARGE))])


def test_who_aborts_its_group_in_the_middle_of_a_call_tells_the_others(ranks: Ranks) -> None:
    first, _, second = ranks.run(destroy_in_one, size=3)
    for _, text in (first, second):
        assert "rank 1" in text


def miss_the_barrier() -> tuple[int | None, str] | None:
    """Of the group of ranks 1 and 2, the second does not come."""
    group = dist.new_group([1, 2])
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        with pytest.raises(CallTimedOut) as caught:
            group.monitored_barrier(timedelta(milliseconds=500))
        store.set("given up", "yes")
        return caught.value.peer, str(caught.value)
    store.get("given up")
    return None


def test_a_monitored_barrier_of_some_ranks_names_the_absent_as_the_program_does(ranks: Ranks) -> None:
    _, (peer, text), _ = ranks.run(miss_the_barrier, size=3)
    assert peer == 2
    assert "rank 2 did not come" in text


def die_beside_another_backend() -> tuple[int | None, str] | None:
    group = dist.new_group([1, 2], backend="hcsim")
    if dist.get_rank() == 0:
        return None
    dist.all_reduce(torch.ones(2), group=group)
    if dist.get_rank() == 2:
        die()
    with pytest.raises(CallFailed) as caught:
        dist.all_reduce(torch.ones(2), group=group)
    return caught.value.peer, str(caught.value)


def test_a_group_beside_another_backends_names_the_lost_rank_as_the_program_does(ranks: Ranks) -> None:
    _, (peer, text), lost = ranks.answers(die_beside_another_backend, size=3, backend="gloo")
    assert lost == Killed()
    assert peer == 2
    assert "its ranks are 1, 2 of the program" in text


def refused(what: str) -> bool:
    """Whether rank 0's call, whose parts together have the right size, is refused; the others come to no harm."""
    us = dist.get_rank()
    uneven = [torch.zeros(2), torch.zeros(4)]
    acts: dict[str, Callable[[], Any]] = {
        "gather": lambda: dist.gather(torch.ones(3), uneven, 0),
        "scatter": lambda: dist.scatter(torch.ones(3), uneven, 0),
        "all_gather": lambda: dist.all_gather([torch.zeros(3)] * 4, torch.ones(6)),
        "split sizes": lambda: dist.all_to_all_single(torch.ones(2), torch.ones(4), [1, 1], [1, 1]),
    }
    if us == 0:
        with pytest.raises(ValueError, match=r"elements|sizes|size per rank"):
            acts[what]()
    dist.barrier()
    return True


@pytest.mark.parametrize("what", ["gather", "scatter", "all_gather", "split sizes"])
def test_parts_that_do_not_fit_are_refused_before_anything_is_moved(ranks: Ranks, what: str) -> None:
    assert ranks.run(refused, what, size=2) == [True, True]


def end_twice(how: str) -> float:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    group = dist.group.WORLD
    assert group is not None
    getattr(group, how)()
    getattr(group, how)()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    return float(tensor[0])


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_a_group_that_was_ended_by_itself_can_still_be_destroyed(ranks: Ranks, how: str) -> None:
    assert ranks.run(end_twice, how, size=2) == [2.0, 2.0]


def send_and_leave(length: int, partly: bool) -> float:
    """Rank 0 waits for nothing that it started, and the others take their time."""
    group = dist.new_group([0, 1]) if partly else None
    received = torch.zeros(length)
    if dist.get_rank() == 0:
        dist.isend(torch.full((length,), 3.0), 1, group=group)
        dist.isend(torch.full((length,), 4.0), 1, group=group)
        dist.irecv(torch.zeros(1), 2)  # which never comes, and is not waited for
        dist.all_reduce(torch.ones(length), async_op=True)
        dist.destroy_process_group()
        return 0.0
    if dist.get_rank() == 1:
        dist.recv(received, 0, group=group)
        again = torch.zeros(length)
        dist.recv(again, 0, group=group)
        received += again
    total = torch.ones(length)
    dist.all_reduce(total)
    return float(received.min() + total.min())


@pytest.mark.parametrize("length", [1, LARGE])
@pytest.mark.parametrize("partly", [False, True])
def test_what_was_started_arrives_although_its_sender_destroys_its_group(
    ranks: Ranks, length: int, partly: bool
) -> None:
    assert ranks.run(send_and_leave, length, partly, size=3) == [0.0, 10.0, 3.0]


def leave_early() -> float:
    """Rank 0 leaves as soon as it has its own result; the others may still be at it."""
    tensor = torch.ones(1000)
    for _ in range(5):
        dist.all_reduce(tensor)
    if dist.get_rank() == 0:
        dist.destroy_process_group()
    return float(tensor[0])


def test_leaving_after_the_last_call_disturbs_nobody(ranks: Ranks) -> None:
    for size in (3, 4):
        assert ranks.run(leave_early, size=size) == [float(size**5)] * size


def meet_again(us: Meeting) -> float:
    store = dist.FileStore(us.file, us.size)
    for _ in range(3):
        dist.init_process_group("hcsim", store=store, rank=us.rank, world_size=us.size)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
    return float(tensor)


def test_groups_may_meet_in_one_store_one_after_the_other(ranks: Ranks) -> None:
    assert ranks.run(meet_again, size=3, backend="") == [3.0] * 3
