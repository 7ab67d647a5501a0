"""What a worker's answers depend on, beside its task: all workers have to be alike in it."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hcsim.registry import load_plugin, plugins_sha256

_LIBRARIES = ("hcsim", "numpy", "torch", "simpy", "zstandard", "msgspec")
_CODE = ("hcsim/**/*.py", "hcsim/**/*.[ch]", "hcsim/scenarios/*.toml", "experiments/**/*.py", "experiments/**/*.toml")
_SHOWN = 12


@cache
def identity(plugins: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of this process's software, digests of its code and of these plugins."""
    for plugin in plugins:
        load_plugin(plugin)
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _LIBRARIES},
        "code of hcsim": _code_sha256()[:_SHOWN],
        **({"code of its plugins": plugins_sha256()[:_SHOWN]} if plugins else {}),
    }


def unlike(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the differences in words, or nothing."""
    parts = (f"{name} {theirs.get(name, 'none')} (here {value})" for name, value in ours.items())
    return ", ".join(part for part, name in zip(parts, ours, strict=True) if ours[name] != theirs.get(name))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _code_sha256() -> str:
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in _files(root, _CODE):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _files(root: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in root.glob(pattern)})
