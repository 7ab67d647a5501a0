"""MLX's distributed calls over hcsim, on real ranks and on a virtual cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from hcsim.errors import ConfigError
from hcsim.mlx.group import Group, read_hostfile
from tests.mlx_programs.conftest import InWorld, OnRanks, alike

EVERY_CALL = """
    group = dist.init(strict=True)
    rank, size = group.rank(), group.size()
    found = {"size": size}
    for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.int32):
        mine = (mx.arange(6) + rank).astype(dtype)
        total, most, least = dist.all_sum(mine), dist.all_max(mine), dist.all_min(mine)
        assert total.dtype == dtype
        found[str(dtype)] = [total.tolist(), most.tolist(), least.tolist(), mine.tolist()]
    turned = mx.arange(6).reshape(2, 3).T + 10 * rank
    found["turned"] = dist.all_sum(turned).tolist()
    found["one number"] = dist.all_sum(mx.array(2.5)).item()
    found["gathered"] = dist.all_gather(mx.array([[rank, -rank]])).tolist()
    found["gathered numbers"] = dist.all_gather(mx.array(rank)).tolist()
    found["scattered"] = dist.sum_scatter(mx.arange(2 * size)).tolist()
    right, left = (rank + 1) % size, (rank - 1) % size
    if rank % 2:
        got = dist.recv_like(mx.array([0.0]), left)
        dist.send(mx.array([float(rank)]), right)
    else:
        dist.send(mx.array([float(rank)]), right)
        got = dist.recv((1,), mx.float32, left)
    found["from the left"] = got.tolist()
    half = group.split(rank % 2, key=size - rank)
    found["half"] = [half.rank(), dist.all_gather(mx.array([rank]), group=half).tolist()]
    tell(found)
"""


def test_every_call_gives_what_mlx_defines(in_world: InWorld) -> None:
    size = 4
    for rank, found in enumerate(in_world(size, EVERY_CALL)):
        assert found["size"] == size
        for dtype in ("float32", "float16", "bfloat16", "int32"):
            total, most, least, mine = found[f"mlx.core.{dtype}"]
            assert total == [size * n + 6 for n in range(6)]
            assert (most, least, mine) == ([n + 3 for n in range(6)], list(range(6)), [n + rank for n in range(6)])
        assert found["turned"] == (size * np.arange(6).reshape(2, 3).T + 60).tolist()
        assert found["one number"] == 2.5 * size
        assert found["gathered"] == [[other, -other] for other in range(size)]
        assert found["gathered numbers"] == list(range(size))
        assert found["scattered"] == [size * 2 * rank, size * (2 * rank + 1)]
        assert found["from the left"] == [(rank - 1) % size]
        assert found["half"] == [1 - rank // 2, [rank % 2 + 2, rank % 2]]


GRADIENTS = """
    rank, weight = dist.init().rank(), mx.array([1.0, 2.0])
    scale = mx.arange(2.0 * dist.init().size())
    tell([
        mx.grad(lambda w: dist.all_sum(w * w).sum())(weight).tolist(),
        mx.grad(lambda w: (dist.all_gather(w) * scale).sum())(weight).tolist(),
    ])
"""


@pytest.mark.slow
def test_gradients_flow_through_sums_and_gathered_arrays(on_ranks: OnRanks) -> None:
    for number, rank in enumerate(on_ranks(2, GRADIENTS)):
        assert rank.value == [[2.0, 4.0], [2.0 * number, 2.0 * number + 1]]


EXCHANGE = """
    rank = dist.init().rank()
    for number in range(3):
        dist.send(mx.full((1 << 20,), rank + number), 1 - rank)
    got = [dist.recv((1 << 20,), mx.int32, 1 - rank) for _ in range(3)]
    dist.send(mx.arange(4), 1 - rank)
    if rank:
        dist.recv((4,), mx.int32, 0)
        tell([[each.min().item(), each.max().item()] for each in got])
    else:
        tell([[each.min().item(), each.max().item()] for each in got])
        assert dist.recv((4,), mx.int32, 1).tolist() == [0, 1, 2, 3]
"""


def test_ranks_may_all_send_before_they_receive(in_world: InWorld) -> None:
    first, second = in_world(2, EXCHANGE)
    assert first == [[number, number] for number in (1, 2, 3)]
    assert second == [[number, number] for number in (0, 1, 2)]


REFUSED = """
    def refusal(call):
        try:
            call()
        except Exception as error:
            return type(error).__name__, str(error)

    group, one = dist.init(), mx.ones(2)
    tell([
        refusal(lambda: mx.compile(lambda x: dist.all_sum(x))(one)),
        refusal(lambda: mx.grad(lambda x: dist.all_max(x).sum())(one)),
        refusal(lambda: dist.send(one, group.rank())),
        refusal(lambda: dist.sum_scatter(mx.ones(3))),
        dist.all_sum(mx.array(1)).item(),
    ])
