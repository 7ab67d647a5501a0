"""Whose state the members of a new view go on from."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from hcsim.cluster.view import Member, View
from hcsim.config import Training
from hcsim.runtime.host import Host
from hcsim.selftest.script import ScriptedCluster, ScriptedOutcome, train
from hcsim.training.elastic.checkpoint import CheckpointWriter, in_store
from hcsim.training.elastic.progress import MemberProgress, TrainedView, lineage_digest, most_right
from hcsim.units import PositiveSeconds
from tests.switches import on_switch

SWITCH = on_switch("abc", rate="10 Mb/s", latency="0.5 ms")
CONVEX = Training(task="convex", steps=12, timeout_s=PositiveSeconds(0.5))


def trained(lineage: str, *epochs: int) -> TrainedView:
    """What follows from these views of one lineage."""
    reached = TrainedView()
    for epoch in epochs:
        reached = reached.next(view(lineage, epoch))
    return reached


def view(lineage: str, epoch: int) -> View:
    return View(lineage, epoch, (Member("a", 1, "a", "a:1"),))


def header(reached: TrainedView, step: int, *, live: bool) -> MemberProgress:
    return MemberProgress.of(reached, step, -1, b"settings", live=live)


NEW, OLD, FRESH = trained("new", 3), trained("old", 7, 30), TrainedView()
BRANCH = trained("old", 7).next(view("old/7.8.b", 8))


def test_a_header_crosses_the_wire_whole():
    for each in (header(OLD, 5, live=True), header(NEW, 0, live=False), header(FRESH, 0, live=False)):
        assert MemberProgress.read(np.array(each.numbers(), np.int64)) == each


@pytest.mark.parametrize(
    ("headers", "right"),
    [
        ([header(NEW, 40, live=True), header(OLD, 500, live=False)], 0),
        ([header(FRESH, 0, live=False), header(NEW, 40, live=True), header(OLD, 500, live=False)], 1),
        # Of two that work, the senior one's cluster took in the other's members.
        ([header(NEW, 40, live=True), header(OLD, 500, live=True)], 0),
        ([header(OLD, 500, live=True), header(NEW, 40, live=True)], 0),
        # Without steps there is nothing to keep.
        ([header(NEW, 0, live=False), header(OLD, 500, live=False)], 1),
        ([header(NEW, 900, live=False), header(OLD, 500, live=False)], 0),
        ([header(FRESH, 0, live=False), header(OLD, 500, live=False)], 1),
        # Of one origin the later trained view is right, whoever holds it, and in it the most steps.
        ([header(trained("old", 7), 600, live=True), header(OLD, 500, live=False)], 1),
        ([header(OLD, 500, live=False), header(OLD, 501, live=True)], 1),
        ([header(OLD, 501, live=True), header(OLD, 501, live=True)], 0),
        # Of those who went apart, whoever comes from elsewhere starts over.
        ([header(OLD, 500, live=True), header(BRANCH, 900, live=True)], 0),
        ([header(BRANCH, 900, live=True), header(OLD, 500, live=True)], 1),
        ([header(BRANCH, 900, live=True), header(trained("old", 7), 400, live=True), header(OLD, 500, live=False)], 2),
    ],
)
def test_whose_state_all_go_on_from(headers, right):
    assert most_right(headers, lineage_digest(view("old", 31))) == right


def saving(host: Host) -> CheckpointWriter:
    return CheckpointWriter(1, in_store(host.store))


def checkpoint_of_long_ago(strategy: str) -> dict[str, bytes]:
    """Of c, which led a cluster of many views: its trained views are later than any that a young cluster has."""
    views = [(step, "cab" if step % 2 else "ca") for step in range(1, 9)]
    first = train(SWITCH, replace(CONVEX, strategy=strategy), first="cab", plan=views, checkpoints=saving)
    assert len(first.cluster.views) == 9
    return dict(first.cluster.world.host("c").store.records)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("strategy", ["ddp", "diloco:2", "parameter_server"])
def test_one_that_left_long_ago_takes_over_what_a_cluster_has_that_began_without_it(strategy: str):
    disk = checkpoint_of_long_ago(strategy)

    def joined(records: dict[str, bytes]) -> ScriptedOutcome:
        def prepare(cluster: ScriptedCluster) -> None:
            cluster.world.host("c").store.records.update(records)

        return train(
            SWITCH,
            replace(CONVEX, strategy=strategy),
            first="ab",
            plan=[(4, "abc")],
            lineage="young",
            prepare=prepare,
            checkpoints=lambda host: CheckpointWriter(100, in_store(host.store)),
        )

    with_it, without = joined(disk), joined({})
    assert sorted(with_it.cluster.done) == list("abc")
    assert [point.step for point in with_it.watchers["a"].points] == list(range(1, 13))
    assert with_it.sha256() == without.sha256()
