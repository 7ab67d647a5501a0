"""A job that loses connections, workers and its server on the way, in the virtual world.

Where nobody is left behind, the result is bit for bit that of the undisturbed job: every push has counted once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hcsim.compressors.registry import make
from hcsim.config import ClockJump, Crash, Partition, Pause, Reset
from hcsim.errors import DeadlineExceeded, PeerRefused
from hcsim.training.learner import Learner
from hcsim.training.parameter_server.gradients import GradientCodec
from hcsim.training.parameter_server.messages import TrainingDone
from hcsim.training.parameter_server.rounds import ServerPolicy
from hcsim.training.parameter_server.worker import Worker
from hcsim.training.tasks import task
from hcsim.virtual.world import HostCrashed
from tests.training.parameter_server.bench import (
    JOB,
    NAMES,
    OPTIMIZER,
    POLICY,
    SEED,
    Bench,
    Job,
    Saved,
    alone,
    of_its_own,
    of_the_round,
    worker_on,
    world_with,
)

STEPS = 40
HASTY = replace(POLICY, deadline_s=0.3)


@cache
def undisturbed() -> Job:
    job = Job(world_with(), total=STEPS)
    assert job.run() == dict.fromkeys(("s", *NAMES), TrainingDone(STEPS))
    return job


def once_each(job: Job) -> bool:
    """Whether what the workers were told agrees with the server's books, and nothing counted twice."""
    told = {name: sum(worker == name for worker, _ in job.counted) for name in NAMES}
    books = {name: job.bench.rounds.members[name].accepted for name in NAMES}
    return told == books and len({*job.counted}) == len(job.counted)


def test_the_undisturbed_job_does_what_one_process_does():
    job = undisturbed()
    np.testing.assert_allclose(job.bench.learner.replica.parameters, alone(STEPS), rtol=2e-5, atol=2e-6)
    assert job.digests == dict.fromkeys(NAMES, job.bench.digest)
    assert sorted(job.counted) == [(name, version + 1) for name in NAMES for version in range(STEPS)]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("mid_frame", [True, False])
@pytest.mark.parametrize("at_s", [0.1, 0.104, 0.108])
def test_after_a_reset_a_worker_calls_again_and_its_push_counts_once(at_s: float, mid_frame: bool):
    resets = [Reset(at_s=at_s + n / 100, between=(name, "s"), mid_frame=mid_frame) for n, name in enumerate("ab")]
    job = Job(world_with(*resets), total=STEPS)
    assert job.run() == dict.fromkeys(("s", *NAMES), TrainingDone(STEPS))
    assert once_each(job)
    assert job.bench.digest == undisturbed().bench.digest
    assert job.digests == undisturbed().digests


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "fault",
    [
        Partition(at_s=0.1, sides=(("a",), ("s",)), duration_s=0.5),
        Partition(at_s=0.1, sides=(("a", "b"), ("s",)), duration_s=0.5, oneway=True),
        Partition(at_s=0.1, sides=(("s",), ("a", "b")), duration_s=0.5, oneway=True),
        Pause(at_s=0.1, node="b", duration_s=1.0),
        Pause(at_s=0.1, node="s", duration_s=1.0),
        ClockJump(at_s=0.1, node="s", by_s=-3600.0),
        ClockJump(at_s=0.1, node="s", by_s=3600.0),
    ],
    ids=lambda fault: f"{type(fault).__name__}",
)
def test_a_short_trouble_changes_no_bit(fault: Any):
    job = Job(world_with(fault), total=STEPS)
    assert job.run() == dict.fromkeys(("s", *NAMES), TrainingDone(STEPS))
    assert job.bench.digest == undisturbed().bench.digest


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "fault",
    [Partition(at_s=0.1, sides=(("a",), ("s",)), duration_s=0.7), Pause(at_s=0.1, node="a", duration_s=0.7)],
    ids=["partition", "pause"],
)
def test_a_worker_that_is_away_for_too_long_is_left_behind_and_comes_back(fault: Any):
    job = Job(world_with(fault), total=150, policy=HASTY)
    assert job.run() == dict.fromkeys(("s", *NAMES), TrainingDone(150))
    assert once_each(job)
    assert job.bench.rounds.members["a"].accepted < 150
    assert ("a", 150) in job.counted
    assert {*job.digests.values()} == {job.bench.digest}


