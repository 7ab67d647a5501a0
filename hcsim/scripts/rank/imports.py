"""Actions after the script's own imports, for libraries that most scripts do without."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _AfterImport(MetaPathFinder):
    """Finds one module as the other finders do, and acts when it has been loaded."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, act: Callable[[], None]) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._act()


def after_import(name: str, act: Callable[[], None]) -> None:
    """Act once the module has been imported, before the importing code goes on."""
    sys.meta_path.insert(0, _AfterImport(name, act))


def answer_mlx() -> None:
    """Let hcsim answer the distributed calls of MLX, if the script imports it."""

    def answer() -> None:
        from hcsim.mlx.intercept import install

        install()

    after_import("mlx.core", answer)
