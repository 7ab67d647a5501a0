"""The machines of `--hosts`: their names for ssh with commas between them, or a file that lists them.

A file is what `mlx.launch --hostfile` reads, a JSON list of `{"ssh": "mini.local", "ips": ["10.0.42.2"]}` (or an object
with such a list under `hosts`), or what MPI and DeepSpeed read, a line `mini.local slots=1` for each machine. This
machine may be in it, as it is the first one in the files of these programs: it is not started through ssh.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hcsim.errors import ConfigError
from hcsim.real.interfaces import host_name, list_interfaces
from hcsim.units import did_you_mean

_OPTIONS = ("slots", "max_slots", "max-slots")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LONGEST = 320
"""The length of a name for ssh: a user, @ and a host's name, which has at most 253 characters."""
_EXAMPLE = "give each machine once, as ssh knows it, such as mini.local,studio.local, or a file that lists them"


class HostEntry(msgspec.Struct, frozen=True):
    """A machine."""

    ssh: str
    """Its name for ssh."""
    ips: tuple[str, ...] = ()
    """The addresses at which the others reach it, the best first; empty: those that it finds itself."""
    slots: int = 1


class _Hostfile(msgspec.Struct, frozen=True):
    """The object that newer versions of MLX write."""

    hosts: tuple[HostEntry, ...]


def read_hosts(given: Sequence[str]) -> tuple[HostEntry, ...]:
    """Return the machines of all values of `--hosts`."""
    found: list[HostEntry] = []
    for text in given:
        path = Path(text).expanduser()
        if path.is_file():
            found += _from_file(path)
            continue
        if text.endswith((".json", ".txt")) or "/" in text:
            raise ConfigError(f"--hosts {text}: there is no such file")
        found += [HostEntry(part.strip()) for part in text.split(",")]
    names = [entry.ssh for entry in found]
    for name in names:
        plain = name.isprintable() and " " not in name and len(name) <= _LONGEST
        if not name or name.startswith("-") or not plain:
            raise ConfigError(f"--hosts: {name[:_LONGEST]!r} is not the name of a host: {_EXAMPLE}")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"--hosts {','.join(given)}: {twice} is there twice: {_EXAMPLE}")
    return tuple(found)


def without_here(entries: Sequence[HostEntry]) -> tuple[tuple[HostEntry, ...], HostEntry | None]:
    """Return the other machines, and this one if it is among them."""
    names = {*_LOOPBACK, host_name().removesuffix(".local").lower()}
    ours = names | {address for each in list_interfaces() for address in each.addresses}
    here = [entry for entry in entries if _plain_name(entry) in names or ours.intersection((entry.ssh, *entry.ips))]
    return tuple(entry for entry in entries if entry not in here), here[0] if here else None


def _plain_name(entry: HostEntry) -> str:
    return entry.ssh.rpartition("@")[2].removesuffix(".local").lower()


def _from_file(path: Path) -> list[HostEntry]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    entries = _from_json(path, text) if text.lstrip()[:1] in ("[", "{") else _from_lines(path, text)
    if not entries:
        raise ConfigError(f"--hosts {path}: there is no machine in it")
    return entries


def _from_json(path: Path, text: str) -> list[HostEntry]:
    try:
        kind = tuple[HostEntry, ...] | _Hostfile
        read = msgspec.json.decode(text, type=kind)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f'--hosts {path}: {error}; expected [{{"ssh": "mini.local", "ips": ["10.0.42.2"]}}, …]'
        ) from None
    return [*(read.hosts if isinstance(read, _Hostfile) else read)]


def _from_lines(path: Path, text: str) -> list[HostEntry]:
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        name, *options = line.partition("#")[0].split() or [""]
        if not name:
            continue
        slots = 1
        if counted := re.fullmatch(r"([^:]+):(\d+)", name):  # as MPICH writes it
            name, slots = counted[1], int(counted[2])
        for option in options:
            key, _, value = option.partition("=")
            if key not in _OPTIONS or not value.isdecimal():
                hint = did_you_mean(key, _OPTIONS)
                raise ConfigError(f'--hosts {path}, line {number}: {option!r}{hint}; expected "{name} slots=1"')
            slots = int(value) if key == "slots" else slots
        entries.append(HostEntry(name, (), slots))
    return entries
