"""Machines that the others went on or ended without."""

from __future__ import annotations

import pytest

from hcsim.cluster.diagnosis import ViewFailure
from hcsim.cluster.node import ClusterNode
from hcsim.cluster.view import View
from hcsim.errors import HcsimError
from tests.cluster.nodes import Party

ABC = ("a", "b", "c")


async def end(node: ClusterNode, outcome: str) -> None:
    node.finish(outcome)
    await node.leave()
    await node.stop("it has finished or left")


async def accuse(node: ClusterNode, who: str) -> View:
    """In the first view of all three, say that one breaks the protocol; the view that follows."""
    view = await node.view(-1)
    while len(view.members) < 3:
        view = await node.view(view.epoch)
    node.broken(view.epoch, ViewFailure(f"{who} talks nonsense", violator=who))
    return await node.view(view.epoch)


@pytest.mark.parametrize(
    ("gone", "outcome", "waits"), [("ab", "all", False), ("ab", "other", True), ("a", "all", True)]
)
def test_one_that_holds_what_the_others_ended_with_waits_no_longer_once_they_have_gone(
    gone: str, outcome: str, waits: bool
):
    party, found = Party(ABC), dict[str, View | None]()

    async def go(node: ClusterNode) -> None:
        await node.view(-1)
        await end(node, "all")

    async def stay(node: ClusterNode) -> None:
        first = await node.view(-1)
        found["next"] = await node.view(first.epoch, outcome)

    party.meanwhile = {**dict.fromkeys(gone, go), "c": stay}
    party.run(5)
    assert (found["next"] is not None) == waits
    assert found["next"] is None or found["next"].nodes == tuple(name for name in ABC if name not in gone)


def test_one_that_was_left_out_does_not_begin_anew_when_the_others_have_finished():
    party, told = Party(ABC), list[str]()

    async def finish(node: ClusterNode) -> None:
        assert (await accuse(node, "c")).nodes == ("a", "b")
        await end(node, "all")

    async def wait(node: ClusterNode) -> None:
        first = await node.view(-1)
        try:
            await node.view(first.epoch)
        except HcsimError as error:
            told.append(str(error))

    party.meanwhile = {"a": finish, "b": finish, "c": wait}
    party.run(8)
    assert told == ["training has ended without this machine: b finished it, and nobody is left"]


def test_one_that_was_left_out_waits_for_those_who_go_on_also_where_it_may_work_alone():
    party = Party(ABC)
    party.config = type(party.config)(nodes=1, preset="low_latency")

    async def report(node: ClusterNode) -> None:
        await accuse(node, "c")

    party.meanwhile = {"a": report, "b": report}
    party.run(20)
    views = party.members("c")
    assert views[-2:] == [ABC, ABC]
