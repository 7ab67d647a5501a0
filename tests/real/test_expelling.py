"""Who belongs to a real cluster while it trains: a machine joins by an invitation, and one is expelled for good."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hcsim.real.keys import load_node_key, load_trust
from tests.real.namespaces import Machine
from tests.real.together import SLOW_KBIT, members, together


def done(machine: Machine, *arguments: str, typed: str | None = None, status: int = 0) -> str:
    process = machine.hcsim("cluster", *arguments, typed=typed)
    assert process.ends() == status, process.text
    assert "Traceback" not in process.text
    return process.text


@pytest.mark.soak
def test_one_joins_by_an_invitation_and_one_is_expelled_while_they_train(tmp_path: Path) -> None:
    with together(tmp_path, "abnx") as cluster:
        a, b, n, x = (cluster.lan[name] for name in "abnx")
        (n.folder / "clusters" / "home").unlink()
        cluster.write(3, 100_000)
        at_a, at_b, at_x = cluster.start("a", "b", "x")
        at_a.says("training begins")
        b.slow(SLOW_KBIT)

        # The newcomer joins while they train, and takes part; the invitation is over then.
        inviting = b.hcsim("cluster", "invite")
        inviting.says("only while this command runs")
        text = next(line for line in inviting.lines if re.fullmatch(r"(\w{5}-){5}\w{5}", line))
        assert "is now in the cluster" in done(n, "join", typed=text + "\n")
        assert inviting.ends() == 0
        assert "nobody on the local network waits" in done(
            x, "join", "--name", "b", "--look", "1 s", typed=text, status=1
        )
        (at_n,) = cluster.start("n")
        at_a.says("n joined")

        # One is expelled, by a member: it is left out at once, told why, and nobody takes it back.
        seen = len(at_a.lines)
        said = done(b, "expel", "x")
        assert "x is expelled" in said
        at_a.says(r"view \d+: [abn, ]+ \(x .*: it was expelled", seen)
        at_x.says("refused us: this machine was expelled from the cluster.*node_key.*hcsim cluster invite")
        at_a.says("we refused x .*: it was expelled from the cluster", seen)
        assert sorted(members(at_a)) == ["a", "b", "n"]
        lists = [load_trust(machine.folder, "home", "") for machine in (a, b, n)]
        assert len({each.digest for each in lists}) == 1
        assert load_node_key(x.folder).node_id in lists[0].list.expelled
        at_x.kill()

        # Nor with a new key, made of the old phrase.
        (x.folder / "node_key").unlink()
        (x.folder / "clusters" / "home.trust").unlink()
        (again,) = cluster.start("x")
        again.says("our key is not on the cluster's trust list: run `hcsim cluster invite`")
        at_a.says("its key is not on the cluster's trust list: run `hcsim cluster invite`", seen)
        assert sorted(members(at_a)) == ["a", "b", "n"]
        assert at_n.running
        assert not [
            line for process in (at_a, at_b, at_n, at_x, again) for line in process.lines if "Traceback" in line
        ]
