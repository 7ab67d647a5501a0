"""A twin in a file: a scenario to which each measurement is added as soon as it is there.

A file may have been written by hand, or hold what other machines have measured. Only the tables that a measurement
changes are written anew; all other text stays as it is, comments included. What would be read back as another scenario
than the one that is meant is not written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from hcsim.config import AnyMedium, Ethernet, Scenario, Thunderbolt, Wifi, load_scenario, parse_scenario, write_scenario
from hcsim.config.check import complete
from hcsim.config.file import write_table
from hcsim.config.machine import Basis, Machine
from hcsim.config.scenario import TWIN_VERSION, Attachment, Node
from hcsim.errors import ConfigError
from hcsim.files import write_whole
from hcsim.runtime.host import Interface, Medium
from hcsim.twin.home import Fit
from hcsim.units import BitRate

_HEADER = re.compile(r"(?:^[ \t]*#[^\n]*\n)*^[ \t]*\[\[?[ \t]*(?P<root>[A-Za-z0-9_-]+)[ \t]*\]\]?", re.MULTILINE)
"""The header of a table of the root, with the comments above it."""
_ORDER = ("medium", "wan", "machine", "node", "tcp", "cluster", "training", "job", "fault")
_KEYS = {"wan": "home"}
"""What tells tables of a kind apart, where it is not their name."""
_USUAL_BPS = 1e9
_FILE_COMMENT = """\
# The twin of a home: what was measured of its machines and of the network between them. It is a scenario for
# `hcsim run`, `hcsim bench` and others. Measuring again replaces the tables of what was measured, and nothing else.
"""


class TwinFile:
    """A twin that is kept in a file."""

    def __init__(self, path: Path) -> None:
        """Read the file, if it is there."""
        self.path = path
        if path.is_dir():
            raise ConfigError(f"{path}: cannot be written: it is a folder")
        if path.exists():
            self.scenario = load_scenario(path)
            self._text = path.read_text(encoding="utf-8")
        else:
            _check_folder(path)
            name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip(".-_") or "home"
            self.scenario = Scenario(name, twin=TWIN_VERSION)
            self._text = ""

    def machine(self, name: str) -> Machine | None:
        """Return what is known of a machine."""
        return next((machine for machine in self.scenario.machines if machine.name == name), None)

    def put_machine(self, machine: Machine, interfaces: Sequence[Interface] = ()) -> None:
        """Replace or add a machine, and the node that is this machine. A new node is joined to the network by the
        first of these interfaces, at its nominal rate."""
        machines = _put(self.scenario.machines, machine)
        scenario = replace(self.scenario, machines=machines)
        known = next((node for node in self.scenario.nodes if node.name == machine.name), None)
        if known is None:
            media, node = _plugged(scenario, Node(machine.name, machine), interfaces)
            scenario = replace(scenario, media=media, nodes=(*scenario.nodes, node))
        else:
            scenario = replace(scenario, nodes=_put(scenario.nodes, replace(known, machine=machine)))
        self.save(scenario)

    def put_links(self, fit: Fit, machines: Mapping[str, Machine | str]) -> None:
        """Replace the media that were measured, and the links of these nodes to them. A node that is new has that
        machine."""
        scenario, nodes, media, tables = self.scenario, self.scenario.nodes, self.scenario.media, self.scenario.machines
        known = {node.name: node for node in nodes}
        elsewhere = {medium.name: medium.home for medium in media if not isinstance(medium, Thunderbolt)}
        replaced = [medium.name for medium in media if medium.basis is not None and medium.basis.kind == "estimated"]
        replaced += [medium.name for medium in fit.media]
        for name, links in fit.links.items():
            node, home = known.get(name) or Node(name, machines[name]), fit.homes[name]
            others = tuple(
                link for link in node.links if link.medium not in replaced and elsewhere.get(link.medium, home) == home
            )
            nodes = _put(nodes, replace(node, home=home, links=(*others, *links)))
            if isinstance(node.machine, Machine):
                tables = _put(tables, node.machine)
        for medium in fit.media:
            media = _put(media, medium)
        lines = {**{line.home: line for line in scenario.wan}, **{line.home: line for line in fit.wan}}
        self.save(replace(scenario, media=media, wan=tuple(lines.values()), machines=tables, nodes=nodes))

    def save(self, scenario: Scenario) -> None:
        """Write what has changed."""
        scenario = complete(replace(scenario, twin=TWIN_VERSION))
        text = _updated(self._text, self.scenario, scenario) if self._text else _FILE_COMMENT + write_scenario(scenario)
        try:
            same = parse_scenario(text, str(self.path), self.path.parent) == scenario
        except ConfigError:
            same = False
        if not same:
            raise ConfigError(
                f"{self.path}: this file cannot be updated: give each medium, machine and node in it a [[table]] "
                "of its own, or write to another file with -o"
            )
        try:
            write_whole(self.path, text.encode())
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {error.strerror}") from None
        self.scenario, self._text = scenario, text


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: there is no folder {path.parent}")


Named = TypeVar("Named", Machine, Node, AnyMedium)


def _put(tables: tuple[Named, ...], table: Named) -> tuple[Named, ...]:
    """Return the tables with the one of the same name replaced, or with this one behind them."""
    return tuple({**{each.name: each for each in tables}, table.name: table}.values())


def _plugged(scenario: Scenario, node: Node, interfaces: Sequence[Interface]) -> tuple[tuple[AnyMedium, ...], Node]:
    """Return the media, with one to which the node is joined, and the node. Until links are measured, the nominal rate
    of its interface is the best that is known."""
    wired = next((each for each in interfaces if each.medium in (Medium.ETHERNET, Medium.WIFI)), None)
    kind: type[Ethernet | Wifi] = Wifi if wired is not None and wired.medium is Medium.WIFI else Ethernet
    rate_bps = None if wired is None or wired.rate_bps is None else BitRate(wired.rate_bps)
    source = "the usual rate" if wired is None or rate_bps is None else f"the nominal rate of {wired.name}"
    media = scenario.media
    known = [each for each in media if isinstance(each, kind)]
    medium = known[0] if known else _new_medium(kind, scenario, rate_bps, Basis("estimated", source))
    is_same = rate_bps is None or rate_bps == getattr(medium, "rate_bps", None)
    link = Attachment(medium.name, None if is_same or kind is Wifi else rate_bps)
    return media if known else (*media, medium), replace(node, home=medium.home, links=(link,))


def _new_medium(
    kind: type[Ethernet | Wifi], scenario: Scenario, rate_bps: BitRate | None, basis: Basis
) -> Ethernet | Wifi:
    home = scenario.nodes[0].home if scenario.nodes else "home"
    if kind is Ethernet:
        return Ethernet("switch", rate_bps or BitRate(_USUAL_BPS), home, basis=basis)
    usual = parse_scenario('name = "usual"\n[[medium]]\nkind = "wifi"\nname = "air"', "usual").media[0]
    assert isinstance(usual, Wifi)
    return replace(usual, home=home, basis=basis)


class _Piece(NamedTuple):
    """A part of a file: what comes before its first table, or a table of the root with the tables in it."""

    root: str
    name: str
    text: str


def _pieces(text: str) -> list[_Piece]:
    headers = [match for match in _HEADER.finditer(text) if "." not in match[0].rpartition("[")[2]]
    starts = [match.start() for match in headers]
    pieces = [_Piece("", "", text[: starts[0]] if starts else text)]
    for match, (start, end) in zip(headers, pairwise([*starts, len(text)]), strict=True):
        try:
            [table] = msgspec.toml.decode(text[start:end], type=dict[str, list[dict[str, object]]])[match["root"]]
            name = str(table.get(_KEYS.get(match["root"], "name"), ""))
        except (msgspec.DecodeError, msgspec.ValidationError, ValueError, KeyError):
            name = ""
        pieces.append(_Piece(match["root"], name, text[start:end]))
    return pieces


def _updated(text: str, before: Scenario, after: Scenario) -> str:
    """Return the text of the file with the tables that have changed."""
    pieces = _pieces(text)
    if before.twin is None:
        pieces[0] = pieces[0]._replace(text=f"twin = {after.twin}\n{pieces[0].text}")
    changes = [
        *(("medium", each.name, each) for each in after.media if each not in before.media),
        *(("wan", each.home, each) for each in after.wan if each not in before.wan),
        *(("machine", each.name, each) for each in after.machines if each not in before.machines),
        *(("node", each.name, _naming(each, after)) for each in after.nodes if _naming(each, after) not in
          [_naming(known, before) for known in before.nodes]),
    ]  # fmt: skip
    for root, name, table in changes:
        piece = _Piece(root, name, f"{write_table(root, table)}\n")
        place = next((i for i, each in enumerate(pieces) if (each.root, each.name) == (root, name)), None)
        if place is not None:
            pieces[place] = piece
        else:
            before_us = [i for i, each in enumerate(pieces) if _order(each.root) <= _order(root)]
            pieces.insert(before_us[-1] + 1, piece)
    return "".join(piece.text if piece.text.endswith("\n") else f"{piece.text}\n" for piece in pieces if piece.text)


def _naming(node: Node, scenario: Scenario) -> Node:
    """Return the node with the name of its machine, if the machine has a table of its own."""
    return replace(node, machine=node.machine.name) if node.machine in scenario.machines else node


def _order(root: str) -> int:
    return _ORDER.index(root) if root in _ORDER else -1 if not root else len(_ORDER)
