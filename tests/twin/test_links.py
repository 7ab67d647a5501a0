"""The links of a virtual home are measured, and the twin that follows is held against the home."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hcsim.collectives.group import Group
from hcsim.config import Basis, Scenario, Thunderbolt, Wifi, idealised, load_scenario, parse_scenario
from hcsim.launch.virtual import outcome_of
from hcsim.transport.groups import GroupMembership
from hcsim.twin.file import TwinFile
from hcsim.twin.home import fitted, predicted_s
from hcsim.twin.links import Pace, Surveyed, held_out, joined, steps_of, survey
from hcsim.twin.quality import Survey
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World

BASIS = Basis("measured", "the simulator", "2026-11-19")
SHORT = Pace(alone_s=0.5, together_s=0.4, paced_s=0.4, calls=10)


def wired(links: str, extra: str = "") -> Scenario:
    nodes = "\n".join(
        f'[[node]]\nname = "{name}"\nmachine = "ideal"\nlinks = [{{ medium = "lan"{link} }}]'
        for name, link in zip("abcdefgh", links.split("|"), strict=False)
    )
    medium = f'[[medium]]\nkind = "ethernet"\nname = "lan"\nrate = "1 Gb/s"\nlatency = "0.2 ms"\n{extra}'
    return parse_scenario(f'name = "test"\n{medium}\n{nodes}', "test")


def surveyed(scenario: Scenario, pace: Pace = SHORT) -> Surveyed:
    world = World(scenario)
    names = [host.name for host in world.hosts]

    async def on_host(host: VirtualHost) -> Surveyed:
        async def opened(port: int, name: str) -> Group:
            addresses = tuple(f"{each}:{port}" for each in names)
            return await Group.open(host, GroupMembership(names.index(host.name), addresses, name=name))

        async with await opened(1, "flows") as flows, await opened(2, "calls") as calls:
            found = await held_out(flows, await survey(flows, calls, pace=pace))
            kinds = {each.name: each.medium.value for each in host.interfaces()}
            media = tuple(
                (flows.rank, rank, kinds[ours.partition("%")[2]])
                for rank, (ours, _) in flows.ends.items()
                if "%" in ours
            )
            return msgspec.structs.replace(found, media=media)

    return joined(outcome_of(world, world.run_on_all(on_host)).values())


def test_every_pair_is_measured_in_both_directions_alone_and_together() -> None:
    steps = steps_of(3)
    assert [step.pairs for step in steps if step.kind == "alone"] == [
        ((0, 1),), ((0, 2),), ((1, 0),), ((1, 2),), ((2, 0),), ((2, 1),),
    ]  # fmt: skip
    assert {step.kind for step in steps} == {"alone", "both ways", "two into one", "all"}
    assert {step.kind for step in steps_of(2)} == {"alone", "both ways"}


@pytest.mark.parametrize(
    ("links", "rates_mbps"),
    [
        ("|", {(0, 1): 1000, (1, 0): 1000}),
        ('|, rate = "100 Mb/s"|', {(0, 1): 100, (1, 0): 100, (0, 2): 1000}),
        (', up = "100 Mb/s", down = "700 Mb/s"|', {(0, 1): 100, (1, 0): 700}),
    ],
)
def test_a_twin_of_ports_predicts_what_its_figures_do_not_rest_on(
    tmp_path: Path, links: str, rates_mbps: dict[tuple[int, int], float]
) -> None:
    home = wired(links)
    found = surveyed(home)
    goodput = (1500 - 52) / (1500 + 38)
    for pair, rate_mbps in rates_mbps.items():
        assert found.rate_Bps(*pair) == pytest.approx(rate_mbps * 1e6 / 8 * goodput, rel=0.01)
    names = [node.name for node in home.nodes]
    fit = fitted(Survey(found, names, {}, home.tcp, BASIS), {})
    assert fit.notes == ()
    twin = TwinFile(tmp_path / "twin.toml")
    twin.put_links(fit, dict.fromkeys(names, "ideal"))
    again = load_scenario(tmp_path / "twin.toml")
    assert [medium.basis for medium in again.media] == [BASIS]
    for [link] in fit.links.values():
        assert 0 < link.up_bps <= 1.01e9
        assert 0 < link.down_bps <= 1.01e9
    assert again.media[0].latency_s == pytest.approx(0.2e-3, rel=0.1)
    measured = sorted(found.held_out_s)[len(found.held_out_s) // 2]
    assert predicted_s(again, names, found.held_out_bytes) == pytest.approx(measured, rel=0.01)


@pytest.mark.slow
def test_stations_share_their_air_and_machines_with_a_cable_have_one(tmp_path: Path) -> None:
    home = idealised(load_scenario("mixed-home"))
    found = surveyed(home, Pace(alone_s=0.3, together_s=0.3, calls=5))
    names = [node.name for node in home.nodes]
    fit = fitted(Survey(found, names, {}, home.tcp, BASIS), {})
    twin = TwinFile(tmp_path / "twin.toml")
    twin.put_links(fit, dict.fromkeys(names, "ideal"))
    cables = [medium for medium in load_scenario(tmp_path / "twin.toml").media if isinstance(medium, Thunderbolt)]
    assert [cable.between for medium in cables for cable in medium.cables] == [("studio-1", "studio-2")]
    assert any(isinstance(medium, Wifi) for medium in fit.media)
    measured = sorted(found.held_out_s)[len(found.held_out_s) // 2]
    assert predicted_s(twin.scenario, names, found.held_out_bytes) == pytest.approx(measured, rel=0.1)


def test_links_are_written_beside_what_others_measured(tmp_path: Path) -> None:
    home = wired("|")
    path = tmp_path / "home.toml"
    path.write_text(
        '# Mine.\nname = "home"\n[[medium]]\nkind = "ethernet"\nname = "switch"\nrate = "1 Gb/s"\n'
        'basis = { source = "a guess" }\n[[node]]\nname = "a"\nmachine = "M4"\nlinks = ["switch"]\n'
    )
    fit = fitted(Survey(surveyed(home), ["a", "b"], {}, home.tcp, BASIS), {})
    TwinFile(path).put_links(fit, {"a": "M1", "b": "M2"})
    again = load_scenario(path)
    assert [node.machine for node in again.nodes] == ["M4", "M2"]
    assert again.media == fit.media
    assert path.read_text().startswith("twin = 1\n# Mine.\n")
