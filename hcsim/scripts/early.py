"""What a script begins by importing, imported before it begins: ranks that are forked later have it already."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

LIBRARIES = ("torch", "numpy", "scipy", "sklearn", "pandas")
"""Those that take long, and bear being forked: the threads that some start, in OpenBLAS or jemalloc, are prepared."""
HARMLESS = (*LIBRARIES, "hcsim", *sorted(sys.stdlib_module_names))
"""What changes nothing for those who are imported after it."""


def import_early(script: str) -> None:
    """Import what the script will of these libraries. Whatever is wrong, the script is the one to find out."""
    with suppress(Exception):
        source = Path(script).read_bytes()
        wanted = [name for name in _first_imports(ast.parse(source)) if _library(name) in LIBRARIES]
        if b"optim" in source or b"DistributedDataParallel" in source:
            wanted.append("torch._dynamo")  # torch does so with the first optimizer or replica
        folder, path = str(Path(script).parent), sys.path.copy()
        if not sys.flags.safe_path:
            del sys.path[0]  # a folder of somebody's own, whose modules are not for libraries
        try:
            for name in wanted:
                if not _is_beside(folder, _library(name)):
                    with suppress(Exception, SystemExit):
                        import_module(name)
        finally:
            sys.path[:] = path


def _first_imports(script: ast.Module) -> Iterator[str]:
    """The modules that it imports before it does anything else, such as to say where or how they are to be loaded."""
    for statement in script.body[ast.get_docstring(script) is not None :]:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names = [statement.module]
        else:
            return
        yield from names
        if any(_library(name) not in HARMLESS for name in names):
            return


def _library(name: str) -> str:
    return name.partition(".")[0]


def _is_beside(folder: str, library: str) -> bool:
    """Whether a module of this name lies in the script's folder, and comes first."""
    found = PathFinder.find_spec(library, [folder])
    return found is not None and found.loader is not None  # without one it is any folder, which comes last
