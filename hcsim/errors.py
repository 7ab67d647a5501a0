"""The exceptions of hcsim, by cause.

The class tells who has to act: the user (`ConfigError`), the calling code (`UsageError`), hcsim itself
(`ChannelClosed`), the peer (`RemoteProtocolError`, `PeerRefused`), or none of them, since the network or a
machine failed (`ChannelBroken`, `DeadlineExceeded`). Exceptions of other libraries are translated into
these once, at the boundary where they enter.
"""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of decoding bytes that are not a message: they may also be invalid text, or nested without
end."""


class HcsimError(Exception):
    """The base class of all exceptions that hcsim raises on purpose."""


class ConfigError(HcsimError):
    """A file or a command-line argument cannot be used. The text says where the problem is and what would be
    valid."""


class UsageError(HcsimError, ValueError):
    """The calling code requested something that has no meaning."""


class ChannelError(HcsimError):
    """A channel cannot carry this message. `peer` names the other end."""

    def __init__(self, message: str, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class ChannelClosed(ChannelError):
    """The channel was used after this side had closed it."""


class ChannelBroken(ChannelError):
    """The channel ended for an external reason: reset, crash, cable, end of stream."""


class RemoteProtocolError(ChannelError):
    """The peer sent bytes that no correct peer sends. The channel is closed."""


class PeerRefused(ChannelError):
    """There is no listener, or the peer answered with a refusal."""


class WrongPeer(PeerRefused):
    """Another node than the wanted one answers at this address; `identity` is the id that it has proved."""

    def __init__(self, message: str, peer: str = "", identity: str = "") -> None:
        super().__init__(message, peer)
        self.identity = identity


class GradientsRefused(PeerRefused):
    """The parameter server accepted none of a worker's last gradients: the server is faulty, or the worker is."""


class AdmissionRefused(PeerRefused):
    """This side and the peer do not accept each other as members of one cluster. `reason` is one of
    `identity.trust_list.RefusalReason`."""

    def __init__(self, message: str, peer: str = "", reason: str = "") -> None:
        super().__init__(message, peer)
        self.reason = reason


class DeadlineExceeded(HcsimError, TimeoutError):
    """An operation exceeded its time limit."""


class CollectiveError(HcsimError):
    """A collective ended without a result, on this rank, for the named reason.

    `peer` is the rank that was waited for or that failed (None if it is not known). `phase` is the state of the
    exchange with it."""

    def __init__(self, message: str, *, peer: int | None = None, phase: str = "") -> None:
        super().__init__(message)
        self.peer = peer
        self.phase = phase


class CollectiveTimeout(CollectiveError, DeadlineExceeded):
    """A collective's deadline passed."""


class Deadlock(HcsimError):
    """The virtual world has no events left and tasks still wait. The text names each task."""


class CompressionError(HcsimError):
    """A tensor cannot be encoded, or a payload is not valid for the tensor's compressor. `tensor` names the
    tensor."""

    def __init__(self, message: str, tensor: str) -> None:
        super().__init__(f"{tensor}: {message}")
        self.tensor = tensor


class NotFinite(CompressionError):
    """A tensor or its sum has a NaN or an infinity, on this rank or another. After an exchange all ranks know."""


class TrainingError(HcsimError):
    """Training cannot go on with any set of members. The text names the node, the step and the tensor."""


class Diverged(TrainingError):
    """Replicas that must be equal are not: memory or arithmetic failed on a machine."""


class CheckpointError(HcsimError):
    """A checkpoint cannot be written, or an existing one is incomplete. The text says what is missing or damaged."""


class NoCheckpoint(CheckpointError):
    """There is no checkpoint at all: training begins."""


class CallRefused(HcsimError):
    """The peer rejected a remote call: no such function, wrong arguments, too large, too many."""


class RemoteError(HcsimError):
    """A remote function failed with an error that is not an `HcsimError`; `kind` is its class there."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class WorkerLost(HcsimError):
    """A task cannot be finished because a worker has died, left or stayed silent. The text names the worker."""
