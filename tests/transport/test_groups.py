"""The listener of a node's collectives, and whom others take it to be by a check."""

from __future__ import annotations

import pytest

from hcsim.config import FewDescriptors
from hcsim.transport.groups import CheckedPeer, GroupListener, check_all
from hcsim.units import Seconds
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.world import World
from tests.switches import on_switch


@pytest.mark.parametrize(("connections", "wrong"), [(1, 1), (2, 0)])
def test_who_cannot_be_connected_to_all_others_at_once_does_not_pass(connections: int, wrong: int) -> None:
    world = World(on_switch("abc", [FewDescriptors(at_s=Seconds(0.5), node="a", connections=connections)]))

    async def body(host: VirtualHost, *others: VirtualHost) -> tuple[str, list[str]]:
        receptions = [GroupListener(other, await other.listen(f"{other.name}:52416")) for other in others]
        await host.clock.sleep(1)
        found = await check_all(host, [CheckedPeer(f"{other.name}:52416") for other in others])
        for reception in receptions:
            await reception.close()
        return found

    own, theirs = world.run(body(*world.hosts))
    assert own == ""
    assert sum(bool(each) for each in theirs) == wrong
