"""What members hold: nothing owed is lost or sent twice, replicas are alike, a checkpoint is enough to go on from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from hcsim.config import AnyFault, Crash, Pause, Reset, Training
from hcsim.errors import ConfigError, Diverged, TrainingError
from hcsim.real.hardware import FolderStore
from hcsim.runtime.host import Host
from hcsim.selftest.script import SEED, ScriptedCluster, ScriptedOutcome, train
from hcsim.training.data import Batches
from hcsim.training.elastic.checkpoint import CheckpointWriter, decode, in_store
from hcsim.training.learner import fingerprint
from hcsim.training.optimizer import Sgd
from hcsim.training.tasks import task
from hcsim.units import PositiveSeconds, Seconds
from tests.switches import on_switch
from tests.training.elastic.linear import LAYOUT, SLOPES, Linear, means

SWITCH = on_switch("abcd", rate="10 Mb/s", latency="0.5 ms")
LINEAR = Training(steps=8, timeout_s=PositiveSeconds(0.5))
CONVEX = replace(LINEAR, task="convex", evaluate_every=8)
EVERY_KIND = ("topk:0.1", "randomk:0.2", "fp16", "int8", "int8:block=16,stochastic", "onebit", "powersgd:2", "zstd")


def leaving(cluster: ScriptedCluster, node: str, step: int) -> Callable[[Host], asyncio.Event]:
    """That node is asked to leave when it has done so many steps."""
    events = {name: asyncio.Event() for name in "abcd"}

    def on_step(name: str, done: int) -> None:
        if (name, done) == (node, step):
            events[name].set()

    cluster.on_step = on_step
    return lambda host: events[host.name]


def dying(node: str, step: int) -> Callable[[ScriptedCluster], None]:
    """That node crashes when all have done so many steps, and exchange what comes next."""

    def prepare(cluster: ScriptedCluster) -> None:
        def on_step(name: str, done: int) -> None:
            if (name, done) == (node, step):
                cluster.world.inject(Crash(at_s=Seconds(cluster.world.loop.time() + 4e-3), node=node))

        cluster.on_step = on_step

    return prepare


def train_and_leave(node: str, step: int, chosen: Training, faults: Sequence[AnyFault] = ()) -> ScriptedOutcome:
    asked: list[Callable[[Host], asyncio.Event]] = []
    return train(
        SWITCH,
        chosen,
        faults=faults,
        prepare=lambda cluster: asked.append(leaving(cluster, node, step)),
        leaving=lambda host: asked[0](host),
        what=lambda host: Linear(),
    )


def sent_and_owed(outcome: ScriptedOutcome, lr: float) -> np.ndarray:
    """All that the model was moved by, and all that is still owed by those who are there at the end."""
    runs = [outcome.watchers[name].run for name in outcome.cluster.done]
    assert runs[0] is not None
    total = -np.asarray(runs[0].learner.replica.parameters, np.float64) / lr
    for run in runs:
        assert run is not None
        for tensor in LAYOUT.tensors:
            owed = run.compressor.state().get(f"own/residual/{tensor.name}")
            if owed is not None:
                total[tensor.span] += owed.reshape(-1)
    return total


def worlds(outcome: ScriptedOutcome, steps: int) -> list[int]:
    """How many members took part in each step."""
    plan = outcome.plan()
    return [len(next(names for at, names in reversed(plan) if at <= step)) for step in range(steps)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("strategy", ["ddp", "hierarchical"])
@pytest.mark.parametrize("compressor", EVERY_KIND)
def test_what_is_sent_and_what_is_owed_make_all_gradients_over_retries_absence_and_an_orderly_leave(
    compressor: str, strategy: str
) -> None:
    chosen = replace(LINEAR, compressor=compressor + "+ef", strategy=strategy)
    faults = [Reset(at_s=Seconds(0.012), between=("a", "c")), Pause(at_s=Seconds(0.8), node="b", duration_s=Seconds(1))]
    outcome = train_and_leave("a", 3, chosen, faults)
    sizes = [4 * world for world in worlds(outcome, chosen.steps)]
    assert sizes == [16] * 4 + [12] * 4
    np.testing.assert_allclose(sent_and_owed(outcome, 0.5), means(sizes), rtol=1e-4, atol=1e-4)


def test_a_member_that_comes_back_still_owes_what_it_owed() -> None:
    chosen = replace(LINEAR, compressor="topk:0.1+ef")
    outcome = train(SWITCH, chosen, plan=[(3, "abc"), (6, "abcd")], what=lambda host: Linear())
    sizes = [4 * world for world in worlds(outcome, 8)]
    assert sizes == [16] * 3 + [12] * 3 + [16] * 2
    np.testing.assert_allclose(sent_and_owed(outcome, 0.5), means(sizes), rtol=1e-4, atol=1e-4)


def test_only_what_a_crashed_member_owed_is_lost() -> None:
    """The difference is the dead member's residual, so it is no more than that member's gradients."""
    chosen = replace(LINEAR, compressor="topk:0.1+ef")
    outcome = train(SWITCH, chosen, prepare=dying("c", 4), what=lambda host: Linear())
    sizes = [4 * world for world in worlds(outcome, 8)]
    lost = means(sizes) - sent_and_owed(outcome, 0.5)
    together = sum(size == 16 for size in sizes)
    assert 0 < np.abs(lost).max() <= together * np.abs(SLOPES).max() / 4
    assert not np.allclose(lost, 0, atol=1e-3)


def test_no_sample_is_skipped_or_seen_twice_in_an_epoch_whoever_comes_and_goes() -> None:
    """Uncompressed, the model is where the means of successive batches lead."""
    outcome = train(SWITCH, LINEAR, first="ab", plan=[(2, "abcd"), (5, "bcd")], what=lambda host: Linear())
    sizes = [8, 8, 16, 16, 16, 12, 12, 12]
    np.testing.assert_allclose(sent_and_owed(outcome, 0.5), means(sizes), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("element", "place"), [(0, 31), (77, 0), (240, 12), (326, 23)])
def test_a_flipped_bit_in_one_replica_is_caught_in_the_next_step_and_named(element: int, place: int) -> None:
    tasks = {name: Linear() for name in "abcd"}

    def flip(name: str, step: int) -> None:
        if (name, step) == ("c", 3):
            tasks["c"].replicas[0].parameters.view(np.uint32)[element] ^= np.uint32(1 << place)

    def prepare(cluster: ScriptedCluster) -> None:
        cluster.on_step = flip

    outcome = train(SWITCH, LINEAR, prepare=prepare, what=lambda host: tasks[host.name])
    tensor = next(t.name for t in LAYOUT.tensors if t.offset <= element < t.span.stop)
    for name in "abcd":
        with pytest.raises(Diverged, match=rf"before step 3 .*: {tensor} on c differs from the others"):
            raise outcome.error(name)


def test_of_two_unlike_replicas_none_is_said_to_be_right() -> None:
    tasks = {name: Linear() for name in "ab"}

    def flip(name: str, step: int) -> None:
        if (name, step) == ("a", 2):
            tasks["a"].replicas[0].parameters[5] += 1

    def prepare(cluster: ScriptedCluster) -> None:
        cluster.on_step = flip

    outcome = train(on_switch("ab"), LINEAR, prepare=prepare, what=lambda host: tasks[host.name])
    with pytest.raises(Diverged, match="a, b differ, and none is in the majority"):
        raise outcome.error("b")


def spoiled(times: Sequence[int]) -> Linear:
    def spoil(number: int, gradients: np.ndarray) -> None:
        if number in times:
            gradients[LAYOUT.tensors[1].offset + 4] = np.nan

    return Linear(spoil)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compressor", ["none", "topk:0.1+ef", "int8+ef", "powersgd:2+ef"])
@pytest.mark.parametrize("times", [[3], [3, 4, 5]])
def test_a_gradient_that_is_not_finite_costs_another_attempt_and_nothing_else(
    compressor: str, times: list[int]
) -> None:
    chosen = replace(LINEAR, compressor=compressor)
    mishap = train(SWITCH, chosen, what=lambda host: spoiled(times if host.name == "c" else []))
    assert mishap.sha256() == train(SWITCH, chosen, what=lambda host: Linear()).sha256()
    assert len(mishap.cluster.views) == 1


def test_a_gradient_that_is_not_finite_each_time_ends_training_with_the_node_the_step_and_the_tensor() -> None:
    outcome = train(SWITCH, LINEAR, what=lambda host: spoiled(range(3, 20) if host.name == "c" else []))
    for name in "abcd":
        with pytest.raises(TrainingError, match=rf"step 2 was tried 4 times, .* of {LAYOUT.tensors[1].name} on c "):
            raise outcome.error(name)


@pytest.mark.parametrize("times", [[3], range(3, 20)])
def test_what_grows_too_large_on_the_way_is_tried_again_too(times: Sequence[int]) -> None:
    def spoil(number: int, gradients: np.ndarray) -> None:
        if number in times:
            gradients[:] = 3e38

    chosen = replace(LINEAR, compressor="powersgd:2")
    outcome = train(SWITCH, chosen, what=lambda host: Linear(spoil))
    if len(times) == 1:
        assert outcome.sha256() == train(SWITCH, chosen, what=lambda host: Linear()).sha256()
    else:
        with pytest.raises(TrainingError, match=r"step 2 was tried 4 times, and ended on . *: "):
            raise next(error for error in map(outcome.error, "abcd") if isinstance(error, TrainingError))


def test_after_all_have_started_anew_training_goes_on_from_the_newest_checkpoint() -> None:
    def kept(host: Host) -> CheckpointWriter:
        return CheckpointWriter(2, in_store(host.store))

    through = train(SWITCH, CONVEX)
    crashes = [Crash(at_s=Seconds(0.06), node=node) for node in "abcd"]
    first = train(SWITCH, CONVEX, faults=crashes, checkpoints=kept)
    disks = {name: first.cluster.world.host(name).store.records for name in "abcd"}
    assert [bool(disk) for disk in disks.values()] == [True, False, False, False]

    def with_disks(cluster: ScriptedCluster) -> None:
        for name, disk in disks.items():
            cluster.world.host(name).store.records.update(disk)

    # The checkpoint's owner need not be the first of the new view.
    second = train(SWITCH, CONVEX, first="bacd", prepare=with_disks, checkpoints=kept, lineage="another")
    steps = [point.step for point in second.watchers["b"].points]
    assert steps[0] > 2
    assert steps[-1] == 8
    assert sorted(second.cluster.done) == list("abcd")
    same_order = train(SWITCH, CONVEX, prepare=with_disks, checkpoints=kept, lineage="another")
    assert same_order.sha256() == through.sha256()


def left_and_started_anew(
    steps: dict[str, int], chosen: Training, **options: Any
) -> tuple[ScriptedOutcome, ScriptedOutcome]:
    """Each is asked to leave after so many steps; then all start anew from their disks."""
    events = {name: asyncio.Event() for name in steps}

    def prepare(cluster: ScriptedCluster) -> None:
        cluster.on_step = lambda name, step: events[name].set() if step == steps[name] else None

    def saving(host: Host) -> CheckpointWriter:
        return CheckpointWriter(100, in_store(host.store))

    first = train(
        SWITCH, chosen, prepare=prepare, leaving=lambda host: events[host.name], checkpoints=saving, **options
    )
    disks = {name: first.cluster.world.host(name).store.records for name in steps}
    assert not first.cluster.done
    assert all(disks.values())

    def with_disks(cluster: ScriptedCluster) -> None:
        for name, disk in disks.items():
            cluster.world.host(name).store.records.update(disk)

    return first, train(SWITCH, chosen, prepare=with_disks, checkpoints=saving, lineage="another", **options)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compressor", ["none", "topk:0.1+ef", "powersgd:2+ef"])
def test_after_all_have_left_training_goes_on_as_if_nobody_had(compressor: str) -> None:
    chosen = replace(CONVEX, compressor=compressor)
    _, again = left_and_started_anew(dict.fromkeys("abcd", 3), chosen)
    assert again.watchers["a"].points[0].step == 5
    assert sorted(again.cluster.done) == list("abcd")
    assert again.sha256() == train(SWITCH, chosen).sha256()


def test_what_one_handed_on_before_the_others_left_too_is_owed_once() -> None:
    chosen = replace(LINEAR, compressor="topk:0.1+ef", steps=12)
    steps = {"a": 2, "b": 5, "c": 5, "d": 5}
    first, again = left_and_started_anew(steps, chosen, what=lambda host: Linear())
    assert [point.step for point in first.watchers["d"].points] == [1, 2, 3, 4, 5, 6]
    sizes = [16] * 3 + [12] * 3 + [16] * 6
    np.testing.assert_allclose(sent_and_owed(again, 0.5), means(sizes), rtol=1e-4, atol=1e-4)


def left_without_a_view(chosen: Training, after: int) -> ScriptedOutcome:
    """After so many steps the view is lost, none follows, and all are asked to leave."""
    event = asyncio.Event()

    def prepare(cluster: ScriptedCluster) -> None:
        def on_step(name: str, step: int) -> None:
            if step == after and not event.is_set():
                event.set()
                cluster.end("the quorum is lost")

        cluster.on_step = on_step

    return train(
        SWITCH,
        chosen,
        prepare=prepare,
        leaving=event,
        checkpoints=lambda host: CheckpointWriter(100, in_store(host.store)),
        what=lambda host: Linear(),
    )


def test_who_leaves_without_a_view_saves_where_all_last_agreed_or_nothing() -> None:
    for strategy, saves in (("ddp", True), ("local_sgd:4", False)):
        outcome = left_without_a_view(replace(LINEAR, strategy=strategy, steps=16), after=6)
        disks = [outcome.cluster.world.host(name).store.records for name in "abcd"]
        assert [bool(disk) for disk in disks] == [saves] * 4, strategy


def test_a_full_disk_keeps_nobody_from_leaving() -> None:
    class Full:
        def save(self, data: bytes) -> None:
            raise ConfigError("state/checkpoint: cannot be written: No space left on device")

        def load(self) -> None:
            return None

    told: list[str] = []
    events = {name: asyncio.Event() for name in "abcd"}

    def prepare(cluster: ScriptedCluster) -> None:
        cluster.on_step = lambda name, step: events[name].set() if step == 3 else None

    outcome = train(
        SWITCH,
        CONVEX,
        prepare=prepare,
        leaving=lambda host: events[host.name],
        checkpoints=lambda host: CheckpointWriter(100, [Full()], told.append),
    )
    assert all(outcome.watchers[name].run is not None for name in "abcd")
    assert told == ["what was trained until step 4 could not be saved: state/checkpoint: cannot be written: No space "
                    "left on device"] * 4  # fmt: skip


def test_a_checkpoint_that_is_not_what_was_saved_is_refused() -> None:
    outcome = train(SWITCH, CONVEX, checkpoints=lambda host: CheckpointWriter(4, in_store(host.store)))
    data = outcome.cluster.world.host("a").store.records["checkpoint"]
    assert decode(data).snapshot.arrays["parameters"].nbytes == 4096
    spoiled_data = bytearray(data)
    spoiled_data[-5] ^= 1
    with pytest.raises(ConfigError, match="SHA-256"):
        decode(bytes(spoiled_data))
    with pytest.raises(ConfigError, match="damaged"):
        decode(data[:100])


def test_who_finds_a_damaged_checkpoint_is_told_where_it_is(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "state")
    store.save("checkpoint", b"nothing of the kind")
    with pytest.raises(ConfigError, match=f"^{tmp_path}/state/checkpoint: this checkpoint is damaged .*remove it"):
        CheckpointWriter(1, in_store(store)).load()


def test_a_newcomer_with_other_settings_is_told_and_the_others_go_on() -> None:
    unlike = {"d": replace(CONVEX, lr=0.01)}
    outcome = train(SWITCH, CONVEX, first="abc", plan=[(3, "abcd")], unlike=unlike)
    with pytest.raises(ConfigError, match=r"lr is 0\.05 on a and 0\.01 on d"):
        raise outcome.error("d")
    assert outcome.sha256() == train(SWITCH, CONVEX, first="abc").sha256()


def test_batch_sizes_stay_with_the_nodes_that_training_began_with() -> None:
    chosen = replace(LINEAR, batch=(2, 3, 5, 7))
    outcome = train(SWITCH, chosen, plan=[(4, "acd")], what=lambda host: Linear())
    np.testing.assert_allclose(sent_and_owed(outcome, 0.5), means([17] * 4 + [14] * 4), rtol=1e-4, atol=1e-4)


def test_a_newcomer_without_a_batch_size_is_refused_and_the_others_go_on() -> None:
    chosen = replace(CONVEX, batch=(2, 3, 5))
    outcome = train(SWITCH, chosen, first="abc", plan=[(4, "abcd")])
    with pytest.raises(ConfigError, match="give one figure for all"):
        raise outcome.error("d")
    assert sorted(outcome.cluster.done) == list("abc")
    with pytest.raises(ConfigError, match="3 batch sizes, and training begins with 2 members"):
        raise train(SWITCH, chosen, first="ab").error("a")


@pytest.mark.parametrize("words", [1, 64, 1000])
def test_a_fingerprint_sees_every_flipped_bit_and_parts_that_change_places(words: int) -> None:
    data = np.random.default_rng(words).integers(0, 2**32, 2 * words + 1, dtype=np.uint32)
    whole = fingerprint(data)
    for element in range(0, data.size, 1 + data.size // 7):
        for bit in range(32):
            data[element] ^= np.uint32(1 << bit)
            assert fingerprint(data) != whole
            data[element] ^= np.uint32(1 << bit)
    assert fingerprint(data) == whole
    if words > 1:
        assert fingerprint(np.roll(data, 2)) != whole


def local_sgd(outer: Sgd, every: int, steps: int, victim: str, dies_in: int) -> np.ndarray:
    """By hand: who dies in a period takes its way with it; the others' are averaged by their samples."""
    convex = task("convex")
    anchor = convex.replica(SEED).parameters.copy()
    move = outer.open(anchor)
    replicas = {name: convex.replica(SEED) for name in "abcd"}
    inner = {name: Sgd(lr=0.05, momentum=0.9).open(replica.parameters) for name, replica in replicas.items()}
    members, since = list("abcd"), (0, 0)
    for start in range(0, steps, every):
        end = min(start + every, steps)
        batches = Batches.of(convex, [16] * len(members), SEED, since)
        for step in range(start, end):
            for rank, name in enumerate(members):
                replica = replicas[name]
                replica.gradients.fill(0)
                replica.forward(batches.batch(step, rank))
                for block in reversed(range(3)):
                    replica.backward(block)
                inner[name].step(replica.gradients)
        since = end, batches.position(end)
        if start <= dies_in < end:
            members.remove(victim)
        move.step(np.mean([anchor - replicas[name].parameters for name in members], axis=0, dtype=np.float32))
        for name in members:
            replicas[name].parameters[...] = anchor
    return anchor


