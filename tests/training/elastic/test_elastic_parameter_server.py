"""A parameter server whose machine dies, and its workers: every push that was accepted counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from hcsim.compressors.base import Ident
from hcsim.compressors.draws import bits
from hcsim.compressors.registry import make
from hcsim.config import AnyFault, Crash, Pause, Reset, Training
from hcsim.errors import ConfigError, NotFinite
from hcsim.runtime.host import Host
from hcsim.selftest.script import ScriptedCluster, ScriptedOutcome, train
from hcsim.training.elastic.checkpoint import CheckpointWriter, in_store
from hcsim.training.run import Report
from hcsim.training.tasks import task
from hcsim.units import PositiveSeconds, Seconds
from tests.switches import on_switch
from tests.training.elastic.linear import LAYOUT, ORDER, SLOPES, Linear

SWITCH = on_switch("abcd", rate="10 Mb/s", latency="0.5 ms")
SYNC = Training(strategy="parameter_server", steps=8, timeout_s=PositiveSeconds(4))
CONVEX = replace(SYNC, task="convex", evaluate_every=8)
MODES = ("parameter_server", "parameter_server:async", "parameter_server:bounded,staleness=6")


def mean(lo: int, hi: int) -> np.ndarray:
    return SLOPES[ORDER[lo:hi]].astype(np.float64).mean(axis=0)


def moved(outcome: ScriptedOutcome, lr: float = 0.5) -> np.ndarray:
    run = outcome.watchers[outcome.cluster.done[-1]].run
    assert run is not None
    return -np.asarray(run.learner.replica.parameters, np.float64) / lr


def regrouping(*times: float) -> object:
    """The view ends at these times, with nobody lost."""

    def prepare(cluster: ScriptedCluster) -> None:
        for time in times:
            cluster.world.env.call_at(round(time * 1e9), cluster.lose, "by the script")

    return prepare


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compressor", ["none", "topk:0.1+ef", "int8+ef"])
def test_every_push_counts_once_however_often_the_server_starts_anew(compressor: str) -> None:
    chosen = replace(SYNC, compressor=compressor)
    outcome = train(SWITCH, chosen, prepare=regrouping(0.021, 0.14, 0.2317, 0.301), what=lambda host: Linear())
    assert len(outcome.cluster.views) > 3
    total = 16 * moved(outcome)
    for name in "abcd":
        run = outcome.watchers[name].run
        assert run is not None
        for tensor in LAYOUT.tensors:
            residual = run.compressor.state().get(f"own/residual/{tensor.name}")
            total[tensor.span] += 0 if residual is None else residual.reshape(-1)
    gradients = sum(16 * mean(16 * step, 16 * step + 16) for step in range(8))
    np.testing.assert_allclose(total, gradients, rtol=1e-4, atol=2e-3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compressor", ["none", "topk:0.1+ef", "randomk:0.1+ef", "powersgd:2+ef", "zstd"])
def test_the_standby_has_the_servers_bits_however_it_is_told(compressor: str) -> None:
    """Whether as averaged gradients or as what workers pushed: members compare, whenever a view begins."""
    chosen = replace(CONVEX, compressor=compressor, clip=0.3)
    outcome = train(SWITCH, chosen, prepare=regrouping(0.06, 0.14, 0.2317, 0.301))
    assert len(outcome.cluster.views) > 3
    assert outcome.sha256() == train(SWITCH, chosen).sha256()


@pytest.mark.slow
def test_what_the_standby_is_told_is_as_small_as_what_workers_push() -> None:
    """A server sends each of its three remote workers the model, and the standby what all four have pushed."""

    def sent_bytes(compressor: str, mode: str) -> float:
        settings = replace(SYNC, task="gpt2", strategy=mode, steps=2, batch=1, compressor=compressor)
        settings = replace(settings, timeout_s=PositiveSeconds(3600))
        report = train(on_switch("abcd"), settings).results["a"]
        assert isinstance(report, Report)
        return report.sent_bytes / task("gpt2").replica(0).layout.size_bytes

    pulls = 3 * (2 + 1)  # of two steps, and the final one
    assert sent_bytes("none", "parameter_server") == pytest.approx(pulls + 2, rel=0.01)
    assert sent_bytes("fp16", "parameter_server") == pytest.approx(pulls + 2, rel=0.01)  # four halves are more than one
    assert sent_bytes("topk:0.01", "parameter_server") == pytest.approx(pulls + 2 * 4 * 0.02, rel=0.01)


def test_a_server_that_is_far_away_behind_a_tunnel_is_reached() -> None:
    """It takes a round trip of 0.8 s to get there, which is longer than workers try a server that is near."""
    far = on_switch("abcd", latency="400 ms")
    placed = replace(CONVEX, server="a:7000", listen="0.0.0.0:7000", timeout_s=PositiveSeconds(30))
    assert sorted(train(far, placed).cluster.done) == list("abcd")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", range(10))
def test_the_next_member_takes_over_from_a_server_that_dies_at_any_moment(number: int) -> None:
    """The round under way is of the three others; with the batches that they had, or with new ones."""
    crash = Crash(at_s=Seconds(0.0201 + 0.0021 * number), node="a", clean=bool(number % 2))
    outcome = train(SWITCH, SYNC, faults=[crash], what=lambda host: Linear())
    assert sorted(outcome.cluster.done) == list("bcd")
    outcome.sha256()
    found = moved(outcome)

    def if_lost_in(version: int, first: int) -> np.ndarray:
        """`first` is where the batches of that round began, after the position of its version."""
        at = 16 * version
        rounds = [mean(16 * v, 16 * v + 16) for v in range(version)]
        rounds.append(mean(at + first, at + first + 12))
        rounds += [mean(at + 12 * v, at + 12 * v + 12) for v in range(1, 8 - version)]
        return np.sum(rounds, axis=0)

    tried = [if_lost_in(version, first) for version in range(8) for first in (0, 4)]
    assert sum(np.allclose(found, each, rtol=1e-4, atol=1e-4) for each in tried) == 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "faults",
    [
        [Crash(at_s=Seconds(0.061), node="b")],
        [Crash(at_s=Seconds(0.061), node="d", clean=False)],
        [Crash(at_s=Seconds(0.061), node="a"), Crash(at_s=Seconds(0.21), node="b")],
        [Crash(at_s=Seconds(0.061), node="a"), Crash(at_s=Seconds(0.0612), node="b")],
        [Crash(at_s=Seconds(0.061), node="a"), Crash(at_s=Seconds(0.306), node="b")],
        [Pause(at_s=Seconds(0.061), node="a", duration_s=Seconds(6))],
        [Pause(at_s=Seconds(0.02), node="a", duration_s=Seconds(6))],
        [Reset(at_s=Seconds(0.061), between=("a", "b")), Reset(at_s=Seconds(0.063), between=("a", "c"))],
    ],
    ids=["standby", "worker", "one after the other", "both at once", "at the end", "pause", "no answer", "reset"],
)
def test_training_comes_to_its_end_with_one_model(mode: str, faults: list[AnyFault]) -> None:
    outcome = train(SWITCH, replace(CONVEX, strategy=mode), faults=faults)
    outcome.sha256()
    dead = {fault.node for fault in faults if isinstance(fault, Crash)}
    assert {*outcome.cluster.done} == {*"abcd"} - dead


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", range(9))
def test_members_that_all_stand_still_for_longer_than_their_patience_try_again(number: int, mode: str) -> None:
    pauses = [Pause(at_s=Seconds(0.02 + 0.0137 * number), node=node, duration_s=Seconds(6)) for node in "ab"]
    outcome = train(SWITCH, replace(CONVEX, strategy=mode), first="ab", faults=pauses)
    assert sorted(outcome.cluster.done) == list("ab")
    outcome.sha256()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_workers_come_and_go_and_the_server_goes_too(mode: str) -> None:
    events = {name: asyncio.Event() for name in "abcd"}

    def prepare(cluster: ScriptedCluster) -> None:
        def on_step(name: str, step: int) -> None:
            if step >= 4:
                events["a"].set()

        cluster.on_step = on_step

    chosen = replace(CONVEX, strategy=mode, steps=12)
    outcome = train(
        SWITCH, chosen, first="abc", plan=[(3, "abcd")], prepare=prepare, leaving=lambda host: events[host.name]
    )
    assert sorted(outcome.cluster.done) == list("bcd")
    outcome.sha256()


class Owing:
    """Workers with error feedback, written down independently of the protocol: what each sends, and still owes."""

    def __init__(self, spec: str) -> None:
        self._compressor = make(spec, seed=7, rank=0)
        self._owed = {name: np.zeros(LAYOUT.length, np.float32) for name in "abcd"}

    def pushed(self, name: str, lo: int, *, whole: bool = False) -> np.ndarray:
        """The sum that it sends for its four samples."""
        total = self._owed[name] + 4 * SLOPES[ORDER[lo : lo + 4]].mean(axis=0)
        sent = total.copy()
        for tensor in () if whole else LAYOUT.tensors:
            payload = self._compressor.encode(tensor.view(total), Ident(tensor.name))
            self._compressor.decode(payload, tensor.view(sent), Ident(tensor.name))
        self._owed[name] = total - sent
        return sent


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("leaver", ["d", "a"])
def test_a_worker_that_leaves_pays_what_it_owes_before(leaver: str) -> None:
    """Also the server's own. The round after its last may have the batches that were dealt out with it, or without."""
    event = asyncio.Event()

    def prepare(cluster: ScriptedCluster) -> None:
        cluster.on_step = lambda name, step: event.set() if name == leaver and step >= 3 else None

    chosen = replace(SYNC, compressor="topk:0.1+ef", steps=9)
    leaving = lambda host: event if host.name == leaver else asyncio.Event()  # noqa: E731
    outcome = train(SWITCH, chosen, prepare=prepare, what=lambda host: Linear(), leaving=leaving)
    others = [name for name in "abcd" if name != leaver]
    assert sorted(outcome.cluster.done) == others

    def if_last_in(version: int, first: int, *, pays: bool = True) -> np.ndarray:
        owing, total = Owing("topk:0.1"), np.zeros(LAYOUT.length)
        for v in range(version + 1):
            sent = [owing.pushed(n, 16 * v + 4 * rank, whole=pays and (n, v) == (leaver, version))
                    for rank, n in enumerate("abcd")]  # fmt: skip
            total += np.sum(sent, axis=0) / 16
        for v in range(9 - version - 1):
            at = 16 * (version + 1) + 12 * v + (first if v == 0 else 0)
            total += np.sum([owing.pushed(n, at + 4 * rank) for rank, n in enumerate(others)], axis=0) / 12
        return total

    def matches(each: np.ndarray) -> bool:
        return np.allclose(moved(outcome), each, rtol=1e-4, atol=1e-4)

    tried = [(version, first) for version in range(3, 8) for first in ((0,) if leaver == "d" else (0, 4))]
    assert sum(matches(if_last_in(*each)) for each in tried) == 1
    assert not any(matches(if_last_in(*each, pays=False)) for each in tried)