@pytest.mark.parametrize("clean", [True, False])
def test_the_others_go_on_without_a_worker_that_crashed(clean: bool):
    job = Job(world_with(Crash(at_s=0.1, node="c", clean=clean)), total=STEPS)
    results = job.run()
    assert isinstance(results.pop("c"), HostCrashed)
    assert results == dict.fromkeys(("s", "a", "b"), TrainingDone(STEPS))
    assert job.digests == dict.fromkeys("ab", job.bench.digest)
    # It costs the grace or one deadline, and at the end the time that the server stays for it; not every round.
    assert job.world.loop.time() < 0.7 + POLICY.deadline_s + POLICY.linger_s


def test_with_too_few_workers_for_a_quorum_everybody_is_told_why_it_ends():
    policy = replace(POLICY, quorum=3)
    job = Job(world_with(Crash(at_s=0.1, node="c")), total=STEPS, policy=policy)
    results = job.run()
    assert isinstance(results["s"], DeadlineExceeded)
    for worker in "ab":
        assert isinstance(results[worker], PeerRefused)
        assert "2 of at least 3 pushed, waiting for c" in str(results[worker])


def test_workers_give_up_when_the_server_is_gone_for_good():
    job = Job(world_with(Crash(at_s=0.1, node="s")), total=STEPS)
    results = job.run()
    for worker in NAMES:
        assert isinstance(results[worker], DeadlineExceeded)
        assert "was not reached in 20 s" in str(results[worker])
    assert job.world.loop.time() < 0.1 + POLICY.silence_s + POLICY.patience_s + 1.0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mode", ["async", "bounded"])
def test_each_push_counts_once_in_the_other_modes_too(mode: Any):
    policy = ServerPolicy(mode=mode, staleness=4, deadline_s=2.0, grace_s=0.5, patience_s=20.0, linger_s=2.0)
    faults = [Reset(at_s=at_s, between=(name, "s")) for at_s, name in ((0.1, "a"), (0.15, "b"), (0.2, "a"))]
    job = Job(world_with(*faults, Pause(at_s=0.3, node="c", duration_s=1.0)), total=200, policy=policy)
    assert job.run() == dict.fromkeys(("s", *NAMES), TrainingDone(200))
    assert once_each(job)
    assert sorted(version for _, version in job.counted) == list(range(1, 201))
    assert {*job.digests.values()} == {job.bench.digest}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compressor", ["topk:0.1+ef", "powersgd:2+ef"])
def test_what_error_feedback_owes_is_right_after_stale_and_repeated_pushes(compressor: str):
    """A left-behind worker's residual is as if its stale push had never been encoded."""
    faults = (Pause(at_s=0.1, node="a", duration_s=0.7), Reset(at_s=0.9, between=("b", "s")))
    job = Job(world_with(*faults), total=100, compressor=compressor, policy=HASTY)
    assert job.run() == dict.fromkeys(("s", *NAMES), TrainingDone(100))
    assert job.bench.rounds.members["a"].accepted < 100
    assert once_each(job)
    for name, worker in job.workers.items():
        counted = [worker.gradients.packed[version - 1] for who, version in job.counted if who == name]
        meant, sent = (np.sum([pair[n].astype(np.float64) for pair in counted], axis=0) for n in (0, 1))
        state = worker.gradients.compressor.state()
        residual = np.concatenate(
            [state[f"own/residual/{tensor.name}"].reshape(-1) for tensor in worker.gradients.tensors]
        )
        np.testing.assert_allclose(meant, sent + residual, atol=1e-4)


MOMENTS = st.floats(0.0, 0.7)
SPELLS = st.floats(0.01, 0.6)
WORKERS = st.sampled_from(NAMES)


@st.composite
def troubles(draw: st.DrawFn) -> Any:
    at_s, worker, flag = draw(MOMENTS), draw(WORKERS), draw(st.booleans())
    match draw(st.sampled_from(["reset", "pause", "partition"])):
        case "reset":
            return Reset(at_s=at_s, between=(worker, "s"), mid_frame=flag)
        case "pause":
            return Pause(at_s=at_s, node="s" if flag else worker, duration_s=draw(SPELLS))
        case _:
            return Partition(at_s=at_s, sides=((worker,), ("s",)), duration_s=draw(SPELLS), oneway=flag)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.lists(troubles(), min_size=1, max_size=5),
    st.sampled_from(["sync", "bounded", "async"]),
    st.sampled_from([0.2, 2.0]),
)
def test_after_any_troubles_all_have_the_final_model_and_every_push_has_counted_once(faults, mode, deadline_s):
    policy = replace(POLICY, mode=mode, staleness=3, deadline_s=deadline_s, linger_s=10.0)  # longer than any trouble
    job = Job(world_with(*faults), total=STEPS, policy=policy)
    assert job.run() == dict.fromkeys(("s", *NAMES), TrainingDone(STEPS))
    assert once_each(job)
    assert job.digests == dict.fromkeys(NAMES, job.bench.digest)
    if len(job.counted) == len(NAMES) * STEPS:
        assert job.bench.digest == undisturbed().bench.digest


