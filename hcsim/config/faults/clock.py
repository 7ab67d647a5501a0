"""What happens to a machine's clock."""

from __future__ import annotations

from hcsim.config.faults.fault import Fault
from hcsim.units import SignedSeconds


class ClockJump(Fault, frozen=True, tag="clock_jump"):
    """The node's clock is set forwards or backwards."""

    node: str
    by_s: SignedSeconds
