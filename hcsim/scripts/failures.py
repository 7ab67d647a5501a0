"""What has gone wrong, in words: errors of the simulator's side, as they reach a rank, and the ends of processes."""

from __future__ import annotations

import signal

from hcsim import errors
from hcsim.errors import ChannelError, CollectiveError, HcsimError
from hcsim.scripts.conversation import Failure


def ended_how(code: int) -> str:
    """An exit status, or minus a signal, in words."""
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:  # of those for real time, only the first and the last have names
        return f"was ended by signal {-code}"


def failure_of(error: BaseException) -> Failure:
    """What is said of it."""
    peer = error.peer if isinstance(error, CollectiveError) else None
    phase = error.phase if isinstance(error, CollectiveError) else ""
    return Failure(type(error).__name__, str(error) or repr(error), peer, phase)


def raised(failure: Failure) -> Exception:
    """The same error, on the other side."""
    kind = getattr(errors, failure.kind, None)
    if not isinstance(kind, type) or not issubclass(kind, HcsimError):
        return HcsimError(failure.text if failure.kind == "HcsimError" else f"{failure.kind}: {failure.text}")
    if issubclass(kind, CollectiveError):
        return kind(failure.text, peer=failure.peer, phase=failure.phase)
    if issubclass(kind, ChannelError):
        return kind(failure.text)
    try:
        return kind(failure.text)
    except TypeError:
        return HcsimError(failure.text)
