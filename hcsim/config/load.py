"""Reading a scenario: from TOML to the finished tree, with shorthands spelled out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from hcsim.config.check import complete
from hcsim.config.explain import explain
from hcsim.config.media import WIFI_STANDARDS
from hcsim.config.scenario import Scenario, idealised
from hcsim.errors import ConfigError
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
        return parse_scenario(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        hint = did_you_mean(str(where), shipped)
        raise ConfigError(f"{where}: no such file{hint}; shipped scenarios: {', '.join(shipped)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def parse_scenario(text: str, source: str) -> Scenario:
    """Read a scenario from TOML; `source` names it in errors."""
    raw = _decoded(text, source)
    try:
        _spell_out(raw)
        scenario = complete(msgspec.convert(raw, Scenario, dec_hook=decode_quantity))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, raw, Scenario)}") from None
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
