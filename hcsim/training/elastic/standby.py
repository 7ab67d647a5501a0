"""What the server tells the other members: all of them where a view begins and where it listens, the standby every
update, before anybody else is told of it.

The server sends the learning rate, which pushes are answered how, and either the averaged gradients or the pushes as
they came, whichever is less: where gradients are compressed, so is this. The standby says that it has them, and does
what the server did with a replica of its own. A length of 0 is the end. What no correct server says is not
believed: it ends the view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec
import numpy as np

from hcsim.collectives.group import Group
from hcsim.compressors.base import Bytes
from hcsim.errors import UNDECODABLE, CompressionError
from hcsim.runtime.address import LAST_PORT
from hcsim.runtime.channel import Phantom
from hcsim.runtime.device import Work
from hcsim.training.elastic.keeper import Keeper, Start
from hcsim.training.elastic.parcel import LABEL_MOST_BYTES, refuse
from hcsim.training.learner import Learner
from hcsim.training.optimizer import clip
from hcsim.training.parameter_server.gradients import Gradients, Received, average
from hcsim.training.parameter_server.messages import Push
from hcsim.training.parameter_server.server import Record

SERVER, STANDBY = 0, 1
"""Their ranks."""


async def agreed_start(group: Group, ours: Start, steps: int) -> Start:
    """Where the view begins, as the server says; of so many steps in all."""
    start = Start(*await _from_server(group, ours))
    if min(start) < 0 or start.step > steps:
        refuse(SERVER, f"it begins with version {start.version} and step {start.step} of {steps}")
    return start


async def agreed_port(group: Group, ours: int) -> int:
    """Where the server listens, as it says."""
    (port,) = await _from_server(group, (ours,))
    if not 0 <= port <= LAST_PORT:
        refuse(SERVER, f"it listens at port {port}")
    return port


async def _from_server(group: Group, ours: Sequence[int]) -> list[int]:
    """The server's numbers. They come from itself: whoever passed them on could have changed them."""
    told = np.array(ours, np.int64)
    await group.broadcast(told, SERVER, algorithm="centralized")
    return [int(number) for number in told]


class _Update(msgspec.Struct, frozen=True):
    """What the standby is told, beside the gradients."""

    version: int
    lr: float
    workers: dict[str, Record]
    pushes: tuple[Push, ...]
    """What it was made of, if that follows; otherwise it is the averaged gradients."""


async def tell(
    group: Group, learner: Learner, version: int, lr: float, workers: dict[str, Record], received: list[Received]
) -> None:
    """The update whose averaged gradients are in place counts once the standby has it: then this returns."""
    pushes, data = tuple(each.push for each in received), learner.replica.gradients
    size_bytes = sum(push.size_bytes for push in pushes)
    if size_bytes < data.nbytes:
        data = Phantom(size_bytes) if isinstance(data, Phantom) else np.concatenate([each.data for each in received])
    else:
        pushes = ()
    text = msgspec.msgpack.encode(_Update(version, lr, workers, pushes))
    sending = [
        group.send(np.array([len(text)], np.int64), STANDBY),
        group.send(np.frombuffer(text, np.uint8), STANDBY),
        group.send(data, STANDBY),
    ]
    await asyncio.gather(*sending)
    await group.recv(np.zeros(1, np.int64), STANDBY)


async def tell_end(group: Group) -> None:
    """This server ends: there is nothing more to come."""
    await group.send(np.zeros(1, np.int64), STANDBY)


async def follow(group: Group, keeper: Keeper, gradients: Gradients, max_norm: float | None) -> None:
    """Do as the server does, until it says that it ends."""
    learner, length = keeper.learner, np.zeros(1, np.int64)
    assert keeper.state is not None
    while True:
        await group.recv(length, SERVER)
        if not length[0]:
            return
        update = await _heard(group, int(length[0]), gradients)
        packed = _room(update, learner)
        await group.recv(learner.replica.gradients if packed is None else packed, SERVER)
        await group.send(length, SERVER)  # from here on it counts: nothing but our own end keeps us from the rest
        if packed is not None:
            try:
                received = await _unpacked(update, packed, learner, gradients)
            except CompressionError as error:
                keeper.state = None  # the server may have told its workers of an update that we do not have
                refuse(SERVER, error)
            await average(learner, received)
            await clip_gradients(learner, max_norm)
        await learner.update(update.lr)
        keeper.state.version, keeper.state.workers = update.version, update.workers


async def _heard(group: Group, length: int, gradients: Gradients) -> _Update:
    """The server's next words, of that length."""
    if not 0 < length <= LABEL_MOST_BYTES:
        refuse(SERVER, f"its update would have {length} bytes beside the gradients")
    text = np.empty(length, np.uint8)
    await group.recv(text, SERVER)
    try:
        update = msgspec.msgpack.decode(text.tobytes(), type=_Update)
    except UNDECODABLE as error:
        refuse(SERVER, error)
    if objection := next(filter(None, map(gradients.objection, update.pushes)), ""):
        refuse(SERVER, objection)
    return update


async def clip_gradients(learner: Learner, max_norm: float | None) -> None:
    """Clip those that are in place."""
    gradients = learner.replica.gradients
    if max_norm is not None:
        work = Work(3.0 * gradients.nbytes / 4, 3.0 * gradients.nbytes)
        await learner.run(work, partial(clip, gradients, max_norm))


def _room(update: _Update, learner: Learner) -> Bytes | Phantom | None:
    """For the pushes, if they follow."""
    if not update.pushes:
        return None
    size_bytes = sum(push.size_bytes for push in update.pushes)
    return Phantom(size_bytes) if isinstance(learner.replica.gradients, Phantom) else np.empty(size_bytes, np.uint8)


async def _unpacked(update: _Update, packed: Bytes | Phantom, learner: Learner, gradients: Gradients) -> list[Received]:
    received, at = [], 0
    for push in update.pushes:
        end = at + push.size_bytes
        data = Phantom(push.size_bytes) if isinstance(packed, Phantom) else packed[at:end]
        received.append(Received(push, data, await gradients.decoded(push, data, learner)))
        at = end
    return received
