"""Scenarios as files: reads TOML into the finished tree, with shorthands expanded, and writes parts of a scenario as
TOML that reads back as the same objects.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from hcsim.config.check import complete
from hcsim.config.cluster import Cluster
from hcsim.config.faults import FAULTS, OWN_FAULTS, AnyFault
from hcsim.config.home import MEDIA, OWN_MEDIA, WIFI_STANDARDS
from hcsim.config.scenario import Scenario, Tcp, idealised
from hcsim.config.table import Table, explain
from hcsim.config.training import Training
from hcsim.errors import ConfigError
from hcsim.registry import Registry, function_in, load_plugin
from hcsim.units import (
    MEMORY_RATE,
    RATE,
    SIZE,
    SPEED,
    TIME,
    Quantity,
    decode_quantity,
    did_you_mean,
    quantity_text,
)

_SCENARIOS = Path(__file__).parent.parent / "scenarios"
_OF_THE_ROOT = ("name", "description", "twin", "plugins", "processes", "seed", "routes")
_DIMENSIONS = {"s": TIME, "bps": RATE, "Bps": MEMORY_RATE, "bytes": SIZE, "flops": SPEED}
_WIDTH = 120
_COMMENTS = {
    "machine": (
        "A machine. basis says where its figures are from; spread is half of the distance between the 10th and",
        "the 90th percentile, relative to the figure.",
    ),
    "machine.kernel": ("The time of one kernel: [FLOPs or, for kinds without arithmetic, bytes moved; seconds].",),
    "machine.script": (
        "A script that was timed in its own steps; of each operation with its shapes, the time of one.",
    ),
    "machine.task": ("A task whose parts were timed in its own steps: [samples, seconds].",),
    "machine.codec": ("The time to encode and to decode a tensor: [bytes before compression, seconds].",),
    "machine.messages": ("What a message costs the processor, and how many bytes of them one core passes on.",),
}
"""What a table is, before the first one of its kind."""


def shipped_scenarios() -> dict[str, Path]:
    """Return the scenarios that come with hcsim, by name."""
    return {path.stem: path for path in sorted(_SCENARIOS.glob("*.toml"))}


def load_scenario(where: Scenario | str | Path) -> Scenario:
    """Read a scenario from a file, or a shipped one by its name. A `Scenario` is returned as it is."""
    if isinstance(where, Scenario):
        return where
    shipped = shipped_scenarios()
    path = shipped.get(str(where), Path(where))
    try:
        return parse_scenario(path.read_text(encoding="utf-8"), str(path), path.parent)
    except FileNotFoundError:
        hint = did_you_mean(str(where), shipped)
        raise ConfigError(f"{where}: no such file{hint}; shipped scenarios: {', '.join(shipped)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from None


def parse_scenario(text: str, source: str, folder: Path | None = None) -> Scenario:
    """Read a scenario from TOML. `source` names it in errors; files that it names are looked for in `folder`."""
    raw = _decoded(text, source)
    tree = Scenario
    try:
        _load_plugins(raw, folder or Path())
        _spell_out(raw)
        tree = _tree(_kinds(raw, "medium", MEDIA), _kinds(raw, "fault", FAULTS))
        scenario = complete(_plain(msgspec.convert(raw, tree, dec_hook=decode_quantity)))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, raw, tree)}") from None
    except RecursionError:
        raise ConfigError(f"{source}: this is nested too deeply") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return idealised(scenario) if scenario.effects == "ideal" else scenario


def pack_scenario(scenario: Scenario) -> bytes:
    """Encode a scenario for another process of this program."""
    return msgspec.msgpack.encode(scenario, enc_hook=_bare)


def unpack_scenario(data: bytes) -> Scenario:
    """Decode what `pack_scenario` has encoded. Nothing is checked: a scenario that was drawn from the spread
    of its figures may be beyond what a file may say."""
    raw = msgspec.msgpack.decode(data, type=dict[str, Any])
    for plugin in raw["plugins"]:
        load_plugin(plugin, Path())
    tree = _tree(_kinds(raw, "medium", MEDIA), _kinds(raw, "fault", FAULTS))
    return _plain(msgspec.convert(raw, tree, dec_hook=lambda kind, value: kind(value)))


def _bare(value: object) -> int | float:
    """Return the number of a quantity."""
    return int(value) if isinstance(value, int) else float(cast(float, value))


def _decoded(text: str, source: str) -> dict[str, Any]:
    try:
        return msgspec.toml.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError) as error:  # the second: a number of thousands of digits
        raise ConfigError(f"{source}: this is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: this is nested too deeply") from None


def _load_plugins(raw: dict[str, Any], folder: Path) -> None:
    """Import the plugins that the scenario names, which the rest of it may need, and replace file names by full
    paths."""
    for key, load in (("plugins", load_plugin), ("processes", function_in)):
        if not isinstance(names := raw.get(key), list):
            continue
        for i, name in enumerate(names):
            if isinstance(name, str):  # else the decoder refuses it
                load(name, folder)
                names[i] = in_full(name, folder)


def in_full(name: str, folder: Path) -> str:
    """Return the name of a plugin, or of a function in it, independent of the folder."""
    named = re.fullmatch(r"(.+\.py)(:[^:]*)?", name)
    return name if named is None else f"{folder.joinpath(named[1]).resolve()}{named[2] or ''}"


def _kinds(raw: dict[str, Any], key: str, known: Registry[Any]) -> tuple[type[Table], ...]:
    """Return all kinds, including those of installed plugins if the file has a kind that is unknown without them."""
    for table in _tables(raw, key):
        known.get(str(table.get("kind")))
    return tuple(known.values())


@cache
def _tree(media: tuple[type[Table], ...], faults: tuple[type[Table], ...]) -> type[Scenario]:
    """Return the type of a scenario that accepts all these kinds."""
    if media == OWN_MEDIA and faults == tuple(OWN_FAULTS.values()):
        return Scenario
    fields: list[Any] = [
        (attribute, types.GenericAlias(tuple, (reduce(or_, kinds), ...)), msgspec.field(name=key, default=()))
        for attribute, key, kinds in (("media", "medium", media), ("faults", "fault", faults))
    ]
    return cast(type[Scenario], msgspec.defstruct("Scenario", fields, bases=(Scenario,), frozen=True))


def _plain(scenario: Scenario) -> Scenario:
    return Scenario(**{name: getattr(scenario, name) for name in Scenario.__struct_fields__})


def _tables(parent: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = parent.get(key)
    return [table for table in found if isinstance(table, dict)] if isinstance(found, list) else []


def _spell_out(raw: dict[str, Any]) -> None:
    """Replace shorthands by their expansion. Malformed entries are left for the decoder to reject."""
    for node in _tables(raw, "node"):
        if isinstance(links := node.get("links"), list):
            node["links"] = [{"medium": link} if isinstance(link, str) else link for link in links]
    for medium in _tables(raw, "medium"):
        if medium.get("kind") == "wifi":
            # An unknown standard gets some figures too, so that the decoder complains about it and not about them.
            figures = WIFI_STANDARDS.get(str(medium.get("standard")), WIFI_STANDARDS["wifi6"])
            medium.update({key: value for key, value in figures.items() if key not in medium})
        for cable in _tables(medium, "cable"):
            if "forward" in cable:
                cable.setdefault("backward", cable["forward"])


def write_scenario(scenario: Scenario) -> str:
    """Return a self-contained file whose run is the same. It contains the scenario's training, and not its job."""
    head = [line for line in _given(scenario) if line.partition(" ")[0] in _OF_THE_ROOT]
    nodes = [replace(n, machine=n.machine.name) if n.machine in scenario.machines else n for n in scenario.nodes]
    tables: list[tuple[str, Table]] = [("medium", medium) for medium in scenario.media]
    tables += [("wan", line) for line in scenario.wan]
    tables += [("machine", machine) for machine in scenario.machines]
    tables += [("processor", processor) for processor in scenario.processors]
    tables += [("node", node) for node in nodes]
    once: list[tuple[str, Table | None]] = [("tcp", scenario.tcp), ("cluster", scenario.cluster)]
    once += [("training", scenario.training)]
    commented: set[str] = set()
    parts = ["\n".join([*head, ""])]
    parts += [_section(path, table, commented, repeated=True) for path, table in tables]
    parts += [
        _section(path, table, commented, repeated=False) for path, table in once if table is not None and table != Tcp()
    ]
    return "\n".join([*parts, write_faults(scenario.faults)])


