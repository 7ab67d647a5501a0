"""Callers that were turned away: one of them may be whom somebody waits for."""

from __future__ import annotations

from collections.abc import Callable

_LONGEST = 300
"""Part of the text may be a stranger's own."""


class Refusals:
    """Keeps the last one, and passes each on."""

    def __init__(self, tell: Callable[[str], None] = lambda what: None) -> None:
        self._tell = tell
        self._last = ""

    def __call__(self, why: str) -> None:
        """A caller was turned away."""
        # A terminal obeys some of what cannot be printed.
        plain = "".join(letter if letter.isprintable() else "?" for letter in why)
        plain = plain if len(plain) <= _LONGEST else plain[:_LONGEST] + "…"
        self._last = f"a caller was refused: {plain}"
        self._tell(self._last)

    @property
    def hint(self) -> str:
        """What an error about somebody who did not call ends with."""
        return f"; {self._last}" if self._last else ""

    def forget(self) -> None:
        """What comes next has nothing to do with those so far."""
        self._last = ""
