"""Homes in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcsim.config import parse_scenario, write_scenario
from hcsim.config.machine import GIB
from hcsim.errors import ConfigError
from hcsim.plan.home import bought, home_in_words, home_of, is_joined, on_medium, only_nodes, with_rates

MIXED = "M4 24GB, M1 Air on wifi6; M3 Pro on 1gbe"


def links(words: str) -> dict[str, list[str]]:
    return {node.name: [link.medium for link in node.links] for node in home_in_words(words).nodes}


def test_machines_are_joined_by_the_networks_behind_them() -> None:
    assert links(MIXED) == {"m4": ["wifi6"], "m1-air": ["wifi6"], "m3-pro": ["1gbe"]}
    assert home_in_words(MIXED).nodes[0].memory_bytes == 24 * GIB


def test_a_number_makes_several_alike_which_are_numbered() -> None:
    assert list(links("2 x M4 mini and a MacBook Pro M3 on wifi7")) == ["m4-1", "m4-2", "m3"]


def test_thunderbolt_is_cables_around_and_one_between_two() -> None:
    cables = {n: len(home_in_words(f"{n} x M4 on thunderbolt").media[0].cables) for n in (2, 3, 4)}  # type: ignore[union-attr]
    assert cables == {2: 1, 3: 3, 4: 4}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("M4, M3 Pro", "m4 is on no network"),
        ("M4 on wifi6; 2 x M3 on thunderbolt", "m3-1 is only on thunderbolt, which others are not on"),
        ("M4 on thunderbolt", "a cable joins two machines, and m4 is alone on it"),
        ("M4,,M3 on wifi6", "a machine is missing"),
        ("0 x M4 on wifi6", "none of them is no machine"),
        ("four-mac-1gbe", r"did you mean four-macs-1gbe\?"),
        ("", "say which Macs there are"),
        ("99 x M4 on 1gbe", "more than 64 machines"),
    ],
)
def test_a_home_that_cannot_be_is_refused_in_a_line(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        home_of(words)
    assert "\n" not in str(caught.value)


def test_a_home_in_words_is_a_scenario_that_can_be_written_and_read(tmp_path: Path) -> None:
    home = home_in_words(MIXED)
    assert parse_scenario(write_scenario(home), "file").nodes == home.nodes
    file = tmp_path / "home.toml"
    file.write_text(write_scenario(home))
    assert home_of(str(file)).media == home.media


def test_a_better_network_takes_the_place_of_the_old_one() -> None:
    switched = bought(home_in_words(MIXED), "2.5gbe switch").home
    assert {link.medium for node in switched.nodes for link in node.links} == {"2.5gbe"}
    aired = bought(home_in_words(MIXED), "wifi7").home
    assert [[link.medium for link in node.links] for node in aired.nodes] == [["wifi7"], ["wifi7"], ["1gbe"]]


def test_a_new_machine_is_plugged_into_the_switch() -> None:
    *_, new = bought(home_in_words(MIXED), "M4 mini").home.nodes
    assert (new.name, new.machine, [link.medium for link in new.links]) == ("new-m4", "M4", ["1gbe"])


def test_what_cannot_be_bought_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither a network nor a machine"):
        bought(home_in_words(MIXED), "toaster")


def test_a_cable_takes_one_machine_off_the_air() -> None:
    cabled = on_medium(home_in_words(MIXED), "1gbe", ["m4"])
    assert [[link.medium for link in node.links] for node in cabled.nodes] == [["new-1gbe"], ["wifi6"], ["1gbe"]]


def test_a_network_at_half_its_rate_has_half_of_it() -> None:
    half = with_rates(home_in_words(MIXED), "1gbe", 0.5).media[1]
    assert half.rate_bps == 0.5e9  # type: ignore[union-attr]


def test_machines_at_far_ends_of_a_chain_need_those_between_them() -> None:
    home = home_in_words("4 x M4 on thunderbolt")
    assert is_joined(only_nodes(home, ["m4-1", "m4-2"]))
    assert not is_joined(only_nodes(home, ["m4-1", "m4-3"]))
    assert is_joined(home_of("two-homes-wan"))
