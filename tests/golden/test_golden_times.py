"""What the model says today about every shipped scenario, kept in `times.json`.

A change of these figures may be right, but never goes unnoticed. Then write them anew:
`python tests/golden/test_golden_times.py > tests/golden/times.json`
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from hcsim import Group, Options, Phantom, simulate
from hcsim.config import shipped_scenarios

KEPT = Path(__file__).with_name("times.json")
ALGORITHMS = ("ring", "tree", "centralized", "direct", "halving_doubling")


def times_s(scenario: str) -> dict[str, float]:
    """How long an all_reduce of 4 MB takes, by algorithm, on warm connections."""

    async def program(group: Group) -> list[float]:
        loop = asyncio.get_running_loop()
        found = []
        for algorithm in ALGORITHMS:
            for _ in range(2):
                await group.barrier()
                started_s = loop.time()
                await group.all_reduce(Phantom(4_000_000), algorithm=algorithm)
            found.append(loop.time() - started_s)
        return found

    ranks = simulate(scenario, program, options=Options(timeout_s=300.0)).values()
    return {name: round(max(found), 6) for name, found in zip(ALGORITHMS, zip(*ranks, strict=True), strict=True)}


@pytest.mark.parametrize("scenario", shipped_scenarios())
def test_the_model_says_what_it_said(scenario):
    assert times_s(scenario) == pytest.approx(json.loads(KEPT.read_text())[scenario], rel=1e-4)


if __name__ == "__main__":
    print(json.dumps({scenario: times_s(scenario) for scenario in shipped_scenarios()}, indent=2))
