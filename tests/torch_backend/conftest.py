from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torch_backend.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Rank processes, started when the first test needs them."""
    processes = Ranks()
    yield processes
    processes.close()
