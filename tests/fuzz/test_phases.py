"""Which machines have to go on when nothing changes any more, and when they may wait."""

from __future__ import annotations

import pytest

from hcsim.config import (
    AnyFault,
    BlockedPort,
    Clog,
    Crash,
    Datagrams,
    FullDisk,
    LinkChange,
    Misbehave,
    Partition,
    Pause,
    Restart,
    RouterReboot,
    Scenario,
    StaleStep,
    Stranger,
    parse_scenario,
)
from hcsim.fuzz.phases import HostHistories, ViewAdoption, WorkStart, excuse, phases_of, settled
from hcsim.units import BitRate, PositiveSeconds, Seconds, Share

T = Seconds(3)


def home(*faults: AnyFault, quorum: str = "majority", nodes: int = 4) -> Scenario:
    text = f"""
    name = "home"
    medium = [{{ kind = "ethernet", name = "switch", rate = "1 Gb/s" }}]
    node = [{{ name = "m", count = {nodes}, machine = "M4", links = ["switch"] }}]
    cluster = {{ nodes = {nodes}, quorum = "{quorum}" }}
    training = {{ task = "slopes" }}
    """
    scenario = parse_scenario(text, "home")
    return Scenario(
        scenario.name, scenario.nodes, media=scenario.media, cluster=scenario.cluster, training=scenario.training,
        faults=faults,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("faults", "sick", "untouched"),
    [
        ((), (), ("m-1", "m-2", "m-3", "m-4")),
        ((Crash(T, "m-2"),), ("m-2",), ("m-1", "m-3", "m-4")),
        ((Crash(T, "m-2"), Restart(Seconds(9), "m-2")), (), ("m-1", "m-2", "m-3", "m-4")),
        ((Pause(T, "m-2", PositiveSeconds(2)),), (), ("m-1", "m-2", "m-3", "m-4")),
        ((Pause(T, "m-2"), BlockedPort(T, "m-3", "gradient", "silent")), ("m-2", "m-3"), ("m-1", "m-4")),
        ((Clog(T, ("m-2", "m-1")), Clog(T, ("m-2", "m-3"))), ("m-2",), ("m-4",)),
        ((Partition(T, (("m-1",), ("m-2", "m-3", "m-4"))),), ("m-1",), ()),
        ((RouterReboot(T, "home"),), ("m-1", "m-2", "m-3", "m-4"), ()),
        ((Stranger(T, "home", 5.0),), (), ("m-1", "m-2", "m-3", "m-4")),
        ((Datagrams(T, "switch", loss=Share(0.3)),), (), ("m-1", "m-2", "m-3", "m-4")),
        ((LinkChange(T, "switch", rate_bps=BitRate(1e3)),), ("m-1", "m-2", "m-3", "m-4"), ()),
        ((Misbehave(T, "m-2", "noise"),), ("m-2",), ("m-1", "m-3", "m-4")),
        ((Misbehave(T, "m-2", "lie"),), ("m-1", "m-2", "m-3", "m-4"), ()),
    ],
)
def test_the_sick_are_as_few_as_explain_what_is_broken(
    faults: tuple[AnyFault, ...], sick: tuple[str, ...], untouched: tuple[str, ...]
) -> None:
    phases = phases_of(home(*faults))
    assert phases.sick == sick
    assert phases.untouched == untouched


def test_liveness_begins_when_nothing_changes_any_more() -> None:
    assert phases_of(home(Pause(T, "m-2", PositiveSeconds(4)), Crash(Seconds(5), "m-3"))).liveness_s == 7.0


def excused(
    *members: str, sick: str, quorum: str = "majority", worked: tuple[str, ...] = ("m-1", "m-2", "m-3", "m-4"),
    started_s: dict[str, float] | None = None,
) -> str:  # fmt: skip
    scenario = home(*(Crash(T, node) for node in sick.split()), quorum=quorum)
    assert scenario.cluster is not None
    views = [ViewAdoption(1.0, name, "L", 2, members) for name in ("m-1", "m-2", "m-3", "m-4")]
    lives = HostHistories(views, [WorkStart(1.0, name, 2) for name in worked], started_s or {}, {})
    return excuse(phases_of(scenario), scenario.cluster, lives)


@pytest.mark.parametrize(
    ("quorum", "members", "sick", "must"),
    [
        ("majority", "m-1 m-2 m-3 m-4", "m-4", True),
        ("majority", "m-1 m-2 m-3 m-4", "m-3 m-4", False),
        ("majority", "m-1 m-4", "m-4", False),
        ("tiebreak", "m-1 m-2 m-3 m-4", "m-3 m-4", True),
        ("tiebreak", "m-1 m-2 m-3 m-4", "m-1 m-4", False),
        ("tiebreak", "m-1 m-4", "m-4", True),
        ("any", "m-1 m-2 m-3 m-4", "m-1 m-2 m-3", True),
        ("any", "m-1 m-2", "m-1 m-2", False),
    ],
)
def test_a_core_must_go_on_where_it_is_a_quorum_of_the_newest_view(
    quorum: str, members: str, sick: str, must: bool
) -> None:
    assert (excused(*members.split(), sick=sick, quorum=quorum) == "") == must


