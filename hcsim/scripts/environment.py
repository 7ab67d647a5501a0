"""How a rank begins: which one its process is, what its script finds in its environment, and what is imported before.

Ranks that are forked later have it already.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

MASTER_PORT = 29500


class Seat(msgspec.Struct, frozen=True):
    """Which rank a process is, and what it runs."""

    rank: int
    world: int
    first: str
    """The host of rank 0."""
    script: str
    arguments: tuple[str, ...]
    flops_per_byte: float
    """Work that is denser than this is held up by the machine's arithmetic, other work by its memory."""
    seed: int
    """Of what its script draws before it has set a seed."""
    life: int = 1
    """How often the machine has been started."""


def environment(rank: int, world: int, first: str, life: int) -> dict[str, str]:
    """What torchrun would have set: one process on each machine."""
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
