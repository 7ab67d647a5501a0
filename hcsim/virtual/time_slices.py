"""Cores that a system's scheduler hands out in time slices, as Linux does since 6.6: earliest eligible virtual deadline
first (Stoica and Abdel-Wahab, "Earliest eligible virtual deadline first", 1995).

Each program that has work has a virtual time, which is how long it has run. The virtual time of the cores is the mean
of theirs. A program is eligible if it is not ahead of it, and its deadline is a slice behind the time at which it was
placed, or at which it reached its last deadline. The eligible one with the earliest deadline gets a core.

- A program keeps its core until its deadline, as long as it is eligible, even if another one wakes up.
- If it is not eligible, one that wakes up takes the core at once: a program that seldom works waits for nobody.
- Where others wait, the scheduler also looks at each tick of the system's timer, and so turns of programs that always
  work last for whole ticks.
- A program that sleeps keeps what it is behind or ahead, at most two slices. Being ahead wears off while it sleeps.

Between two programs that always work, each has half of a core; ideally shared cores (`Cores`) are the limit of short
slices.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from hcsim.config import Processor
from hcsim.virtual.environment import NS, Environment
from hcsim.virtual.processor import Cores, CoreUser

_LONGEST_LAG_SLICES = 2.0
_DECISION_NS = 1.0


class _Program:
    """What the scheduler knows of a user of its cores."""

    def __init__(self) -> None:
        self.time_ns = 0.0
        """Virtual: how long it has run, or is taken to have."""
        self.deadline_ns = 0.0
        self.kept_until_ns = 0.0
        """The virtual time until which nobody takes its core from it, once it runs."""
        self.lag_ns = 0.0
        """How far it was behind the others when it went to sleep."""
        self.has_work = False


class TimeSlicedCores(Cores):
    """Cores that are shared by turns."""

    def __init__(self, env: Environment, processor: Processor) -> None:
        super().__init__(processor.cores)
        self._env = env
        self._slice_ns = float(round(processor.slice_s * NS))
        self._tick_ns = max(1, round(processor.tick_s * NS))
        self._programs: dict[CoreUser, _Program] = {}
        self._running: dict[CoreUser, _Program] = {}
        self._waiting: dict[CoreUser, _Program] = {}
        self._since_ns = 0
        self._time_ns = 0.0
        """The virtual time when the last program went to sleep."""
        self._ticks = False
        self._idle: dict[CoreUser, None] = {}
        """Those that sleep unless they have work again within this instant."""

    def enter(self, user: CoreUser) -> None:
        """The user has work from now on."""
        program = self._programs.setdefault(user, _Program())
        if program.has_work:
            self._idle.pop(user, None)
            user.run_at(1.0 if user in self._running else 0.0)
            return
        self._advance()
        self._place(program)
        self._waiting[user] = program
        if len(self._running) < self._count:
            self._run(user)
            return
        user.run_at(0.0)
        self._give_way(woken=True)
        self._tick_later()

    def leave(self, user: CoreUser) -> None:
        """The user has no work any more."""
        program = self._programs.get(user)
        if program is not None and program.has_work:
            if not self._idle:
                self._env.call_at_instant_end(self._let_sleep)
            self._idle[user] = None

    def _let_sleep(self) -> None:
        idle, self._idle = self._idle, {}
        for user in idle:
            self._sleep(user)

    def _sleep(self, user: CoreUser) -> None:
        self._advance()
        program = self._programs[user]
        most_ns = max(_LONGEST_LAG_SLICES * self._slice_ns, float(self._tick_ns))
        self._time_ns = self._virtual_ns()
        program.lag_ns = min(max(self._time_ns - program.time_ns, -most_ns), most_ns)
        program.has_work = False
        self._waiting.pop(user, None)
        if self._running.pop(user, None) is not None and self._waiting:
            self._run(self._first(self._waiting))

    def _place(self, program: _Program) -> None:
        others = [*self._running.values(), *self._waiting.values()]
        if others:
            now_ns = self._virtual_ns()
            if program.lag_ns > 0.0:  # with it among them, the mean moves, too
                program.time_ns = now_ns - program.lag_ns * (len(others) + 1) / len(others)
            else:  # what it was ahead has worn off as far as the others have caught up
                program.time_ns = max(now_ns, min(program.time_ns, now_ns - program.lag_ns))
        else:
            program.time_ns = self._time_ns
        program.deadline_ns = program.time_ns + self._slice_ns
        program.has_work = True

    def _run(self, user: CoreUser) -> None:
        program = self._running[user] = self._waiting.pop(user)
        program.kept_until_ns = program.deadline_ns
        user.run_at(1.0)

    def _give_way(self, *, woken: bool) -> None:
        """Let those run that come first. One that runs keeps its core until its deadline: when another one wakes up if
        it is eligible, and at a tick in any case.

        It has to be behind the others: while the scheduler decides, it goes on running."""
        now_ns = self._virtual_ns()
        for user, program in list(self._running.items()):
            eligible = program.time_ns < now_ns - _DECISION_NS
            kept = program.time_ns < program.kept_until_ns and (eligible or not woken)
            if kept or not self._waiting:
                continue
            first = self._first({**self._waiting, user: program} if eligible else self._waiting)
            if first is not user:
                self._waiting[user] = self._running.pop(user)
                user.run_at(0.0)
                self._run(first)

    def _first(self, programs: dict[CoreUser, _Program]) -> CoreUser:
        """Return the eligible program with the earliest deadline."""
        now_ns = self._virtual_ns()
        eligible = {user: program for user, program in programs.items() if program.time_ns <= now_ns}
        among = eligible or programs
        return min(among, key=lambda user: among[user].deadline_ns)

    def _virtual_ns(self) -> float:
        there = _times(self._running.values(), self._waiting.values())
        return fmean(there) if there else self._time_ns

    def _advance(self) -> None:
        """Count what has been worked since the last time."""
        now_ns = self._env.now_ns
        for program in self._running.values():
            program.time_ns += now_ns - self._since_ns
            if program.time_ns >= program.deadline_ns:
                program.deadline_ns = program.time_ns + self._slice_ns
        self._since_ns = now_ns

    def _tick_later(self) -> None:
        if self._waiting and not self._ticks:
            self._ticks = True
            self._env.call_at((self._env.now_ns // self._tick_ns + 1) * self._tick_ns, self._tick)

    def _tick(self) -> None:
        self._ticks = False
        self._advance()
        self._give_way(woken=False)
        self._tick_later()


def _times(*groups: Iterable[_Program]) -> list[float]:
    return [program.time_ns for group in groups for program in group]
