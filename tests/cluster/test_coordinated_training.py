"""Training whose members register with a coordinator, in both worlds, through what happens to them and to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from hcsim.cluster.coordinator import CoordinatorPolicy
from hcsim.config import AnyFault, BlockedPort, Cluster, Crash, Leave, Pause, Restart, Scenario, Training
from hcsim.errors import ConfigError, UsageError
from hcsim.launch.real import RealNode, serve_coordinator, train_in_cluster
from hcsim.launch.virtual import Outcome
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.node import ClusterJob
from hcsim.real.keys import new_secret, save_secret
from hcsim.runtime.clock import BroadcastEvent
from hcsim.training.run import Point, Report, Run
from hcsim.units import PositiveSeconds, Seconds
from tests.conftest import free_addresses
from tests.switches import on_switch

ABC = ("a", "b", "c")


def home(*faults: AnyFault, steps: int = 60, strategy: str = "ddp", **changes: object) -> Scenario:
    training = Training(task="convex", steps=steps, strategy=strategy, timeout_s=PositiveSeconds(20))
    given: dict[str, object] = {"coordinator": "a:52417", "nodes": 3, "preset": "low_latency", **changes}
    cluster = Cluster(checkpoint_every=20, **given)  # type: ignore[arg-type]
    return replace(on_switch(ABC, faults, rate="2 Mb/s"), training=training, cluster=cluster)


def run(scenario: Scenario) -> tuple[Outcome[Report], list[str]]:
    told: list[str] = []
    outcome = simulate_cluster(scenario, tell=lambda host, what: told.append(f"{host}: {what}"), limit_s=600)
    return outcome, told


def ends(outcome: Outcome[Report]) -> list[int | type[BaseException]]:
    """How many steps each took, or what ended it; all that took as many hold the same model."""
    reports = [result for result in outcome.results if isinstance(result, Report)]
    assert len({report.sha256 for report in reports}) == len({report.steps for report in reports})
    return [result.steps if isinstance(result, Report) else type(result) for result in outcome.results]


def test_a_calm_run_ends_with_the_model_that_it_ends_with_when_members_agree():
    coordinated, told = run(home())
    agreed, _ = run(home(coordinator=None))
    assert ends(coordinated) == [60, 60, 60]
    assert coordinated.values()[0].sha256 == agreed.values()[0].sha256
    assert "b: view 1: a, b, c (work begins)" in told


def test_two_runs_are_the_same_event_for_event():
    first, second = (run(home(Crash(Seconds(1), "b")))[0] for _ in range(2))
    assert first.trace_sha256 == second.trace_sha256


def test_the_others_go_on_without_a_member_that_crashed_and_take_it_in_again():
    outcome, told = run(home(Crash(Seconds(3), "b"), Restart(Seconds(8), "b"), steps=400))
    assert ends(outcome) == [400, 400, 400]
    assert "a: view 2: a, c (b (rank 1) was silent for 2 s)" in told
    assert "b: view 3: a, c, b (b joined)" in told
    assert any(what.startswith("b: view 3: training goes on after step") for what in told)


def test_a_member_that_stood_still_registers_again():
    outcome, told = run(home(Pause(Seconds(3), "b", duration_s=Seconds(5)), steps=400))
    assert ends(outcome) == [400, 400, 400]
    assert "b: view 3: a, c, b (b joined)" in told


@pytest.mark.parametrize("leaver", ["a", "b"])
def test_a_member_leaves_after_its_step_and_the_coordinator_stays_for_the_others(leaver):
    outcome, told = run(home(Leave(Seconds(1.5), leaver), steps=150))
    steps = dict(zip(ABC, ends(outcome), strict=True))
    assert 0 < steps.pop(leaver) < 150
    assert [*steps.values()] == [150, 150]
    assert any(f"({leaver} left)" in what for what in told)


@pytest.mark.slow
def test_a_parameter_server_goes_on_with_a_member_that_comes_back():
    outcome, _ = run(
        home(Crash(Seconds(3), "b"), Restart(Seconds(8), "b"), steps=300, strategy="parameter_server:async")
    )
    assert ends(outcome) == [300, 300, 300]


def test_a_coordinator_that_crashed_with_its_host_takes_the_members_in_again():
    outcome, told = run(home(Crash(Seconds(3), "a"), Restart(Seconds(8), "a"), steps=300))
    assert ends(outcome) == [300, 300, 300]
    assert "b: the coordinator at a:52417 is there again" in told
    assert "b: view 2: a, b, c (the coordinator has started anew)" in told


@pytest.mark.slow
def test_a_member_that_is_alive_and_cannot_be_worked_with_is_left_out_and_let_in_again():
    blocked = BlockedPort(Seconds(1), "b", port="gradient", how="silent", duration_s=PositiveSeconds(6))
    outcome, told = run(home(blocked, steps=600))
    assert ends(outcome) == [600, 600, 600]
    found = "b (rank 1) is left out: b:52416 answered 0 of 16384 bytes within 3 s"
    assert f"a: view 2: a, c ({found})" in [what.replace("rank 2", "rank 1") for what in told]
    assert "a: view 3: a, c, b (b joined)" in told


def test_members_end_with_a_clear_message_when_the_coordinator_stays_away():
    outcome, _ = run(home(Crash(Seconds(3), "a"), steps=300))
    for error in outcome.results[1:]:
        assert "the coordinator at a:52417 could not be reached for 60 s" in str(error)


def test_work_begins_with_as_many_as_were_asked_for_and_takes_in_more():
    outcome, told = run(home(nodes=2))
    assert ends(outcome) == [60, 60, 60]
    assert sum(what.startswith("a: view ") and "(" in what for what in told) in (1, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"coordinator": "mini"}, 'a host and a port, such as "mini.local:52417"'),
        ({"coordinator": "mini:0"}, "a host and a port"),
        ({"coordinator": "mini:x"}, "a host and a port"),
        ({"coordinator": "ws://mini:52417"}, "a host and a port"),
        ({"coordinator": "mini:52416"}, "gradient_port are both 52416"),
        ({"coordinator": "mini:52417", "peers": ("a:1",)}, "peers is for members that find each other"),
        ({"coordinator": "mini:52417", "discover": True}, "discover is for members that find each other"),
        ({"coordinator": "mini:52417", "quorum": "any"}, "quorum is for members that find each other"),
        ({"coordinator": "mini:52417", "measure": "order"}, "nothing is measured"),
    ],
)
def test_what_means_nothing_with_a_coordinator_is_refused_in_a_line(settings, words):
    with pytest.raises(UsageError) as caught:
        Cluster(**settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_coordinator_in_a_simulation_is_one_of_its_nodes():
    with pytest.raises(ConfigError, match='coordinator = "mini:52417": there is no such node; there are a, b, c'):
        simulate_cluster(home(coordinator="mini:52417"))


def test_a_node_may_be_named_as_a_real_machine_is():
    named = [simulate_cluster(home(coordinator=f"{name}:52417", steps=3)) for name in ("a", "a.local")]
    assert named[0].trace_sha256 == named[1].trace_sha256


class Scene:
    """A coordinator and two members of one machine that train, with what they say."""

    def __init__(self, folder: Path, steps: int) -> None:
        secret = new_secret()
        self.homes = {name: folder / name for name in ("hub", "a", "b")}
        for home_ in self.homes.values():
            save_secret(home_, "home", secret)
        self.at, *free = free_addresses(5)
        self.ports = [int(address.rpartition(":")[2]) for address in free]
        self.state, self.steps = folder / "state", steps
        self.told: list[str] = []
        self.reached = dict.fromkeys(self.homes, 0)
        self.news = BroadcastEvent()

    def coordinator(self) -> asyncio.Task[None]:
        policy = CoordinatorPolicy(workers=2, heartbeat_s=0.2, silence_s=1.0)
        member = self.homes["hub"], "home"
        return asyncio.create_task(
            serve_coordinator(self.at, policy, self.told.append, state=self.state, member=member)
        )

    def member(self, name: str) -> asyncio.Task[Report]:
        control, data = self.ports[:2] if name == "a" else self.ports[2:]
        cluster = Cluster(nodes=2, coordinator=self.at, discovery_port=control, gradient_port=data)
        node = RealNode(self.homes[name], name=name, hosts=("127.0.0.1",))
        plan = ClusterJob(cluster, Training(task="convex", steps=self.steps, timeout_s=PositiveSeconds(20)), 1)
        counting = _Counting(self, name)
        return asyncio.create_task(
            train_in_cluster(node, plan, observer=counting, tell=lambda what: self.told.append(f"{name}: {what}"))
        )

    async def step(self, name: str, step: int) -> None:
        """Return when that member has come so far."""
        while self.reached[name] < step:
            await self.news.next()


class _Counting:
    def __init__(self, scene: Scene, name: str) -> None:
        self._scene, self._name = scene, name

    def point(self, rank: int, point: Point) -> None:
        self._scene.reached[self._name] = point.step
        self._scene.news.tell()

    def finished(self, run: Run) -> None:
        """It was counted."""


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_real_machines_train_through_a_coordinator_and_end_as_simulated_ones(tmp_path):
    async def main() -> list[Report]:
        scene = Scene(tmp_path, 20)
        async with asyncio.timeout(120):
            members = [scene.member("a"), scene.member("b")]  # before there is a coordinator: they wait for it
            serving = scene.coordinator()
            try:
                return await asyncio.gather(*members)
            finally:
                await ended(serving)

    reports = asyncio.run(main())
    two = replace(on_switch(("a", "b"), rate="2 Mb/s"), training=Training(task="convex", steps=20), seed=1)
    virtual = simulate_cluster(replace(two, cluster=Cluster(nodes=2, coordinator="a:52417"))).values()
    assert {report.sha256 for report in reports} == {report.sha256 for report in virtual}


@pytest.mark.slow
@pytest.mark.parametrize("remembers", [True, False])
def test_a_real_coordinator_that_starts_again_is_found_again(tmp_path, remembers):
    async def main() -> tuple[list[Report], list[str]]:
        scene = Scene(tmp_path, 1500)
        async with asyncio.timeout(240):
            serving = scene.coordinator()
            members = [scene.member("a"), scene.member("b")]
            await scene.step("a", 5)
            await ended(serving)
            if not remembers:
                scene.state = tmp_path / "another disk"
            serving = scene.coordinator()
            try:
                return await asyncio.gather(*members), scene.told
            finally:
                await ended(serving)

    reports, told = asyncio.run(main())
    assert [report.steps for report in reports] == [1500, 1500]
    assert len({report.sha256 for report in reports}) == 1
    assert any(what.endswith("is there again") for what in told)
    assert any("view 2" in what and "training goes on after step" in what for what in told)


@pytest.mark.slow
def test_a_real_member_that_is_lost_is_missed_and_the_other_goes_on(tmp_path):
    async def main() -> tuple[Report, list[str]]:
        scene = Scene(tmp_path, 1000)
        async with asyncio.timeout(240):
            serving = scene.coordinator()
            members = [scene.member("a"), scene.member("b")]
            await scene.step("b", 5)
            members[1].cancel()
            try:
                return await members[0], scene.told
            finally:
                await ended(serving)
                await asyncio.gather(*members, return_exceptions=True)

    report, told = asyncio.run(main())
    assert report.steps == 1000
    assert any(what.startswith("a: view 2: a (") for what in told)


@pytest.mark.slow
def test_a_real_coordinator_takes_no_member_of_another_cluster(tmp_path):
    async def main() -> str:
        scene = Scene(tmp_path, 20)
        save_secret(tmp_path / "thief", "home", new_secret())
        scene.homes["a"] = tmp_path / "thief"
        async with asyncio.timeout(120):
            serving = scene.coordinator()
            try:
                await scene.member("a")
            except Exception as error:
                return str(error)
            finally:
                await ended(serving)
        return ""

    assert "our authority did not sign its certificate" in asyncio.run(main())
