"""What happens to data: on their way, past every checksum of the network, or where they are computed."""

from __future__ import annotations

from typing import Literal, TypeAlias

from hcsim.config.faults.fault import Fault
from hcsim.config.table import Count
from hcsim.errors import UsageError
from hcsim.units import PositiveBytes, PositiveSeconds, PositiveShare

_LONGEST_FRAME_BYTES = 2**32 - 1
"""Its header says its length in 32 bits."""


class FlippedBit(Fault, frozen=True, tag="flipped_bit"):
    """One bit of the next payload from the first node to the second is changed on its way."""

    between: tuple[str, str]
    of: Literal["data", "control", "any"] = "data"
    """Which frames: segments of tensors, messages of other components, or whichever comes next."""


class WrongSize(Fault, frozen=True, tag="wrong_size"):
    """The first node sends the second one a segment that is shorter than it should be, or `longer`."""

    between: tuple[str, str]
    by_bytes: PositiveBytes = PositiveBytes(4)
    longer: bool = False

    def __post_init__(self) -> None:
        if self.by_bytes > _LONGEST_FRAME_BYTES:
            raise UsageError(f"by ({self.by_bytes} B) is more than any segment has: at most {_LONGEST_FRAME_BYTES} B")


class StaleStep(Fault, frozen=True, tag="stale_step"):
    """The first node sends the second one a segment of an earlier step again, instead of the right one."""

    between: tuple[str, str]


class NanGradient(Fault, frozen=True, tag="nan_gradient"):
    """One number among the gradients that the node computes is not a number."""

    node: str
    nth: Count = 1
    """Which block's gradients, counted from the time of the fault."""


Misbehaviour: TypeAlias = Literal[
    "duplicate", "other_epoch", "old_epoch", "huge_operation", "huge_step", "huge_offset", "giant_total", "unasked",
    "raw_bytes", "wrong_signature", "short", "noise", "lie",
]  # fmt: skip
"""How a member can break the protocol; docs/reference/scenarios.md says what each one is."""


class Misbehave(Fault, frozen=True, tag="misbehave"):
    """A member breaks the protocol in what it sends: in frames of data, or for `lie` in messages about membership."""

    node: str
    how: Misbehaviour
    to: str | None = None
    """Who gets such frames; left out: everybody."""
    share: PositiveShare = PositiveShare(1)
    """How many of the frames that this can be done to."""
    duration_s: PositiveSeconds | None = None
    """None: for good, also after a restart."""