@pytest.mark.slow
def test_the_same_troubles_leave_the_same_trace():
    def trace() -> str:
        job = Job(
            world_with(Reset(at_s=0.1, between=("a", "s")), Pause(at_s=0.2, node="b", duration_s=0.5)), total=STEPS
        )
        job.run()
        return job.world.trace.digest()

    assert trace() == trace()


# Resuming.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compressor", ["none", "topk:0.1+ef"])
def test_a_server_that_is_started_again_goes_on_and_no_push_is_lost_or_doubled(compressor: str):
    calm = Job(world_with(), total=STEPS, compressor=compressor)
    calm.run()

    world = world_with()
    kept: list[Saved] = []
    first = Bench(world.host("s"), STEPS, compressor=compressor)
    job = Job(world, first, compressor=compressor)

    async def keep(saved: Saved) -> None:
        kept.append(saved)

    async def on_host(host: Any) -> Any:
        if host.name != "s":
            return await job.on_host(host)
        first.save_to(keep)
        for stop_s in (0.2, 0.35):
            await job.bench.open("s:7000")
            await host.clock.sleep(stop_s - world.loop.time())
            await job.bench.stop()
            await host.clock.sleep(0.05)
            job.bench = Bench(host, STEPS, saved=kept[-1], compressor=compressor)
            job.bench.save_to(keep)
        await job.bench.open("s:7000")
        return await job.bench.serving

    assert world.run_on_all(on_host) == [TrainingDone(STEPS)] * 4
    assert [saved.version for saved in kept] == list(range(1, STEPS + 1))
    assert once_each(job)
    assert job.bench.digest == calm.bench.digest
    assert job.digests == calm.digests


def test_a_server_that_is_started_again_after_the_last_update_gives_out_the_final_model():
    world = world_with()
    kept: list[Saved] = []
    job = Job(world, total=STEPS)

    async def stop_at_the_end(saved: Saved) -> None:
        kept.append(saved)
        if saved.version == STEPS:
            await world.host("s").clock.sleep(1.0)  # nobody is told any more

    async def on_host(host: Any) -> Any:
        if host.name != "s":
            return await job.on_host(host)
        job.bench.save_to(stop_at_the_end)
        await job.bench.open("s:7000")
        await host.clock.sleep(1.5)
        await job.bench.stop()
        job.bench = Bench(host, STEPS, saved=kept[-1])
        await job.bench.open("s:7000")
        return await job.bench.serving

    assert world.run_on_all(on_host) == [TrainingDone(STEPS)] * 4
    assert once_each(job)
    assert job.digests == undisturbed().digests


def test_a_worker_that_is_started_again_goes_on_where_it_was():
    world = world_with()
    job = Job(world, total=STEPS)

    async def on_host(host: Any) -> Any:
        if host.name != "b":
            return await job.on_host(host)
        working = host.spawn(job.on_host(host), name="first life")
        await host.clock.sleep(0.2)
        working.cancel()
        await host.clock.sleep(0.05)
        return await job.on_host(host)

    assert world.run_on_all(on_host) == [TrainingDone(STEPS)] * 4
    assert job.bench.rounds.members["b"].accepted == STEPS
    assert job.bench.digest == undisturbed().bench.digest


def test_a_worker_that_began_anew_goes_on_with_a_server_that_knows_its_earlier_life():
    """The first server knows nothing of the pushes that the second one remembers."""
    world = world_with()
    kept: list[Saved] = []
    earlier = Job(world, total=20)

    async def keep(saved: Saved) -> None:
        kept.append(saved)

    earlier.bench.save_to(keep)
    job = Job(world, total=STEPS)

    async def on_host(host: Any) -> Any:
        if host.name != "s":
            await earlier.on_host(host)
            return await job.on_host(host)
        await earlier.on_host(host)
        await job.bench.open("s:7000")
        await host.clock.sleep(0.1)
        await job.bench.stop()
        assert 0 < job.bench.rounds.version < 20
        job.bench = Bench(host, STEPS, saved=kept[-1])
        await job.bench.open("s:7000")
        return await job.bench.serving

    assert world.run_on_all(on_host) == [TrainingDone(STEPS)] * 4
    assert {name: job.bench.rounds.members[name].accepted for name in NAMES} == dict.fromkeys(NAMES, STEPS)
    assert job.digests == dict.fromkeys(NAMES, job.bench.digest)


