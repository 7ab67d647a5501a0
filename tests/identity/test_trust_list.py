"""Who belongs to a cluster by its trust list, whatever is signed by whom and in whatever order lists meet."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcsim.errors import ConfigError, HcsimError, RemoteProtocolError
from hcsim.identity.handshake import Credentials, Handshake, HandshakeRole
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.identity.trust_list import (
    MOST_LISTINGS,
    MOST_STATEMENTS,
    Listing,
    RefusalReason,
    Rotation,
    TrustList,
    TrustListFull,
    TrustRecord,
    decode_record,
)
from hcsim.identity.trust_list import phrase_key as phrase_key_of
from hcsim.identity.trust_store import MOST_UNPROVED, TrustStore

FIRST = ClusterSecret(bytes(range(16)))
EMPTY = TrustList.of(FIRST)


@cache
def key(name: str) -> NodeKey:
    return NodeKey(hashlib.sha256(name.encode()).digest())


@cache
def secret(name: str) -> ClusterSecret:
    return ClusterSecret(hashlib.sha256(name.encode()).digest()[:16])


def names(trusted: TrustList) -> list[str]:
    return sorted(trusted.members.values())


def joined(*newcomers: str, by: ClusterSecret = FIRST, to: TrustList = EMPTY) -> TrustList:
    """They have listed themselves with the phrase."""
    for name in newcomers:
        to = to.merged([to.listing(key(name).public, name, phrase_key_of(by))])
    return to


def invited(by: str, name: str, to: TrustList) -> TrustList:
    return to.merged([to.listing(key(name).public, name, key(by))])


def rotated(by: str, to: TrustList, *expelled: str, new: str = "") -> TrustList:
    nodes = [key(name).node_id for name in expelled]
    phrase = phrase_key_of(secret(new or f"by {by}")).public
    return to.merged([to.rotation(nodes, phrase, key(by))])


def test_whoever_knows_the_phrase_lists_itself_until_it_is_replaced() -> None:
    before = joined("a", "b")
    assert names(before) == ["a", "b"]
    after = rotated("a", before, new="second")
    assert names(after) == ["a", "b"]
    assert names(joined("c", by=FIRST, to=after)) == ["a", "b"]
    assert names(joined("c", by=secret("second"), to=after)) == ["a", "b", "c"]


def test_a_member_lists_others_and_a_stranger_nobody() -> None:
    before = joined("a")
    assert names(invited("a", "b", before)) == ["a", "b"]
    assert names(invited("stranger", "b", before)) == ["a"]
    assert invited("stranger", "b", before) == before


def test_whoever_is_expelled_stays_so_and_takes_nobody_along() -> None:
    before = joined("a", "b", "x")
    after = rotated("a", before, "x")
    assert names(after) == ["a", "b"]
    assert list(after.expelled.values()) == ["x"]
    for late in (
        invited("x", "helper", before),  # signed with its own key
        joined("helper", to=before),  # a new key, with the old phrase
        rotated("x", before, new="mine"),  # a secret of its own
        invited("helper", "another", joined("helper", to=before)),
        invited("a", "x", after),  # nobody can bring it back
        joined("x", by=secret("by a"), to=after),
        joined("x"),
    ):
        assert names(after.merged(late.statements)) == ["a", "b"]
        assert names(late.merged(after.statements)) == ["a", "b"]


def test_an_expelled_member_cannot_undo_that_by_expelling_the_others_at_the_same_time() -> None:
    before = joined("a", "b", "c")
    for expelled, by in (("a", "b"), ("b", "a"), ("c", "a"), ("a", "c")):
        ours = rotated(by, before, expelled)
        theirs = rotated(expelled, before, by)
        both = ours.merged(theirs.statements)
        assert names(both) == [name for name in "abc" if name not in (by, expelled)]
    senior, junior = sorted("bx", key=lambda name: key(name).public)
    before = joined("a", senior, junior)
    ours = rotated(senior, before, junior)
    theirs = rotated(junior, before, senior, "a")
    assert names(ours.merged(theirs.statements)) == ["a"], "it takes along whoever expels it, and nobody else"


def test_rotations_at_the_same_time_expel_all_that_either_expels() -> None:
    before = joined("a", "b", "c", "d")
    ours, theirs = rotated("a", before, "c"), rotated("b", before, "d")
    both = ours.merged(theirs.statements)
    assert names(both) == ["a", "b"]
    assert len(both.phrases) == 2
    after = rotated("a", both, new="third")
    assert (names(after), after.generation, len(after.phrases)) == (["a", "b"], 2, 1)


def test_a_newcomer_that_the_rotating_member_did_not_know_has_to_be_invited_again() -> None:
    before = joined("a", "b")
    both = rotated("a", before).merged(invited("b", "c", before).statements)
    assert names(both) == ["a", "b"]
    assert names(invited("b", "c", both)) == ["a", "b", "c"]


def test_a_list_from_a_backup_learns_what_it_missed_and_changes_nothing() -> None:
    backup = joined("a", "b", "x")
    now = invited("b", "d", rotated("a", rotated("a", backup, "x"), new="third"))
    assert backup.merged(now.statements) == now == now.merged(backup.statements)


def test_a_statement_of_another_cluster_or_with_another_name_on_it_counts_for_nothing() -> None:
    other = TrustList.of(secret("another"))
    theirs = other.merged([other.listing(key("x").public, "x", phrase_key_of(secret("another")))])
    assert EMPTY.merged(theirs.statements) == EMPTY
    [listing] = joined("a").statements
    assert EMPTY.merged([msgspec.structs.replace(listing, name="b")]) == EMPTY


@st.composite
def histories(draw: st.DrawFn) -> list[TrustList]:
    """Lists of four machines that change them, and now and then hear of each other, as they please."""
    lists = [joined(*"abcd")] * draw(st.integers(1, 4))
    for step in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(lists) - 1))
        by, other = draw(st.sampled_from("abcdxy")), draw(st.sampled_from("abcdxyz"))
        match draw(st.sampled_from(["invite", "rotate", "expel", "phrase", "hear"])):
            case "invite":
                lists[at] = invited(by, other, lists[at])
            case "rotate":
                lists[at] = rotated(by, lists[at], new=str(step))
            case "expel":
                gone = [other] if key(other).node_id in lists[at].members else []
                lists[at] = rotated(by, lists[at], *gone, new=str(step))
            case "phrase":
                lists[at] = joined(other, by=draw(st.sampled_from([FIRST, *map(secret, "0123")])), to=lists[at])
            case "hear":
                heard = lists[draw(st.integers(0, len(lists) - 1))]
                lists[at] = lists[at].merged(heard.statements)
    return lists


def all_of(lists: Sequence[TrustList], start: TrustList = EMPTY) -> TrustList:
    for each in lists:
        start = start.merged(each.statements)
    return start


@pytest.mark.slow
@given(histories(), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_lists_merge_to_the_same_in_any_order_and_any_number_of_times(lists, shuffler) -> None:
    together = all_of(lists)
    shuffled = [*lists, *lists]
    shuffler.shuffle(shuffled)
    assert all_of(shuffled) == together
    assert all_of([all_of(lists[:2]), all_of(lists[1:])]) == together
    assert (all_of(shuffled).members, all_of(shuffled).phrases) == (together.members, together.phrases)
    assert [*all_of(shuffled).members] == [*together.members]


@given(histories())
@settings(max_examples=30, deadline=None)
def test_nobody_that_a_generation_has_expelled_is_ever_a_member_again(lists) -> None:
    for each in lists:
        assert not {*each.members} & {*each.expelled}
    together = all_of(lists)
    assert not {*together.members} & {*together.expelled}
    following = rotated("a", together, new="then") if key("a").node_id in together.members else together
    assert {*together.expelled} <= {*following.expelled}


@pytest.mark.slow
@given(histories())
@settings(max_examples=30, deadline=None)
def test_an_expelled_machine_that_knows_all_old_lists_gets_nobody_in(lists) -> None:
    """It signs what it likes upon any list of an earlier generation, also with old phrases."""
    now = rotated("a", joined("a", "b", "x", to=EMPTY), "x", new="secret of a and b")
    for old in [joined("a", "b", "x"), *lists]:
        for forged in (
            invited("x", "y", old),
            joined("y", to=old),
            rotated("x", old, new="mine"),
            invited("y", "z", joined("y", to=rotated("x", old, new="mine"), by=secret("mine"))),
        ):
            mine = [each for each in forged.statements if each not in old.statements]
            assert now.merged(mine).members == now.members


def test_a_list_that_is_too_long_is_refused_and_the_old_one_stays() -> None:
    before = joined("a")
    many = [before.listing(key(str(number)).public, f"m{number}", key("a")) for number in range(MOST_STATEMENTS)]
    with pytest.raises(ConfigError, match="full"):
        before.merged(many)
    assert names(before) == ["a"]


@given(st.binary(max_size=300))
def test_noise_is_no_list(data: bytes) -> None:
    with suppress(RemoteProtocolError):
        assert EMPTY.merged(decode_record(data, "mini").statements) == EMPTY


@given(st.data())
@settings(deadline=None)
def test_a_list_that_was_changed_anywhere_makes_nobody_a_member(data) -> None:
    """Whatever byte is changed, the list cannot be read, or what it says was signed."""
    whole = rotated("a", joined("a", "b"), "b")
    encoded = bytearray(msgspec.msgpack.encode(TrustRecord(whole.statements)))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    try:
        read = EMPTY.merged(decode_record(bytes(encoded), "mini").statements)
    except HcsimError:
        return
    assert {*read.statements} <= {*whole.statements}


def test_what_is_read_fits_its_bounds() -> None:
    for bad in (Listing(0, b"short", "a", bytes(32)), Listing(-1, bytes(32), "a", bytes(32)), "noise", ["listing"]):
        with pytest.raises(RemoteProtocolError):
            decode_record(msgspec.msgpack.encode({"statements": [bad]}), "mini")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_agrees_on_what_was_signed_by_whom(tmp_path: Path) -> None:
    """The signed bytes are put together here once more, by hand."""
    whole = rotated("a", joined("a", "b"), "b")
    [rotation] = [each for each in whole.statements if isinstance(each, Rotation)]
    a, b, phrase = key("a").public, key("b").public, phrase_key_of(secret("by a")).public
    fields = ["rotation", 1, [b], [a], phrase, a, b""]
    message = b"hcsim trust list 1\0" + FIRST.namespace + msgspec.msgpack.encode(fields)
    (tmp_path / "message").write_bytes(message)
    (tmp_path / "signature").write_bytes(rotation.signature)
    (tmp_path / "key").write_bytes(key("a").pem())
    command = ["openssl", "pkeyutl", "-verify", "-rawin", "-inkey", "key", "-in", "message", "-sigfile", "signature"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "message").write_bytes(message[:-1] + b"?")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode != 0


class Disk:
    """In memory."""

    def __init__(self) -> None:
        self.record: TrustRecord | None = None

    def load(self) -> TrustRecord | None:
        return self.record

    def update(self, change: Callable[[TrustRecord | None], TrustRecord]) -> None:
        self.record = change(self.record)


def store_of(name: str) -> TrustStore:
    return TrustStore(FIRST, key(name), name, Disk())


def test_a_machine_that_knows_the_phrase_is_on_its_own_list_from_its_first_start() -> None:
    store = store_of("a")
    assert names(store.list) == ["a"]
    assert store.phrase == FIRST.phrase()


def test_stores_that_hear_each_other_know_the_same_and_the_expelled_one_is_refused() -> None:
    a, b, x = map(store_of, "abx")
    for one, other in ((a, b), (b, a), (a, x), (b, x), (b, a), (x, a)):
        name = {id(a): "a", id(b): "b", id(x): "x"}[id(other)]
        assert one.receive(other.told_to(key("?").public), name, key(name).public)
    a.rotate(secret("second"), [key("x").node_id])
    assert not a.receive(x.told_to(key("a").public), "x", key("x").public)
    assert b.digest != a.digest
    assert b.receive(a.told_to(key("b").public), "a", key("a").public)
    assert (b.digest, b.secret) == (a.digest, secret("second"))
    assert b.phrase == f"{FIRST.phrase()}-{secret('second').phrase()}"
    assert x.receive(a.told_to(key("x").public), "a", key("a").public), "of a it learns nothing but how a is listed"
    assert x.secret == FIRST
    with pytest.raises(ConfigError, match="delete its file node_key"):
        a.enlist(key("x").public, "x")


def test_a_stranger_cannot_have_many_statements_checked() -> None:
    a = store_of("a")
    before = a.list
    many = [before.listing(key(f"m{number}").public, "m", key("late")) for number in range(MOST_UNPROVED)]
    theirs = TrustRecord((*joined("late").statements, *many))
    assert not a.receive(msgspec.msgpack.encode(theirs), "late", key("late").public)
    assert a.list == before
    assert a.receive(msgspec.msgpack.encode(TrustRecord(theirs.statements[:1])), "late", key("late").public)


def test_a_machine_that_is_not_listed_cannot_change_the_list() -> None:
    a, late = store_of("a"), store_of("late")
    a.rotate(secret("second"))
    late.take(a.record)
    for change in (lambda: late.rotate(secret("third")), lambda: late.enlist(key("y").public, "y")):
        with pytest.raises(ConfigError, match="not on the cluster's trust list"):
            change()


def test_a_phrase_with_two_parts_lists_a_newcomer_at_the_first_member_that_it_meets() -> None:
    a = store_of("a")
    a.rotate(secret("second"))
    assert a.phrase is not None
    first, second = ClusterSecret.from_phrases(a.phrase)
    assert (first, second) == (FIRST, secret("second"))
    disk = Disk()
    disk.record = TrustRecord(secret=second.data)
    late = TrustStore(first, key("late"), "late", disk)
    assert a.receive(late.told_to(key("a").public), "late", key("late").public)
    late.receive(a.told_to(key("late").public), "a", key("a").public)
    assert (names(late.list), late.digest) == (["a", "late"], a.digest)
    a.rotate(secret("third"))
    disk.record = TrustRecord(secret=second.data)
    later = TrustStore(first, key("later"), "later", disk)
    assert not a.receive(later.told_to(key("a").public), "later", key("later").public)


def full_list(by: str, tag: str, count: int = MOST_LISTINGS - 2) -> TrustStore:
    """A member's store after it has listed so many machines, beside itself and a fellow member."""
    store = store_of(by)
    store.take(TrustRecord(joined("a", "b").statements))
    listings = [store.list.listing(key(f"{tag}{n}").public, f"{tag}{n}", key(by)) for n in range(count)]
    store.save(TrustRecord(tuple(listings)))
    return store


