"""How messages travel between the members of a group."""

from __future__ import annotations

import msgspec

from hcsim.errors import UsageError

MAX_FRAME_BYTES = 16 * 2**20


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """How messages travel. All members must agree on it."""

    stripes: int = 1
    """Connections per peer; more can help on fast links with long round trips."""
    segment_bytes: int = 8 * 2**20
    """Large messages travel in pieces of this size: smaller overlaps better, larger costs less."""
    connect_timeout_s: float = 30.0
    """How long the peers of an operation have, from its beginning on, to be reached or to call."""

    def __post_init__(self) -> None:
        if self.stripes < 1 or not 0 < self.segment_bytes <= MAX_FRAME_BYTES or self.connect_timeout_s <= 0:
            raise UsageError(
                f"a wire has at least one stripe, segments of 1 to {MAX_FRAME_BYTES} bytes, and time to connect: {self}"
            )
