"""What a torch program sees when a call fails: torch's own kind of error, which says whose fault it was."""

from __future__ import annotations

from torch.distributed import DistBackendError

from hcsim.errors import CollectiveError, CollectiveTimeout, DeadlineExceeded, UsageError


class CallFailed(DistBackendError):
    """A call on a group failed, and the group with it: destroy the process group, and make a new one of who is left."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        """The rank, in the whole program, that it failed at, where that is known."""


class CallTimedOut(CallFailed):
    """It took longer than the group's timeout, or than the call's own."""


_WHAT_TO_DO = " (this group has ended: destroy_process_group(), then init_process_group() with whoever is left)"


def translated(error: BaseException) -> BaseException:
    """The error as torch's users expect it."""
    if isinstance(error, UsageError):
        return ValueError(str(error))
    peer = error.peer if isinstance(error, CollectiveError) else None
    if isinstance(error, CollectiveTimeout):
        return CallTimedOut(str(error) + _WHAT_TO_DO, peer)
    if isinstance(error, CollectiveError):
        return CallFailed(str(error) + _WHAT_TO_DO, peer)
    if isinstance(error, DeadlineExceeded):
        return CallTimedOut(str(error))
    if isinstance(error, Exception):
        return CallFailed(str(error) or repr(error))
    return error
