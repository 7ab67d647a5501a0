"""Names and reasons of other machines, as a person sees them: nothing for a terminal to obey, no endless line."""

from __future__ import annotations

import pytest

from hcsim.cli import membership, screen
from hcsim.cluster.membership_source import NodeInfo
from hcsim.cluster.messages import Goodbye, LinkStatus, Status, StatusReply
from hcsim.cluster.node import ClusterNode
from hcsim.cluster.view import Member, View
from hcsim.transport.admission_queue import LONGEST_LINE, one_line
from hcsim.virtual.host import VirtualHost
from tests.cluster.nodes import Party

EVIL = "\x1b[2J\x1b]0;owned\x07\r\u202eevil\x9b31m\nview 9: forged"
NAMES = [EVIL, "x" * 10_000]


def is_harmless(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


class Named(Party):
    """Host b has a name of its own choice."""

    name = ""

    def node(self, host: VirtualHost) -> ClusterNode:
        name = self.name if host.name == "b" else host.name
        boot = host.rng("boot").getrandbits(47)
        me = NodeInfo(host.name, boot, name, f"{host.name}:52415", f"{host.name}:52416")
        return ClusterNode(host, me, self.config, lambda what: self.told.append((host.name, what)))


@pytest.mark.parametrize("name", NAMES, ids=["escapes", "long"])
def test_what_a_node_tells_of_a_member_is_one_harmless_line(name: str) -> None:
    party = Named("abc")
    party.name = name

    async def go(node: ClusterNode) -> None:
        view = await node.view(-1)
        node.broken(view.epoch, 0, f"because {name}")
        await node.view(view.epoch)
        await node.leave()
        await node.stop(f"reason {name}")

    party.meanwhile = {"b": go}
    party.run(8)
    told = [what for host, what in party.told if host in "ac"]
    assert any(name[-6:] in what or "xxx" in what for what in told)
    assert all(is_harmless(what) and "\n" not in what and len(what) <= LONGEST_LINE + 1 for what in told)


@pytest.mark.parametrize("name", NAMES, ids=["escapes", "long"])
def test_what_the_screen_shows_is_harmless(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    member = Member("0" * 32, 1, name, "10.0.0.1:52416")
    status = Status(member, "10.0.0.1:52415", "0", 1, 1, True, reason=name)
    link = LinkStatus("1" * 32, name, "10.0.0.2:52415", "10.0.0.2:52415", None, name)
    told = StatusReply(status, View("0", 1, (member,), formed=True, reason=name), (link,), ())
    membership.show_rows(("machine", "node", "", "view", "members", "addresses"), [membership.node_row(told)])
    membership.show_rows(
        ("from", "to", "out of", "into", "medium", "round trip", "Gb/s", ""), [membership.link_row(told, link, {})]
    )
    for show in (screen.note, screen.say, screen.complain):
        show(Goodbye(name).reason)
    with screen.ProgressLine("step", 3) as progress:
        progress.news(name)
        progress.waiting([name])
    shown = "".join(capsys.readouterr())
    assert shown
    assert is_harmless(shown)
    assert len(shown) < 100_000


def test_a_line_says_that_it_was_cut() -> None:
    assert one_line("a\nb\x1bc") == "a b?c"
    assert one_line("x" * 20, 10) == "x" * 10 + "…"
