"""A worker, as the server knows it."""

from __future__ import annotations

import msgspec

from hcsim.training.parameter_server.messages import Await, Pull, Verdict
from hcsim.training.parameter_server.policy import Policy

NEVER_S = float("inf")


class Member(msgspec.Struct):
    """A worker that has called, or that is expected to."""

    life: int | None = None
    """None: it has not called this server yet."""
    contributes: bool = True
    """It will push; False once it has said that it will not."""
    awaited: bool = True
    """The others wait for it."""
    gone: bool = False
    """It has left after the end, with all it wanted."""
    connected: bool = False
    lost_s: float = 0.0
    """Since when it is not connected, if it is not."""
    heard_s: float = 0.0
    """When it last said something; at first, when it was expected."""
    told_s: float = 0.0
    """When it last asked something, or was told to wait."""
    asked: Pull | Await | None = None
    """What it waits for, beside the answer to a push."""
    answered: int = 0
    """The number of its last push that was answered, and how."""
    verdict: Verdict | None = None
    answered_life: int | None = None
    """In which life it pushed that."""
    accepted: int = 0
    """How many of its pushes have counted."""
    pace: int = 0
    """The same, for comparing: whoever comes, or comes back, starts from the slowest of the others."""
    samples: int | None = None
    """In its last push."""

    def absent_s(self, policy: Policy) -> float:
        """When the others stop waiting for it, if it stays silent."""
        if not self.connected:
            return self.lost_s + (policy.deadline_s if self.life is None else policy.grace_s)
        if policy.mode == "sync" or self.asked is not None:
            return NEVER_S  # the round's deadline decides; or it is we who keep it waiting
        return self.heard_s + policy.deadline_s
