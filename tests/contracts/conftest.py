"""One body, two worlds: the `arena` fixture runs a test body on a pair of hosts of either world, over every carrier.

A body is `async def body(left, right)` and never learns where it runs.
"""

from __future__ import annotations

import pytest

from hcsim.selftest.arena import ARENAS, Arena

EVERY_DAY = ("real", "virtual")
"""One of each world; the other carriers are slow."""


@pytest.fixture(params=[pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.slow) for name in ARENAS])
def arena(request: pytest.FixtureRequest) -> Arena:
    return ARENAS[request.param]()