@pytest.mark.parametrize(
    ("strategy", "outer", "every"),
    [
        ("local_sgd:2", Sgd(lr=1.0), 2),
        ("diloco:3", Sgd(lr=0.7, momentum=0.9, nesterov=True), 3),
    ],
)
@pytest.mark.parametrize("victim", ["a", "c"])
def test_who_dies_between_exchanges_takes_its_way_with_it_and_the_others_ways_count(
    strategy: str, outer: Sgd, every: int, victim: str
) -> None:
    outcome = train(SWITCH, replace(CONVEX, strategy=strategy), prepare=dying(victim, every + 1))
    outcome.sha256()
    survivor = outcome.watchers["d"].run
    assert survivor is not None
    assert [point.step for point in outcome.watchers["d"].points] == list(range(1, 9))
    expected = local_sgd(outer, every, 8, victim, every + 1)
    np.testing.assert_allclose(survivor.learner.replica.parameters, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("strategy", ["local_sgd:2", "diloco:3"])
@pytest.mark.parametrize("compressor", ["none", "topk:0.1+ef"])
def test_members_come_and_go_between_exchanges(strategy: str, compressor: str) -> None:
    chosen = replace(CONVEX, strategy=strategy, compressor=compressor, steps=12)
    outcome = train(SWITCH, chosen, first="abc", plan=[(4, "abcd"), (8, "bcd")])
    assert sorted(outcome.cluster.done) == list("bcd")
    assert outcome.cluster.reports == []
    outcome.sha256()


@pytest.mark.parametrize("strategy", ["ddp", "diloco:3"])
def test_a_task_of_shapes_alone_survives_too(strategy: str) -> None:
    chosen = Training(task="resnet50", strategy=strategy, steps=4, timeout_s=PositiveSeconds(20))
    crash = Crash(at_s=Seconds(2.0), node="b")
    outcome = train(on_switch("abcd"), chosen, first="abc", plan=[(3, "abcd")], faults=[crash])
    assert sorted(outcome.cluster.done) == list("acd")
