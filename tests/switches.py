"""Hosts on one switch, where latency and bandwidth are the only effects unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from hcsim.config import AnyFault, Scenario, parse_scenario


def on_switch(
    names: Sequence[str],
    faults: Sequence[AnyFault] = (),
    *,
    rate: str = "1 Gb/s",
    latency: str = "0.1 ms",
    effects: str = "ideal",
    tcp: str = "",
) -> Scenario:
    nodes = ", ".join(f'{{ name = "{name}", machine = "ideal", links = ["switch"] }}' for name in names)
    scenario = parse_scenario(
        f"""
        name = "switch"
        effects = "{effects}"
        medium = [{{ kind = "ethernet", name = "switch", rate = "{rate}", latency = "{latency}" }}]
        tcp = {{ {tcp} }}
        node = [{nodes}]
        """,
        "switch",
    )
    return replace(scenario, faults=tuple(faults))
