"""Members say the same to everybody, or it is found who does not."""

from __future__ import annotations

import numpy as np
import pytest

from hcsim.collectives.group import Group
from hcsim.config import Misbehave
from hcsim.training.elastic.transfer import Contradiction, gather_echoed
from hcsim.units import PositiveShare, Seconds


async def hear(group: Group) -> object:
    """What all say, or why they cannot go on."""
    await group.barrier()
    try:
        return [int(words[0]) for words in await gather_echoed(group, np.array([10 * group.rank], np.int64))]
    except Contradiction as error:
        return error


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_everybody_hears_what_each_says(virtual, count):
    assert virtual.run(count, hear) == [[10 * rank for rank in range(count)]] * count


@pytest.mark.parametrize("count", [3, 4, 5])
@pytest.mark.parametrize("share", [0.7, 1.0])
@pytest.mark.parametrize("liar", [0, 1, 2])
def test_whoever_tells_each_something_else_is_in_all_that_is_found(virtual, count, share, liar):
    fault = Misbehave(at_s=Seconds(0), node=f"mac-{liar}", how="noise", share=PositiveShare(share))
    results = virtual.outcome(count, hear, faults=[fault]).results
    errors = [each for each in results if isinstance(each, Contradiction)]
    assert errors
    for error in errors:
        assert all(liar in (doubt.witness, doubt.accused) for doubt in error.doubts)
