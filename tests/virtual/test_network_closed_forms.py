"""Simulated collectives against the textbooks' α–β formulas, with latency and bandwidth as the only effects."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from hcsim import Group, Options, Phantom, Wire, simulate
from hcsim.collectives.cost import closed_form
from hcsim.config import parse_scenario
from hcsim.runtime.frame import HEADER_BYTES

UNCUT = Wire(segment_bytes=16 << 20)
LINKS = [("1 Gb/s", "0.1 ms", 8_400_000), ("10 Gb/s", "2 ms", 4_200_000), ("100 Mb/s", "20 ms", 840_000)]
"""Rate, latency and bytes: the bandwidth decides; both do; the latency decides. 840 divides by all world sizes used."""
TINY = [(rate, latency, 840) for rate, latency, _ in LINKS]
"""Of which the headers are a good part."""
NS = 1e-9
START_S = 10.0
RATES_BPS = {"1 Gb/s": 1e9, "10 Gb/s": 1e10, "100 Mb/s": 1e8}


def simulated_s(algorithm: str, world: int, link: tuple[str, str, int], arity: int = 2, wire: Wire = UNCUT) -> float:
    rate, latency, size_bytes = link
    scenario = parse_scenario(
        f"""
        name = "uniform"
        effects = "ideal"
        medium = [{{ kind = "ethernet", name = "switch", rate = "{rate}", latency = "{latency}" }}]
        node = [{{ name = "mac", count = {world}, machine = "ideal", links = ["switch"] }}]
        """,
        "uniform",
    )

    async def program(group: Group) -> float:
        loop = asyncio.get_running_loop()
        await group.all_reduce(Phantom(1000 * world), algorithm=algorithm)  # opens the links
        await asyncio.sleep(START_S - loop.time())
        await group.all_reduce(Phantom(size_bytes), algorithm=algorithm)
        took_s = loop.time() - START_S
        await asyncio.sleep(START_S)  # to say goodbye takes a moment of the ports, which others still need
        return took_s

    return max(simulate(scenario, program, wire=wire, options=Options(arity=arity)).values())


def textbook_s(algorithm: str, world: int, link: tuple[str, str, int], arity: int = 2) -> float:
    rate, latency, size_bytes = link
    latency_s = float(latency.removesuffix(" ms")) / 1e3
    return closed_form(algorithm, world, size_bytes, latency_s, RATES_BPS[rate] / 8, arity, HEADER_BYTES)


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("link", [*LINKS, *TINY])
@pytest.mark.parametrize(
    ("algorithm", "world"),
    [
        *[("ring", world) for world in (2, 3, 4, 5, 7, 8)],
        *[("centralized", world) for world in (2, 3, 4, 5, 7, 8)],
        *[("direct", world) for world in (2, 3, 4, 5, 7, 8)],
        *[("recursive_doubling", world) for world in (2, 4, 8)],
        *[("halving_doubling", world) for world in (2, 4, 8)],
        *[("tree", world) for world in (2, 3, 4, 5, 6, 7, 8, 9, 15)],
    ],
)
def test_an_all_reduce_takes_the_time_of_its_formula(algorithm, world, link):
    wanted_s = textbook_s(algorithm, world, link)
    assert simulated_s(algorithm, world, link) == pytest.approx(wanted_s, abs=10 * NS)  # its clock has whole ones


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("world", [2, 4, 8, 16])
@pytest.mark.parametrize("algorithm", ["ring", "direct", "recursive_doubling", "halving_doubling"])
def test_a_message_that_is_cut_takes_no_longer(algorithm, world):
    """Where every line is full all the time, there is nothing to gain by beginning a round early, and much to lose."""
    link = ("1 Gb/s", "0.1 ms", 840_000_000)
    found_s = simulated_s(algorithm, world, link, wire=Wire(segment_bytes=8 << 20))
    assert found_s == pytest.approx(textbook_s(algorithm, world, link), rel=0.01)


@pytest.mark.parametrize("world", [3, 5, 6, 7])
def test_where_some_are_guests_a_message_gains_by_being_cut(world):
    """Their hosts pass on what comes while more is still coming."""
    cut_s = simulated_s("halving_doubling", world, LINKS[0], wire=Wire(segment_bytes=1 << 18))
    assert cut_s < 0.9 * simulated_s("halving_doubling", world, LINKS[0])


@pytest.mark.quick_cases(15)
@pytest.mark.parametrize("link", [*LINKS, *TINY])
@pytest.mark.parametrize(("world", "arity"), [(4, 3), (8, 3), (13, 3), (5, 4), (8, 4), (8, 7)])
def test_a_tree_of_any_arity_takes_the_time_of_its_formula(world, arity, link):
    wanted_s = textbook_s("tree", world, link, arity)
    assert simulated_s("tree", world, link, arity) == pytest.approx(wanted_s, abs=10 * NS)


def test_a_tree_with_an_inner_rank_on_one_side_pays_for_equal_shares():
    """Four ranks: 0 above 1 and 2, and 1 above 3. Up takes 2 α + 2 B, since 2's message is through before 1's starts.

    Down, the root serves both children at once at half the rate each, so that 1 passes on after 2 B: 2 α + 3 B.
    """
    buffer_s, latency_s = (8_400_000 + HEADER_BYTES) / 125e6, 0.1e-3
    assert textbook_s("tree", 4, LINKS[0]) == pytest.approx(4 * latency_s + 5 * buffer_s)
    assert simulated_s("tree", 4, LINKS[0]) == pytest.approx(4 * latency_s + 5 * buffer_s, abs=10 * NS)


def test_the_formulas_tell_the_algorithms_apart():
    """Otherwise the comparisons above would say little."""
    times_s = sorted(
        simulated_s(algorithm, 8, LINKS[0])
        for algorithm in ("ring", "tree", "centralized", "direct", "recursive_doubling", "halving_doubling")
    )
    gaps = [later / earlier for earlier, later in pairwise(times_s)]
    assert max(gaps) > 1.3
    assert times_s[-1] / times_s[0] > 7
