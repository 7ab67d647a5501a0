"""How the standby comes to know what the server does: every update, before anybody else is told of it.

The server sends the averaged gradients, the learning rate, and which pushes are answered how; the standby
applies them to a replica of its own and says so. A length of 0 is the end.
"""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np

from hcsim.collectives.group import Group
from hcsim.training.elastic.keeper import Keeper
from hcsim.training.learner import Learner
from hcsim.training.parameter_server.saved import Record

SERVER, STANDBY = 0, 1
"""Their ranks."""


class _Update(msgspec.Struct, frozen=True):
    """What the standby is told, beside the gradients."""

    version: int
    lr: float
    workers: dict[str, Record]


async def tell(group: Group, learner: Learner, version: int, lr: float, workers: dict[str, Record]) -> None:
    """The update whose gradients are in place counts once the standby has it: then this returns."""
    text = msgspec.msgpack.encode(_Update(version, lr, workers))
    sending = [
        group.send(np.array([len(text)], np.int64), STANDBY),
        group.send(np.frombuffer(text, np.uint8), STANDBY),
        group.send(learner.replica.gradients, STANDBY),
    ]
    await asyncio.gather(*sending)
    await group.recv(np.zeros(1, np.int64), STANDBY)


async def tell_end(group: Group) -> None:
    """This server ends: there is nothing more to come."""
    await group.send(np.zeros(1, np.int64), STANDBY)


async def follow(group: Group, keeper: Keeper) -> None:
    """Do as the server does, until it says that it ends."""
    learner, length = keeper.learner, np.zeros(1, np.int64)
    assert keeper.state is not None
    while True:
        await group.recv(length, SERVER)
        if not length[0]:
            return
        text = np.empty(int(length[0]), np.uint8)
        await asyncio.gather(group.recv(text, SERVER), group.recv(learner.replica.gradients, SERVER))
        update = msgspec.msgpack.decode(text.tobytes(), type=_Update)
        await learner.update(update.lr)
        keeper.state.version, keeper.state.workers = update.version, update.workers
        await group.send(length, SERVER)
