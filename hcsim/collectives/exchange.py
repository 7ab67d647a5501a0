"""Walks the plans of all ranks at once, without a clock: messages decide who can go on.

Sending never waits, so whoever rests in the end rests for ever. Ranks go on in a fixed order, and each
runs until a message is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
Key: TypeAlias = tuple[int, ...]
"""Which message: round, sender, receiver, and whatever more tells them apart."""


class Exchange(Generic[T]):
    """Runs one generator per rank. One that yields a key rests until the message is posted."""

    def __init__(self) -> None:
        self._posted: dict[Key, T] = {}
        self._resting: dict[Key, int] = {}
        self._ready: deque[int] = deque()

    def __contains__(self, key: Key) -> bool:
        return key in self._posted

    def post(self, key: Key, message: T) -> None:
        """Leave a message, and wake who rests for it."""
        self._posted[key] = message
        if key in self._resting:
            self._ready.append(self._resting.pop(key))

    def take(self, key: Key) -> T:
        """The message, which is there."""
        return self._posted.pop(key)

    def run(self, walks: Sequence[Iterator[Key]]) -> dict[Key, int]:
        """Run all as far as they get; returns who rests for what in the end."""
        self._ready.extend(range(len(walks)))
        while self._ready:
            rank = self._ready.popleft()
            key = next(walks[rank], None)
            if key is not None:
                self._resting[key] = rank
        return self._resting
