"""The secrets of a machine: its node key, and those of the clusters that it has joined.

    HOME/node_key          the node's Ed25519 key, in PEM format
    HOME/clusters/NAME     a cluster's join phrase, as it was when the cluster was created
    HOME/clusters/NAME.trust   its trust list, and the secret of the last rotation

HOME is `~/.hcsim` by default. The files are created atomically, once, and readable by their owner only; a file
that others can read is rejected, since they may have read it. The trust list is replaced as a whole, by one
process at a time. If there is none yet, the machine creates one that contains itself.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hcsim.errors import ConfigError
from hcsim.files import flush, flush_names, write_whole
from hcsim.identity.handshake import BOOT_BITS, Credentials
from hcsim.identity.keys import SECRET_BYTES, SEED_BYTES, ClusterSecret, NodeKey
from hcsim.identity.trust_list import TrustRecord
from hcsim.identity.trust_store import TrustStore
from hcsim.runtime.host import packed, unpacked

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


def default_home() -> Path:
    """Return HOME where a command does not set it."""
    return Path(os.environ.get("HCSIM_HOME") or Path.home() / ".hcsim").expanduser()


def load_node_key(home: Path) -> NodeKey:
    """Return this machine's key; creates it at the first call."""
    path = home / "node_key"
    data = _read_private(path)
    if data is None:
        _create_private(path, NodeKey(os.urandom(SEED_BYTES)).pem())
        data = _read_private(path) or b""  # another process may have been faster: its key counts
    try:
        private = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise ConfigError(
            f"{path}: damaged, or not an Ed25519 key without a passphrase; "
            "take it from a backup, or delete it: this machine is then a new node to its cluster, and has to be invited"
        )
    return NodeKey(private.private_bytes_raw())


def new_secret() -> ClusterSecret:
    return ClusterSecret(os.urandom(SECRET_BYTES))


def save_secret(home: Path, name: str, secret: ClusterSecret) -> bool:
    """Store a cluster's secret; return False if it is stored already. A different one is never overwritten."""
    path = _cluster_file(home, name)
    if _create_private(path, f"{secret.phrase()}\n".encode()):
        return True
    if load_secret(home, name) == secret:
        return False
    raise ConfigError(
        f"{path}: this machine belongs to another cluster of the name {name!r} already (`hcsim cluster phrase "
        f"--name {name}` prints how others join it); give this one another name (--name), or delete that file to "
        "forget the other"
    )


def has_joined(home: Path, name: str) -> bool:
    return _cluster_file(home, name).exists()


def load_secret(home: Path, name: str) -> ClusterSecret:
    path = _cluster_file(home, name)
    data = _read_private(path)
    if data is None:
        joined = ", ".join(sorted(other.name for other in path.parent.glob("*") if _NAME.fullmatch(other.name)))
        raise ConfigError(
            f"this machine has joined no cluster of the name {name!r} ({path} does not exist)"
            f"{f', only {joined}' if joined else ''}: "
            "run `hcsim cluster create` on the first machine, `hcsim cluster join` on the others"
        )
    try:
        return ClusterSecret.from_phrase(data.decode("ascii", errors="replace"))
    except ConfigError:
        raise ConfigError(f"{path}: damaged; delete it and join the cluster again") from None


class TrustFile:
    """The file of a cluster's trust list."""

    def __init__(self, home: Path, name: str) -> None:
        self._path = _cluster_file(home, name).with_name(f"{name}.trust")

    def load(self) -> TrustRecord | None:
        data = _read_private(self._path)
        return None if data is None else unpacked(data, TrustRecord, str(self._path))

    def update(self, change: Callable[[TrustRecord | None], TrustRecord]) -> None:
        path = self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                write_whole(path, packed(change(self.load())), 0o600)
            finally:
                os.close(folder)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None

    def add(self, record: TrustRecord) -> None:
        """Add a record to the file. Its validity is checked when it is loaded."""

        def joint(saved: TrustRecord | None) -> TrustRecord:
            statements = () if saved is None else saved.statements
            return TrustRecord(tuple(dict.fromkeys((*statements, *record.statements))), record.secret)

        self.update(joint)


def load_trust(home: Path, name: str, machine: str) -> TrustStore:
    """Return the trust list of a cluster that this machine, under that name, has joined."""
    return TrustStore(load_secret(home, name), load_node_key(home), machine, TrustFile(home, name))


def credentials(key: NodeKey, secret: ClusterSecret, trusted: TrustStore | None = None) -> Credentials:
    """Return this machine's credentials for a new incarnation, with random bytes of the operating system."""
    return Credentials(key, secret, 1 + secrets.randbelow(2**BOOT_BITS - 1), os.urandom, trusted)


def load_credentials(home: Path, name: str, machine: str) -> Credentials:
    """Return the same for a cluster that this machine has joined."""
    return credentials(load_node_key(home), load_secret(home, name), load_trust(home, name, machine))


def beside_a_node(credentials: Credentials) -> Credentials:
    """Return the credentials with boot number 0, for a command or a program on a machine whose node may run."""
    return msgspec.structs.replace(credentials, boot=0)


def check_cluster_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a cluster: use small letters, digits, - and _, up to 32")


def _cluster_file(home: Path, name: str) -> Path:
    check_cluster_name(name)
    return home / "clusters" / name


def _read_private(path: Path) -> bytes | None:
    """Return the content of a file that only its owner can read; None if there is none."""
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.geteuid():
                raise ConfigError(f"{path}: belongs to another user, so it is not ours to trust")
            if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"{path}: others on this machine can read it; if none of them did, run `chmod 600 {path}`, "
                    "otherwise delete it and make a new one"
                )
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _create_private(path: Path, data: bytes) -> bool:
    """Atomically create a file that only its owner can read; return False if it exists already."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                flush(file.fileno())
            os.link(beside, path)  # fails if the name is taken, as a rename would not
        finally:
            os.unlink(beside)
        flush_names(path.parent)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
    return True
