"""How errors travel: those of a closed table by the name of their class, all others as text.

No traceback, and nothing of the other side's classes: an error is built anew here, from its text. Errors about
channels are not in the table, since they would be taken for errors of this one.
"""

from __future__ import annotations

from collections.abc import Mapping

from hcsim.errors import (
    CallRefused,
    CollectiveError,
    CollectiveTimeout,
    ConfigError,
    DeadlineExceeded,
    HcsimError,
    RemoteError,
    UsageError,
    WorkerLost,
)

MAX_TEXT = 4096

OUR_ERRORS: dict[str, type[HcsimError]] = {
    error.__name__: error
    for error in (
        HcsimError, ConfigError, UsageError, CallRefused, DeadlineExceeded, CollectiveError, CollectiveTimeout,
        WorkerLost,
    )
}  # fmt: skip


def describe(error: BaseException) -> tuple[str, str]:
    """The kind and the text of an error, for the caller."""
    try:
        text = str(error)
    except Exception:
        text = "an error that cannot say what it is"
    return _sendable(type(error).__name__[:128]), _sendable(text[:MAX_TEXT])


def _sendable(text: str) -> str:
    """A file's name may have bytes in it that are no text."""
    return text.encode("utf-8", "backslashreplace").decode()


def revive(kind: str, text: str, call: str, peer: str, table: Mapping[str, type[HcsimError]]) -> HcsimError:
    """The error that a call ended with."""
    known = table.get(kind)
    if known is not None:
        return known(text)
    return RemoteError(f"{call} failed at {peer}: {kind}: {text}", kind)
