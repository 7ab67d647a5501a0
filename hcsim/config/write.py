"""Parts of a scenario as the text that its file has for them: what is read back is the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import msgspec

from hcsim.config.cluster import Cluster
from hcsim.config.faults import AnyFault
from hcsim.config.table import Table
from hcsim.config.training import Training

_UNITS = {"_s": " s", "_bps": " b/s", "_bytes": " B"}


def write_faults(faults: Iterable[AnyFault]) -> str:
    """`[[fault]]` tables to put at the end of a scenario's file; what is as by default is left out."""
    return "\n".join(_table(fault) for fault in faults)


def write_job(name: str, seed: int, cluster: Cluster, training: Training) -> str:
    """A file that says what a real cluster is to do."""
    head = [f"name = {json.dumps(name)}", f"seed = {seed}"]
    return "\n".join([*head, "[cluster]", *_given(cluster), "[training]", *_given(training), ""])


def _table(fault: AnyFault) -> str:
    return "\n".join(["[[fault]]", f'kind = "{fault.__struct_config__.tag}"', *_given(fault), ""])


def _given(table: Table) -> list[str]:
    """What is not as by default."""
    values = ((field, getattr(table, field.name)) for field in msgspec.structs.fields(table))
    return [f"{field.encode_name} = {_value(field.name, value)}" for field, value in values if value != field.default]


def _value(name: str, value: object) -> str:
    if isinstance(value, Table):
        return f"{{ {', '.join(_given(value))} }}"
    unit = re.search(r"_(bps|s|bytes)$", name)
    if unit is not None:
        number = value if isinstance(value, int) else repr(float(str(value)))
        return json.dumps(f"{number}{_UNITS[unit[0]]}")
    return json.dumps(value, ensure_ascii=False)  # for texts, lists, numbers and truth values TOML is like JSON
