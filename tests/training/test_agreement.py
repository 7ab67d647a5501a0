"""Ranks that intend to do unlike things, and one that says what no correct rank says."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from experiments.clusters import ideal
from hcsim.collectives.group import Group
from hcsim.config import Training
from hcsim.errors import ConfigError
from hcsim.launch.virtual import simulate
from hcsim.training.trainer import Intent, agree


def errors(said: bytes) -> list[Any]:
    """What two ranks raise when the second one says this."""

    async def program(group: Group) -> None:
        if group.rank == 0:
            await agree(group, Intent(Training(task="convex"), 1, "digest"))
        length = await group.all_gather(np.array([len(said)]))
        await group.all_gather(np.frombuffer(said, np.uint8), [int(np.asarray(each)[0]) for each in length])

    return simulate(ideal(2, ()).scenario, program).results


def test_ranks_that_differ_are_told_in_what() -> None:
    said = msgspec.json.encode(Intent(Training(task="convex", steps=7), 1, "digest"), enc_hook=float)
    with pytest.raises(ConfigError, match=r"unlike settings: steps is .* on rank 0 and 7 on rank 1"):
        raise errors(said)[0]


@pytest.mark.parametrize("said", [b"[1]", b"null", b'"settings"', b"{", b"\xff", b"[" * 5000])
def test_what_cannot_be_read_is_told_as_such(said: bytes) -> None:
    with pytest.raises(ConfigError, match="what one of them has said cannot be read"):
        raise errors(said)[0]
