"""When a push counts, and for whom the server waits."""

from __future__ import annotations

from typing import Literal

import msgspec

from hcsim.errors import UsageError


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """What a parameter server allows its workers."""

    mode: Literal["sync", "bounded", "async"] = "sync"
    """sync: one update per round of all. bounded: one per push, of a model not too old. async: one per push."""
    staleness: int = 0
    """bounded: how many updates a push may lag behind, and how many pushes a worker may be ahead of the slowest.
    Higher wastes less work on unlike machines, and learns from older gradients. Among N workers that keep
    pace every push lags N - 1 updates, so a lower bound than that refuses many."""
    quorum: int = 1
    """sync: a round that does not wait any longer needs so many pushes, unless fewer workers are left. Lower
    survives more losses; higher keeps a cut-off few from training on alone."""
    deadline_s: float = 30.0
    """How long a worker may keep the others waiting: in a round after its first push, or in silence."""
    grace_s: float = 1.0
    """How long a worker whose connection is lost is waited for, in the hope that it calls again."""
    patience_s: float = 60.0
    """The end of all waiting: how long there may be no update, or no answer, before one gives up with an error."""
    linger_s: float = 30.0
    """How long the server stays at the end for a worker that it last heard so long ago, or since then. Higher lets a
    slow worker finish what it computes and fetch the final model; lower ends sooner after a silent crash."""

    def __post_init__(self) -> None:
        times = (self.deadline_s, self.grace_s, self.patience_s, self.linger_s)
        if self.quorum < 1 or self.staleness < 0 or not all(0 < seconds < float("inf") for seconds in times):
            raise UsageError(f"a quorum is at least 1, a staleness at least 0, and times are positive: {self}")

    @property
    def silence_s(self) -> float:
        """After this much of it a connection is taken for dead: whoever waits is told so at every deadline."""
        return 2 * self.deadline_s
