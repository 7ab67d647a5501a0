"""Inputs that are nearly right are refused or taken by everything that reads bytes from outside."""

from __future__ import annotations

import pytest

from experiments.hostile.campaign import Shard, Tally, by_name, one_input, run_shard, shards
from experiments.hostile.parsers import Finding, pure

INPUTS = {name: 40 if "port" in name else 300 for name in by_name()}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", INPUTS)
def test_a_parser_takes_or_refuses_all(name: str) -> None:
    tally = run_shard(Shard(name, 7, 0, INPUTS[name]))
    assert not tally.findings
    assert (tally.inputs, tally.refused + tally.accepted) == (INPUTS[name], INPUTS[name])
    assert tally.refused > 0


@pytest.mark.parametrize("name", [name for name in INPUTS if "port" not in name])
def test_what_is_right_is_taken(name: str) -> None:
    parser = by_name()[name]
    with parser.open() as parse:
        for data in parser.valid:
            parse(data)


def test_an_input_follows_from_its_number() -> None:
    first, again = (one_input(Shard("trust list", 7, number, number + 1))[0] for number in (3, 3))
    assert first == again != one_input(Shard("trust list", 8, 3, 4))[0]


def test_every_input_is_dealt_out_once() -> None:
    dealt = shards(["phrase", "scenario"], 1, 30_000)
    assert sum(shard.last - shard.first for shard in dealt) == 30_000
    assert len({(shard.name, shard.first) for shard in dealt}) == len(dealt)


def test_other_errors_and_strange_numbers_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(data: bytes) -> None:
        if len(data) < 4:
            raise IndexError
        if data[0] > 127:
            raise Finding("strange")

    known = {**by_name(), "bad": pure("bad", [b"abcdefgh"], parse)}
    monkeypatch.setattr("experiments.hostile.campaign.by_name", lambda: known)
    tally = run_shard(Shard("bad", 7, 0, 300))
    assert sorted(what.partition(" ")[0] for what in tally.findings) == ["IndexError", "strange"]
    assert tally.plus(Tally(findings={"strange": (0, 2)})).findings["strange"][0] == 0
    assert tally.accepted > 0
