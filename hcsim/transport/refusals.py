"""Callers that were turned away: one of them may be whom somebody waits for."""

from __future__ import annotations

from collections.abc import Callable

LONGEST_LINE = 1000
"""Of what a person is told of others."""
_LONGEST = 300
"""Of what a person is told of a stranger."""


def plain(text: str) -> str:
    """What a peer says, for people: a terminal would obey some of what cannot be printed."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """The same in one line of bounded length: part of it may be a member's or a stranger's own words."""
    text = plain(text[: longest + 1]).replace("\n", " ")
    return text if len(text) <= longest else text[:longest] + "…"


class Refusals:
    """Keeps the last one, and passes each on."""

    def __init__(self, tell: Callable[[str], None] = lambda what: None) -> None:
        self._tell = tell
        self._last = ""

    def __call__(self, why: str) -> None:
        """A caller was turned away."""
        self._last = f"a caller was refused: {one_line(why, _LONGEST)}"
        self._tell(self._last)

    @property
    def hint(self) -> str:
        """What an error about somebody who did not call ends with."""
        return f"; {self._last}" if self._last else ""

    def forget(self) -> None:
        """What comes next has nothing to do with those so far."""
        self._last = ""
