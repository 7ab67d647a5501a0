"""Keys and secrets: against openssl's and hashlib's idea of them, and against people's typos."""

from __future__ import annotations

import hashlib
import hmac
import shutil
import subprocess

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hcsim.errors import ConfigError, UsageError
from hcsim.identity.keys import ClusterSecret, NodeKey, is_signed, node_id_of

secrets = st.binary(min_size=16, max_size=16).map(ClusterSecret)
CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def test_a_node_key_is_the_ed25519_key_of_its_seed_and_names_the_node_by_a_digest() -> None:
    """The first test vector of RFC 8032, section 7.1."""
    key = NodeKey(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert key.public.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155")
    assert key.node_id == hashlib.sha3_256(key.public).hexdigest()[:32] == node_id_of(key.public)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_the_digest_that_names_a_node_is_the_one_openssl_computes() -> None:
    key = NodeKey(bytes(32))
    done = subprocess.run(["openssl", "dgst", "-sha3-256", "-r"], input=key.public, capture_output=True, check=True)
    assert done.stdout.decode()[:32] == key.node_id


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_node_key_of_another_size_is_a_mistake(size: int) -> None:
    with pytest.raises(UsageError, match="32"):
        NodeKey(bytes(size))


def test_a_signature_holds_for_one_message_and_one_key() -> None:
    one, other = NodeKey(bytes(32)), NodeKey(bytes([1]) * 32)
    signature = one.sign(b"message")
    assert is_signed(b"message", signature, one.public)
    assert not is_signed(b"massage", signature, one.public)
    assert not is_signed(b"message", signature, other.public)
    assert not is_signed(b"message", b"short", one.public)


def test_no_private_part_shows_in_a_representation() -> None:
    seed, data = bytes(range(32)), bytes(range(16))
    for shown, kept in ((NodeKey(seed), seed), (ClusterSecret(data), data)):
        for text in (repr(shown), str(shown)):
            assert kept.hex() not in text
            assert repr(kept)[2:-1] not in text


@pytest.mark.parametrize("size", [0, 4, 15, 17])
def test_a_secret_of_fewer_bits_does_not_exist(size: int) -> None:
    with pytest.raises(UsageError, match="16 random bytes"):
        ClusterSecret(bytes(size))


@given(secrets, secrets)
def test_another_secret_has_another_namespace_and_other_keys(one: ClusterSecret, other: ClusterSecret) -> None:
    assume(one.phrase() != other.phrase())
    assert one != other
    assert one.namespace != other.namespace
    assert one.derive("a") != other.derive("a")


def test_keys_are_hkdf_sha256_with_the_purpose_as_info() -> None:
    """Extract and expand of RFC 5869, by hand."""
    data = bytes(range(16))
    extracted = hmac.digest(b"hcsim cluster 1", data, "sha256")
    expected = hmac.digest(extracted, b"admission" + b"\x01", "sha256")
    assert ClusterSecret(data).derive("admission") == expected
    assert ClusterSecret(data).derive("admissio") != expected


@given(secrets, st.sampled_from(["", " ", "-", " - "]), st.booleans())
def test_a_phrase_is_read_however_it_is_written(secret: ClusterSecret, between: str, lower: bool) -> None:
    phrase = secret.phrase()
    assert [len(group) for group in phrase.split("-")] == [5] * 6
    assert set(phrase) <= set(CROCKFORD + "-")
    written = between.join(phrase.replace("-", ""))
    assert ClusterSecret.from_phrase(written.lower() if lower else written) == secret


@given(secrets)
def test_letters_that_look_alike_are_read_alike(secret: ClusterSecret) -> None:
    for one, zero in (("I", "O"), ("l", "o")):
        assert ClusterSecret.from_phrase(secret.phrase().replace("1", one).replace("0", zero)) == secret


@given(secrets, st.integers(0, 29), st.sampled_from(CROCKFORD))
def test_a_wrong_letter_is_noticed(secret: ClusterSecret, place: int, letter: str) -> None:
    letters = list(secret.phrase().replace("-", ""))
    assume(letters[place] != letter)
    letters[place] = letter
    with pytest.raises(ConfigError, match="typo"):
        ClusterSecret.from_phrase("".join(letters))


@given(secrets, st.integers(0, 28))
def test_two_letters_that_changed_places_are_noticed(secret: ClusterSecret, place: int) -> None:
    letters = list(secret.phrase().replace("-", ""))
    assume(letters[place] != letters[place + 1])
    letters[place : place + 2] = reversed(letters[place : place + 2])
    with pytest.raises(ConfigError, match="typo"):
        ClusterSecret.from_phrase("".join(letters))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda phrase: phrase[:-6], "25 letters and digits where 30 are needed"),
        (lambda phrase: phrase + "-" + phrase[:5], "35 letters and digits where 30"),
        (lambda phrase: "U" + phrase[1:], r"'U' \(character 1 of group 1\)"),
        (lambda phrase: phrase[:-1] + "!", r"'!' \(character 5 of group 6\)"),
        (lambda phrase: "", "0 letters"),
        (lambda phrase: phrase[:-1] + "é", "'É'"),
    ],
)
def test_a_phrase_that_cannot_be_one_is_refused_with_what_is_wrong(change, complaint) -> None:
    with pytest.raises(ConfigError, match=complaint):
        ClusterSecret.from_phrase(change(ClusterSecret(bytes(range(16))).phrase()))


@given(st.text())
def test_no_text_crashes_the_reader_of_phrases(text: str) -> None:
    with pytest.raises(ConfigError, match="join phrase"):
        ClusterSecret.from_phrase(text)
