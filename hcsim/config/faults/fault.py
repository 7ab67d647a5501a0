"""What all faults share."""

from __future__ import annotations

from hcsim.config.table import Table
from hcsim.units import Seconds


class Fault(Table, frozen=True, tag_field="kind"):
    """An entry of a scenario's list: what happens, and when."""

    at_s: Seconds
