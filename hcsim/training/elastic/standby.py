"""The state of a parameter server, and its replication: the first two members of a view hold it, bit for bit the same.

When a view begins, the member with the newest state hands it to those of the first two that lack it. If no
member has any (server and standby were lost at once), training goes on from the newest model that a worker has
pulled.

From then on the server sends every update to the standby before it tells any worker: the learning rate, the
answer to each push, and either the averaged gradients or the pushes as they came, whichever is smaller
(compressed pushes are). The standby acknowledges and applies the update to a replica of its own. A length of 0
is the end. Messages that no correct server sends end the view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np

from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.compressors.base import ByteArray
from hcsim.errors import UNDECODABLE, CompressionError, Diverged
from hcsim.runtime.address import LAST_PORT
from hcsim.runtime.channel import Phantom
from hcsim.training.elastic.progress import MemberProgress, TrainedView, lineage_digest, most_right
from hcsim.training.elastic.synchronise import same_intent
from hcsim.training.elastic.transfer import LABEL_MOST_BYTES, StateArrays, gather_echoed, refuse, relay
from hcsim.training.learner import Learner, fingerprint
from hcsim.training.optimizer import Optimizer
from hcsim.training.parameter_server.gradients import GradientCodec, ReceivedPush, average
from hcsim.training.parameter_server.messages import Push
from hcsim.training.parameter_server.server import WorkerRecord
from hcsim.training.parameter_server.strategy import Participant, ViewStart
from hcsim.training.recoverable import Replicated
from hcsim.training.strategies import one_level

SERVER, STANDBY = 0, 1
"""The ranks of the server and its standby."""
PULLED = -1
"""The generation of a model that a worker has pulled: any state of a server or standby goes before it."""


class ServerState(msgspec.Struct):
    """The state of a server beside the model."""

    trained: TrainedView = TrainedView()
    version: int = 0
    workers: dict[str, WorkerRecord] = {}
    since: tuple[int, int] = (0, 0)
    """The version that this view began with, and the number of samples dealt out before it."""
    step: int = 0
    """The step of that version."""

    def begin(self, start: ViewStart) -> None:
        self.since, self.step = (start.version, start.position), start.step


class ServerReplica:
    """One member's copy of the server's model and state."""

    def __init__(self, learner: Learner, optimizer: Optimizer) -> None:
        self.learner = learner
        self.state: ServerState | None = None
        """None on members that are neither the server nor its standby."""
        self.reloaded = False
        """Whether the state is from a checkpoint."""
        self._optimizer = optimizer

    async def synchronise(
        self, group: Group, view: View, intent: bytes, us: Participant, done: bool
    ) -> tuple[list[str], bool]:
        """Return when the first two members hold the newest state. The result is the nodes whose workers have the
        final model, and whether this member's state was the newest."""
        pulled = us.worker.version
        ours = self._header(intent, pulled)
        mark = fingerprint(self.learner.replica.parameters)
        gathered = await gather_echoed(group, np.array([*ours.numbers(), mark, done], np.int64))
        headers, marks = [MemberProgress.read(each[:-2]) for each in gathered], [int(each[-2]) for each in gathered]
        right = most_right(headers, lineage_digest(view))
        await same_intent(group, intent, [header.intent for header in headers], right, view)
        if headers[right].generation == PULLED:
            if group.rank == right:
                self._inherit(us, pulled)
            headers[right] = headers[right]._replace(generation=0)
        keepers = range(min(2, group.size))
        _check_alike(
            view, [rank for rank in keepers if headers[rank].standing == headers[right].standing], right, marks
        )
        routes = [(right, r) for r in keepers if r != right and headers[r].standing != headers[right].standing]
        giving = {taker: self._snapshot() for giver, taker in routes if giver == group.rank}
        for snapshot in await relay(group, routes, giving) if routes else ():
            self.adopt(snapshot)
        await group.barrier()
        if group.rank in keepers:
            assert self.state is not None
            self.state.trained = self.state.trained.next(view)
            self.reloaded = False
        else:
            self.state = None
        current = headers[group.rank].standing == headers[right].standing
        return [view.nodes[rank] for rank, each in enumerate(gathered) if each[-1]], current

    def _header(self, intent: bytes, pulled: int) -> MemberProgress:
        held = self.state
        if held is None:
            return MemberProgress.of(TrainedView(PULLED), pulled, -1, intent, live=False)
        return MemberProgress.of(held.trained, held.version, -1, intent, live=held.version > 0 and not self.reloaded)

    def _inherit(self, us: Participant, pulled: int) -> None:
        """Start from the model that this member's worker pulled, or from the initial one."""
        self.state = ServerState()
        if pulled >= 0:
            self.state.version = pulled
            self.state.begin(us.start)
            found, place = us.learner.replica.parameters, self.learner.replica.parameters
            if not isinstance(found, Phantom) and not isinstance(place, Phantom):
                np.copyto(place, found)
            self.learner.stepper = self._optimizer.open(place)
            self.learner.host.trace("parameter server", "went back to", pulled)

    def saved(self, start: ViewStart, workers: dict[str, WorkerRecord]) -> StateArrays:
        """Return the state that a server needs to go on from `start`, which is where it is now."""
        assert self.state is not None
        state = ServerState(self.state.trained, start.version, workers)
        state.begin(start)
        return StateArrays(msgspec.msgpack.encode(state), self._model.shared())

    def _snapshot(self) -> StateArrays:
        return StateArrays(msgspec.msgpack.encode(self.state), self._model.shared())

    def adopt(self, snapshot: StateArrays) -> None:
        self.state = snapshot.told(ServerState)
        self._model.adopt(snapshot.arrays, self.state.step)

    @property
    def _model(self) -> Replicated:
        return Replicated(self.learner, one_level)


