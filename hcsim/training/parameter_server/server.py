"""The server: it holds the model, and does what the state machine decides.

One task handles all events, one after the other, each with its effects: the model, its version and the
answers given agree between any two.

Its state between two updates is what a restarted one needs to go on as if nothing had been.

Pushes of a round that has not ended are not in it: nobody was told that they count, so their workers send
them again. Answers are in it: a worker that did not hear its answer asks again and gets the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.errors import DeadlineExceeded, UsageError
from hcsim.runtime.channel import Listener, Payload, Phantom
from hcsim.training.learner import Learner
from hcsim.training.parameter_server.gradients import Gradients, Received, average
from hcsim.training.parameter_server.messages import Done, Model, Verdict
from hcsim.training.parameter_server.reception import Reception
from hcsim.training.parameter_server.rounds import Apply, Effect, Give, Member, Rounds, Tell

PARAMETERS = "parameters"
OPTIMIZER = "optimizer/"


class Record(msgspec.Struct, frozen=True):
    """What is remembered of a worker."""

    answered: int
    verdict: Verdict | None
    accepted: int
    samples: int | None
    contributes: bool
    answered_life: int | None = None


class Saved(msgspec.Struct, frozen=True):
    """A server's state."""

    version: int
    workers: dict[str, Record]
    arrays: dict[str, npt.NDArray[np.generic]]
    """Parameters, and the optimizer's state; none for phantoms."""


def save(rounds: Rounds, learner: Learner) -> Saved:
    """The state as it is now; copies."""
    arrays = {OPTIMIZER + name: array for name, array in learner.stepper.state().items()}
    if not isinstance(learner.replica.parameters, Phantom):
        arrays[PARAMETERS] = learner.replica.parameters.copy()
    return Saved(rounds.version, records(rounds), arrays)


def records(rounds: Rounds) -> dict[str, Record]:
    """What is remembered of all workers."""
    return {
        name: Record(m.answered, m.verdict, m.accepted, m.samples, m.contributes, m.answered_life)
        for name, m in rounds.members.items()
    }


def recall(workers: Mapping[str, Record], rounds: Rounds, now: float) -> None:
    """Remember that."""
    for name, record in workers.items():
        # As if we had heard it just now: if all is done, it may still want the final model.
        rounds.members[name] = Member(lost_s=now, heard_s=now, **msgspec.structs.asdict(record))


def restore(saved: Saved, rounds: Rounds, learner: Learner, now: float) -> None:
    """Go on from there, with a machine and a learner that are new."""
    parameters = learner.replica.parameters
    if not isinstance(parameters, Phantom):
        _refill(parameters, saved.arrays)
    learner.stepper.restore(
        {name.removeprefix(OPTIMIZER): array for name, array in saved.arrays.items() if name.startswith(OPTIMIZER)}
    )
    rounds.version = saved.version
    recall(saved.workers, rounds, now)


def _refill(parameters: npt.NDArray[np.float32], arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
    found = arrays.get(PARAMETERS)
    if found is None or found.shape != parameters.shape:
        there = "missing" if found is None else f"of shape {found.shape}"
        raise UsageError(f"this is another model's state: its parameters are {there}, not of shape {parameters.shape}")
    parameters[...] = found


SHORTEST_WAIT_S = 1e-6
"""Below a clock's resolution time would not pass."""


class Server:
    """Serves until training is over."""

    def __init__(
        self,
        learner: Learner,
        gradients: Gradients,
        rounds: Rounds,
        update: Callable[[int, float], Awaitable[None]],
        *,
        job: str,
    ) -> None:
        self.rounds = rounds
        self.reception = Reception(learner, gradients, rounds, job=job)
        self.on_update: Callable[[Saved], Awaitable[None]] | None = None
        """Given the state after every update, before anybody is told of it: what it saves then is never taken back."""
        self.before_telling: Callable[[list[Received]], Awaitable[None]] | None = None
        """Called after every update, before anybody is told of it, with what it was made of; the averaged gradients are
        still in place."""
        self.has_successor = False
        """Whether another server goes on from our state when we give up: workers are told nothing then, and ask that
        one."""
        self._stopping = False
        self._learner = learner
        self._host = learner.host
        self._update = update
        """Applies the gradients in place as the update of that number (from 0), with a share of its learning rate."""
        self._snapshot: Payload | None = None
        """The model as it is sent: it stays as it is while it is under way."""
        rounds.history = self._host.rng("parameter server", "history", repr(self._now())).getrandbits(62)

    async def run(self, listener: Listener) -> Done:
        """Serve until training is over and everybody knows. A failure is told to all who depend on us, and raised."""
        self.reception.open(listener)
        try:
            ended = await self._decide()
        finally:
            await self.reception.close()
            await listener.close()
        if ended.error:
            raise DeadlineExceeded(f"the parameter server gave up at version {ended.version}: {ended.error}")
        return ended

    def stop(self) -> None:
        """End between two events. Workers are told nothing: another server will go on from this one's state."""
        self._stopping = True
        self.reception.events.put_nowait((lambda _: [], asyncio.get_running_loop().create_future()))

    async def _decide(self) -> Done:
        while True:
            now = self._now()
            effects = self.rounds.tick(now)
            if self.has_successor and self.rounds.ended is not None and self.rounds.ended.error:
                return self.rounds.ended
            await self._do(effects)
            if self.rounds.ended is not None and self.rounds.over(now) and not self.reception.answering:
                return self.rounds.ended
            try:
                async with self._host.clock.timeout(max(self.rounds.due_s(now) - now, SHORTEST_WAIT_S)):
                    event, handled = await self.reception.events.get()
            except TimeoutError:
                continue
            await self._do(event(self._now()))
            if not handled.done():
                handled.set_result(None)
            if self._stopping:
                return Done(self.rounds.version)

    def _now(self) -> float:
        """Whoever sets our clock sets nobody's deadline."""
        return self._host.clock.elapsed()

    async def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Apply():
                    await self._apply(effect)
                case Tell(worker, answer):
                    self.reception.tell(worker, answer)
                case Give(worker, version, known):
                    payload = None if known else await self._model()
                    self.reception.tell(worker, Model(version, payload.nbytes if payload is not None else 0), payload)

    async def _apply(self, effect: Apply) -> None:
        await average(self._learner, [contribution.gradient for contribution in effect.contributions])
        await self._update(self.rounds.version - 1, effect.share)
        self._snapshot = None
        self._host.trace("parameter server", "version", self.rounds.version)
        if self.on_update is not None:
            await self.on_update(save(self.rounds, self._learner))
        if self.before_telling is not None:
            await self.before_telling([contribution.gradient for contribution in effect.contributions])

    async def _model(self) -> Payload:
        parameters = self._learner.replica.parameters
        if self._snapshot is None:
            await self._host.device.touch(2 * parameters.nbytes)
            self._snapshot = parameters if isinstance(parameters, Phantom) else memoryview(parameters.tobytes())
        return self._snapshot