def write_table(path: str, table: Table) -> str:
    """Return one table of a list of them, such as "machine", to put into a scenario's file."""
    return _section(path, table, set(), repeated=True)


def _section(path: str, table: Table, commented: set[str], *, repeated: bool) -> str:
    """Return a table, followed by the tables in it that have a section of their own."""
    own, below = _tag(table), []
    comment = [] if path in commented else [f"# {line}" for line in _COMMENTS.get(path, ())]
    commented.add(path)
    for key, name, value in _changed(table):
        if isinstance(value, tuple) and value and key != name and all(isinstance(each, Table) for each in value):
            below += [_section(f"{path}.{key}", each, commented, repeated=True) for each in value]
        elif isinstance(value, Table) and any(isinstance(each, Table) for *_, each in _changed(value)):
            below.append(_section(f"{path}.{key}", value, commented, repeated=False))
        else:
            own.append(f"{key} = {_value(name, value)}")
    header = f"[[{path}]]" if repeated else f"[{path}]"
    return "\n".join([*comment, header, *own, "", *below])


def write_faults(faults: Iterable[AnyFault]) -> str:
    """Return `[[fault]]` tables to append to a scenario's file, without values that equal the defaults."""
    return "\n".join(_table(fault) for fault in faults)


def write_job(name: str, seed: int, cluster: Cluster, training: Training) -> str:
    """Return the file of a job for a real cluster."""
    head = [f"name = {json.dumps(name)}", f"seed = {seed}"]
    return "\n".join([*head, "[cluster]", *_given(cluster), "[training]", *_given(training), ""])


