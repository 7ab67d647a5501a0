"""Saying a thing once: what keeps being tried keeps failing for the same reason, and one line about it is enough."""

from __future__ import annotations

import re
from collections.abc import Callable

_PORT = re.compile(r":\d+\b")
"""A caller has another port each time."""
_MOST = 256
"""Then it begins to forget: a stranger cannot fill our memory."""


class Once:
    """Passes on what was not said before."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._said: dict[str, None] = {}

    def __call__(self, what: str) -> None:
        """Say it, if it is new."""
        key = _PORT.sub("", what)
        if key not in self._said:
            self._said[key] = None
            if len(self._said) > _MOST:
                del self._said[next(iter(self._said))]
            self._tell(what)
