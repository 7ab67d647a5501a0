"""Names that refer to something: they must exist, and an error says which do."""

from __future__ import annotations

from collections.abc import Collection

from hcsim.errors import ConfigError
from hcsim.units import did_you_mean


def check_known(path: str, name: str, known: Collection[str], what: str) -> None:
    """Refuse a name at that place that is none of the known ones."""
    if name not in known:
        valid = ", ".join(known) or "none"
        raise ConfigError(f'{path} = "{name}": there is no such {what}{did_you_mean(name, known)}; known: {valid}')


def check_pair(path: str, pair: tuple[str, str], names: Collection[str]) -> None:
    """Refuse anything but two different nodes."""
    for i, name in enumerate(pair):
        check_known(f"{path}[{i}]", name, names, "node")
    if pair[0] == pair[1]:
        raise ConfigError(f'{path}: "{pair[0]}" is there twice; two different nodes are needed')
