"""One member's training, from view to view: what it holds, what it can give, and what it can take over."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.collectives.options import Options
from hcsim.compressors.registry import make
from hcsim.config.training import Training
from hcsim.errors import ConfigError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import Host
from hcsim.training.agreement import Intent
from hcsim.training.data import Batches
from hcsim.training.elastic.checkpoint import fitting
from hcsim.training.elastic.parcel import Parcel
from hcsim.training.elastic.standing import Era, Header, Past
from hcsim.training.learner import Learner, fingerprint_of_all
from hcsim.training.recoverable import Held, Tally
from hcsim.training.run import Run
from hcsim.training.strategies import completed, optimizer, recoverable
from hcsim.training.task import Task
from hcsim.training.tasks import task

OWN = "own/"
"""What a compressor's state calls what each rank holds for itself."""
MEMORY = "compressor/"


class About(msgspec.Struct, frozen=True):
    """What goes with a model, beside its arrays."""

    era: Era
    past: Past
    step: int
    since: tuple[int, int]
    """A step, and how many samples were dealt out before it: where the next batches begin."""
    sizes: dict[str, int]
    """Batch sizes by node, where each has its own."""
    memory: bool
    """Whether what compressors remember goes with it; that may be nothing."""


class Trainee:
    """What a member is between two views."""

    def __init__(self, host: Host, settings: Training, seed: int, what: Task | None, *, by_links: bool = False) -> None:
        what = what or task(settings.task)
        self.host = host
        self.seed = seed
        self._by_links = by_links
        self.task = what
        self.settings = completed(settings, what, len(settings.batch) if isinstance(settings.batch, tuple) else 1)
        self.learner = Learner(host, what, optimizer(self.settings), seed)
        self.method = recoverable(self.settings, self.learner)
        self.compressor = make(settings.compressor, seed=seed, rank=0)
        self.era = Era()
        self.past = Past()
        self.sizes: dict[str, int] = {}
        self.reloaded = False
        """Our state is from a checkpoint: what we did after it, if it counts, is not in it."""
        self.checkpoint: Parcel | None = None
        """What we start from, if it is not nothing."""
        self._start = (0, (0, 0))
        self._run: Run | None = None

    @cached_property
    def intent(self) -> bytes:
        """What must be the same for all."""
        return msgspec.json.encode(
            Intent(self.settings, self.seed, self.task.fingerprint, "order" if self._by_links else "links or nothing"),
            enc_hook=float,
        )

    @property
    def has_begun(self) -> bool:
        """Whether there has been a view."""
        return self._run is not None

    @property
    def run(self) -> Run:
        """From the first view on."""
        assert self._run is not None
        return self._run

    # Views.

    def options(self, view: View) -> Options:
        """How a view's group works: members of one home are close to each other."""
        homes: dict[str, list[int]] = {}
        for rank, member in enumerate(view.members):
            homes.setdefault(member.home, []).append(rank)
        groups = tuple(map(tuple, homes.values()))
        wanted = len(groups) > 1 or "hierarchical" in (self.settings.strategy, self.settings.algorithm)
        return Options(timeout_s=self.settings.timeout_s, groups=groups if wanted else (), conducted=True)

    def meet(self, group: Group, view: View) -> None:
        """A view begins. In the first one, there is nothing yet but what we start with."""
        if self._run is None:
            self._run = Run(group, self.settings, self.task, self.learner, self._dealt(view), self.compressor)
            if self.checkpoint is not None:
                self._reload(self.checkpoint)

    def regroup(self, group: Group, view: View, tallies: list[Tally]) -> None:
        """All members of the view hold the same now: go on with them."""
        since = self.since
        run = self.run
        if not self.sizes:
            self.sizes = self._given_sizes(view)
        self.era = self.era.next(view)
        self.past = self.past.after(self.era, run.step)
        self.reloaded = False
        self._start = run.step, since
        self.compressor = make(self.settings.compressor, seed=self.seed, rank=group.rank)
        # What a compressor that is not used remembers would not stay what the others' remember.
        kept = run.compressor.state() if self.method.compresses(group) else self.owed()
        self.compressor.restore({name: array for name, array in kept.items() if not isinstance(array, Phantom)})
        self.method.take_up(tallies)
        run.regroup(group, self._dealt(view), self.compressor)

    @property
    def since(self) -> tuple[int, int]:
        """Where the next batches begin."""
        gone = self.method.tally(self.run).gone
        return self._start[1] if gone <= self._start[1][0] else (gone, self.run.batches.position(gone))

    @property
    def is_on_the_way(self) -> bool:
        """Whether we have gone on alone since all last agreed."""
        return self.method.tally(self.run).gone > self.run.step

    def _dealt(self, view: View) -> Batches:
        batch = self.settings.batch
        assert batch is not None
        sizes = [batch] * len(view.members) if isinstance(batch, int) else [self.sizes.get(n, 0) for n in view.nodes]
        if not any(sizes):
            sizes[0] = 1  # before the first synchronisation: nothing is dealt out of it
        return Batches.of(self.task, self.method.dealt(sizes), self.seed, self._start[1])

    def _given_sizes(self, view: View) -> dict[str, int]:
        """The list of batch sizes is for the members that training begins with, in their order."""
        batch = self.settings.batch
        if not isinstance(batch, tuple):
            return {}
        if len(batch) != len(view.members):
            raise ConfigError(
                f"batch = {list(batch)}: {len(batch)} batch sizes, and training begins with {len(view.members)} members"
            )
        return dict(zip(view.nodes, batch, strict=True))

    # What is held.

    def header(self) -> Header:
        """What the others are told first."""
        run = self.run
        pending = run.pending.step if run.pending is not None else -1
        return Header.of(self.era, run.step, pending, self.intent, live=run.step > 0 and not self.reloaded)

    async def resolve(self, truth: Header) -> None:
        """What we hold of an update counts if those who know say so. Of another era we hear more later."""
        run = self.run
        if run.pending is not None and truth.era == self.era:
            if truth.step > run.pending.step:
                await run.carry_out(run.pending)
            else:
                run.drop()

    def fingerprint(self) -> int:
        """Of what all must hold alike."""
        return fingerprint_of_all(self.method.shared())

    def memory_fingerprint(self) -> int:
        """Of what the compressors of all who compress must remember alike; 0 for nothing."""
        return fingerprint_of_all(self._memory())

    def parcel(self, *, model: bool, memory: bool) -> Parcel:
        """What another member lacks; at least it has to know where we are."""
        about = About(self.era, self.past, self.run.step, self.since, self.sizes, memory)
        arrays = {**(self.method.shared() if model else {}), **(self._memory() if memory else {})}
        return Parcel(msgspec.msgpack.encode(about), arrays)

    def adopt(self, parcel: Parcel) -> None:
        """Go on from there. What error feedback owes is kept if all that it followed from counts."""
        about = parcel.told(About)
        own = self._own_that_counts(about)
        if "parameters" in parcel.arrays:
            self.method.adopt(parcel.arrays, about.step)
        memory = parcel.arrays if about.memory else self._memory()
        state = own | {n.removeprefix(MEMORY): array for n, array in memory.items() if n.startswith(MEMORY)}
        self.run.compressor.restore({name: array for name, array in state.items() if not isinstance(array, Phantom)})
        self.era, self.past, self.sizes = about.era, about.past, about.sizes
        self.run.step = about.step
        self._start = about.step, about.since

    def saved(self) -> Parcel:
        """All that we would need to go on from here, were we started anew."""
        saved = self.parcel(model=True, memory=True)
        return Parcel(saved.about, {**saved.arrays, **self.owed()})

    def _reload(self, checkpoint: Parcel) -> None:
        with fitting():
            self.adopt(checkpoint)
            self.take_in({name: array for name, array in checkpoint.arrays.items() if name.startswith(OWN)})
        self.reloaded = True

    def take_in(self, owed: Mapping[str, npt.NDArray[np.generic] | Phantom]) -> None:
        """Somebody who leaves hands on what it still owes: from now on, we do."""
        state = self.run.compressor.state()
        for name, array in owed.items():
            assert not isinstance(array, Phantom)  # phantoms owe nothing
            state[name] = state[name] + array if name in state else array  # type: ignore[operator]
        self.run.compressor.restore(state)

    def owed(self) -> Held:
        """What we owe: our gradients that were not sent yet."""
        return {name: array for name, array in self.run.compressor.state().items() if name.startswith(OWN)}

    def forget_owed(self) -> None:
        """Somebody else owes it now."""
        state = self.run.compressor.state()
        self.run.compressor.restore({name: array for name, array in state.items() if not name.startswith(OWN)})

    def _own_that_counts(self, about: About) -> Held:
        """What we owe, if all steps that we took part in count; and nothing otherwise."""
        run = self.run
        counted = about.past.counted(self.era, about.step)
        if run.pending is not None:
            if counted is not None and counted > run.pending.step:
                run.compressor.commit(run.pending.step)
                run.pending = None
            run.drop()
        return {} if self.reloaded or counted is None or counted < run.step else self.owed()

    def _memory(self) -> Held:
        return {MEMORY + n: array for n, array in self.run.compressor.state().items() if not n.startswith(OWN)}