@pytest.mark.parametrize("times", [[3, 4, 5], range(3, 20)])
def test_gradients_that_are_not_finite_cost_other_attempts_and_nothing_else(times: Sequence[int]) -> None:
    def spoil(number: int, gradients: np.ndarray) -> None:
        if number in times:
            gradients[LAYOUT.tensors[1].offset + 4] = np.nan

    chosen = replace(SYNC, compressor="int8+ef")
    outcome = train(SWITCH, chosen, what=lambda host: Linear(spoil) if host.name == "c" else Linear())
    if len(times) <= 3:
        assert outcome.sha256() == train(SWITCH, chosen, what=lambda host: Linear()).sha256()
    else:
        with pytest.raises(NotFinite, match="has the training diverged"):
            raise outcome.error("c")


def test_what_has_no_meaning_with_a_parameter_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="give one figure"):
        raise train(SWITCH, replace(CONVEX, batch=(1, 2, 3, 4))).error("a")


def saving(host: Host) -> CheckpointWriter:
    return CheckpointWriter(2, in_store(host.store))


def started_anew(
    crash_s: float, settings: Training, members: str = "abcd", order: str = ""
) -> tuple[ScriptedOutcome, list[int]]:
    """All crash at that time and start anew from their disks; and the steps that were taken after that."""
    crashes = [Crash(at_s=Seconds(crash_s), node=node) for node in members]
    first = train(SWITCH, settings, first=members, faults=crashes, checkpoints=saving)
    disks = {name: first.cluster.world.host(name).store.records for name in members}
    assert [bool(disk) for disk in disks.values()] == [name == "a" for name in members]

    def with_disks(cluster: ScriptedCluster) -> None:
        for name, disk in disks.items():
            cluster.world.host(name).store.records.update(disk)

    again = train(SWITCH, settings, first=order or members, prepare=with_disks, checkpoints=saving, lineage="another")
    assert sorted(again.cluster.done) == sorted(members)
    return again, [point.step for point in again.watchers["a"].points]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ["abcd", "bacd", "cdba"])
