"""Short texts that name a thing and set its figures: "topk:0.01", "diloco:16,lr=0.7", "int8:stochastic".

A name, and after a colon what differs from the defaults: `field=value`, the bare value of the first field, or the
bare name of a switch. The fields are those of a struct, which checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from hcsim.config.explain import in_words
from hcsim.errors import ConfigError
from hcsim.units import did_you_mean

T = TypeVar("T", bound=msgspec.Struct)


def read_spec(text: str, kinds: Mapping[str, type[T]], what: str) -> T:
    """The struct that the text describes; `what` is what these texts name, for errors."""
    name, colon, rest = text.partition(":")
    if name not in kinds:
        raise ConfigError(f'there is no {what} "{name}"{did_you_mean(name, kinds)}; known: {", ".join(kinds)}')
    kind = kinds[name]
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    given: dict[str, str | bool] = {}
    for number, part in enumerate(rest.split(",") if colon else ()):
        key, equals, value = part.partition("=")
        if not equals and fields.get(key) is bool:
            given[key] = True
        elif part and not equals and number == 0 and fields:
            given[next(iter(fields))] = key
        elif equals and key in fields:
            given[key] = value
        else:
            raise ConfigError(f'{what} "{text}": "{part}" cannot be used; {_usage(name, kind)}')
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        where = place.strip(".`") or name
        raise ConfigError(f'{what} "{text}": {where}: {in_words(problem)}; {_usage(name, kind)}') from None


def _usage(name: str, kind: type[msgspec.Struct]) -> str:
    known = [
        f.name if f.type is bool else f"{f.name}={'…' if f.default is msgspec.NODEFAULT else f.default}"
        for f in msgspec.structs.fields(kind)
    ]
    return f'"{name}" knows {", ".join(known)}' if known else f'"{name}" has nothing to set'
