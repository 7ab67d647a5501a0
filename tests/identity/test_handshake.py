"""The handshake, message by message: who gets in, who does not, and what a listener on the wire learns."""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Callable, Sequence

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import assume, given
from hypothesis import strategies as st

from hcsim.errors import UsageError
from hcsim.identity.handshake import (
    NEXT,
    VERSION,
    Credentials,
    Handshake,
    HandshakeEvent,
    HandshakeRole,
    HandshakeState,
    read_hello,
)
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.identity.trust_list import RefusalReason, told
from hcsim.rng import stream

OURS, THEIRS = ClusterSecret(bytes(range(16))), ClusterSecret(bytes(range(1, 17)))
LABEL = b"hcsim admission 1\0"
FINAL = (HandshakeState.ADMITTED, HandshakeState.REFUSED)
Change = Callable[[int, bytes], bytes]


def member(name: str, *, secret: ClusterSecret = OURS, key: str = "", boot: int = 7) -> Credentials:
    draw = stream(1, "fresh", name)
    return Credentials(NodeKey(hashlib.sha256((key or name).encode()).digest()), secret, boot, draw.randbytes)


def pair(
    caller: Credentials | None = None, listener: Credentials | None = None, bindings: tuple[bytes, bytes] = (b"", b"")
) -> tuple[Handshake, Handshake]:
    return (
        Handshake(HandshakeRole.CALLER, caller or member("caller"), bindings[0]),
        Handshake(HandshakeRole.LISTENER, listener or member("listener"), bindings[1]),
    )


def play(caller: Handshake, listener: Handshake, change: Change = lambda number, message: message) -> list[bytes]:
    """Carry messages to and fro until nobody has anything to say; returns them as they were sent."""
    sent: list[bytes] = []
    message, receiver, other = caller.first(), listener, caller
    while message is not None and receiver.state not in FINAL:
        sent.append(message)
        message = receiver.receive(change(len(sent) - 1, message))
        receiver, other = other, receiver
    return sent if message is None else [*sent, message]


def test_two_members_admit_each_other_and_know_whom() -> None:
    caller, listener = pair(member("caller", boot=3), member("listener", boot=2**64 - 1), (b"tls", b"tls"))
    assert len(play(caller, listener)) == 4
    assert (caller.state, listener.state) == (HandshakeState.ADMITTED, HandshakeState.ADMITTED)
    assert caller.theirs is not None
    assert listener.theirs is not None
    assert (caller.theirs.node_id, caller.theirs.boot) == (member("listener").key.node_id, 2**64 - 1)
    assert (listener.theirs.node_id, listener.theirs.boot) == (member("caller").key.node_id, 3)


def test_a_node_may_call_itself_in_the_same_life() -> None:
    """A worker calls the server beside it; whoever has a copy of our key is in another life."""
    caller, listener = pair(member("caller", key="listener", boot=5), member("listener", boot=5), (b"", b""))
    play(caller, listener)
    assert (caller.state, listener.state) == (HandshakeState.ADMITTED, HandshakeState.ADMITTED)


@pytest.mark.parametrize(
    ("listener", "bindings", "reason"),
    [
        (member("listener", secret=THEIRS), (b"", b""), RefusalReason.OTHER_CLUSTER),
        (member("listener", key="caller", boot=77), (b"", b""), RefusalReason.COPIED_IDENTITY),
        (member("listener"), (b"one connection", b"another"), RefusalReason.FOREIGN_PROOF),
        (member("listener"), (b"", b"tls"), RefusalReason.FOREIGN_PROOF),
    ],
)
def test_both_sides_know_why_it_failed(
    listener: Credentials, bindings: tuple[bytes, bytes], reason: RefusalReason
) -> None:
    ours, theirs = pair(None, listener, bindings)
    play(ours, theirs)
    assert (theirs.state, theirs.reason, theirs.was_told) == (HandshakeState.REFUSED, reason, False)
    assert (ours.state, ours.reason, ours.was_told) == (HandshakeState.REFUSED, reason, True)


def test_who_knows_the_namespace_but_not_the_secret_is_found_out() -> None:
    impostor = ClusterSecret(bytes(16))
    impostor.namespace = OURS.namespace
    for caller, listener in (
        pair(member("caller", secret=impostor)),
        pair(None, member("listener", secret=impostor)),
    ):
        play(caller, listener)
        assert (caller.reason, listener.reason) == (RefusalReason.WRONG_SECRET, RefusalReason.WRONG_SECRET)
        assert (caller.was_told, listener.was_told) == (True, False)  # the caller had to prove itself first


def test_an_identity_without_its_key_is_found_out() -> None:
    """The hello claims another node's public key, the proof is signed with one's own."""
    thief = member("thief")
    thief.key.public = member("victim").key.public
    caller, listener = pair(thief)
    play(caller, listener)
    assert listener.reason is RefusalReason.FOREIGN_PROOF