def test_after_all_have_started_anew_training_goes_on_from_what_the_server_saved(mode: str, order: str) -> None:
    """Wherever in the new view the one is that was the server."""
    settings = replace(CONVEX, strategy=mode)
    outcome, steps = started_anew(0.2, settings, order=order)
    assert steps[0] > 2
    assert steps[-1] == 8
    if mode == "parameter_server" and order == "abcd":
        assert outcome.sha256() == train(SWITCH, settings).sha256()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", MODES)
def test_after_all_have_left_training_goes_on_from_what_was_trained(mode: str) -> None:
    """Though nothing was saved before: whoever holds the server's state saves it when it goes."""
    events = {name: asyncio.Event() for name in "abcd"}

    def prepare(cluster: ScriptedCluster) -> None:
        cluster.on_step = lambda name, step: events[name].set() if step >= 4 else None

    def rarely(host: Host) -> CheckpointWriter:
        return CheckpointWriter(1000, in_store(host.store))

    settings = replace(CONVEX, strategy=mode, steps=12)
    first = train(SWITCH, settings, prepare=prepare, leaving=lambda host: events[host.name], checkpoints=rarely)
    assert not first.cluster.done
    disks = {name: first.cluster.world.host(name).store.records for name in "abcd"}

    def with_disks(cluster: ScriptedCluster) -> None:
        for name, disk in disks.items():
            cluster.world.host(name).store.records.update(disk)

    again = train(SWITCH, settings, first="dcba", prepare=with_disks, checkpoints=rarely, lineage="another")
    assert sorted(again.cluster.done) == list("abcd")
    steps = [point.step for name in "abcd" for point in again.watchers[name].points]
    assert min(steps) > 4
    assert max(steps) == 12
    again.sha256()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("number", range(12))
def test_what_the_servers_own_worker_owes_is_saved_as_of_the_same_update(number: int) -> None:
    """Alone, it ends with the bits of one that never crashed: no push is in it twice, and none is missing."""
    settings = replace(SYNC, task="convex", compressor="topk:0.1+ef", evaluate_every=8, steps=40)
    through = train(SWITCH, settings, first="a")
    last_s = through.watchers["a"].points[-1].time_s
    outcome, steps = started_anew(last_s * (0.15 + 0.07 * number), settings, members="a")
    assert 2 < steps[0] < 40
    assert outcome.sha256() == through.sha256()


def test_workers_that_round_at_random_do_not_draw_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[object, ...]] = []

    def watched(*name: str | int) -> np.random.SFC64:
        drawn.append(name)
        return bits(*name)

    monkeypatch.setattr("hcsim.compressors.block_scaled.bits", watched)
    train(SWITCH, replace(SYNC, compressor="int8:stochastic", steps=2), what=lambda host: Linear())
    assert len({name[2] for name in drawn}) == len("abcd")
    assert len({*drawn}) == len(drawn)
