"""What a script begins by importing, imported before it begins: ranks that are forked later have it already."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

LIBRARIES = ("torch", "numpy", "scipy", "sklearn", "pandas")
"""Those that take long, start nothing when they are imported, and are the same in all ranks."""


def import_early(script: str) -> None:
    """Import what the script will of these libraries. Whatever is wrong, the script is the one to find out."""
    folder = Path(script).parent
    with suppress(OSError, SyntaxError, ValueError):
        text = Path(script).read_text(encoding="utf-8")
        wanted = dict.fromkeys(_imported(ast.parse(text)))
        if "optim" in text or "DistributedDataParallel" in text:
            wanted["torch._dynamo"] = None  # torch does so with the first optimizer or replica
        first = sys.path.pop(0)  # a folder of somebody's own, whose modules are not for libraries
        try:
            for name in wanted:
                library = name.partition(".")[0]
                if library in LIBRARIES and not _is_its_own(folder, library):
                    with suppress(Exception, SystemExit):
                        import_module(name)
        finally:
            sys.path.insert(0, first)


def _imported(script: ast.Module) -> Iterator[str]:
    """The modules that it names, where it does so first of all."""
    for statement in script.body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module


def _is_its_own(folder: Path, library: str) -> bool:
    """Whether something beside the script has this name, and comes first."""
    return any(folder.glob(f"{library}.*")) or (folder / library).is_dir()
