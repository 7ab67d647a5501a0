"""Callers that were turned away: one of them may be whom somebody waits for."""

from __future__ import annotations

from collections.abc import Callable

_LONGEST = 300
"""Part of the text may be a stranger's own."""


def plain(text: str) -> str:
    """What a peer says, for people: a terminal would obey some of what cannot be printed."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


class Refusals:
    """Keeps the last one, and passes each on."""

    def __init__(self, tell: Callable[[str], None] = lambda what: None) -> None:
        self._tell = tell
        self._last = ""

    def __call__(self, why: str) -> None:
        """A caller was turned away."""
        line = plain(why).replace("\n", " ")
        self._last = f"a caller was refused: {line if len(line) <= _LONGEST else line[:_LONGEST] + '…'}"
        self._tell(self._last)

    @property
    def hint(self) -> str:
        """What an error about somebody who did not call ends with."""
        return f"; {self._last}" if self._last else ""

    def forget(self) -> None:
        """What comes next has nothing to do with those so far."""
        self._last = ""
