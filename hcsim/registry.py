"""Registries of named things (compressors, strategies, machines, …), and the plugins that extend them.

A plugin is a Python module that registers its names when it is imported (see `hcsim.plugins`). It is loaded
because a scenario, a sweep or a command names it, as an importable module or as a file; or because it is
installed, with an entry point:

    [project.entry-points."hcsim.plugins"]
    ternary = "my_package.ternary"

Installed plugins are imported only when a name is requested that is unknown without them. A run that uses
no plugin does not wait for them, and gives the same result with and without them.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Generic, TypeVar

from hcsim.errors import ConfigError, HcsimError, UsageError
from hcsim.units import did_you_mean

GROUP = "hcsim.plugins"
"""The entry-point group of installed plugins."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]*")

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A mapping of names to things: the built-in ones, and those that plugins have added."""

    def __init__(self, what: str, own: Mapping[str, T]) -> None:
        self.what = what
        """The noun for an entry, for errors."""
        self._things = dict(own)

    def add(self, name: str, thing: T) -> None:
        """Add an entry. A name can be given only once, because the names in a result must be unambiguous."""
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot be the name of a {self.what}: letters, digits, dots, dashes, spaces")
        if name in self._things:
            raise UsageError(f"there is a {self.what} {name!r} already")
        self._things[name] = thing

    def __getitem__(self, name: str) -> T:
        if name not in self._things:
            load_installed()
        return self._things[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._things)

    def __len__(self) -> int:
        return len(self._things)

    def named(self, name: str) -> T:
        """Return the entry of that name. Raises `ConfigError` with the known names if there is none."""
        if name not in self:
            known = ", ".join(self)
            raise ConfigError(f'there is no {self.what} "{name}"{did_you_mean(name, self)}; known: {known}')
        return self[name]


_loaded: dict[str, ModuleType] = {}
"""By name, or by the file's absolute path."""


def load_plugin(name: str, beside: Path | None = None) -> ModuleType:
    """Import a plugin, once: a module's name, or a file's (it ends with .py), which may be relative to `beside`."""
    if not name.endswith(".py"):
        return _imported(name, name, lambda: import_module(name))
    path = (Path() if beside is None else beside).joinpath(name).resolve()
    return _imported(name, str(path), lambda: _from_file(path))


def function_in(name: str, beside: Path | None = None) -> Callable[..., Any]:
    """Return the function that "module:function" or "file.py:function" names."""
    module, colon, function = name.rpartition(":")
    if not (module and colon and function.isidentifier()):
        raise ConfigError(f'"{name}": expected module:function, or file.py:function')
    found = getattr(load_plugin(module, beside), function, None)
    if not callable(found):
        raise ConfigError(f'"{name}": there is no function {function} in {module}')
    return found  # type: ignore[no-any-return]


def loaded_plugins() -> tuple[str, ...]:
    """Return the plugins that another process must load to know the same names."""
    return tuple(_loaded)


def plugins_sha256() -> str:
    """Return the digest of the sources of all loaded plugins: results depend on these besides the code of hcsim."""
    digest = hashlib.sha256()
    for module in _loaded.values():
        if module.__file__ is not None:
            digest.update(hashlib.sha256(Path(module.__file__).read_bytes()).digest())
    return digest.hexdigest()


@cache
def load_installed() -> None:
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        _load_entry(point)


def _load_entry(point: EntryPoint) -> None:
    _imported(f"{point.name} ({point.value})", point.module, lambda: import_module(point.module))


def _from_file(path: Path) -> ModuleType:
    # Its name says where it lies: two files of one name are two plugins.
    name = f"hcsim_plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _imported(name: str, key: str, load: Callable[[], ModuleType]) -> ModuleType:
    """Return the module. An error names the place of the mistake in it, without the frames of hcsim."""
    if key not in _loaded:
        try:
            _loaded[key] = load()
        except HcsimError as error:
            raise ConfigError(f"plugin {name}: {error}") from error
        except Exception as error:
            frames = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
            last = frames[-1] if frames else None
            at = "" if last is None or last.filename == __file__ else f" ({last.filename}, line {last.lineno})"
            kind = "" if isinstance(error, (FileNotFoundError, ModuleNotFoundError)) else f"{type(error).__name__}: "
            raise ConfigError(f"plugin {name}: {kind}{error}{at}") from error
    return _loaded[key]
