"""What the two worlds rest on, read from the source: who imports whom, and what a component never does.

A component takes time, randomness, the network and the order of events from its host alone. Whatever
would bring them in by another way is refused here, with its line.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import hcsim

HCSIM = Path(__file__).parent.parent / "hcsim"
COMPONENTS = ("transport", "collectives", "compressors", "identity", "cluster", "training")
"""Folders; those that do not exist yet have no files to check."""
IN_A_RUN = ("virtual", "node.py", "jobs.py")
"""What else decides the order of a virtual run's events; much of it is what components may not touch."""

OFF_LIMITS = (
    "simpy", "socket", "time", "random", "secrets", "os", "subprocess", "threading", "importlib",
    "hcsim.virtual", "hcsim.real", "hcsim.launch", "hcsim.cli",
    *(f"asyncio.{name}" for name in ("sleep", "open_connection", "start_server", "to_thread", "wait", "as_completed")),
)  # fmt: skip
OFF_LIMITS_METHODS = ("time", "run_in_executor", "sock_connect", "create_connection", "create_server")
"""Of the event loop, however it is called there."""
TORCH_ITSELF = (
    "training/tasks/", "training/modules/", "torch_backend/", "checkpoints/", "scripts/rank/", "torch_kernels.py",
    "twin/kernels.py", "twin/blocks.py", "twin/stopwatch.py", "twin/script_rank.py",
)  # fmt: skip
"""Folders and modules that compute with torch."""
BY_ADDRESS = ("id", "hash")
IN_ORDER = ("list", "tuple", "enumerate", "iter", "zip", "map", "filter", "reversed", "fromkeys", "join", "extend")
"""Calls that keep the order of what they are given."""


parsed = cache(ast.parse)


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, full dotted name, and the name it has in this file, of everything imported anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}", alias.asname or alias.name


def run_on_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The imports outside of functions, less those for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            yield from run_on_import(node)


