"""The base of all tables of a scenario: strict keys, names without units, a few checked types, and errors that say
what would be valid.

msgspec reports the problem and its path. The value at that path comes from the file, and the valid words come from
the types of the tree.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, inspect

from hcsim.units import did_you_mean

Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Mtu: TypeAlias = Annotated[int, Meta(ge=576, le=65535)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]


def _key(attribute: str) -> str:
    return re.sub(r"_(bps|Bps|s|bytes|flops)$", "", attribute)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=_key):
    """A table of the file. A key is the attribute without its unit; unknown keys are rejected."""


_PROBLEM_AND_PLACE = re.compile(r"(.*) - at `\$([^`]*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected `([^`]*)`( of length)?(?: (>=|<=|>|<))?(?: ([^ ,]+))?(?:, got `?([^`]*)`?)?")
_KINDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "a table", "null": "nothing",
}  # fmt: skip
_BOUNDS = {">=": "at least ", "<=": "at most ", ">": "more than ", "<": "less than "}


def explain(error: msgspec.ValidationError, raw: dict[str, Any], tree: type[msgspec.Struct]) -> str:
    """Return where in `raw` the decoder stopped, what it found there, and what would be valid."""
    text = str(error)
    # A quoted key can look like the end of the decoder's text; only a key of the root has no path behind it.
    at_root = any(text == f"Object contains unknown field `{key}`" for key in raw)
    split = None if at_root else _PROBLEM_AND_PLACE.fullmatch(text)
    problem, place = split.groups() if split else (text, "")
    keys = [int(index) if index else name for index, name in re.findall(r"\[(\d+)\]|([^.\[\]]+)", place)]
    value, words = _look_up(keys, raw, tree)
    valid = f"; valid: {', '.join(words)}" if words else ""
    path = place.lstrip(".")
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
        where = f"{path}.{unknown[1]}" if path else unknown[1]
        return f"{where}: unknown key{did_you_mean(unknown[1], words)}{valid}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        choose = valid if missing[1] not in words else ""
        return f"{path or 'the file'}: the key {missing[1]} is missing{choose}"
    if problem.startswith("Invalid"):
        problem = f"not known here{did_you_mean(str(value), words)}{valid}"
    found = "" if isinstance(value, (dict, list)) else f" = {json.dumps(value, ensure_ascii=False, default=str)}"
    return f"{path}{found}: {in_words(problem)}"


def in_words(problem: str) -> str:
    """Return the decoder's message about a type, without Python's names for it."""
    if "matching regex" in problem and "^auto" in problem:
        return 'expected a whole number, a list of them, "auto", or "auto:96" to share out 96'
    if "matching regex" in problem:  # otherwise only names have to
        return "expected a name: letters, digits, dots, dashes and underscores, with a letter or a digit first"
    said = _EXPECTED.fullmatch(problem)
    if said is None:
        return problem
    kind, length, bound, limit, got = said.groups()
    words = f"expected {_named(kind)}"
    if limit is not None:
        words += f",{length or ''} {_BOUNDS.get(bound, '')}{limit}"
    return words if got is None else f"{words}, not {_named(got)}"


def _named(kind: str) -> str:
    return " or ".join(_KINDS.get(one, one) for one in kind.split(" | "))


def _look_up(keys: list[int | str], raw: Any, tree: type[msgspec.Struct]) -> tuple[Any, tuple[str, ...]]:
    """Return the value at that place, and the words (keys, tags or choices) that are valid there."""
    kind: Any = inspect.type_info(tree)
    for key in keys:
        kind = _chosen(kind, raw)
        if isinstance(kind, inspect.UnionType):  # only its tag has a place of its own
            return raw[key], _words(kind)
        raw = raw[key]
        if isinstance(kind, inspect.StructType):
            kind = next(entry.type for entry in kind.fields if entry.encode_name == key)
        elif isinstance(kind, inspect.VarTupleType):
            kind = kind.item_type
        elif isinstance(kind, inspect.TupleType):
            kind = kind.item_types[int(key)]
    return raw, _words(_chosen(kind, raw))


def _words(kind: Any) -> tuple[str, ...]:
    if isinstance(kind, inspect.StructType):
        return (*filter(None, [kind.tag_field]), *(entry.encode_name for entry in kind.fields))
    if isinstance(kind, inspect.LiteralType):
        return tuple(map(str, kind.values))
    if isinstance(kind, inspect.UnionType):
        tags = [str(one.tag) for one in kind.types if isinstance(one, inspect.StructType) and one.tag]
        return (
            *tags,
            *(str(word) for one in kind.types if isinstance(one, inspect.LiteralType) for word in one.values),
        )
    return ()


def _chosen(kind: Any, raw: Any) -> Any:
    """Return the struct of a union that the table's tag selects, if it selects one."""
    if not isinstance(kind, inspect.UnionType) or not isinstance(raw, dict):
        return kind
    structs = [one for one in kind.types if isinstance(one, inspect.StructType)]
    chosen = [one for one in structs if one.tag_field is None or one.tag == raw.get(one.tag_field)]
    return chosen[0] if chosen else kind