def _check_alike(view: View, alike: list[int], right: int, marks: list[int]) -> None:
    for rank in alike:
        if marks[rank] != marks[right]:
            names = view.members[right].name, view.members[rank].name
            raise Diverged(f"the server's state is not the same on {names[0]} and {names[1]}: memory failed there")


async def agreed_start(group: Group, ours: ViewStart, steps: int) -> ViewStart:
    """Return where the view begins, as the server says, out of `steps` steps in all."""
    start = ViewStart(*await _from_server(group, ours))
    if min(start) < 0 or start.step > steps:
        refuse(SERVER, f"it begins with version {start.version} and step {start.step} of {steps}")
    return start


async def agreed_port(group: Group, ours: int) -> int:
    """Return the port that the server announces."""
    (port,) = await _from_server(group, (ours,))
    if not 0 <= port <= LAST_PORT:
        refuse(SERVER, f"it listens at port {port}")
    return port


async def _from_server(group: Group, ours: Sequence[int]) -> list[int]:
    """Receive numbers from the server directly: a member that forwarded them could have changed them."""
    told = np.array(ours, np.int64)
    await group.broadcast(told, SERVER, algorithm="centralized")
    return [int(number) for number in told]


class _Update(msgspec.Struct, frozen=True):
    """The message to the standby, beside the gradients."""

    version: int
    lr: float
    workers: dict[str, WorkerRecord]
    pushes: tuple[Push, ...]
    """The pushes that make up the update, if they follow; otherwise the averaged gradients follow."""


async def tell(
    group: Group,
    learner: Learner,
    version: int,
    lr: float,
    workers: dict[str, WorkerRecord],
    received: list[ReceivedPush],
) -> None:
    """Send the update whose averaged gradients are in place; return when the standby has it and it counts."""
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
    await group.send(np.zeros(1, np.int64), STANDBY)


async def follow(group: Group, keeper: ServerReplica, gradients: GradientCodec, max_norm: float | None) -> None:
    """Apply the server's updates until it ends."""
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
            await learner.clip(max_norm)
        await learner.update(update.lr)
        keeper.state.version, keeper.state.workers = update.version, update.workers


async def _heard(group: Group, length: int, gradients: GradientCodec) -> _Update:
    """Receive the server's next message, of that length."""
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


def _room(update: _Update, learner: Learner) -> ByteArray | Phantom | None:
    """Allocate memory for the pushes, if they follow."""
    if not update.pushes:
        return None
    size_bytes = sum(push.size_bytes for push in update.pushes)
    return Phantom(size_bytes) if isinstance(learner.replica.gradients, Phantom) else np.empty(size_bytes, np.uint8)


async def _unpacked(
    update: _Update, packed: ByteArray | Phantom, learner: Learner, gradients: GradientCodec
) -> list[ReceivedPush]:
    received, at = [], 0
    for push in update.pushes:
        end = at + push.size_bytes
        data = Phantom(push.size_bytes) if isinstance(packed, Phantom) else packed[at:end]
        received.append(ReceivedPush(push, data, await gradients.decoded(push, data, learner)))
        at = end
    return received
