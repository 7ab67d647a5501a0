"""The DDP benchmark: what it says without root, and that it notices ranks that disagree."""

from __future__ import annotations

import os
import re

import pytest
import typer
from typer.testing import CliRunner

from experiments.ddp import __main__ as ddp
from experiments.ddp.loopback import Measured, check
from experiments.ddp.steps import Timed
from experiments.peers.crew import TeamFailed


def _timed(*durations_s: float, checksum: float = 1.0) -> Timed:
    return Timed(list(durations_s), list(durations_s), checksum)


def test_a_step_takes_as_long_as_its_slowest_rank_and_the_cpu_time_of_all() -> None:
    measured = Measured()
    measured.add([_timed(1.0, 5.0), _timed(2.0, 3.0)])
    assert measured.durations_s == [2.0, 5.0]
    assert measured.cpu_s == [3.0, 8.0]


@pytest.mark.parametrize(
    ("hcsim", "gloo", "word"),
    [((1.0, 2.0), (1.0, 1.0), "unlike parameters"), ((1.0, 1.0), (1.1, 1.1), "add up to")],
)
def test_results_that_differ_are_not_compared(hcsim: tuple[float, ...], gloo: tuple[float, ...], word: str) -> None:
    sums = {"hcsim": hcsim, "gloo": gloo}
    with pytest.raises(TeamFailed, match=word):
        check({backend: [_timed(1.0, checksum=each) for each in values] for backend, values in sums.items()})


def test_without_root_there_are_no_shaped_links_and_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    app = typer.Typer()
    app.command()(ddp.main)
    result = CliRunner().invoke(app, ["--shaped"])
    assert result.exit_code == 2
    assert re.search("only for root|only on Linux|iproute2", result.output)
