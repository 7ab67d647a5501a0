"""What all faults share."""

from __future__ import annotations

from hcsim.config.table import Table
from hcsim.units import Seconds


class Fault(Table, frozen=True, tag_field="kind"):
    """An entry of a scenario's list: what happens, and when."""

    at_s: Seconds

    @property
    def is_for_good(self) -> bool:
        """Whether it could end and does not: it has a `duration`, and none is given."""
        return getattr(self, "duration_s", 0.0) is None

    @property
    def over_s(self) -> float:
        """When the last thing happens that the fault does by itself: its end, or its start if it never ends."""
        return self.at_s + sum(getattr(self, name, None) or 0.0 for name in ("duration_s", "down_s", "slow_for_s"))
