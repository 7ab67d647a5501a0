"""The files that a machine keeps secret."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from hcsim.errors import ConfigError
from hcsim.identity.keys import ClusterSecret
from hcsim.real.keys import credentials, load_node_key, load_secret, new_secret, save_secret

SECRET = ClusterSecret(bytes(range(16)))


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_node_key_is_made_once_for_our_eyes_only(tmp_path: Path) -> None:
    home = tmp_path / "home"
    key = load_node_key(home)
    assert load_node_key(home).node_id == key.node_id
    assert mode(home / "node_key") == 0o600
    assert mode(home) == 0o700
    assert [path.name for path in home.iterdir()] == ["node_key"]
    assert load_node_key(tmp_path / "another").node_id != key.node_id


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_reads_the_key_and_finds_the_same_public_part(tmp_path: Path) -> None:
    key = load_node_key(tmp_path)
    command = ["openssl", "pkey", "-in", str(tmp_path / "node_key"), "-pubout", "-outform", "DER"]
    assert subprocess.run(command, capture_output=True, check=True).stdout.endswith(key.public)


def test_threads_that_start_at_once_agree_on_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda _: load_node_key(tmp_path).node_id, range(16)))
    assert len(set(keys)) == 1


@pytest.mark.parametrize("others", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_can_read_is_refused_with_what_to_do(tmp_path: Path, others: int) -> None:
    load_node_key(tmp_path)
    (tmp_path / "node_key").chmod(others)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_node_key(tmp_path)


@pytest.mark.parametrize("damage", ["", "nonsense", "half", "another kind"])
def test_a_damaged_key_is_refused_and_left_alone(tmp_path: Path, damage: str) -> None:
    load_node_key(tmp_path)
    path = tmp_path / "node_key"
    whole = path.read_bytes()
    other = X25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    damaged = {"": b"", "nonsense": b"nonsense", "half": whole[: len(whole) // 2], "another kind": other}[damage]
    path.write_bytes(damaged)
    with pytest.raises(ConfigError, match="node_key: damaged"):
        load_node_key(tmp_path)
    assert path.read_bytes() == damaged


def test_a_folder_in_place_of_the_key_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "node_key").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_node_key(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written"):
        load_node_key(tmp_path)


def test_a_cluster_is_remembered_and_never_overwritten(tmp_path: Path) -> None:
    assert save_secret(tmp_path, "home", SECRET)
    assert not save_secret(tmp_path, "home", SECRET)
    assert mode(tmp_path / "clusters" / "home") == 0o600
    with pytest.raises(ConfigError, match="another cluster of the name 'home'"):
        save_secret(tmp_path, "home", new_secret())
    assert load_secret(tmp_path, "home") == SECRET


def test_a_cluster_that_was_not_joined_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hcsim cluster join"):
        load_secret(tmp_path, "home")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"WSE38", SECRET.phrase().replace("0", "2").encode()])
def test_a_damaged_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    save_secret(tmp_path, "home", SECRET)
    (tmp_path / "clusters" / "home").write_bytes(content)
    with pytest.raises(ConfigError, match="damaged"):
        load_secret(tmp_path, "home")


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "A", ".hidden", "x" * 33, "a\0b", "-x"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name"):
        save_secret(tmp_path, name, SECRET)


def test_secrets_and_nonces_are_the_operating_systems_random_bytes(tmp_path: Path) -> None:
    assert len({new_secret().phrase() for _ in range(100)}) == 100
    assert credentials(load_node_key(tmp_path), SECRET).fresh is os.urandom
