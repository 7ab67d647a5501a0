"""The coordinator and its workers, in both worlds."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest

from hcsim.cluster.coordinator import Coordinator, CoordinatorClient, CoordinatorPolicy, GenerationRoster
from hcsim.cluster.coordinator.messages import Register
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config import Lid, Pause, Reset
from hcsim.errors import (
    CallRefused,
    ChannelBroken,
    CollectiveError,
    ConfigError,
    DeadlineExceeded,
    HcsimError,
    UsageError,
    WorkerLost,
)
from hcsim.real.host import RealHost, RealOptions
from tests.cluster.coordinator.conftest import run_virtual

NAMES = ["hub", "w0", "w1", "w2", "w3"]


def quick(workers: int, **changes) -> CoordinatorPolicy:
    return CoordinatorPolicy(**{"workers": workers, "heartbeat_s": 0.05, "silence_s": 0.4, **changes})


async def together(*waiting):
    return await asyncio.gather(*waiting)


async def shut(stage, coordinator, *workers: CoordinatorClient) -> None:
    for worker in workers:
        await worker.close()
    await stage.stop(coordinator)


async def summed(worker: CoordinatorClient, roster: GenerationRoster, value: float) -> np.ndarray:
    """An all-reduce among the generation."""
    options = Options(timeout_s=20.0)
    async with await Group.open(worker.host, roster.membership(worker.name), options) as group:
        data = np.full(1000, value, np.float32)
        await group.all_reduce(data)
        await group.barrier()
        return data


def test_every_worker_gets_the_whole_list_however_early_it_registered(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(4))
        workers, asking = [], []
        for name in NAMES[1:]:  # one after the other, each asking at once
            workers.append(await stage.join(name))
            asking.append(workers[-1].host.spawn(workers[-1].ready(), name="ready"))
        rosters = await together(*asking)
        assert len({roster.generation for roster in rosters}) == 1
        assert all([peer.worker for peer in roster.peers] == NAMES[1:] for roster in rosters)
        assert [worker.rank for worker in workers] == [0, 1, 2, 3]
        await shut(stage, coordinator, *workers)

    staged(NAMES, body)


def test_four_workers_sum_and_three_go_on_when_one_dies(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(4, least=3))
        workers = await together(*(stage.join(name) for name in NAMES[1:]))

        async def work(worker: CoordinatorClient) -> tuple[int, float]:
            done = (0, 0.0)
            for _ in range(10):
                roster = await worker.ready()
                try:
                    total = await worker.during(roster, summed(worker, roster, worker.rank + 1.0))
                    done = (roster.generation, float(total[0]))
                    if roster.generation == 1:
                        await worker.during(roster, wait_for_ever(worker))
                    return done
                except (WorkerLost, CollectiveError):
                    continue
            return done

        tasks = [worker.host.spawn(work(worker), name="work") for worker in workers]
        while coordinator.state.generation < 1:
            await stage.hosts["hub"].clock.sleep(0.02)
        await stage.hosts["hub"].clock.sleep(0.3)
        await stage.kill("w1")
        survivors = [worker for worker in workers if worker.name != "w1"]
        results = await together(*(tasks[workers.index(worker)] for worker in survivors))
        lost = workers[[worker.name for worker in workers].index("w1")].rank
        assert results == [(2, 10.0 - (lost + 1.0))] * 3
        assert any("w1" in note and "silent" in note for note in stage.notes)
        await shut(stage, coordinator, *survivors)

    staged(NAMES, body)


async def wait_for_ever(worker: CoordinatorClient) -> None:
    while True:
        await worker.host.clock.sleep(1.0)


async def one_left_behind(
    stage, policy: CoordinatorPolicy
) -> tuple[Coordinator, list[CoordinatorClient], list[GenerationRoster]]:
    """Three workers, of which the first does not ask for the second generation, and the list of that."""
    coordinator = await stage.coordinator(policy)
    workers = await together(*(stage.join(name) for name in NAMES[1:4]))
    await together(*(worker.ready() for worker in workers))
    second = await together(*(worker.ready() for worker in workers[1:]))
    assert sorted(peer.worker for peer in second[0].peers) == ["w1", "w2"]
    return coordinator, workers, second


def test_one_that_was_too_busy_for_a_generation_is_in_the_next(staged):
    async def body(stage):
        coordinator, (busy, *others), second = await one_left_behind(stage, quick(3, least=2, form_s=0.5))
        asking = busy.host.spawn(busy.ready(), name="ready")
        while not all(worker.superseded for worker in others):
            await busy.host.clock.sleep(0.02)
        totals = await together(*(summed(worker, roster, 1.0) for worker, roster in zip(others, second, strict=True)))
        assert [float(total[0]) for total in totals] == [2.0, 2.0]  # it did not disturb them
        third = await together(asking, *(worker.ready() for worker in others))
        assert [sorted(peer.worker for peer in roster.peers) for roster in third] == [["w0", "w1", "w2"]] * 3
        await shut(stage, coordinator, busy, *others)

    staged(NAMES[:4], body)


@pytest.mark.slow
def test_who_waits_for_a_generation_does_not_end_that_of_those_who_work(staged):
    async def body(stage):
        coordinator, (busy, *others), second = await one_left_behind(stage, quick(3, form_s=0.3))
        asking = busy.host.spawn(busy.ready(), name="ready")
        await busy.host.clock.sleep(1.0)  # three times as long as anybody has to wait
        assert coordinator.state.generation == second[0].generation
        third = await together(asking, *(worker.ready() for worker in others))
        assert [sorted(peer.worker for peer in roster.peers) for roster in third] == [["w0", "w1", "w2"]] * 3
        await shut(stage, coordinator, busy, *others)

    staged(NAMES[:4], body)


def test_a_worker_that_starts_again_with_its_name_gets_its_rank_back(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(3, least=1))
        workers = [await stage.join(name) for name in NAMES[1:4]]
        await together(*(worker.ready() for worker in workers))
        await workers[0].close()
        again = await stage.join("w0")
        assert again.rank == 0
        rosters = await together(*(worker.ready() for worker in (again, *workers[1:])))
        assert rosters[0].generation == 2
        assert [(peer.rank, peer.worker) for peer in rosters[0].peers] == [(0, "w0"), (1, "w1"), (2, "w2")]
        await shut(stage, coordinator, again, *workers[1:])

    staged(NAMES, body)


def test_a_newcomer_fills_the_hole_and_nobody_gets_a_rank_beyond_the_world(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(3, least=1))
        workers = [await stage.join(name) for name in NAMES[1:4]]
        with pytest.raises(CallRefused, match="one too many"):
            await stage.join("w3", patience_s=0.1)
        await together(*(worker.ready() for worker in workers))
        await workers[1].close()
        newcomer = await stage.join("w3")  # waits until the silence has been noticed
        assert newcomer.rank == 1
        rosters = await together(*(worker.ready() for worker in (workers[0], newcomer, workers[2])))
        assert [(peer.rank, peer.worker) for peer in rosters[0].peers] == [(0, "w0"), (1, "w3"), (2, "w2")]
        assert rosters[0].place("w3") == 1
        await shut(stage, coordinator, workers[0], newcomer, workers[2])

    staged(NAMES, body)


def test_a_second_worker_under_a_living_ones_name_is_refused(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(2))
        first = await stage.join("w0", "twin")
        with pytest.raises(CallRefused, match="here already"):
            await stage.join("w1", "twin", patience_s=0.1)
        assert first.rank == 0
        await shut(stage, coordinator, first)

    staged(NAMES, body)


@pytest.mark.slow
def test_healthy_workers_are_not_evicted_while_they_do_nothing(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(2))
        workers = [await stage.join(name) for name in ("w0", "w1")]
        rosters = await together(*(worker.ready() for worker in workers))
        await stage.hosts["hub"].clock.sleep(1.2)  # three times the silence that would evict them
        assert not any(worker.over(rosters[0].generation).done() for worker in workers)
        assert len(coordinator.state.workers) == 2
        await shut(stage, coordinator, *workers)

    staged(NAMES, body)


def test_a_barrier_that_waits_for_a_dead_worker_ends_and_names_it(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(3))
        workers = [await stage.join(name) for name in NAMES[1:4]]
        await together(*(worker.ready() for worker in workers))
        await together(*(worker.barrier("begin") for worker in workers))
        await stage.kill("w2")
        for end in await asyncio.gather(*(w.barrier("next") for w in workers[:2]), return_exceptions=True):
            assert isinstance(end, WorkerLost)
            assert "w2 (rank 2)" in str(end)
        await shut(stage, coordinator, *workers[:2])

    staged(NAMES, body)


def test_a_checkpoint_is_committed_when_all_have_reported_and_not_before(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(3, checkpoint_s=0.3))
        workers = [await stage.join(name) for name in NAMES[1:4]]
        await together(*(worker.ready() for worker in workers))
        two = await asyncio.gather(*(w.checkpoint(5, f"d{w.rank}") for w in workers[:2]), return_exceptions=True)
        assert all(isinstance(end, WorkerLost) and "w2 (rank 2)" in str(end) for end in two)
        assert await workers[0].committed() is None
        done = await together(*(worker.checkpoint(5, f"d{worker.rank}") for worker in workers))  # tried again
        assert {one.digests for one in done} == {((0, "d0"), (1, "d1"), (2, "d2"))}
        assert await workers[1].committed() == done[0]
        assert await workers[1].checkpoint(5, "d1") == done[0]  # asking once more changes nothing
        with pytest.raises(CallRefused, match="too late"):
            await workers[1].checkpoint(4, "d1")
        await shut(stage, coordinator, *workers)

    staged(NAMES, body)


def test_who_leaves_is_let_go_when_the_others_know(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(3, least=2))
        workers = [await stage.join(name) for name in NAMES[1:4]]
        first = await together(*(worker.ready() for worker in workers))

        async def go_on(worker: CoordinatorClient) -> GenerationRoster:
            with pytest.raises(WorkerLost, match=r"w0 .* leaves"):
                await worker.during(first[0], wait_for_ever(worker))
            return await worker.ready()

        going = [worker.host.spawn(go_on(worker), name="go on") for worker in workers[1:]]
        await workers[0].leave()
        await workers[0].close()
        rosters = await together(*going)
        assert [peer.worker for peer in rosters[0].peers] == ["w1", "w2"]
        assert rosters[0].generation == 2
        await shut(stage, coordinator, *workers[1:])

    staged(NAMES, body)


def test_those_who_work_are_told_that_a_newcomer_waits_and_are_not_disturbed(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(3, least=1, leave_s=0.1))
        workers = [await stage.join(name) for name in NAMES[1:4]]
        await together(*(worker.ready() for worker in workers))
        await workers[2].leave()
        await workers[2].close()
        rosters = await together(*(worker.ready() for worker in workers[:2]))
        newcomer = await stage.join("w3")
        asking = newcomer.host.spawn(newcomer.ready(), name="ready")
        while not all(worker.superseded for worker in workers[:2]):
            await stage.hosts["hub"].clock.sleep(0.02)
        assert not any(worker.over(rosters[0].generation).done() for worker in workers[:2])
        later = await together(*(worker.ready() for worker in workers[:2]), asking)
        assert [peer.worker for peer in later[0].peers] == ["w0", "w1", "w3"]
        assert later[0].generation > rosters[0].generation
        await shut(stage, coordinator, newcomer, *workers[:2])

    staged(NAMES, body)


def test_a_coordinator_that_starts_again_keeps_ranks_numbers_and_checkpoints(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(2))
        workers = [await stage.join(name) for name in ("w1", "w0")]
        before = await together(*(worker.ready() for worker in workers))
        committed = await together(*(worker.checkpoint(1, "digest") for worker in workers))
        await stage.stop(coordinator)
        coordinator = await stage.coordinator(quick(2))
        rosters = await together(*(worker.ready(deadline_s=20) for worker in workers))
        assert [(peer.rank, peer.worker) for peer in rosters[0].peers] == [(0, "w1"), (1, "w0")]
        assert rosters[0].generation == before[0].generation + 1
        assert await workers[0].committed() == committed[0]
        await shut(stage, coordinator, *workers)

    staged(NAMES, body)


def test_without_a_coordinator_a_worker_gives_up_and_says_so(staged):
    async def body(stage):
        with pytest.raises(HcsimError, match=r"hub|127"):
            await stage.join("w0", patience_s=0.3)
        coordinator = await stage.coordinator(quick(1))
        worker = await stage.join("w0", patience_s=0.3)
        roster = await worker.ready()
        await stage.stop(coordinator)
        with pytest.raises(WorkerLost, match="coordinator"):
            await worker.during(roster, wait_for_ever(worker))
        with pytest.raises(HcsimError):
            await worker.ready()
        await worker.close()
        with pytest.raises(UsageError, match="closed"):
            await worker.ready()

    staged(NAMES, body)


def test_waiting_for_workers_that_never_come_ends_at_the_deadline(staged):
    async def body(stage):
        coordinator = await stage.coordinator(quick(2))
        worker = await stage.join("w0")
        with pytest.raises(DeadlineExceeded, match="ready"):
            await worker.ready(deadline_s=0.2)
        other = await stage.join("w1")
        rosters = await together(worker.ready(), other.ready())
        assert len(rosters[0].peers) == 2
        await shut(stage, coordinator, worker, other)

    staged(NAMES, body)


def test_a_connection_that_breaks_costs_nobody_a_place():
    async def body(stage):
        coordinator = await stage.coordinator(quick(2))
        workers = [await stage.join(name) for name in ("w0", "w1")]
        rosters = await together(*(worker.ready() for worker in workers))
        await stage.hosts["hub"].clock.sleep(2.0)  # the reset strikes meanwhile
        assert not any(worker.over(rosters[0].generation).done() for worker in workers)
        await together(*(worker.barrier() for worker in workers))
        await shut(stage, coordinator, *workers)

    run_virtual(NAMES, body, (Reset(at_s=1.0, between=("hub", "w0"), mid_frame=False),))


def test_a_coordinator_that_was_stuck_evicts_nobody_for_it():
    async def body(stage):
        coordinator = await stage.coordinator(quick(2))
        workers = [await stage.join(name) for name in ("w0", "w1")]
        rosters = await together(*(worker.ready() for worker in workers))
        await stage.hosts["w0"].clock.sleep(6.0)
        assert not any(worker.over(rosters[0].generation).done() for worker in workers)
        assert any("itself was stuck" in note for note in stage.notes)
        assert not any("silent" in note for note in stage.notes)
        await shut(stage, coordinator, *workers)

    run_virtual(NAMES, body, (Pause(at_s=1.0, node="hub", duration_s=3.0),))


def test_a_worker_that_was_stuck_comes_back_under_its_rank():
    async def body(stage):
        coordinator = await stage.coordinator(quick(2, least=1))
        workers = [await stage.join(name) for name in ("w0", "w1")]
        first = await together(*(worker.ready() for worker in workers))
        with pytest.raises(WorkerLost, match=r"w1 .* was silent"):
            await workers[0].during(first[0], wait_for_ever(workers[0]))
        alone = await workers[0].ready()
        assert [peer.worker for peer in alone.peers] == ["w0"]
        assert "is over" in await asyncio.wait_for(_over(workers[1], first[0]), 20)
        while not workers[0].superseded:
            await stage.hosts["hub"].clock.sleep(0.02)
        rosters = await together(*(worker.ready() for worker in workers))
        assert [(peer.rank, peer.worker) for peer in rosters[0].peers] == [(0, "w0"), (1, "w1")]
        assert rosters[0].generation > alone.generation
        await shut(stage, coordinator, *workers)

    async def _over(worker: CoordinatorClient, roster: GenerationRoster) -> str:
        with pytest.raises(WorkerLost) as caught:
            await worker.during(roster, wait_for_ever(worker))
        return str(caught.value)

    run_virtual(NAMES, body, (Pause(at_s=1.0, node="w1", duration_s=3.0),))


def test_a_worker_that_slept_says_so_when_it_is_back():
    said: list[str] = []

    async def body(stage):
        coordinator = await stage.coordinator(quick(2, least=1))
        other = await stage.join("w0")
        host = stage.hosts["w1"]
        who = Register("w1", 1, stage.addresses["w1"])
        worker = await CoordinatorClient.registered(host, stage.addresses["hub"], who, tell=said.append)
        await stage.hosts["hub"].clock.sleep(60.0)
        await shut(stage, coordinator, other, worker)

    run_virtual(NAMES, body, (Lid(at_s=1.0, node="w1", duration_s=40.0),))
    assert [what for what in said if "slept" in what] == ["this machine slept for 40 s"]


def test_a_coordinator_that_cannot_write_tells_people_and_goes_on_when_it_can(tmp_path):
    folder = tmp_path / "state"
    notes: asyncio.Queue[str] = asyncio.Queue()

    async def noted(words: str) -> None:
        while words not in await notes.get():
            pass

    async def main() -> None:
        hub, one, other = (RealHost(RealOptions(name, state=tmp_path / name)) for name in ("state", "w0", "w1"))
        async with asyncio.timeout(60), hub, one, other:
            listener = await hub.listen("127.0.0.1:0")
            coordinator = Coordinator(hub, quick(2, least=1), note=notes.put_nowait)
            coordinator.open(listener)
            first = await CoordinatorClient.join(one, listener.address, "w0", "127.0.0.1:1")
            second = await CoordinatorClient.join(other, listener.address, "w1", "127.0.0.1:2")
            await together(first.ready(), second.ready())
            asking = one.spawn(first.ready(), name="ready")
            await noted("generation 1 is over")
            shutil.rmtree(folder)
            await second.close()
            await noted("cannot be written")
            with pytest.raises(CallRefused, match="cannot remember anybody now"):
                await CoordinatorClient.join(other, listener.address, "w2", "127.0.0.1:3", patience_s=0.1)
            assert not asking.done()
            folder.mkdir()
            assert [peer.worker for peer in (await asking).peers] == ["w0"]
            await first.close()
            await coordinator.close()
            await listener.close()

    asyncio.run(main())


def test_answers_that_nobody_waits_for_do_not_pile_up_while_nothing_can_be_written(monkeypatch):
    def full(name: str, data: bytes) -> None:
        raise ConfigError("the disk is full")

    async def main() -> None:
        hub, one, other = (RealHost(RealOptions(name)) for name in ("hub", "w0", "w1"))
        async with asyncio.timeout(60), hub, one, other:
            listener = await hub.listen("127.0.0.1:0")
            coordinator = Coordinator(hub, quick(2, silence_s=20.0))
            coordinator.open(listener)
            first = await CoordinatorClient.join(one, listener.address, "w0", "127.0.0.1:1")
            second = await CoordinatorClient.join(other, listener.address, "w1", "127.0.0.1:2")
            with monkeypatch.context() as broken:
                broken.setattr(hub.store, "save", full)
                asking = [host.spawn(worker.ready(), name="ready") for host, worker in ((one, first), (other, second))]
                while not (before := coordinator.held_up):  # noqa: ASYNC110 - nobody tells when both have asked
                    await asyncio.sleep(0.01)
                for _ in range(20):
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.01):
                            await first.committed()
                while coordinator.held_up != before:  # noqa: ASYNC110 - nobody tells when the last was given up
                    await asyncio.sleep(0.01)
            assert [(await roster).generation for roster in asking] == [1, 1]
            for worker in (first, second):
                await worker.close()
            await coordinator.close()
            await listener.close()

    asyncio.run(main())


def test_a_coordinator_whose_people_cannot_be_told_goes_on():
    deaf = False

    def note(text: str) -> None:
        if deaf:
            raise BrokenPipeError("nobody reads that")

    async def main() -> None:
        nonlocal deaf
        hub, one = (RealHost(RealOptions(name)) for name in ("hub", "w0"))
        async with asyncio.timeout(60), hub, one:
            listener = await hub.listen("127.0.0.1:0")
            coordinator = Coordinator(hub, quick(1, silence_s=20.0), note=note)
            coordinator.open(listener)
            worker = await CoordinatorClient.join(one, listener.address, "w0", "127.0.0.1:1")
            roster = await worker.ready()
            deaf = True
            async with asyncio.timeout(10):
                checkpoint = await worker.checkpoint(5, "digest")
                assert await worker.committed() == checkpoint
                await worker.barrier("after")
            assert not worker.over(roster.generation).done()
            await worker.close()
            await coordinator.close()
            await listener.close()

    asyncio.run(main())


def test_who_endures_waits_for_the_coordinator_only_while_it_asks():
    async def body(stage):
        coordinator = await stage.coordinator(quick(1))
        worker = await stage.join("w0", patience_s=2.0)
        worker.endures = True
        roster = await worker.ready()
        await stage.stop(coordinator)
        clock = stage.hosts["w0"].clock
        await clock.sleep(60.0)
        assert not worker.over(roster.generation).done()
        began_s = clock.elapsed()
        with pytest.raises(ChannelBroken, match="could not be reached for 2 s"):
            await worker.ready()
        assert clock.elapsed() - began_s < 8.0
        await worker.close()

    run_virtual(NAMES, body)
