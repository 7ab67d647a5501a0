"""Background load: other programs of a machine's owner, which share its cores with ours."""

from __future__ import annotations

from random import Random

import simpy

from hcsim.config import BackgroundLoad
from hcsim.virtual.environment import NS, Environment
from hcsim.virtual.faults.apply import FaultProcess, apply, draws, lasting, note
from hcsim.virtual.host import Surroundings
from hcsim.virtual.processor import Cores, CoreWork

_SHORTEST, _LONGEST = 0.5, 1.5
"""Of a period."""


class Program(CoreWork):
    """A program that works and sleeps by turns."""

    def __init__(self, env: Environment, cores: Cores) -> None:
        super().__init__(env, cores)
        self._worked: simpy.Event | None = None
        self.has_ended = False

    def work(self, seconds: float) -> simpy.Event:
        """Use so much processor time; the event succeeds afterwards."""
        self._worked = self._env.event()
        self._begin(seconds * NS)
        self._cores.enter(self)
        return self._worked

    def end(self) -> None:
        self.has_ended = True
        self._stop()

    def _done(self) -> None:
        assert self._worked is not None
        self._stop()
        self._worked.succeed()


@apply.register(BackgroundLoad)
def use_cores(fault: BackgroundLoad, world: Surroundings) -> FaultProcess:
    """Run programs on the cores of the node, which are the machine's, in all of its lives."""
    random = draws(world, fault)
    programs = [Program(world.env, world.host(fault.node).cores) for _ in range(fault.programs)]
    for program in programs:
        world.env.process(_life(program, fault, world.env, Random(random.random())))
    yield from lasting(world, fault.duration_s)
    note(world, "rest", fault.node)
    for program in programs:
        program.end()


def _life(program: Program, fault: BackgroundLoad, env: Environment, random: Random) -> FaultProcess:
    """Begin within the first period, so that several programs are not in step."""
    idle_s = 0.0 if fault.share == 1.0 else random.uniform(0.0, fault.period_s)
    while True:
        yield env.timeout(round(idle_s * NS))
        if program.has_ended:
            return
        lasts_s = fault.period_s * random.uniform(_SHORTEST, _LONGEST)
        yield program.work(fault.share * lasts_s)
        idle_s = (1.0 - fault.share) * lasts_s
