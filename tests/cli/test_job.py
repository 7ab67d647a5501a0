"""The job that `hcsim run` does: its check notices what is wrong, and holds for many ranks."""

from __future__ import annotations

import re

import numpy as np
import pytest
from msgspec.structs import replace

from experiments.clusters import ideal
from hcsim.collectives.group import Group
from hcsim.config import ClockJump, Job
from hcsim.errors import ConfigError
from hcsim.jobs import JobRepeat, check_job, compare_to_expected, run_job
from hcsim.launch.virtual import simulate
from hcsim.units import Bytes, Seconds


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_sum_is_exact_in_narrow_dtypes_on_any_number_of_ranks(ranks: int, dtype: str) -> None:
    job = Job(size_bytes=Bytes(2000), repeat=1, dtype=dtype)  # type: ignore[arg-type]

    async def program(group: Group) -> list[JobRepeat]:
        return await run_job(group, job, lambda lap: None)

    reports = simulate(ideal(ranks, ()).scenario, program).values()
    assert [lap.wrong for lap in reports[0]] == [0]
    assert all(report == reports[0] for report in reports)


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (
            Job(size_bytes=Bytes(3)),
            'job.size = "3 B": no whole number of float32, which have 4 B each; 0 B and 4',
        ),
        (Job(size_bytes=Bytes(1004), dtype="float64"), "1000 B and 1008 B are"),
        (Job(size_bytes=Bytes(10**30)), "more than can be addressed"),
        (Job(size_bytes=Bytes(10**30), payload="phantom"), "more than can be addressed"),
        (Job(algorithm="rign"), "did you mean ring?"),
    ],
)
def test_a_job_that_cannot_be_as_it_is_written_is_refused(job: Job, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        check_job(job)


@pytest.mark.parametrize(
    "job",
    [
        Job(size_bytes=Bytes(0)),
        Job(size_bytes=Bytes(1000), dtype="float64"),
        Job(size_bytes=Bytes(3), dtype="uint8"),
        Job(size_bytes=Bytes(3), payload="phantom"),
    ],
)
def test_a_job_of_whole_elements_or_of_bytes_without_any_is_not_refused(job: Job) -> None:
    check_job(job)


def test_setting_a_clock_in_the_middle_changes_no_figure() -> None:
    home = ideal(3, ()).scenario
    node = home.nodes[1].name
    ahead = ClockJump(at_s=Seconds(0.001), node=node, by_s=Seconds(3600.0))
    job = Job(size_bytes=Bytes(4_000_000), repeat=2)

    async def program(group: Group) -> tuple[list[JobRepeat], object]:
        return await run_job(group, job, lambda lap: None), await group.measure()

    quiet, disturbed = simulate(home, program), simulate(replace(home, faults=(ahead,)), program)
    assert disturbed.seconds > 0.001
    assert disturbed.values() == quiet.values()


def test_every_wrong_element_is_counted_and_changes_the_digest() -> None:
    right = np.arange(1000, dtype=np.float32)
    wrong = right.copy()
    wrong[[3, 999]] += 1
    assert compare_to_expected([right], [right])[0] == 0
    assert compare_to_expected([wrong, right], [right, right])[0] == 2
    assert compare_to_expected([wrong], [right])[1] != compare_to_expected([right], [right])[1]