def test_our_own_words_are_recognised() -> None:
    caller, _ = pair()
    hello = caller.first()
    assert hello is not None
    caller.receive(hello)
    assert caller.reason is RefusalReason.REFLECTED

    caller, listener = pair()
    first = caller.first()
    assert first is not None
    answer = listener.receive(first)
    assert answer is not None
    proof = caller.receive(answer)
    assert proof is not None
    caller.receive(proof)
    assert caller.reason is RefusalReason.REFLECTED


def test_two_callers_have_the_same_role() -> None:
    one, _ = pair()
    other = Handshake(HandshakeRole.CALLER, member("other"), b"")
    hello = other.first()
    assert hello is not None
    one.receive(hello)
    assert one.reason is RefusalReason.WRONG_ROLE


def test_a_relay_between_two_encrypted_connections_is_refused() -> None:
    """The man in the middle passes every message on unchanged, over its own two TLS connections."""
    caller, listener = pair(None, None, (b"caller and middle", b"middle and listener"))
    play(caller, listener)
    assert HandshakeState.ADMITTED not in (caller.state, listener.state)


@pytest.mark.parametrize("number", range(4))
def test_a_message_of_an_earlier_handshake_is_refused(number: int) -> None:
    """The same two nodes, the same lives: only the nonces are new."""
    caller_us, listener_us = member("caller"), member("listener")
    recorded = play(*pair(caller_us, listener_us))
    caller, listener = pair(caller_us, listener_us)
    play(caller, listener, lambda at, message: recorded[at] if at == number else message)
    assert (caller if number % 2 else listener).state is HandshakeState.REFUSED
    assert (caller.state, listener.state) != (HandshakeState.ADMITTED, HandshakeState.ADMITTED)


@pytest.mark.parametrize("side", [HandshakeRole.CALLER, HandshakeRole.LISTENER])
def test_a_whole_recorded_side_is_refused(side: HandshakeRole) -> None:
    recorded = play(*pair())
    fresh = Handshake(side, member("new draws"), b"")
    for message in recorded[1 - (side == HandshakeRole.LISTENER) :: 2]:
        if fresh.state not in FINAL:
            fresh.receive(message)
    assert (fresh.state, fresh.reason) == (HandshakeState.REFUSED, RefusalReason.FOREIGN_PROOF)


def mutations(message: bytes) -> st.SearchStrategy[bytes]:
    bits = st.integers(0, 8 * len(message) - 1)
    flipped = bits.map(lambda bit: _flip(message, bit))
    cut = st.integers(0, len(message) - 1).map(lambda size: message[:size])
    grown = st.binary(min_size=1, max_size=64).map(lambda tail: message + tail)
    overwritten = st.tuples(st.integers(0, len(message) - 1), st.binary(min_size=1, max_size=32)).map(
        lambda change: (message[: change[0]] + change[1] + message[change[0] + len(change[1]) :])[: len(message)]
    )
    return st.one_of(flipped, cut, grown, overwritten, st.binary(max_size=256))


def _flip(message: bytes, bit: int) -> bytes:
    changed = bytearray(message)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(st.integers(0, 3), st.data())
def test_every_changed_message_ends_it_for_its_receiver_and_nobody_is_taken_for_another(number, data) -> None:
    caller, listener = pair(None, None, (b"tls", b"tls"))

    def change(at: int, message: bytes) -> bytes:
        if at != number:
            return message
        changed = data.draw(mutations(message))
        assume(changed != message)
        return changed

    play(caller, listener, change)
    hellos_differ = number < 2  # found out at the next proof at the latest, by either side
    assert (caller if number % 2 else listener).state is HandshakeState.REFUSED or hellos_differ
    assert (caller.state, listener.state) != (HandshakeState.ADMITTED, HandshakeState.ADMITTED)
    if number < 3:  # the last message is the listener's welcome: it has admitted the true caller by then
        assert HandshakeState.ADMITTED not in (caller.state, listener.state)
    for side in (caller, listener):
        assert (side.reason is not None) == (side.state is HandshakeState.REFUSED)


def test_every_byte_of_every_message_matters() -> None:
    sizes = [len(message) for message in play(*pair())]
    for number, size in enumerate(sizes):
        for bit in range(0, 8 * size, 9):  # another bit of each
            caller, listener = pair()
            play(caller, listener, lambda at, message, n=number, b=bit: _flip(message, b) if at == n else message)
            assert caller.state is not HandshakeState.ADMITTED, (number, bit)
            assert listener.state is not HandshakeState.ADMITTED or number == 3, (number, bit)


@given(st.sampled_from(HandshakeRole), st.lists(st.binary(max_size=300), max_size=4))
def test_no_message_crashes_it_and_strangers_stay_outside(role: HandshakeRole, messages: list[bytes]) -> None:
    side = Handshake(role, member("we"), b"")
    for message in messages:
        if side.state not in FINAL:
            side.receive(message)
    assert side.state is not HandshakeState.ADMITTED


@given(st.permutations(range(4)))
def test_messages_in_another_order_are_refused(order: list[int]) -> None:
    assume(order != [0, 1, 2, 3])
    caller, listener = pair()
    seen: list[bytes] = []

    def shuffled(at: int, message: bytes) -> bytes:
        seen.append(message)
        return seen[order[at]] if order[at] < len(seen) else b""

    play(caller, listener, shuffled)
    assert (caller.state, listener.state) != (HandshakeState.ADMITTED, HandshakeState.ADMITTED)


