"""A group over listeners that listened before anybody knew their addresses, over every carrier."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hcsim import Group, Options
from hcsim.errors import HcsimError
from hcsim.runtime.host import Host
from hcsim.transport.groups import GroupMembership


def test_ranks_that_took_any_port_form_a_group_which_closes_their_listeners(arena):
    async def body(left: Host, right: Host) -> list[float]:
        hosts = (left, right)
        listeners = [await host.listen(arena.address(host)) for host in hosts]
        addresses = tuple(listener.address for listener in listeners)

        async def on_rank(rank: int) -> float:
            us = GroupMembership(rank, addresses)
            async with await Group.open(hosts[rank], us, Options(timeout_s=20.0), listeners[rank]) as group:
                return float((await group.all_reduce(np.array([rank + 1.0])))[0])

        found = await asyncio.gather(on_rank(0), on_rank(1))
        for host, other, address in ((left, right, addresses[0]), (right, left, addresses[1])):
            with pytest.raises(HcsimError):
                await other.connect(address, timeout_s=0.2)
            again = await host.listen(address)  # it is free
            await again.close()
        return found

    assert arena.run(body) == [3.0, 3.0]


def test_a_group_of_one_closes_its_listener_too(arena):
    async def body(left: Host, right: Host) -> None:
        listener = await left.listen(arena.address(left))
        async with await Group.open(left, GroupMembership(0, (listener.address,)), None, listener):
            pass
        with pytest.raises(HcsimError):
            await right.connect(listener.address, timeout_s=0.2)

    arena.run(body)
