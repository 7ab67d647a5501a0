"""All probes, in the order of the table."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tests.torch_backend import probes_calls, probes_collectives, probes_groups, probes_shapes  # noqa: F401
from tests.torch_backend.probing import PROBES, try_all
from tests.torch_backend.ranks import Meeting

ROWS = tuple(dict.fromkeys(probe.row for probe in PROBES))


def try_everything(meeting: Meeting, backend: str, rows: Sequence[str] = ()) -> dict[tuple[str, str], str]:
    """On each rank: run the probes with that backend."""
    return try_all(msgspec.structs.replace(meeting, backend=backend), rows)
