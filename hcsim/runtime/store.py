"""What a host remembers when its process ends."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """Small named records that outlive a crash: written whole or not at all."""

    def load(self, name: str) -> bytes | None:
        """The record of that name, as it was last saved; None where there is none."""

    def save(self, name: str, data: bytes) -> None:
        """Replace the record; once this returns, a crash cannot lose it."""

    def where(self, name: str) -> str:
        """Where a person finds the record of that name."""
