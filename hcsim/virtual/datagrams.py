"""What becomes of datagrams: a fault is a rule that says when the copies of one arrive.

A rule gives the extra delays of the copies that arrive: none when it is lost, one zero when it just passes.
Several rules apply one after the other, to each copy. Connections know nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias


class Datagram(NamedTuple):
    """One packet of the local network's announcements."""

    source: str
    target: str
    media: tuple[str, str]
    """What it leaves and arrives by."""
    question: bool
    """Whether it asks who is there; otherwise it says so."""


Rule: TypeAlias = Callable[[Datagram], tuple[float, ...]]

PASSES = (0.0,)
LOST = ()


class Datagrams:
    """The rules of this moment."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []

    def add(self, rule: Rule) -> None:
        """Have a rule from now on."""
        self._rules.append(rule)

    def remove(self, rule: Rule) -> None:
        """Have it no longer."""
        self._rules.remove(rule)

    def delays_s(self, datagram: Datagram) -> tuple[float, ...]:
        """How much later than usual each copy of the datagram arrives."""
        copies: tuple[float, ...] = PASSES
        for rule in self._rules:
            copies = tuple(so_far + extra for so_far in copies for extra in rule(datagram))
        return copies
