"""What a rank starts with: its rank and script, its environment variables, and its preloaded modules.

Ranks that are forked from the fork server inherit the preloaded modules.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

MASTER_PORT = 29500
Grouping: TypeAlias = Literal["kind", "signature"]
"""How kernels are told apart: by kind and size, or also by operation and shapes."""


class RankSpec(msgspec.Struct, frozen=True):
    """A rank's number, its script, and the parameters of its simulation."""

    rank: int
    world: int
    first: str
    script: str
    arguments: tuple[str, ...]
    flops_per_byte: float
    """Kernels with a higher arithmetic intensity are compute-bound, the others memory-bound."""
    seed: int
    """The initial seed of the script's random number generators, before it sets one."""
    life: int = 1
    """How often the machine has been started."""
    grouping: Grouping | None = None
    """How kernels are counted, for a machine whose kernels were measured."""


def environment(rank: int, world: int, first: str, life: int) -> dict[str, str]:
    """Return the variables that torchrun sets, with one process on each machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(world),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "default",
        "MASTER_ADDR": first,
        "MASTER_PORT": str(MASTER_PORT),
        "TORCHELASTIC_RUN_ID": "hcsim",
        "TORCHELASTIC_RESTART_COUNT": str(life - 1),
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


LIBRARIES = ("torch", "numpy", "scipy", "sklearn", "pandas")
"""Slow imports that are safe to fork: the thread pools that some start (OpenBLAS, jemalloc) handle a fork."""
HARMLESS = (*LIBRARIES, "hcsim", *sorted(sys.stdlib_module_names))
"""Modules whose import has no effect on modules that are imported later."""


def import_early(script: str) -> None:
    """Preload those of these libraries that the script imports. Errors are ignored: the script will raise them
    itself."""
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
    """Yield the modules that the script imports before any other statement, which might configure their
    loading."""
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
    """Return whether a module of this name in the script's folder takes precedence."""
    found = PathFinder.find_spec(library, [folder])
    return found is not None and found.loader is not None  # without one it is any folder, which comes last
