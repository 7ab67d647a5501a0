"""Machines and networks by the names that people have for them."""

from __future__ import annotations

import pytest

from hcsim.config import CATALOGUE
from hcsim.config.machine_names import machine_named
from hcsim.config.media_names import ethernet_bps, medium_name
from hcsim.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("M4 mini", "M4"),
        ("MacBook Pro M3", "M3"),
        ("MacBook Pro M3 Pro", "M3 Pro"),
        ("M3 Pro MacBook Pro", "M3 Pro"),
        ("mac studio m2 ultra", "M2 Ultra"),
        ("MacBook Air M2 2022", "M2 Air"),
        ("m1 air", "M1 Air"),
        ("M4-Pro minis", "M4 Pro"),
        ('14" MacBook Pro M3 Max', "M3 Max"),
    ],
)
def test_a_machine_is_known_by_what_people_call_it(words: str, name: str) -> None:
    assert machine_named(words) == name


def test_every_name_of_the_catalogue_is_a_name() -> None:
    assert all(machine_named(name) == name == machine_named(name.lower()) for name in CATALOGUE)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("M4 Ultra", r'no machine "M4 Ultra" \(did you mean M3 Ultra\?\)'),
        ("MacBook Air", "say which chip it has"),
        ("raspberry pi", 'no machine "raspberry pi"'),
        ("M4 toaster", 'no machine "M4 toaster"'),
    ],
)
def test_a_machine_that_is_not_known_is_refused_with_what_might_be_meant(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        machine_named(words)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("wifi6", "wifi6"),
        ("Wi-Fi 6E", "wifi6e"),
        ("gigabit ethernet", "1gbe"),
        ("2.5gbe switch", "2.5gbe"),
        ("10 Gbit/s", "10gbe"),
        ("ethernet:300 Mb/s", "300mbe"),
        ("Thunderbolt 4", "thunderbolt"),
    ],
)
def test_a_network_is_known_by_what_people_call_it(words: str, name: str) -> None:
    assert medium_name(words) == name


def test_the_rate_of_ethernet_is_in_its_name() -> None:
    assert [ethernet_bps(medium_name(each)) for each in ("2.5gbe", "300 Mb/s", "wifi7")] == [2.5e9, 300e6, None]


def test_a_network_that_is_not_known_is_refused_with_what_might_be_meant() -> None:
    with pytest.raises(ConfigError, match=r'no network "wifi8" \(did you mean wifi'):
        medium_name("wifi8")
