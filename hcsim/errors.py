"""What can go wrong, and whose fault it is.

The class says who has to act: the person at the keyboard (`ConfigError`), the
programmer who called us (`UsageError`), we ourselves (`ChannelClosed`), the
other side (`RemoteProtocolError`, `PeerRefused`), or the world between us
(`ChannelBroken`, `DeadlineExceeded`). Foreign exceptions are translated into
these once, at the boundary where they enter.
"""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What comes of decoding bytes that are no message: they may also be no text, or nested without end."""


class HcsimError(Exception):
    """Everything that hcsim raises on purpose."""


class ConfigError(HcsimError):
    """A file or a flag that a person wrote cannot be used; the text says where and what would be valid."""


class UsageError(HcsimError, ValueError):
    """The calling code asked for something that has no meaning."""


class ChannelError(HcsimError):
    """A channel cannot carry this message. `peer` names the other end."""

    def __init__(self, message: str, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class ChannelClosed(ChannelError):
    """We closed this channel ourselves, and then used it."""


class ChannelBroken(ChannelError):
    """The world ended this channel: reset, crash, cable, end of stream."""


class RemoteProtocolError(ChannelError):
    """The peer sent bytes that no correct peer sends. The channel is closed."""


class PeerRefused(ChannelError):
    """Nobody listens there, or the peer answered and said no."""


class GradientsRefused(PeerRefused):
    """The parameter server took none of a worker's last gradients: it is not well, or this worker is not."""


class AdmissionRefused(PeerRefused):
    """We and the peer do not take each other for members of one cluster. `reason` is one of `identity.reasons`."""

    def __init__(self, message: str, peer: str = "", reason: str = "") -> None:
        super().__init__(message, peer)
        self.reason = reason


class DeadlineExceeded(HcsimError, TimeoutError):
    """Something took longer than it was allowed to."""


class CollectiveError(HcsimError):
    """A collective ended without a result, on this rank, for the named reason.

    `peer` is the rank that was waited for or that failed (None when it is not known),
    `phase` what was being done with it.
    """

    def __init__(self, message: str, *, peer: int | None = None, phase: str = "") -> None:
        super().__init__(message)
        self.peer = peer
        self.phase = phase


class CollectiveTimeout(CollectiveError, DeadlineExceeded):
    """A collective's deadline passed."""


class Deadlock(HcsimError):
    """The virtual world has nothing left to do and tasks still wait; the text names each."""


class CompressionError(HcsimError):
    """A tensor cannot be encoded, or a payload is not what the tensor's compressor sends. `tensor` names it."""

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(f"{tensor}: {message}")
        self.tensor = tensor


class NotFinite(CompressionError):
    """A tensor has a NaN or an infinity, here or on another rank, or its sum has. After an exchange all ranks know."""


class TrainingError(HcsimError):
    """Training cannot go on, whoever takes part; the text names the node, the step and the tensor."""


class Diverged(TrainingError):
    """Replicas that must be alike are not: memory or arithmetic failed on a machine."""


class CheckpointError(HcsimError):
    """A checkpoint cannot be written, or what is there is not a whole one; the text says what is missing or damaged."""


class NoCheckpoint(CheckpointError):
    """There is nothing of a checkpoint at all: training begins."""


class CallRefused(HcsimError):
    """The other side does not do a remote call: no such function, wrong arguments, too large, too many."""


class RemoteError(HcsimError):
    """A function failed at the other side with an error that is not one of ours; `kind` is its class there."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class WorkerLost(HcsimError):
    """Something could not be finished because a worker has died, left or stayed silent; the text names it."""
