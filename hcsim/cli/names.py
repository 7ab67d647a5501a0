"""The names that commands and files accept, for `hcsim list` and for shell completion."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, get_args, get_type_hints

import msgspec
from rich import box
from rich.table import Table

from hcsim.cli import screen
from hcsim.cli.settings import TABLES, meanings, setting_names
from hcsim.config import CATALOGUE, FAULTS, MEDIA, Job, Machine, parse_scenario, shipped_scenarios
from hcsim.errors import ConfigError
from hcsim.registry import load_installed
from hcsim.units import did_you_mean

Row = tuple[str, ...]


def _scenarios() -> list[Row]:
    files = shipped_scenarios().items()
    return [(name, parse_scenario(path.read_text(encoding="utf-8"), str(path)).description) for name, path in files]


def _machines() -> list[Row]:
    return [(name, _abilities(machine)) for name, machine in CATALOGUE.items()]


def _abilities(machine: Machine) -> str:
    if math.isinf(machine.peak_flops):
        return "takes no time for anything"
    fanless = f", fanless: {machine.sustained:.0%} of its speed when it is hot" if machine.fanless else ""
    return f"{machine.peak_flops / 1e12:.3g} TFLOPS, {machine.memory_Bps / 1e9:.3g} GB/s{fanless}"


def _media() -> list[Row]:
    return [(name, _first_sentence(kind)) for name, kind in MEDIA.items()]


def _faults() -> list[Row]:
    return [(name, _first_sentence(kind)) for name, kind in FAULTS.items()]


def _strategies() -> list[Row]:
    from hcsim.training.strategies import STRATEGIES

    return [(name, _first_sentence(kind) + _arguments(kind)) for name, kind in STRATEGIES.items()]


def _arguments(kind: type[msgspec.Struct]) -> str:
    """Return the arguments that may follow the name and a colon."""
    fields = [
        field.name if field.type is bool else f"{field.name}={'…' if field.default is None else field.default}"
        for field in msgspec.structs.fields(kind)
    ]
    return f" ({', '.join(fields)})" if fields else ""


def _compressors() -> list[Row]:
    from hcsim.compressors.registry import specs

    return [(spec.form, spec.description) for spec in specs()]


def _algorithms() -> list[Row]:
    from hcsim.collectives.algorithms import PLANNERS

    return [(operation, ", ".join(("auto", *planners))) for operation, planners in PLANNERS.items()]


def _tasks() -> list[Row]:
    from hcsim.training.tasks import TASKS

    return [(name, _first_sentence(make) + _figures(make)) for name, make in TASKS.items()]


def _figures(make: object) -> str:
    return _arguments(make) if isinstance(make, type) and issubclass(make, msgspec.Struct) else ""


def _settings() -> list[Row]:
    rows: list[Row] = []
    for name, kind in TABLES.items():
        about = meanings(kind)
        for field in msgspec.structs.fields(kind):
            choices = f"one of {', '.join(words)}" if (words := _choices(field.type)) else ""
            meaning = about.get(field.encode_name, "")
            rows.append((f"{name}.{field.encode_name}", _written(field.name, field.default), meaning or choices))
    return rows


def _written(name: str, value: object) -> str:
    """Return a default as a file writes it, or nothing where the task or the machine decides."""
    if value is None or value == ():
        return ""
    if name.endswith("_bytes"):
        return screen.size(int(str(value)))
    if name.endswith("_s"):
        return screen.duration(float(str(value)))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _choices(kind: Any) -> tuple[str, ...]:
    return tuple(word for word in get_args(kind) if isinstance(word, str))


KINDS: dict[str, Callable[[], list[Row]]] = {
    "scenarios": _scenarios,
    "machines": _machines,
    "media": _media,
    "strategies": _strategies,
    "compressors": _compressors,
    "algorithms": _algorithms,
    "tasks": _tasks,
    "faults": _faults,
    "settings": _settings,
}


def show_names(kind: str | None) -> None:
    """Show all names of a kind with their descriptions; without a kind, only the names of every kind."""
    load_installed()
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"{kind}: there is no such list{did_you_mean(kind, KINDS)}; there are {', '.join(KINDS)}")
    if kind is None:
        rows: list[Row] = [(name, ", ".join(_names(name))) for name in KINDS]
    else:
        rows = KINDS[kind]()
    table = Table(box=box.SIMPLE if kind == "settings" else None, pad_edge=False, show_header=kind == "settings")
    for heading in ("key", "default", "meaning") if kind == "settings" else ("", ""):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*row)
    screen.show(table)


def completions(kind: str) -> list[str]:
    """Return the names that a shell offers for a kind."""
    if kind == "kinds":
        return list(KINDS)
    load_installed()
    if kind == "set":
        return [f"{key}=" for key in setting_names()]
    if kind == "dtypes":
        return list(_choices(get_type_hints(Job)["dtype"]))
    return _names(kind)


def _names(kind: str) -> list[str]:
    if kind == "settings":
        return list(setting_names())
    if kind == "operations":
        return [name for name, _ in _algorithms()]
    if kind == "algorithms":
        return list(dict.fromkeys(chain.from_iterable(names.split(", ") for _, names in _algorithms())))
    return [row[0].partition(":")[0].partition("[")[0] for row in KINDS[kind]() if not row[0].startswith("…")]


def _first_sentence(thing: object) -> str:
    """Return the first sentence of a docstring."""
    described = thing.func if isinstance(thing, partial) else thing
    text = " ".join((inspect.getdoc(described) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")
