"""What all faults share."""

from __future__ import annotations

from hcsim.config.table import Table
from hcsim.units import Seconds


class Fault(Table, frozen=True, tag_field="kind"):
    """An entry of a scenario's list: what happens, and when."""

    at_s: Seconds

    @property
    def over_s(self) -> float:
        """When all of it has happened, also its end if it has one."""
        return self.at_s + sum(getattr(self, name, None) or 0.0 for name in ("duration_s", "down_s", "slow_for_s"))
