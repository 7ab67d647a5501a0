"""What goes wrong in a run, as an explicit list: a failing one can be shortened."""

from __future__ import annotations

from typing import TypeAlias

from hcsim.config.table import Table
from hcsim.errors import UsageError
from hcsim.units import BitRate, PositiveSeconds, PositiveShare, Seconds, Share, SignedSeconds


class _Fault(Table, frozen=True, tag_field="kind"):
    at_s: Seconds


class Crash(_Fault, frozen=True, tag="crash"):
    """The node is gone; `clean`: its connections are reset, otherwise they fall silent."""

    node: str
    clean: bool = False


class Pause(_Fault, frozen=True, tag="pause"):
    """The node is alive and does nothing."""

    node: str
    duration_s: PositiveSeconds


class Partition(_Fault, frozen=True, tag="partition"):
    """Nothing passes between the two sides; `oneway`: nothing from the first to the second."""

    sides: tuple[tuple[str, ...], tuple[str, ...]]
    duration_s: PositiveSeconds
    oneway: bool = False

    def __post_init__(self) -> None:
        if not all(self.sides) or any(node in self.sides[1] for node in self.sides[0]):
            raise UsageError("the two sides of a partition need nodes, and no node can be on both")


class LinkChange(_Fault, frozen=True, tag="link_change"):
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


class Reset(_Fault, frozen=True, tag="reset"):
    """The connections between two nodes are reset; `mid_frame`: when part of a frame has arrived."""

    between: tuple[str, str]
    mid_frame: bool = True


class ClockJump(_Fault, frozen=True, tag="clock_jump"):
    """The node's clock is set forwards or backwards."""

    node: str
    by_s: SignedSeconds


class Throttle(_Fault, frozen=True, tag="throttle"):
    """The node computes at a part of its speed."""

    node: str
    factor: PositiveShare
    duration_s: PositiveSeconds


AnyFault: TypeAlias = Crash | Pause | Partition | LinkChange | Reset | ClockJump | Throttle