# Coming and going.


def test_a_worker_whose_data_are_used_up_leaves_and_still_gets_the_final_model():
    job = Job(world_with(), total=STEPS)
    job.batch = lambda name: (
        lambda version, accepted: None if name == "b" and accepted == 5 else of_the_round(name)(version, accepted)
    )
    assert job.run() == dict.fromkeys(("s", *NAMES), TrainingDone(STEPS))
    assert {name: job.bench.rounds.members[name].accepted for name in NAMES} == {"a": STEPS, "b": 5, "c": STEPS}
    assert job.digests == dict.fromkeys(NAMES, job.bench.digest)
    assert job.world.loop.time() < POLICY.deadline_s  # nobody waited for it


def test_a_worker_whose_gradients_are_never_valid_gives_up_and_the_others_go_on():
    world = world_with()
    job = Job(world, total=STEPS)

    async def on_host(host: Any) -> Any:
        if host.name != "c":
            return await job.on_host(host)
        return await worker_on(host, "c", compressor="int8").run("s:7000", of_the_round("c"), lambda *_: None)

    *others, refused = world.run_on_all(on_host)
    assert others == [TrainingDone(STEPS)] * 3
    assert isinstance(refused, PeerRefused)
    assert "refused 3 gradients in a row: compressed with 'int8'" in str(refused)
    assert job.bench.rounds.members["c"].accepted == 0
    assert world.loop.time() < POLICY.deadline_s  # nobody waited for it


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"job": "another"}, "another job than 'another'"),
        ({"model": "digits"}, "another model"),
        ({"worker": "z"}, "no worker called z"),
    ],
)
def test_who_does_not_belong_here_is_told_why(change: dict[str, str], why: str):
    world = world_with()
    bench = Bench(world.host("s"), STEPS)
    bench.server.reception.members_only = True

    async def main() -> Any:
        await bench.open("s:7000")
        learner = Learner(world.host("a"), task(change.get("model", "convex")), OPTIMIZER, SEED)
        gradients = GradientCodec(learner.layout, make("none", seed=SEED, rank=0))
        worker = Worker(learner, gradients, POLICY, name=change.get("worker", "a"), job=change.get("job", JOB))
        with pytest.raises(PeerRefused, match=why):
            await worker.run("s:7000", of_the_round("a"), lambda *_: None)
        await bench.stop()

    world.run(main())
    assert bench.rounds.version == 0


def test_a_worker_of_another_view_is_hung_up_on_and_not_waited_for():
    """The server remembers it, and it might be told of another one at any time."""
    world = world_with()
    bench = Bench(world.host("s"), STEPS, policy=replace(POLICY, patience_s=2.0))
    bench.server.reception.guests = ("b", "c")

    async def main() -> Any:
        await bench.open("s:7000")
        with pytest.raises(DeadlineExceeded, match="was not reached"):
            await worker_on(world.host("a"), "a", policy=bench.rounds.policy).run(
                "s:7000", of_the_round("a"), lambda *_: None
            )
        await bench.stop()

    world.run(main())
    assert not bench.rounds.members["a"].heard_s


def test_when_all_data_are_used_up_training_ends_before_its_time():
    job = Job(world_with(), total=STEPS)
    job.batch = lambda name: lambda version, accepted: None if accepted == 7 else of_the_round(name)(version, accepted)
    assert job.run() == dict.fromkeys(("s", *NAMES), TrainingDone(7))
    assert job.digests == dict.fromkeys(NAMES, job.bench.digest)


@pytest.mark.slow
def test_a_worker_may_come_while_training_goes_on():
    world = world_with()
    policy = replace(POLICY, mode="async")
    job = Job(world, total=300, policy=policy, awaited=())

    async def on_host(host: Any) -> Any:
        if host.name == "c":
            await host.clock.sleep(0.3)
        return await job.on_host(host)

    job.batch = of_its_own
    assert world.run_on_all(on_host) == [TrainingDone(300)] * 4
    assert 0 < job.bench.rounds.members["c"].accepted < 100
    assert job.digests == dict.fromkeys(NAMES, job.bench.digest)
