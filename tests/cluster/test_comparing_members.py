"""What a running cluster's members tell of themselves, and what is made of it."""

from __future__ import annotations

from copy import copy

import pytest
from msgspec.structs import replace

from hcsim.cluster.messages import MemberFacts, StatusReply
from hcsim.cluster.status_client import StatusClient
from hcsim.doctor import compare_members
from hcsim.runtime.host import Interface, Medium
from tests.cluster.nodes import Party
from tests.cluster.test_status_client import ABC, surveyed

NOW_S = 1_800_000_000.0
VERSIONS = {"hcsim": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6", "BLAS": "accelerate"}


@pytest.fixture(scope="module")
def answers() -> StatusClient:
    return surveyed(Party(ABC), (), 1.0)


@pytest.fixture
def survey(answers: StatusClient) -> StatusClient:
    """What three alike machines have told."""
    told = {}
    for node, each in answers.told.items():
        now_s = NOW_S + answers.told_at_s[node]
        told[node] = replace(each, facts=MemberFacts("macOS 15.1, arm64", "Apple M4", VERSIONS, now_s))
    theirs = copy(answers)
    theirs.told = told
    return theirs


def wrong(survey: StatusClient) -> list[tuple[str, str, str]]:
    found = compare_members(survey, NOW_S)
    assert all(finding.remedy for finding in found if finding.state in ("bad", "warning"))
    return [(each.check, each.state, each.found) for each in found if each.state != "good"]


def test_members_tell_whose_announcements_they_hear(survey: StatusClient) -> None:
    assert {node: each.heard for node, each in survey.told.items()} == {
        node: tuple(other for other in each.heard or () if other != node) for node, each in survey.told.items()
    }
    assert all(sorted(each.heard or ()) == [n for n in ABC if n != node] for node, each in survey.told.items())


def test_alike_machines_that_reach_each_other_are_well(survey: StatusClient) -> None:
    assert wrong(survey) == []
    assert [finding.check for finding in compare_members(survey, NOW_S)] == [
        "versions", "clocks", "multicast", "connections"
    ]  # fmt: skip


def change(survey: StatusClient, node: str, **changes: object) -> None:
    survey.told[node] = replace(survey.told[node], **changes)


def facts(each: StatusReply, **changes: object) -> MemberFacts:
    assert each.facts is not None
    return replace(each.facts, **changes)


def test_what_differs_is_named(survey: StatusClient) -> None:
    b = survey.told["b"]
    change(survey, "b", facts=facts(b, versions={**VERSIONS, "hcsim": "0.0.9", "BLAS": "openblas 0.3"}))
    assert wrong(survey) == [
        ("version of BLAS", "warning", "accelerate on a, c; openblas 0.3 on b"),
        ("version of hcsim", "bad", "0.1.0 on a, c; 0.0.9 on b"),
    ]
    assert b.facts is not None
    change(survey, "b", facts=facts(b, time_s=b.facts.time_s - 90))
    assert wrong(survey) == [("clock", "bad", "b: 90 s behind this machine's")]
    change(survey, "b", facts=None)
    assert wrong(survey) == [("versions", "warning", "b: tells no versions")]


def test_machines_that_do_not_hear_or_reach_each_other_are_named(survey: StatusClient) -> None:
    change(survey, "a", heard=("c",))
    change(survey, "c", heard=None)
    assert wrong(survey) == [
        ("multicast", "warning", "a does not hear b"),
        ("multicast", "skipped", "c does not listen for announcements"),
    ]
    change(survey, "a", heard=("b", "c"))
    change(survey, "c", heard=("a", "b"), links=survey.told["c"].links[:1])
    assert wrong(survey) == [("connections", "bad", "c has none to b")]
    first, second = survey.told["b"].links
    change(survey, "c", links=(replace(first, node="a"), replace(second, node="b")))
    change(survey, "b", links=(replace(first, suspected="it has missed 4 heartbeats"), second))
    assert wrong(survey) == [("connections", "warning", f"b to {first.name}: it has missed 4 heartbeats")]


def test_a_connection_over_the_air_beside_a_wire_is_named(survey: StatusClient) -> None:
    both = (
        Interface("en0", Medium.ETHERNET, 1e9, ("192.0.2.1",)),
        Interface("en1", Medium.WIFI, None, ("192.0.2.2",)),
    )
    for node in ABC:
        change(survey, node, interfaces=both)
    a = survey.told["a"]
    change(survey, "a", links=(replace(a.links[0], ends=("192.0.2.2", "192.0.2.9")), a.links[1]))
    (found,) = wrong(survey)
    assert found == ("connections", "warning", "a to b: over Wi-Fi (192.0.2.2), though both have a wire")
    change(survey, "b", interfaces=both[1:])
    assert wrong(survey) == []
