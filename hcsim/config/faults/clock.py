"""What happens to a machine's clock."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from hcsim.config.faults.fault import Fault
from hcsim.units import PositiveSeconds, SignedSeconds


class ClockJump(Fault, frozen=True, tag="clock_jump"):
    """The node's clock is set forwards or backwards; at 0 s: it is wrong from the start."""

    node: str
    by_s: SignedSeconds


class ClockDrift(Fault, frozen=True, tag="clock_drift"):
    """The node's clock runs at another rate: 1.01 gains a second in a hundred."""

    node: str
    rate: Annotated[float, Meta(ge=0.5, le=2.0)]
    duration_s: PositiveSeconds | None = None
    """None: for good."""
