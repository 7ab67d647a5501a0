"""Shards whose members come and go: nothing is lost as long as a copy of each shard is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

from hcsim.config import Crash, Training
from hcsim.errors import ConfigError, TrainingError
from hcsim.real.hardware import FolderStore
from hcsim.runtime.host import Host
from hcsim.selftest.script import ScriptedCluster, train, without_faults
from hcsim.training.elastic.checkpoint import CheckpointOrigin, CheckpointWriter, decode, in_store
from hcsim.training.layout import Layout
from hcsim.training.resharding import Holding, Lost, plan
from hcsim.training.shards import held_shards
from hcsim.training.strategies import check_elastic
from hcsim.training.tasks import task
from hcsim.units import PositiveSeconds, Seconds
from tests.switches import on_switch

SWITCH = on_switch("abcd", rate="10 Mb/s", latency="0.5 ms")
CONVEX = Training(
    task="convex", steps=8, timeout_s=PositiveSeconds(0.5), evaluate_every=4, optimizer="adamw", lr=0.01,
    algorithm="ring", bucket_bytes=1, clip=1.0,
)  # fmt: skip
"""All strategies sum blocks around the ring, to the same bits."""
STAGES = ("zero1", "zero2", "zero3")


def dying(nodes: str, step: int, after_s: float) -> Callable[[ScriptedCluster], None]:
    """These nodes crash some time after all have done so many steps."""

    def prepare(cluster: ScriptedCluster) -> None:
        def on_step(name: str, done: int) -> None:
            if (name, done) == (nodes[0], step):
                for node in nodes:
                    cluster.world.inject(Crash(at_s=Seconds(cluster.world.loop.time() + after_s), node=node))

        cluster.on_step = on_step

    return prepare


@pytest.mark.parametrize("stage", STAGES)
def test_members_that_come_and_go_learn_the_bits_of_data_parallelism(stage: str) -> None:
    script = {"first": "ab", "plan": [(2, "abcd"), (5, "bcd"), (6, "bc")]}
    whole = train(SWITCH, CONVEX, **script)  # type: ignore[arg-type]
    assert train(SWITCH, replace(CONVEX, strategy=f"{stage}:copies=2"), **script).sha256() == whole.sha256()  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("after_ms", [0.5, 3, 5, 7, 9, 11, 13, 15, 18])
def test_a_member_may_be_lost_in_any_phase_of_a_step(stage: str, after_ms: float) -> None:
    settings = replace(CONVEX, strategy=f"{stage}:copies=2")
    faulty = train(SWITCH, settings, prepare=dying("c", 4, after_ms / 1e3))
    assert [names for _, names in faulty.plan()] == [["a", "b", "c", "d"], ["a", "b", "d"]]
    assert faulty.sha256() == without_faults(faulty, SWITCH, replace(settings, strategy="ddp")).sha256()


def test_as_many_neighbours_may_be_lost_at_once_as_there_are_copies_left() -> None:
    settings = replace(CONVEX, strategy="zero3:copies=3")
    faulty = train(SWITCH, settings, prepare=dying("bc", 4, 4e-3))
    assert [names for _, names in faulty.plan()][-1] == ["a", "d"]
    assert faulty.sha256() == without_faults(faulty, SWITCH, replace(settings, strategy="ddp")).sha256()


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "zero3:copies=2"])
def test_a_shard_that_nobody_holds_ends_training_on_all(strategy: str) -> None:
    settings = replace(CONVEX, strategy=strategy)
    outcome = train(SWITCH, settings, prepare=dying("bc" if "copies" in strategy else "c", 4, 4e-3))
    for name in "ad":
        error = outcome.error(name)
        assert isinstance(error, TrainingError)
        assert "are gone with the members that are lost, which did not come back within 120 s" in str(error)


@pytest.mark.parametrize("stage", STAGES)
def test_members_wait_for_shards_that_were_only_cut_off(stage: str) -> None:
    def prepare(cluster: ScriptedCluster) -> None:
        def on_step(name: str, done: int) -> None:
            if (name, done) == ("a", 3):
                cluster.publish("ad")
                env = cluster.world.env
                env.call_at(env.now_ns + 5 * 10**9, cluster.publish, "abcd")

        cluster.on_step = on_step

    settings = replace(CONVEX, strategy=f"{stage}:copies=2")
    outcome = train(SWITCH, settings, prepare=prepare)
    assert outcome.began == {0: 0, 2: 4}
    assert outcome.sha256() == without_faults(outcome, SWITCH, replace(settings, strategy="ddp")).sha256()


@pytest.mark.parametrize("stage", STAGES)
def test_a_member_that_leaves_hands_over_the_only_copy_of_its_shard(stage: str) -> None:
    asked: list[asyncio.Event] = []

    def prepare(cluster: ScriptedCluster) -> None:
        asked.append(asyncio.Event())
        cluster.on_step = lambda name, done: asked[0].set() if (name, done) == ("b", 3) else None

    settings = replace(CONVEX, strategy=stage)
    outcome = train(
        SWITCH, settings, prepare=prepare, leaving=lambda host: asked[0] if host.name == "b" else asyncio.Event()
    )
    assert [names for _, names in outcome.plan()] == [["a", "b", "c", "d"], ["a", "c", "d"]]
    assert outcome.sha256() == without_faults(outcome, SWITCH, replace(settings, strategy="ddp")).sha256()


# Checkpoints.


def writer(folder: Path, host: Host) -> CheckpointWriter:
    origin = CheckpointOrigin("convex", task("convex").fingerprint)
    return CheckpointWriter(2, in_store(FolderStore(folder / host.name)), origin=origin)


@pytest.mark.parametrize(
    ("saving", "loading"), [("zero3", "zero1"), ("zero2", "ddp"), ("ddp", "zero3"), ("zero1", "zero3")]
)
def test_a_checkpoint_is_loaded_by_another_number_of_members_and_another_strategy(
    saving: str, loading: str, tmp_path: Path
) -> None:
    first = replace(CONVEX, steps=4, strategy=saving)
    train(SWITCH, first, checkpoints=lambda host: writer(tmp_path, host))
    on_disk = in_store(FolderStore(tmp_path / "a"))[0].load()
    assert on_disk is not None
    assert {*decode(on_disk).snapshot.arrays} == {"parameters", "optimizer/mean", "optimizer/square", "optimizer/steps"}
    resumed = train(
        SWITCH, replace(CONVEX, strategy=loading), first="abc", lineage="later",
        checkpoints=lambda host: writer(tmp_path, host),
    )  # fmt: skip
    assert resumed.began == {0: 4}
    script = {"first": "abcd", "plan": [(4, "abc")]}
    assert resumed.sha256() == train(SWITCH, CONVEX, **script).sha256()  # type: ignore[arg-type]


def test_members_go_back_to_the_newest_checkpoint_when_a_shard_is_lost(tmp_path: Path) -> None:
    settings = replace(CONVEX, strategy="zero3")
    outcome = train(SWITCH, settings, prepare=dying("c", 5, 4e-3), checkpoints=lambda host: writer(tmp_path, host))
    assert outcome.plan()[-1] == (4, ["a", "b", "d"])
    script = {"first": "abcd", "plan": [(4, "abd")]}
    assert outcome.sha256() == train(SWITCH, CONVEX, **script).sha256()  # type: ignore[arg-type]


def test_in_a_cluster_all_members_share_the_model_out() -> None:
    with pytest.raises(ConfigError, match="shards=2: in a cluster all members share the model out"):
        check_elastic(replace(CONVEX, strategy="zero3:shards=2"))


# The plan.

BUCKETS = Layout.of([(("a", (13,)),), (("b", (7, 3)),), (("c", (2,)),)]).buckets(1)


@given(
    old=some.integers(1, 6), new=some.integers(1, 6), copies=some.integers(1, 3), lost=some.sets(some.integers(0, 5)),
)  # fmt: skip
def test_each_member_ends_with_all_it_is_to_hold_or_something_is_gone(
    old: int, new: int, copies: int, lost: set[int]
) -> None:
    size = max(old, new)
    have = [
        [Holding(old, shard) for shard in held_shards(rank, old, copies)] if rank < old and rank not in lost else []
        for rank in range(size)
    ]
    want = [
        [Holding(new, shard) for shard in held_shards(rank, new, copies)] if rank < new else [] for rank in range(size)
    ]

    def elements(holdings: list[Holding]) -> set[int]:
        return {at for each in holdings for lo, hi in each.spans(BUCKETS) for at in range(lo, hi)}

    left = set().union(*map(elements, have))
    if left != set(range(36)):
        with pytest.raises(Lost):
            plan(BUCKETS, have, want)
        return
    routes = plan(BUCKETS, have, want)
    for (giver, _), ranges in routes.items():
        assert {at for lo, hi in ranges for at in range(lo, hi)} <= elements(have[giver])
    for rank in range(size):
        coming = [
            at for (_, taker), ranges in routes.items() if taker == rank for lo, hi in ranges for at in range(lo, hi)
        ]
        assert len(coming) == len({*coming})
        assert {*coming} == elements(want[rank]) - elements(have[rank])