def as_read(table: Table) -> dict[str, Any]:
    """Return a table as TOML data that the decoder accepts, so that keys can be added before it is decoded again."""
    return msgspec.toml.decode("\n".join(_given(table)), type=dict[str, Any])


def _table(fault: AnyFault) -> str:
    return "\n".join(["[[fault]]", *_tag(fault), *_given(fault), ""])


def _tag(table: Table) -> list[str]:
    """Return the line with the table's kind, where there are several kinds."""
    tag = table.__struct_config__.tag
    return [] if tag is None else [f"kind = {json.dumps(tag)}"]


def _given(table: Table) -> list[str]:
    """Return the lines of the values that differ from the defaults."""
    return [f"{key} = {_value(name, value)}" for key, name, value in _changed(table)]


def _changed(table: Table) -> list[tuple[str, str, Any]]:
    """Return the key, the attribute and the value of each that differs from its default."""
    values = ((field, getattr(table, field.name)) for field in msgspec.structs.fields(table))
    return [(field.encode_name, field.name, value) for field, value in values if value != field.default]


def _value(name: str, value: object) -> str:
    if isinstance(value, Table):
        return f"{{ {', '.join([*_tag(value), *_given(value)])} }}"
    if isinstance(value, tuple) and any(isinstance(each, Table) for each in value):
        return f"[{', '.join(_value('', each) for each in value)}]"
    if isinstance(value, tuple) and value and all(isinstance(each, tuple) for each in value):
        return _rows([f"[{', '.join(map(_number, each))}]" for each in value])
    suffix = re.search(r"_(bps|Bps|s|bytes|flops)$", name)
    dimension = value.dimension if isinstance(value, Quantity) else _DIMENSIONS[suffix[1]] if suffix else None
    if dimension is not None and isinstance(value, int | float):
        return json.dumps(quantity_text(value, dimension), ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)  # for texts, lists, numbers and truth values TOML is like JSON


def _number(value: object) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return json.dumps(value, ensure_ascii=False)


def _rows(items: list[str]) -> str:
    """Return a list, several items a line where it is too long for one."""
    if len(whole := f"[{', '.join(items)}]") <= _WIDTH // 2:
        return whole
    lines = [""]
    for item in items:
        if len(lines[-1]) + len(item) + 2 > _WIDTH - 4:
            lines.append("")
        lines[-1] += f"{item}, "
    return "\n".join(["[", *(f"  {line.rstrip()}" for line in lines), "]"])