def is_within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def offences(source: str) -> list[str]:
    """What a component with this source does that no component may, as "line: what"."""
    tree = parsed(source)
    found = [(line, f"imports {name}") for line, name, _ in imports(tree) if is_within(name, OFF_LIMITS)]
    homes = {local: name for _, name, local in imports(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, _, rest = ast.unparse(node).partition(".")
            if is_within(full := f"{homes.get(base, base)}.{rest}", OFF_LIMITS):
                found.append((node.lineno, f"uses {full}"))
            elif node.attr in OFF_LIMITS_METHODS:
                found.append((node.lineno, f"uses {ast.unparse(node)}"))
        if isinstance(node, ast.Name) and node.id in BY_ADDRESS:
            found.append((node.lineno, f"uses {node.id}()"))
    return [f"{line}: {what}" for line, what in sorted([*found, *_orders_of_sets(tree)])]


def orders_of_sets(source: str) -> list[str]:
    """Where a source reads a set in its order, as "line: what"."""
    return [f"{line}: {what}" for line, what in sorted(_orders_of_sets(parsed(source)))]


def _orders_of_sets(tree: ast.AST) -> Iterator[tuple[int, str]]:
    sets = frozenset(_names_of_sets(tree))
    for node in ast.walk(tree):
        for read in _read_in_order(node):
            if _is_set(read, sets):
                yield read.lineno, f"reads {ast.unparse(read)} in the order of a set"


def _read_in_order(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        return [node.iter]
    if isinstance(node, ast.Starred):
        return [node.value]
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        popped = [node.func.value] if isinstance(node.func, ast.Attribute) and name == "pop" and not node.args else []
        return [*popped, *(node.args if name in IN_ORDER else ())]
    return []


def _is_set(node: ast.expr, names: frozenset[str] = frozenset()) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_set(node.left, names) or _is_set(node.right, names)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("set", "frozenset")
    return isinstance(node, ast.Set | ast.SetComp) or ast.unparse(node) in names


def _names_of_sets(tree: ast.AST) -> Iterator[str]:
    """Names, attributes and parameters of this file that hold a set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and _is_set_type(node.annotation):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.arg) and node.annotation is not None and _is_set_type(node.annotation):
            yield node.arg
        elif isinstance(node, ast.Assign) and _is_set(node.value):
            yield from (ast.unparse(target) for target in node.targets)


def _is_set_type(annotation: ast.expr) -> bool:
    return ast.unparse(annotation).partition("[")[0] in ("set", "frozenset")


def sources(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def name_of(path: Path) -> str:
    return str(path.relative_to(HCSIM))


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("path", [path for name in COMPONENTS for path in sources(HCSIM / name)], ids=name_of)
def test_a_component_takes_everything_from_its_host(path: Path) -> None:
    assert offences(path.read_text(encoding="utf-8")) == []


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("path", [path for name in IN_A_RUN for path in sources(HCSIM / name)], ids=name_of)
def test_no_set_orders_the_events_of_a_run(path: Path) -> None:
    assert orders_of_sets(path.read_text(encoding="utf-8")) == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("world", "other"), [("virtual", "real"), ("real", "virtual")])
def test_neither_world_knows_the_other(world: str, other: str) -> None:
    files = sources(HCSIM / world)
    assert files
    for path in files:
        names = [name for _, name, _ in imports(parsed(path.read_text(encoding="utf-8")))]
        assert [name for name in names if is_within(name, (f"hcsim.{other}",))] == [], path


@pytest.mark.slow
def test_torch_is_imported_in_few_files_and_only_when_it_is_used() -> None:
    """At the top only by what nobody loads without need: tasks that compute with it, a script's own process."""
    importers: dict[str, None] = {}
    for path in sources(HCSIM):
        tree = parsed(path.read_text(encoding="utf-8"))
        importers |= dict.fromkeys(name_of(path) for _, name, _ in imports(tree) if is_within(name, ("torch",)))
        if not name_of(path).startswith(TORCH_ITSELF):
            at_once = [name for node in run_on_import(tree) for _, name, _ in imports(node)]
            assert not any(is_within(name, ("torch",)) for name in at_once), path
    tasks = [f"training/tasks/{name}.py" for name in ("torch_blocks", "torch_replica", "torch_stage", "torch_task")]
    others = [name for name in sorted(importers) if not name.startswith(TORCH_ITSELF[1:])]
    assert others == ["compressors/kernels/plain.py", "real/hardware.py", "selftest/machine.py", *tasks]


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    ["hcsim", "hcsim.launch.virtual", "hcsim.launch.virtual_cluster", "hcsim.launch.real", "hcsim.cli",
     "hcsim.cli.ranks", "hcsim.cli.training", "hcsim.training.tasks.shapes"],
)  # fmt: skip
def test_the_ways_in_do_not_wait_for_heavy_libraries(module: str) -> None:
    heavy = ("torch", "matplotlib", "pandas", "networkx", "cryptography.x509")
    program = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"


def test_a_virtual_job_imports_no_more_than_it_needs() -> None:
    program = """
import sys
from hcsim.cli import main
sys.argv = ["hcsim", "run", "four-macs-1gbe"]
try:
    main()
finally:
    print("imported", *[name for name in sys.modules if name.partition(".")[0] == "hcsim"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    *_, last = done.stdout.splitlines()
    modules = last.split()[1:]
    others = ("hcsim.real", "hcsim.cluster", "hcsim.identity", "hcsim.training", "hcsim.node", "hcsim.scripts")
    assert [name for name in modules if is_within(name, others)] == []
    assert len(modules) <= 115


@pytest.mark.parametrize(
    ("source", "offence"),
    [
        ("import time", "imports time"),
        ("import numpy, socket as s", "imports socket"),
        ("from time import monotonic", "imports time.monotonic"),
        ("from os import environ", "imports os.environ"),
        ("import os.path", "imports os.path"),
        ("def f():\n    import random", "imports random"),
        ("if TYPE_CHECKING:\n    from random import Random", "imports random.Random"),
        ("from hcsim import virtual", "imports hcsim.virtual"),
        ("from hcsim.real.tcp import TcpStream", "imports hcsim.real.tcp.TcpStream"),
        ("from asyncio import sleep", "imports asyncio.sleep"),
        ("import asyncio\nawait asyncio.sleep(1)", "uses asyncio.sleep"),
        ("import asyncio as aio\nnap = aio.sleep", "uses asyncio.sleep"),
        ("import asyncio\nasyncio.open_connection('a', 1)", "uses asyncio.open_connection"),
        ("import asyncio\nasyncio.start_server(f)", "uses asyncio.start_server"),
        ("import asyncio\ndone, late = await asyncio.wait(tasks)", "uses asyncio.wait"),
        ("import asyncio\nfor one in asyncio.as_completed(tasks): pass", "uses asyncio.as_completed"),
        ("import asyncio\nasyncio.get_running_loop().time()", "uses asyncio.get_running_loop().time"),
        ("self._loop.time()", "uses self._loop.time"),
        ("loop.run_in_executor(None, f)", "uses loop.run_in_executor"),
        ("order = sorted(peers, key=id)", "uses id()"),
        ("slot = hash(name) % 8", "uses hash()"),
        ("for x in {1, 2}: pass", "reads {1, 2} in the order of a set"),
        ("[x for x in set(names)]", "reads set(names) in the order of a set"),
        ("sum(x for x in {y for y in z})", "reads {y for y in z} in the order of a set"),
        ("for x in set(a) - b: pass", "reads set(a) - b in the order of a set"),
        ("for i, x in enumerate(frozenset(a)): pass", "reads frozenset(a) in the order of a set"),
        ("[*{1, 2}]", "reads {1, 2} in the order of a set"),
        ("','.join({str(x) for x in y})", "reads {str(x) for x in y} in the order of a set"),
        ("seen = set()\nfor x in seen: pass", "reads seen in the order of a set"),
        ("self.seen: set[int] = make()\nfirst = self.seen.pop()", "reads self.seen in the order of a set"),
        ("def f(ranks: frozenset[int]):\n    return list(ranks)", "reads ranks in the order of a set"),
    ],
)
def test_what_a_component_may_not_do_is_found(source: str, offence: str) -> None:
    assert [found.partition(": ")[2] for found in offences(source)] == [offence]


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasync with asyncio.timeout(1): await asyncio.gather(a, b)",
        "import asyncio\nawait asyncio.wait_for(future, 1)",
        "from timeit import default_timer",
        "for x in sorted({1, 2}): pass",
        "known = set(names)\nif 'a' in known and len(known) > 1: known.discard('a')",
        "for x in {'a': 1}: pass",
        "async def f(host): await host.clock.sleep(1)",
        "class A:\n    def __hash__(self): return self.id",
    ],
)
def test_what_a_component_may_do_is_left_alone(source: str) -> None:
    assert offences(source) == []


def private_names(source: str) -> Iterator[str]:
    """What a test takes from us that is private, where the linter does not see it: by an import, or named in a text."""
    if not re.search(r"import .*\b_|attr\(.*[\"'.]_", source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and is_within(node.module or "", ("hcsim", "experiments")):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "delattr", "getattr")):
            named = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            yield from (name for name in named if is_private(name))


def is_private(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last.startswith("_") and not last.endswith("__")


@pytest.mark.slow
def test_a_test_knows_what_is_public() -> None:
    tests = sources(Path(__file__).parent)
    found = {path.name: [*private_names(path.read_text(encoding="utf-8"))] for path in tests}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from hcsim.real.host import _connected", "_connected"),
        ("monkeypatch.setattr(host, '_resolve', slow)", "_resolve"),
        ("monkeypatch.setattr('hcsim.real.host._resolve', slow)", "hcsim.real.host._resolve"),
        ("getattr(host, '_resolve')", "_resolve"),
    ],
)
def test_what_a_test_takes_from_within_is_found(source: str, found: str) -> None:
    assert [*private_names(source)] == [found]


@pytest.mark.parametrize(
    "source",
    ["from experiments.ddp import __main__", "from torch import _C", "monkeypatch.setattr(host, 'resolve', slow)"],
)
def test_what_a_test_takes_from_without_is_left_alone(source: str) -> None:
    assert [*private_names(source)] == []


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """The strongly connected components of two or more modules, or of one that imports itself (Tarjan)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in graph[module]:
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            at = stack.index(module)
            component = sorted(stack[at:])
            del stack[at:]
            if len(component) > 1 or module in graph[module]:
                found.append(component)

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return sorted(found)


def import_graph(package: Path) -> dict[str, set[str]]:
    """Who imports whom within a package: at the top, in functions, and for types."""
    modules = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in sources(package)}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = [name for _, name, _ in imports(ast.parse(path.read_text(encoding="utf-8")))]
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()
    return graph


LINUX_LOOPBACK = re.compile(r"\b127\.0\.0\.(?!1\b)[0-9]")
"""macOS has 127.0.0.1 alone."""


def with_linux_loopback(source: str) -> list[str]:
    """Return the tests that use other addresses of the loopback and are not skipped anywhere."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        function.name
        for function in functions
        if LINUX_LOOPBACK.search(ast.unparse(function))
        and not any("skipif" in ast.unparse(decorator) for decorator in function.decorator_list)
    ]


def test_tests_use_no_address_of_the_loopback_that_macos_lacks() -> None:
    files = sources(Path(__file__).parent / "real")
    found = {path.name: with_linux_loopback(path.read_text(encoding="utf-8")) for path in files}
    assert {name: tests for name, tests in found.items() if tests} == {}


def test_a_test_that_runs_on_linux_alone_is_found() -> None:
    source = "def test_a(): dial('127.0.0.2:1')\n@pytest.mark.skipif(x)\ndef test_b(): dial('127.0.0.2:1')\n"
    assert with_linux_loopback(source + "def test_c(): dial('127.0.0.1:1')") == ["test_a"]


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = import_graph(HCSIM)
    assert len(graph) > 100
    assert circles(graph) == []


def test_circles_are_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": [], "e": ["e"]}) == [["b", "c"], ["e"]]


def test_imports_in_functions_and_for_types_count(tmp_path: Path) -> None:
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cellar.py").write_text("def down():\n    from house import attic\n")
    (package / "attic.py").write_text("if TYPE_CHECKING:\n    from house.cellar import Wine\n")
    assert circles(import_graph(package)) == [["house.attic", "house.cellar"]]


@pytest.mark.parametrize("name", hcsim.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(hcsim, name) is not None