def test_a_core_that_was_started_anew_may_wait_for_a_sick_member_that_has_the_model() -> None:
    started_s = dict.fromkeys(("m-1", "m-2", "m-3"), 2.0)
    assert "m-4" in excused("m-1", "m-2", "m-3", "m-4", sick="m-4", started_s=started_s)
    assert excused("m-1", "m-2", "m-3", "m-4", sick="m-4", started_s={"m-1": 2.0}) == ""


def test_where_work_has_not_begun_as_many_are_needed_as_were_asked_for() -> None:
    assert "4 machines are needed" in excused("m-1", "m-2", "m-3", "m-4", sick="m-4", worked=())


@pytest.mark.parametrize(
    ("lasting", "left_alone", "must"),
    [
        (Pause(T, "m-1"), True, False),
        (Crash(T, "m-1"), True, False),
        (Crash(T, "m-1"), False, True),
        (BlockedPort(T, "m-1", "gradient", "silent"), True, False),
    ],
    ids=["it hangs", "it is down", "it is down and has not left us out", "it is sick"],
)
def test_whoever_was_left_out_need_not_begin_alone_when_the_cluster_is_lost(
    lasting: AnyFault, left_alone: bool, must: bool
) -> None:
    scenario = home(lasting, quorum="any", nodes=2)
    assert scenario.cluster is not None
    views = [ViewAdoption(1.0, name, "L", 2, ("m-1", "m-2")) for name in ("m-1", "m-2")]
    apart = (
        [ViewAdoption(2.0, "m-1", "L", 3, ("m-1",)), ViewAdoption(2.0, "m-2", "M", 4, ("m-2",))] if left_alone else []
    )
    worked = [WorkStart(1.0, "m-1", 2), WorkStart(1.0, "m-2", 2), *([WorkStart(2.0, "m-1", 3)] if left_alone else [])]
    lives = HostHistories([*views, *apart], worked, {}, {})
    assert (excuse(phases_of(scenario), scenario.cluster, lives) == "") == must


@pytest.mark.parametrize(("left_out_s", "must"), [(4.0, False), (9.0, True)])
def test_nor_need_one_that_is_left_out_as_the_last_fault_is_noticed(left_out_s: float, must: bool) -> None:
    """The sick, who go on without it, are in sight: it asks them."""
    names = ("m-1", "m-2", "m-3", "m-4")
    scenario = home(Clog(T, ("m-1", "m-2")), *(FullDisk(T, name) for name in names[1:]), quorum="any")
    assert scenario.cluster is not None
    views = [ViewAdoption(1.0, name, "L", 2, names) for name in names]
    views += [ViewAdoption(left_out_s, name, "L", 3, names[1:]) for name in names[1:]]
    lives = HostHistories(
        [*views, ViewAdoption(left_out_s, "m-1", "M", 4, ("m-1",))], [WorkStart(1.0, name, 2) for name in names], {}, {}
    )
    phases = phases_of(scenario)
    assert phases.core == ("m-1",)
    assert (excuse(phases, scenario.cluster, lives) == "") == must


@pytest.mark.parametrize(("member", "must"), [("m-4", False), ("m-1", True)])
def test_work_has_begun_for_a_core_that_is_in_the_lineage_in_which_it_began(member: str, must: bool) -> None:
    scenario = home(Crash(T, "m-4"))
    assert scenario.cluster is not None
    names = ("m-1", "m-2", "m-3", "m-4")
    views = [ViewAdoption(1.0, name, "L", 2, names) for name in names] + [ViewAdoption(2.0, member, "L", 3, (member,))]
    views += [ViewAdoption(2.0, name, f"{name}.2", 4, (name,)) for name in names if name != member]
    lives = HostHistories(views, [WorkStart(1.0, name, 2) for name in names], {}, {})
    why = excuse(phases_of(scenario), scenario.cluster, lives)
    assert why == "" if must else "4 machines are needed" in why


@pytest.mark.parametrize(("ended_s", "must"), [(8.0, False), (10.0, True)])
def test_a_machine_that_is_started_when_the_others_have_ended_need_not_begin_alone(ended_s: float, must: bool) -> None:
    scenario = home(Restart(Seconds(9), "m-2"), quorum="tiebreak", nodes=2)
    assert scenario.cluster is not None
    views = [ViewAdoption(1.0, name, "L", 2, ("m-1", "m-2")) for name in ("m-1", "m-2")]
    anew = ViewAdoption(9.0, "m-2", "M", 3, ("m-2",))
    work = [WorkStart(1.0, name, 2) for name in ("m-1", "m-2")]
    lives = HostHistories([*views, anew], work, {"m-2": 9.0}, {}, {"m-1": ended_s, "m-2": 8.0})
    why = excuse(phases_of(scenario), scenario.cluster, lives)
    assert why == "" if must else "2 machines are needed" in why