"""


def test_what_cannot_be_done_is_refused_and_the_group_goes_on(in_world: InWorld) -> None:
    for rank, (compiled, differentiated, to_itself, uneven, total) in enumerate(in_world(2, REFUSED)):
        assert compiled[0] == differentiated[0] == to_itself[0] == uneven[0] == "UsageError"
        assert "inside mx.compile" in compiled[1]
        assert "all_max has no gradient" in differentiated[1]
        assert f"cannot exchange messages with rank {rank}" in to_itself[1]
        assert "2 equal parts" in uneven[1]
        assert total == 2


HELD = """
    rank, length = dist.init().rank(), 5 << 20
    held, views, graphs, last = [], [], [], None
    for number in range(12):
        mine = mx.full((length,), number + rank, mx.float32 if number % 4 else mx.int32)
        last = dist.average_gradients({"a": mine, "b": mine[:3]}) if number % 2 else {"a": dist.all_sum(mine)}
        if number % 3 == 0:
            held.append((last["a"], 2 * number + 1 if number % 2 == 0 else number + 0.5))
        elif number % 3 == 1:
            views.append((last["a"][-2:], 2 * number + 1 if number % 2 == 0 else number + 0.5))
        else:
            graphs.append((last["a"].reshape(2, -1) * 2, 4 * number + 2 if number % 2 == 0 else 2 * number + 1))
    tell([[[each.min().item(), each.max().item()], value] for each, value in held + views + graphs])
"""


@pytest.mark.slow
def test_large_results_stay_as_they_are_while_anything_has_them(on_ranks: OnRanks) -> None:
    for rank in on_ranks(2, HELD):
        assert len(rank.value) == 12
        for found, expected in rank.value:
            assert found == [expected, expected]


REUSED = """
    import resource

    length, faults, total = 16 << 20, [], mx.ones(1)
    for number in range(9):
        mine = mx.ones(length)
        mx.eval(mine)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        total = dist.all_sum(mine)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        assert total[-1].item() == 2
    tell([sum(faults[3:]), 4 * length // resource.getpagesize()])
"""


@pytest.mark.slow
def test_large_results_take_the_memory_of_earlier_ones(on_ranks: OnRanks) -> None:
    for rank in on_ranks(2, REUSED):
        faults, pages = rank.value
        assert faults < pages  # six fresh results would be six times their pages


@pytest.mark.slow
def test_both_worlds_give_the_same_bits(on_ranks: OnRanks, simulated: OnRanks) -> None:
    sums = """
        rank = dist.init().rank()
        draws = np.random.default_rng(rank)
        tell([
            np.array(dist.all_sum(mx.array(draws.standard_normal(length).astype(np.float32)))).tobytes().hex()
            for length in (1, 1000, 300_001)
        ])
    """
    worlds = [[rank.value for rank in run(3, sums)] for run in (on_ranks, simulated)]
    assert alike([*worlds[0], *worlds[1]])


KILLED = """
    rank = dist.init().rank()
    dist.all_sum(mx.ones(4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_sum(mx.ones(1 << 20))
    except Exception as error:
        tell([type(error).__module__, str(error), error.peer])
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_on_the_others(on_ranks: OnRanks) -> None:
    first, killed, last = on_ranks(3, KILLED)
    assert killed.code == -9
    for rank in (first, last):
        module, said, peer = rank.value
        assert module == "hcsim.errors"
        assert peer == 1
        assert "rank 1" in said


DIED_AT_THE_END = """
    rank = dist.init().rank()
    dist.all_sum(mx.ones(4))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(mx.ones(1 << 24), 1)
    tell("sent")
"""


@pytest.mark.slow
def test_a_message_that_nobody_received_is_one_line_at_the_end(on_ranks: OnRanks) -> None:
    first, _ = on_ranks(2, DIED_AT_THE_END)
    assert first.value == "sent"
    (line,) = first.errors.splitlines()
    assert line.startswith("hcsim: what this program sent has not been received: ")
    assert "rank 1" in line


ALONE = """
import json
import mlx.core as mx
import hcsim.mlx as dist
group, x = dist.init(), mx.arange(4)
assert (group.rank(), group.size()) == (0, 1)
assert group.split(3).size() == 1
for call in (dist.all_sum, dist.all_max, dist.all_gather, dist.sum_scatter):
    assert mx.array_equal(call(x), x)
try:
    dist.init(strict=True)
except Exception as error:
    print(json.dumps(str(error)))
"""


def test_a_program_that_is_started_by_hand_is_alone() -> None:
    without = {name: value for name, value in os.environ.items() if not name.startswith("MLX_")}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=without, capture_output=True, text=True, timeout=60, check=True
    )
    assert "hcsim run" in json.loads(done.stdout)


@pytest.mark.parametrize("written", ["", "{}", '[["10.0.0.1"]]', "[[]]", "[7]"])
def test_a_bad_hostfile_is_explained(tmp_path: Path, written: str) -> None:
    hosts = tmp_path / "bad.json"
    hosts.write_text(written)
    with pytest.raises(ConfigError, match="a hostfile is a list of lists"):
        read_hostfile(str(hosts))


def test_a_group_of_mlx_itself_is_refused() -> None:
    import mlx.core as mx

    import hcsim.mlx as dist

    with pytest.raises(ValueError, match="a group of hcsim"):
        dist.all_sum(mx.ones(2), group=mx.distributed.init())
    assert isinstance(dist.init(), Group)
