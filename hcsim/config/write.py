"""Parts of a scenario as the text that its file has for them: what is read back is the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from hcsim.config.cluster import Cluster
from hcsim.config.faults import AnyFault
from hcsim.config.scenario import Scenario, Tcp
from hcsim.config.table import Table
from hcsim.config.training import Training
from hcsim.units import Quantity

_OF_THE_ROOT = ("name", "description", "plugins", "processes", "seed", "routes")
_UNITS = {"_s": " s", "_bps": " b/s", "_Bps": " B/s", "_bytes": " B", "_flops": " FLOPS"}


def write_scenario(scenario: Scenario) -> str:
    """A file of its own: a run of what is read back is the same run. Its job is not written, only its training."""
    head = [line for line in _given(scenario) if line.partition(" ")[0] in _OF_THE_ROOT]
    tables: list[tuple[str, Table]] = [("[[medium]]", medium) for medium in scenario.media]
    tables += [("[[wan]]", line) for line in scenario.wan]
    tables += [("[[node]]", node) for node in scenario.nodes]
    once: list[tuple[str, Table | None]] = [("[tcp]", scenario.tcp), ("[cluster]", scenario.cluster)]
    once += [("[training]", scenario.training)]
    tables += [(header, table) for header, table in once if table is not None and table != Tcp()]
    parts = ["\n".join([*head, ""])]
    parts += ["\n".join([header, *_tag(table), *_given(table), ""]) for header, table in tables]
    return "\n".join([*parts, write_faults(scenario.faults)])


def write_faults(faults: Iterable[AnyFault]) -> str:
    """`[[fault]]` tables to put at the end of a scenario's file; what is as by default is left out."""
    return "\n".join(_table(fault) for fault in faults)


def write_job(name: str, seed: int, cluster: Cluster, training: Training) -> str:
    """A file that says what a real cluster is to do."""
    head = [f"name = {json.dumps(name)}", f"seed = {seed}"]
    return "\n".join([*head, "[cluster]", *_given(cluster), "[training]", *_given(training), ""])


def as_read(table: Table) -> dict[str, Any]:
    """What TOML has for a table, as the decoder takes it: with keys put in, it can be read again."""
    return msgspec.toml.decode("\n".join(_given(table)), type=dict[str, Any])


def _table(fault: AnyFault) -> str:
    return "\n".join(["[[fault]]", *_tag(fault), *_given(fault), ""])


def _tag(table: Table) -> list[str]:
    """Which kind of table this is, where there are several."""
    tag = table.__struct_config__.tag
    return [] if tag is None else [f"kind = {json.dumps(tag)}"]


def _given(table: Table) -> list[str]:
    """What is not as by default."""
    values = ((field, getattr(table, field.name)) for field in msgspec.structs.fields(table))
    return [f"{field.encode_name} = {_value(field.name, value)}" for field, value in values if value != field.default]


def _value(name: str, value: object) -> str:
    if isinstance(value, Table):
        return f"{{ {', '.join([*_tag(value), *_given(value)])} }}"
    if isinstance(value, tuple) and any(isinstance(each, Table) for each in value):
        return f"[{', '.join(_value('', each) for each in value)}]"
    suffix = re.search(r"_(bps|Bps|s|bytes|flops)$", name)
    unit = _UNITS[suffix[0]] if suffix else f" {value.dimension.base}" if isinstance(value, Quantity) else ""
    if unit:
        number = value if isinstance(value, int) else repr(float(str(value)))
        return json.dumps(f"{number}{unit}")
    return json.dumps(value, ensure_ascii=False)  # for texts, lists, numbers and truth values TOML is like JSON
