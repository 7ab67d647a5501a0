"""Faults as the text that a scenario's file has for them: what is read back is the same list."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import msgspec

from hcsim.config.faults import AnyFault

_UNITS = {"_s": " s", "_bps": " b/s", "_bytes": " B"}


def write_faults(faults: Iterable[AnyFault]) -> str:
    """`[[fault]]` tables to put at the end of a scenario's file; what is as by default is left out."""
    return "\n".join(_table(fault) for fault in faults)


def _table(fault: AnyFault) -> str:
    lines = ["[[fault]]", f'kind = "{fault.__struct_config__.tag}"']
    for field in msgspec.structs.fields(fault):
        value = getattr(fault, field.name)
        if value != field.default:
            lines.append(f"{field.encode_name} = {_value(field.name, value)}")
    return "\n".join([*lines, ""])


def _value(name: str, value: object) -> str:
    unit = re.search(r"_(bps|s|bytes)$", name)
    if unit is not None:
        number = value if isinstance(value, int) else repr(float(str(value)))
        return json.dumps(f"{number}{_UNITS[unit[0]]}")
    return json.dumps(value, ensure_ascii=False)  # for texts, lists, numbers and truth values TOML is like JSON
