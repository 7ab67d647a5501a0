"""Reading a scenario: from TOML to the finished tree, with shorthands spelled out."""

from __future__ import annotations

import re
import types
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any, cast

import msgspec

from hcsim.config.check import complete
from hcsim.config.explain import explain
from hcsim.config.faults import FAULTS, OWN_FAULTS
from hcsim.config.media import MEDIA, OWN_MEDIA, WIFI_STANDARDS
from hcsim.config.scenario import Scenario, idealised
from hcsim.config.table import Table
from hcsim.errors import ConfigError
from hcsim.registry import Registry, function_in, load_plugin
from hcsim.units import decode_quantity, did_you_mean

_SCENARIOS = Path(__file__).parent.parent / "scenarios"


def shipped_scenarios() -> dict[str, Path]:
    """The scenarios that come with hcsim, by name."""
    return {path.stem: path for path in sorted(_SCENARIOS.glob("*.toml"))}


def load_scenario(where: Scenario | str | Path) -> Scenario:
    """Read a scenario from a file, or a shipped one by its name; one that has been read is returned as it is."""
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
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def parse_scenario(text: str, source: str, folder: Path | None = None) -> Scenario:
    """Read a scenario from TOML; `source` names it in errors, and files that it names are looked for in `folder`."""
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


def _decoded(text: str, source: str) -> dict[str, Any]:
    try:
        return msgspec.toml.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError) as error:  # the second: a number of thousands of digits
        raise ConfigError(f"{source}: this is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: this is nested too deeply") from None


def _load_plugins(raw: dict[str, Any], folder: Path) -> None:
    """Import what the scenario names, which may bring what the rest of it needs; a file is then named in full."""
    for key, load in (("plugins", load_plugin), ("processes", function_in)):
        if not isinstance(names := raw.get(key), list):
            continue
        for i, name in enumerate(names):
            if isinstance(name, str):  # else the decoder refuses it
                load(name, folder)
                names[i] = in_full(name, folder)


def in_full(name: str, folder: Path) -> str:
    """A plugin's name, or a function's in it, that means the same in any folder."""
    named = re.fullmatch(r"(.+\.py)(:[^:]*)?", name)
    return name if named is None else f"{folder.joinpath(named[1]).resolve()}{named[2] or ''}"


def _kinds(raw: dict[str, Any], key: str, known: Registry[Any]) -> tuple[type[Table], ...]:
    """All there are; those of installed plugins too, if the file has one that is not known without them."""
    for table in _tables(raw, key):
        known.get(str(table.get("kind")))
    return tuple(known.values())


@cache
def _tree(media: tuple[type[Table], ...], faults: tuple[type[Table], ...]) -> type[Scenario]:
    """The tree of a scenario in which all these kinds may stand."""
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
    """Replace shorthands by what they stand for; what is malformed is left for the decoder to refuse."""
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
