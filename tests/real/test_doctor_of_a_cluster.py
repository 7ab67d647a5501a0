"""`hcsim doctor --cluster` asks the members of a running cluster."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.real.namespaces import Machine
from tests.real.together import SLOW_KBIT, together

pytestmark = pytest.mark.slow


TRIES = 30
"""Members that know each other's addresses train before they have announced themselves."""


def examined(machine: Machine, *more: str) -> tuple[list[dict[str, object]], dict[str, str]]:
    """What the members told, and the worst state of each check, once all have announced themselves."""
    for _ in range(TRIES):
        asking = machine.hcsim("doctor", "--cluster", "--json", *more)
        status = asking.ends()
        read = msgspec.json.decode(asking.text[asking.text.index("{") :])
        between = {each["check"]: each["state"] for each in read["between"]}
        if status == 0 and between["multicast"] != "skipped":
            break
    assert status == 0, asking.text
    return read["members"], between


@pytest.mark.parametrize("multicast", [True, False])
def test_members_are_compared_and_those_that_do_not_hear_each_other_are_named(tmp_path: Path, multicast: bool) -> None:
    with together(tmp_path, "abc") as cluster:
        addresses = [machine.ip for machine in cluster.lan]
        if not multicast:
            for machine in cluster.lan:
                machine.drop_multicast()
        cluster.write(3, 100_000, f"peers = {addresses}")
        processes = cluster.start("a", "b", "c")
        processes[0].says("training begins")
        cluster.lan.slow(SLOW_KBIT)
        members, between = examined(cluster.lan["a"], *([] if multicast else ["--peer", addresses[1]]))
        assert sorted(str(each["name"]) for each in members) == ["a", "b", "c"]
        assert all(each["facts"]["versions"]["hcsim"] for each in members)  # type: ignore[index]
        well = dict.fromkeys(("versions", "clocks", "multicast", "connections"), "good")
        assert between == (well if multicast else well | {"multicast": "warning"})


def test_where_nothing_runs_that_is_told_in_a_line(tmp_path: Path) -> None:
    with together(tmp_path, "a") as cluster:
        asking = cluster.lan["a"].hcsim("doctor", "--cluster", "--look", "10 ms")
        assert asking.ends() == 1
        assert "no node of the cluster 'home' answers" in asking.text
        assert "Traceback" not in asking.text