@pytest.mark.slow
def test_members_whose_lists_do_not_fit_together_stay_members_and_can_expel() -> None:
    a, b = full_list("a", "x"), full_list("b", "y")
    before = a.list
    assert a.receive(b.told_to(key("a").public), "b", key("b").public)
    assert a.list == before
    b.rotate(secret("second"), [key("y0").node_id])
    with pytest.raises(TrustListFull):
        a.take(b.record)
    assert (a.list.generation, a.secret) == (1, secret("second")), "it has heard of the rotation"
    assert key("b").node_id in a.list.members
    a.rotate(secret("third"), [key("b").node_id])
    assert key("b").node_id in a.list.expelled


def test_a_full_list_takes_in_nobody_and_says_so() -> None:
    a = full_list("a", "x")
    with pytest.raises(TrustListFull, match="is full: create a new cluster"):
        a.enlist(key("late").public, "late")
    with pytest.raises(TrustListFull):
        a.receive(store_of("late").told_to(key("a").public), "late", key("late").public)
    assert key("late").node_id not in a.list.members
    caller, listener = (
        Handshake(role, Credentials(key(name), FIRST, 1, os.urandom, store), b"")
        for role, name, store in ((HandshakeRole.CALLER, "late", store_of("late")), (HandshakeRole.LISTENER, "a", a))
    )
    message, hears = caller.first(), listener
    while message is not None:
        message, hears = hears.receive(message), caller if hears is listener else listener
    assert (caller.reason, caller.was_told) == (listener.reason, True) == (RefusalReason.LIST_FULL, True)


def test_a_machine_starts_although_its_list_has_no_room_for_it() -> None:
    disk = Disk()
    disk.record = full_list("a", "x").record
    late = TrustStore(FIRST, key("late"), "late", disk)
    assert late.list == full_list("a", "x").list
    with pytest.raises(ConfigError, match="not on the cluster's trust list"):
        late.check_listed()
