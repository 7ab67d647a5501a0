"""Real machines with two cables between them, of which the one that comes first is slow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.real.namespaces import Machine, ip
from tests.real.together import members, together

pytestmark = pytest.mark.slow

SLOW_KBIT = 20_000


def second_cable(*ends: Machine) -> tuple[str, ...]:
    """A cable from machine to machine, beside the switch; returns its addresses."""
    one, other = ends
    ip("-n", one.namespace, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", other.namespace)
    addresses = tuple(f"10.98.0.{number}" for number in (1, 2))
    for machine, address in zip(ends, addresses, strict=True):
        ip("-n", machine.namespace, "addr", "add", f"{address}/24", "dev", "eth1")
        ip("-n", machine.namespace, "link", "set", "eth1", "up")
    return addresses


@pytest.mark.parametrize(("measure", "rate"), [("links", r"[\d.]+"), ("nothing", "–")])
def test_what_is_computed_goes_over_the_cable_that_was_measured_to_be_fast(
    tmp_path: Path, measure: str, rate: str
) -> None:
    with together(tmp_path, "ab") as cluster:
        a, b = cluster.lan["a"], cluster.lan["b"]
        cable = second_cable(a, b)
        cluster.lan.slow(SLOW_KBIT)
        cluster.write(2, 1_000_000, f'measure = "{measure}"')
        one, other = cluster.start("a", "b")
        one.says("training begins")
        (one if members(one)[0] == "a" else other).says("step 5 of")  # the first member tells of steps
        ends = cable if measure == "links" else (a.ip, b.ip)
        for names, (ours, theirs) in (("ab", ends), ("ba", ends[::-1])):
            out_of = re.escape(ours) if measure == "links" else "–"  # who measures nothing does not look where it goes
            row = [f"^ {names[0]}", names[1], out_of, re.escape(theirs), r"\w+", r"[\d.]+ (?:ms|µs|s)"]
            found = status_row(b, a.ip, rf"{' +'.join(row)} +({rate})")
            if measure == "links":
                assert float(found[1]) > 10 * SLOW_KBIT / 1e6, "Gb/s: no figure of the slow one"


def status_row(machine: Machine, peer: str, pattern: str) -> re.Match[str]:
    """The row that a peer's status has, once the nodes have told each other."""
    for _ in range(30):
        status = machine.hcsim("cluster", "status", "--peer", peer, "--look", "10 ms")
        assert status.ends() == 0, status.text
        if found := re.search(pattern, status.text, re.MULTILINE):
            return found
    raise AssertionError(status.text)
