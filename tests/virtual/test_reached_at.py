"""A virtual host is reached at each of its interfaces, as a real one is at each of its addresses."""

from __future__ import annotations

import pytest

from hcsim.config import CablePulled, LinkChange, idealised, load_scenario
from hcsim.errors import DeadlineExceeded
from hcsim.runtime.channel import Phantom
from hcsim.runtime.frame import Header
from hcsim.units import BitRate, PositiveSeconds, Seconds
from hcsim.virtual.world import World

SIZE = 32 << 20


def rates_bps(*places: str, change: LinkChange | None = None) -> list[float]:
    """What studio-1 gets through to studio-2 at each of these places."""
    world = World(idealised(load_scenario("mixed-home")))

    async def main() -> list[float]:
        near, far = world.host("studio-1"), world.host("studio-2")
        listener = await far.listen("studio-2:9")
        found = []
        for place in places:
            sending = await near.connect(f"{place}:9")
            receiving = await listener.accept()
            if change is not None:
                world.wiring.change(change)
            began_s = near.clock.elapsed()
            await sending.send(Header(SIZE), Phantom(SIZE))
            await receiving.recv(lambda header: None)
            found.append(8 * SIZE / (near.clock.elapsed() - began_s))
        return found

    return world.run(main())


def test_an_address_names_the_interface_that_it_leads_to() -> None:
    assert rates_bps("studio-2%bridge0", "studio-2%switch", "studio-2") == pytest.approx(
        [16.4e9, 1e9, 16.4e9], rel=0.05
    )


def test_a_connection_stays_on_its_interfaces_when_the_network_changes() -> None:
    slower = LinkChange(Seconds(0), "switch", rate_bps=BitRate(100e6))
    assert rates_bps("studio-2%switch", change=slower) == pytest.approx([0.1e9], rel=0.05)
    assert rates_bps("studio-2%bridge0", change=slower) == pytest.approx([16.4e9], rel=0.05)


@pytest.mark.parametrize(
    ("caller", "ends"),
    [
        ("studio-2", ("studio-2%bridge0", "studio-1%bridge0")),
        ("mini", ("mini%switch", "studio-1%switch")),
        ("laptop", ("laptop%air", "studio-1%switch")),
    ],
)
def test_of_several_addresses_the_first_that_answers_is_taken_and_remembered(
    caller: str, ends: tuple[str, str]
) -> None:
    world = World(idealised(load_scenario("mixed-home")))
    address = "studio-1%bridge0|studio-1%switch:9"

    async def main() -> None:
        await world.host("studio-1").listen(address)
        assert (await world.host(caller).connect(address)).ends == ends
        began_s = world.loop.time()
        assert (await world.host(caller).connect(address)).ends == ends
        assert world.loop.time() - began_s < 0.1, "a place that did not answer is not tried first again"

    world.run(main())


@pytest.mark.parametrize("place", ["studio-1%bridge0", "studio-1%en7"])
def test_an_interface_that_no_way_leads_to_does_not_answer(place: str) -> None:
    world = World(load_scenario("mixed-home"))
    with pytest.raises(DeadlineExceeded, match=f"{place}:9 did not answer"):
        world.run(world.host("mini").connect(f"{place}:9"))


def test_a_cable_that_is_pulled_stops_what_was_dialled_over_it_and_nothing_else() -> None:
    world = World(idealised(load_scenario("mixed-home")))
    pulled_s = 20.0

    async def main() -> list[float]:
        near, far = world.host("studio-1"), world.host("studio-2")
        listener = await far.listen("studio-2:9")
        arrived_s = []
        for place in ("studio-2%bridge0", "studio-2%switch"):
            sending = await near.connect(f"{place}:9")
            receiving = await listener.accept()
            world.inject(CablePulled(Seconds(0), "studio-1", "desk", PositiveSeconds(pulled_s)))
            await near.clock.sleep(1.0)
            with pytest.raises(DeadlineExceeded):
                await near.connect("studio-2%bridge0:9")
            began_s = near.clock.elapsed()
            await sending.send(Header(SIZE), Phantom(SIZE))
            await receiving.recv(lambda header: None)
            arrived_s.append(near.clock.elapsed() - began_s)
            await near.clock.sleep(2 * pulled_s)
        return arrived_s

    over_cable_s, over_switch_s = world.run(main())
    assert over_cable_s > pulled_s - 10
    assert over_switch_s < 1


def test_a_call_whose_way_goes_away_behind_it_is_not_answered() -> None:
    """It is on its way over the cable when that is pulled; the same call over whatever is left comes through."""
    world = World(load_scenario("mixed-home"))

    async def main() -> None:
        near, far = world.host("studio-1"), world.host("studio-2")
        await far.listen("studio-2:9")
        world.inject(CablePulled(Seconds(5e-5), "studio-1", "desk", PositiveSeconds(60)))
        with pytest.raises(DeadlineExceeded):
            await near.connect("studio-2%bridge0:9")
        await near.connect("studio-2:9")

    world.run(main())
