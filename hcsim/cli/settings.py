"""`--set KEY=VALUE`: every setting of a run that has no option of its own, with the names and values of the
files.

A key belongs to a table of a scenario ([training], [job], [cluster], [tcp]) or to one of the tables
that only a command has: how messages travel (`wire`), this machine (`machine`), and predictions (`prediction`).
`training.timeout` names the table. A bare `timeout` belongs to the table that the run uses, and
`heartbeat.interval` is a key of a nested table. Options are processed the same way, so they are read, checked
and explained as the keys of a file are.

A run takes the tables that it uses (`Settings.take`), and rejects the remaining settings
(`Settings.finish`).
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec import inspect as kinds

from hcsim.config import Cluster, Job, Tcp, Training
from hcsim.config.file import as_read
from hcsim.config.table import Count, Table, explain
from hcsim.errors import ConfigError, UsageError
from hcsim.telemetry.timeline import MOST_STEPS
from hcsim.transport.groups import MAX_FRAME_BYTES, Wire
from hcsim.units import PositiveBytes, PositiveSeconds, Share, decode_quantity, did_you_mean


class WireSettings(Table, frozen=True):
    """How messages travel: the same on all ranks."""

    stripes: Count = Wire().stripes
    """Connections per peer; more can help on fast links with long round trips."""
    segment_bytes: PositiveBytes = PositiveBytes(Wire().segment_bytes)
    """Size of the pieces that a message is cut into: smaller pieces overlap better, larger ones cost less."""

    def __post_init__(self) -> None:
        if self.segment_bytes > MAX_FRAME_BYTES:
            raise UsageError(f"a piece has at most {MAX_FRAME_BYTES >> 20} MiB")


class ThisMachine(Table, frozen=True):
    """This machine in a real run."""

    cluster: str = "home"
    """The cluster to use, of those that this machine has joined."""
    name: str | None = None
    """The name of this machine for the other members; left out, its host name."""
    at: tuple[str, ...] = ()
    """Addresses at which the other members reach this machine."""
    device: str = "auto"
    """The device that computes: cpu, mps, cuda, or auto; sleep:M4 takes the time of an M4."""
    remote_hcsim: str = "hcsim"
    """The name of the hcsim program on the machines of --hosts."""
    state: str | None = None
    """A folder for what outlives a crash: checkpoints and votes; also --state."""
    log: str | None = None
    """A file for what this machine and those of --hosts say, each line with its time and its machine."""
    metrics: str | None = None
    """A port, or host:port, to serve metrics at; in a virtual run, a file for the hosts' final metrics."""


class PredictionSettings(Table, frozen=True):
    """How far predicted times can be trusted."""

    twin: str | None = None
    """The twin of the machines of a real run, whose prediction is compared with what was measured."""
    bands: Annotated[int, Meta(ge=0, le=1024)] | None = None
    """Variants of the scenario from which p10 and p90 follow; left out, 16 where that is quick, and 0 for none."""


class MemorySettings(Table, frozen=True):
    """Whether a training has to fit into the memory of its machines."""

    ignore_memory: bool = False
    """Train also what does not fit into the memory of the machines."""


class TimelineSettings(Table, frozen=True):
    """How much a timeline shows."""

    timeline_steps: Count = MOST_STEPS
    """The number of steps after which a timeline ends."""


TABLES: dict[str, type[Table]] = {
    "training": Training,
    "job": Job,
    "cluster": Cluster,
    "tcp": Tcp,
    "wire": WireSettings,
    "machine": ThisMachine,
    "prediction": PredictionSettings,
    "memory": MemorySettings,
    "timeline": TimelineSettings,
}
"""The tables whose keys `--set` accepts."""

_ONLY = {
    "training": "where something is learned (--task)",
    "job": "where nothing is learned",
    "cluster": "where machines find each other and learn",
    "tcp": "in a virtual run",
    "wire": "in a virtual run, or without a script",
    "machine": "with --real",
    "prediction": "where something is learned (--task)",
    "memory": "where something is learned (--task)",
    "timeline": "with --timeline",
    "prediction.twin": "with --real, where something is learned (--task)",
}