@pytest.mark.parametrize(
    ("broken_s", "ended_s", "must"), [(40.0, 21.0, False), (40.0, 15.0, True), (20.0, 21.0, True), (40.0, 41.0, True)]
)
def test_a_machine_that_is_broken_until_the_others_have_waited_for_it_and_ended_need_not_begin_alone(
    broken_s: float, ended_s: float, must: bool
) -> None:
    scenario = home(Misbehave(T, "m-4", "noise", duration_s=PositiveSeconds(broken_s - T)))
    assert scenario.cluster is not None
    names = ("m-1", "m-2", "m-3", "m-4")
    views, work = (
        [ViewAdoption(1.0, name, "L", 2, names) for name in names],
        [WorkStart(1.0, name, 2) for name in names],
    )
    lives = HostHistories(views, work, {}, {}, dict.fromkeys(names[:3], ended_s), done_s=10.0)
    assert (excuse(phases_of(scenario), scenario.cluster, lives) == "") == must


@pytest.mark.parametrize(
    ("diverged", "must"), [("m-4", True), ("m-3 m-4", False), ("m-1 m-2 m-3 m-4", False)], ids=lambda each: str(each)
)
def test_those_who_ended_since_replicas_differ_are_counted_on_by_nobody(diverged: str, must: bool) -> None:
    scenario = home(Misbehave(T, "m-4", "noise", duration_s=PositiveSeconds(1)))
    assert scenario.cluster is not None
    names = ("m-1", "m-2", "m-3", "m-4")
    views, work = (
        [ViewAdoption(1.0, name, "L", 2, names) for name in names],
        [WorkStart(1.0, name, 2) for name in names],
    )
    lives = HostHistories(views, work, {}, {}, diverged=diverged.split())
    assert (excuse(phases_of(scenario), scenario.cluster, lives) == "") == must


@pytest.mark.parametrize(("struck_s", "must"), [(2.0, True), (9.0, True), (11.0, False)])
def test_nothing_is_asked_where_a_fault_has_waited_until_after_the_last_step(struck_s: float, must: bool) -> None:
    scenario = home(StaleStep(T, ("m-1", "m-2")))
    assert scenario.cluster is not None
    names = ("m-1", "m-2", "m-3", "m-4")
    views, worked = (
        [ViewAdoption(1.0, name, "L", 2, names) for name in names],
        [WorkStart(1.0, name, 2) for name in names],
    )
    lives = HostHistories(views, worked, {}, {}, done_s=10.0, struck_s=struck_s)
    assert (excuse(phases_of(scenario), scenario.cluster, lives) == "") == must


def test_patience_grows_with_the_timeouts_and_the_sick() -> None:
    one, two = phases_of(home(Crash(T, "m-1"))), phases_of(home(Crash(T, "m-1"), Crash(T, "m-2"), nodes=5))
    assert phases_of(home()).patience_s == one.patience_s < two.patience_s
    assert one.patience_s > 3 * 60


@pytest.mark.parametrize(
    ("goes_on", "left_out_s", "core"),
    [
        (("m-1", "m-2"), 4.0, ("m-1", "m-2")),
        (("m-1", "m-2"), 9.0, ("m-3", "m-4")),
        (("m-1",), 4.0, ("m-3", "m-4")),
        (("m-1", "m-2", "m-3"), 4.0, ("m-3", "m-4")),
    ],
    ids=["all of one", "too late", "not all of it", "not all are left out"],
)
def test_of_equally_few_the_sick_are_those_that_were_left_out(
    goes_on: tuple[str, ...], left_out_s: float, core: tuple[str, ...]
) -> None:
    names = ("m-1", "m-2", "m-3", "m-4")
    scenario = home(Clog(T, ("m-3", "m-1")), Clog(T, ("m-2", "m-4")), quorum="any")
    views = [ViewAdoption(1.0, name, "L", 2, names) for name in names]
    views += [ViewAdoption(left_out_s, name, "L", 3, goes_on) for name in goes_on]
    views += [ViewAdoption(left_out_s, name, name, 4, (name,)) for name in names if name not in goes_on]
    worked = [WorkStart(1.0, name, 2) for name in names] + [WorkStart(left_out_s, name, 3) for name in goes_on]
    phases = settled(phases_of(scenario), scenario, HostHistories(views, worked, {}, {}))
    assert phases.core == core
    assert phases.sick == tuple(name for name in names if name not in core)