@given(st.integers(0, 255).filter(lambda version: version != VERSION), st.binary(max_size=200))
def test_another_version_is_named_whatever_follows_it(version: int, rest: bytes) -> None:
    listener = Handshake(HandshakeRole.LISTENER, member("listener"), b"")
    listener.receive(bytes([1, version]) + rest)
    assert listener.reason is RefusalReason.WRONG_VERSION


@pytest.mark.parametrize("point", [bytes(32), bytes([1]) + bytes(31)], ids=["zero", "one"])
def test_a_nonce_that_makes_the_agreement_foreseeable_is_refused(point: bytes) -> None:
    caller, listener = pair()
    play(caller, listener, lambda at, message: message[:-32] + point if at == 0 else message)
    assert listener.reason is RefusalReason.MALFORMED


def transcript_of(hellos: Sequence[bytes], binding: bytes = b"") -> bytes:
    """What both have said and where, as the documentation of the handshake has it: written out once more, by hand."""
    said = b"".join(len(part).to_bytes(4, "big") + part for part in (*hellos, binding))
    return hashlib.sha3_256(LABEL + said).digest()


def mac_key(nonce: X25519PrivateKey, theirs: bytes, transcript: bytes) -> bytes:
    """The key that takes the secret and an agreement between two nonces, of which one is ours."""
    agreed = nonce.exchange(X25519PublicKey.from_public_bytes(theirs))
    return HKDF(SHA256(), 32, salt=OURS.derive("admission"), info=LABEL + transcript).derive(agreed)


def test_the_wire_carries_neither_the_secret_nor_a_key_made_of_it() -> None:
    sent = play(*pair())
    us = member("caller")
    nonce = X25519PrivateKey.from_private_bytes(us.fresh(32))
    kept = [
        bytes(range(16)), OURS.phrase().encode(), OURS.derive("admission"), OURS.derive("tls authority"),
        mac_key(nonce, read_hello(sent[1]).nonce, transcript_of(sent[:2])),
        nonce.private_bytes_raw(), us.key.private.private_bytes_raw(),
    ]  # fmt: skip
    wire = b"".join(sent)
    assert nonce.public_key().public_bytes_raw() in wire  # so it is this handshake's
    for private in kept:
        assert not any(private[at : at + 8] in wire for at in range(len(private) - 7))


def test_who_only_listened_cannot_check_a_guess_even_a_right_one() -> None:
    """With the secret and the whole recording one still lacks the agreement: the MAC could be anybody's."""
    sent = play(*pair())
    transcript, mac = transcript_of(sent[:2]), sent[2][-32:]
    listeners, eavesdroppers = (
        X25519PrivateKey.from_private_bytes(member(name).fresh(32)) for name in ("listener", "eavesdropper")
    )
    statement = LABEL + bytes([HandshakeRole.CALLER]) + transcript
    nonce = read_hello(sent[0]).nonce
    assert hmac.digest(mac_key(listeners, nonce, transcript), statement, "sha256") == mac
    assert hmac.digest(mac_key(eavesdroppers, nonce, transcript), statement, "sha256") != mac


def test_the_signature_is_of_the_whole_exchange_as_anybody_can_check() -> None:
    sent = play(*pair(None, None, (b"tls", b"tls")))
    transcript = transcript_of(sent[:2], b"tls")
    for role, message in ((1, sent[2]), (2, sent[3])):
        public = Ed25519PublicKey.from_public_bytes(read_hello(sent[role - 1]).public)
        statement = LABEL + bytes([role]) + transcript
        public.verify(message[1:65], statement)
        with pytest.raises(InvalidSignature):
            public.verify(message[1:65], statement[:-1] + b"?")


def test_every_state_knows_what_it_may_hear_and_the_end_is_the_end() -> None:
    leads_on = {state for state, _ in NEXT}
    assert leads_on == set(HandshakeState) - {HandshakeState.REFUSED}
    for state, heard in itertools.product(HandshakeState, HandshakeEvent):
        if (state, heard) in NEXT:
            assert NEXT[state, heard] is not state
    caller, listener = pair()
    play(caller, listener)
    with pytest.raises(UsageError, match="over"):
        caller.receive(b"\x03\x01")


def test_every_reason_has_words_for_both_sides_and_survives_the_wire() -> None:
    sentences = [told("mini", reason, by_them=by_them) for reason in RefusalReason for by_them in (False, True)]
    assert all("mini" in sentence for sentence in sentences)
    for reason in RefusalReason:
        caller, listener = pair()
        caller.receive(listener.refuse(reason))
        assert (caller.reason, caller.was_told) == (reason, True)


@pytest.mark.parametrize("boot", [-1, 2**64])
def test_a_boot_that_does_not_fit_is_a_mistake(boot: int) -> None:
    with pytest.raises(UsageError, match="boot"):
        member("node", boot=boot)