TableT = TypeVar("TableT", bound=Table)


class _Given(msgspec.Struct, frozen=True):
    """One setting from the command line."""

    word: str
    """The setting as it was typed: the option, or `--set` and its key."""
    table: str
    """The table that was named; empty for a bare key."""
    keys: tuple[str, ...]
    value: object
    is_text: bool
    """Whether the value is parsed as a value of a file is."""

    @property
    def tables(self) -> list[str]:
        """The tables that have this key."""
        named = [self.table] if self.table else TABLES
        return [name for name in named if self.keys[0] in _keys(TABLES[name])]


class Settings:
    """The settings from `--set` and from some options, until the run's tables take them."""

    def __init__(self, words: Sequence[str] | None, options: Mapping[str, object] | None = None) -> None:
        self._left = [_option(name, value) for name, value in (options or {}).items() if value is not None]
        self._left += map(_setting, words or ())
        self._taken: dict[str, Collection[str]] = {}

    def has(self, table: str) -> bool:
        """Return whether a setting was given that only this table has. A run for which the table is optional then uses
        it."""
        return any(given.tables == [table] for given in self._left)

    def take(self, table: str, base: TableT, only: Collection[str] = ()) -> TableT:
        """Return the table with the settings given for it (or for the keys in `only`), parsed as in a file."""
        keys = self._taken[table] = only or _keys(type(base))
        ours = [given for given in self._left if table in given.tables and given.keys[0] in keys]
        if not ours:
            return base
        self._left = [given for given in self._left if given not in ours]
        raw = as_read(base)
        words: dict[str, str] = {}
        for given in ours:
            if (first := words.setdefault(".".join(given.keys), given.word)) is not given.word:
                both = first if first == given.word else f"{first}, {given.word}"
                raise ConfigError(f"{both}: this is given twice")
            value = given.value
            if given.is_text:
                value = _as_written(str(value), _type_at(type(base), given.keys))
            _put(raw, given.keys, value)
        try:
            return msgspec.convert(raw, type(base), dec_hook=decode_quantity)
        except msgspec.ValidationError as error:
            raise ConfigError(_explained(explain(error, raw, type(base)), ours)) from None

    def finish(self, only: Mapping[str, str] | None = None) -> None:
        """Reject settings that no table of this run has taken; `only` says where a table or a key applies."""
        where = {**_ONLY, **(only or {})}
        for given in sorted(self._left, key=lambda given: bool(given.tables)):  # what is known nowhere comes first
            if not given.tables:
                raise ConfigError(self._unknown(given))
            table, key = given.tables[0], given.keys[0]
            raise ConfigError(f"{given.word}: only {where.get(f'{table}.{key}', where[table])}")

    def _unknown(self, given: _Given) -> str:
        key = ".".join(given.keys)
        if given.table:
            known = list(_keys(TABLES[given.table]))
            where, hint = f"[{given.table}] has no such key", did_you_mean(given.keys[0], known)
        elif key in TABLES:
            return f"{given.word}: this is a table, whose keys are set one by one: --set {key}.KEY=VALUE"
        else:
            known = [each for keys in self._taken.values() for each in keys]
            where = "there is no such setting"
            hint = did_you_mean(key, [*known, *TABLES]) or did_you_mean(key, setting_names())
        return f"{given.word}: {where}{hint}; valid here: {', '.join(known)}"


def setting_names() -> Iterator[str]:
    """Yield every key that can be set, once."""
    yield from dict.fromkeys(key for kind in TABLES.values() for key in _keys(kind))


def value_word(key: str, text: str | None) -> str:
    """Return the words that set this key on the command line."""
    return f"--set {key}=…" if text is None else f"--set {shlex.quote(f'{key}={text}')}"


def meanings(kind: type[Table]) -> dict[str, str]:
    """Return the first sentence of each field's docstring, by key. It is read from the source, which some installs
    lack."""
    try:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, SyntaxError, ValueError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    attributes = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = " ".join(str(below.value.value).split("\n\n")[0].split())
            found[attributes[ast.unparse(field.target)]] = text.partition(". ")[0].rstrip(".")
    return found


