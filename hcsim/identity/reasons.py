"""Why a node is not admitted, in the words of both sides.

A refusal crosses the wire as a number, so nothing that a stranger wrote gets into a log, and each side
says it to its own person.
"""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """The number is what the peer is told."""

    MALFORMED = 1
    WRONG_VERSION = 2
    WRONG_ROLE = 3
    OTHER_CLUSTER = 4
    COPIED_IDENTITY = 5
    REFLECTED = 6
    FOREIGN_PROOF = 7
    WRONG_SECRET = 8
    TOO_MANY_FAILURES = 9
    TOO_SLOW = 10
    TOO_MANY_CALLERS = 11
    UNLISTED = 12
    EXPELLED = 13
    WE_ARE_UNLISTED = 14
    LIST_FULL = 15
    UNKNOWN = 255


_INVITE = "run `hcsim cluster invite` on a member of the cluster, and `hcsim cluster join` on the other machine"
OTHER_CLUSTER = f"remove the cluster of one of the two (its files in ~/.hcsim/clusters), then {_INVITE}"
_OTHER_CLUSTER = f"it belongs to another cluster: if the two belong together, {OTHER_CLUSTER}"
_NEW_KEY = "to have it back, delete its file node_key, which makes it a new machine, and invite it"
FULL = (
    "the cluster's trust list is full: create a new cluster (`hcsim cluster create --name …`) and have its machines "
    "join that"
)
WE_ARE_EXPELLED = (
    "this machine was expelled from the cluster: it can come back with a new key (delete its file node_key) and an "
    "invitation (`hcsim cluster invite` on a member)"
)
WE_ARE_UNLISTED = (
    "this machine's key is not on the cluster's trust list: run `hcsim cluster invite` on a member and "
    "`hcsim cluster join` here"
)
_COPIED = (
    "the file node_key was copied from one machine to another: delete it on one of them, which makes a new one "
    "when it starts again"
)

_OURS = {
    Reason.MALFORMED: "it sent something that is not the admission handshake",
    Reason.WRONG_VERSION: "it speaks another version of the handshake: install the same hcsim on both",
    Reason.WRONG_ROLE: "it claims the same end of the connection as we have",
    Reason.OTHER_CLUSTER: _OTHER_CLUSTER,
    Reason.COPIED_IDENTITY: f"it presents our own identity: {_COPIED}",
    Reason.REFLECTED: "it sent our own words back to us",
    Reason.FOREIGN_PROOF: "its proof was not made for this connection (replayed, relayed or damaged)",
    Reason.WRONG_SECRET: "it names our cluster, but does not know the secret",
    Reason.TOO_MANY_FAILURES: "too many attempts from there have failed; it has to wait",
    Reason.TOO_SLOW: "it did not finish the handshake in time",
    Reason.TOO_MANY_CALLERS: "too many call from there at once, and have not said who they are",
    Reason.UNLISTED: f"its key is not on the cluster's trust list: {_INVITE}",
    Reason.EXPELLED: f"it was expelled from the cluster: {_NEW_KEY}",
    Reason.WE_ARE_UNLISTED: f"our own key is not on the cluster's trust list: {_INVITE}",
    Reason.LIST_FULL: f"its key is not on the list, and {FULL}",
    Reason.UNKNOWN: "nobody knows why",
}
_THEIRS = {
    Reason.MALFORMED: "it could not read our handshake: is it another version of hcsim?",
    Reason.WRONG_VERSION: "it speaks another version of the handshake: install the same hcsim on both",
    Reason.WRONG_ROLE: "it takes itself for the same end of the connection as we do",
    Reason.OTHER_CLUSTER: _OTHER_CLUSTER,
    Reason.COPIED_IDENTITY: f"it has the same identity as we: {_COPIED}",
    Reason.REFLECTED: "it heard its own words from us: something between us sends them back",
    Reason.FOREIGN_PROOF: "our proof did not fit its connection: something between us changes or relays it",
    Reason.WRONG_SECRET: f"our secret is not that of its cluster: {_INVITE}",
    Reason.TOO_MANY_FAILURES: "too many attempts from our address have failed; we have to wait",
    Reason.TOO_SLOW: "we did not finish the handshake in time",
    Reason.TOO_MANY_CALLERS: "too many call it at once from our address, and have not said who they are",
    Reason.UNLISTED: f"our key is not on the cluster's trust list: {_INVITE}",
    Reason.EXPELLED: WE_ARE_EXPELLED,
    Reason.WE_ARE_UNLISTED: f"its own key is not on the cluster's trust list: {_INVITE}",
    Reason.LIST_FULL: f"our key is not on its list, and {FULL}",
    Reason.UNKNOWN: "for a reason that this version of hcsim does not know",
}


def told(peer: str, reason: Reason, *, by_them: bool) -> str:
    """A sentence for the person on this side."""
    return f"{peer} refused us: {_THEIRS[reason]}" if by_them else f"we refused {peer}: {_OURS[reason]}"
