"""What happens between machines."""

from __future__ import annotations

from hcsim.config.faults.fault import Fault
from hcsim.errors import UsageError
from hcsim.units import BitRate, PositiveSeconds, Seconds, Share


class Partition(Fault, frozen=True, tag="partition"):
    """Nothing passes between the two sides; `oneway`: nothing from the first to the second."""

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    duration_s: PositiveSeconds
    oneway: bool = False

    def __post_init__(self) -> None:
        if not all(self.sides) or any(node in self.sides[1] for node in self.sides[0]):
            raise UsageError("the two sides of a partition need nodes, and no node can be on both")


class LinkChange(Fault, frozen=True, tag="link_change"):
    """A medium, or one node's attachment to it, gets other properties."""

    medium: str
    node: str | None = None
    rate_bps: BitRate | None = None
    latency_s: Seconds | None = None
    loss: Share | None = None
    duration_s: PositiveSeconds | None = None
    """None: for good."""

    def __post_init__(self) -> None:
        if self.rate_bps is None and self.latency_s is None and self.loss is None:
            raise UsageError("a link_change needs at least one of rate, latency and loss")


class Reset(Fault, frozen=True, tag="reset"):
    """The connections between two nodes are reset; `mid_frame`: when part of a frame has arrived."""

    between: tuple[str, str]
    mid_frame: bool = True
