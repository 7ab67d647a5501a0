"""An invitation to a cluster: it expires, and admits a bounded number of machines.

The machine that invites keeps it in memory alone, and counts its time with its own monotonic clock: no clock has to be
right, and an invitation is over with the process that made it. A newcomer that has used it may ask again with the same
key, since it may not have got the answer.

Pure: keys and `now` in, objections out.
"""

from __future__ import annotations


class Invitation:
    """Which keys may still use it."""

    def __init__(self, uses: int, expires_at_s: float) -> None:
        self.expires_at_s = expires_at_s
        self._uses = uses
        self._users: dict[bytes, bool] = {}
        """Whether the newcomer has said that it got its answer."""

    def use(self, public: bytes, now_s: float) -> str:
        """Count a use by that key; returns what stands against it, if anything does."""
        if now_s >= self.expires_at_s:
            return "the invitation has expired"
        if public not in self._users and len(self._users) >= self._uses:
            return "the invitation has been used already"
        self._users.setdefault(public, False)
        return ""

    def confirm(self, public: bytes) -> None:
        """The newcomer with that key has got its answer."""
        if public in self._users:
            self._users[public] = True

    def give_back(self, public: bytes) -> None:
        """It could not be admitted after all: that was no use."""
        if not self._users.get(public, True):
            del self._users[public]

    def is_over(self, now_s: float) -> bool:
        """Whether nobody will use it any more."""
        return now_s >= self.expires_at_s or sum(self._users.values()) >= self._uses