def seconds(option: str, text: str) -> float:
    """Parse an option whose value is a duration above zero."""
    try:
        return float(msgspec.convert(text, PositiveSeconds, dec_hook=decode_quantity))
    except msgspec.ValidationError as error:
        raise ConfigError(f'{option} = "{text}": {error}') from None


def _keys(kind: type[Table]) -> tuple[str, ...]:
    return tuple(field.encode_name for field in msgspec.structs.fields(kind))


def _option(name: str, value: object) -> _Given:
    """Return an option of a command as a setting: "training.task" is its --task."""
    table, _, key = name.partition(".")
    return _Given(f"--{key}", table, (key,), value, is_text=False)


def _setting(word: str) -> _Given:
    key, equals, value = (part.strip() for part in word.partition("="))
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set {word}: give KEY=VALUE, such as batch=32; `hcsim list settings` shows all keys")
    if path[0] in TABLES and len(path) > 1:
        return _Given(f"--set {key}", path[0], path[1:], value, is_text=True)
    return _Given(f"--set {key}", "", path, value, is_text=True)


def _put(raw: dict[str, Any], keys: Sequence[str], value: object) -> None:
    *tables, last = keys
    for key in tables:
        raw = raw.setdefault(key, {})
        if not isinstance(raw, dict):
            raise ConfigError(f"--set {'.'.join(keys)}: {key} has no keys of its own")
    raw[last] = value


def _as_written(text: str, kind: Any) -> object:
    """Parse the value as a file has it: as a string where one is expected, and otherwise as TOML.

    A list may be written without brackets and quotes: a,b."""
    try:
        value = text if "\n" in text else msgspec.toml.decode(f"x = {text}")["x"]
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = text
    accepted = _accepted(kind)
    lists = [one for one in _each(kind) if isinstance(one, kinds.VarTupleType)]
    is_word = (
        not lists or "," not in text or any(isinstance(one, kinds.StrType) and not one.pattern for one in _each(kind))
    )
    if isinstance(value, accepted) and (is_word or not isinstance(value, str)):
        return value
    if lists and ("," in text or accepted == (list,)):
        return [_as_written(part.strip(), lists[0].item_type) for part in text.split(",")]
    return text if str in accepted else value


def _type_at(tree: type[Table], keys: Sequence[str]) -> Any:
    kind: Any = kinds.type_info(tree)
    for key in keys:
        inner = [one for one in _each(kind) if isinstance(one, kinds.StructType)]
        kind = next((field.type for one in inner for field in one.fields if field.encode_name == key), None)
    return kind


def _each(kind: Any) -> tuple[Any, ...]:
    return kind.types if isinstance(kind, kinds.UnionType) else (kind,)


_IN_TOML: tuple[tuple[type, tuple[type, ...]], ...] = (
    (kinds.IntType, (int,)),
    (kinds.FloatType, (int, float)),
    (kinds.BoolType, (bool,)),
    (kinds.StrType, (str,)),
    (kinds.LiteralType, (str,)),
    (kinds.VarTupleType, (list,)),
    (kinds.StructType, (dict,)),
)
"""The TOML types that a file may have for each type of a field."""


def _accepted(kind: Any) -> tuple[type, ...]:
    """Return the TOML types that a file may have for a field."""
    found: list[type] = []
    for one in _each(kind):
        if isinstance(one, kinds.CustomType):  # from units.py
            found += [str, int, float] if issubclass(one.cls, Share) else [str]
        found += [known for own, words in _IN_TOML if isinstance(one, own) for known in words]
    return tuple(found)


def _explained(problem: str, ours: Sequence[_Given]) -> str:
    """Return the error with the option or setting that caused it."""
    words = {given.keys[0]: given.word for given in ours}
    key = re.match(r"\w*", problem)
    word = words.get(key[0]) if key is not None else None
    if word is None or key is None:
        return f"{', '.join(words.values())}: {problem.lstrip(' :')}"
    again = f"{key[0]}: "
    problem = problem.removeprefix(again) if problem.startswith(2 * again) else problem
    return f"{'--set ' if word.startswith('--set ') else '--'}{problem}"
