"""A member that holds a replica of the model and votes on every step (see `commit_vote`); rank 0 saves periodically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np

from hcsim.cluster.diagnosis import VotesSeen
from hcsim.cluster.membership_source import MembershipSource
from hcsim.cluster.view import View
from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.config.training import Training
from hcsim.errors import CollectiveError, CompressionError, ConfigError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import Host
from hcsim.training.data import Batches
from hcsim.training.elastic.checkpoint import fitting
from hcsim.training.elastic.commit_vote import CommitVote
from hcsim.training.elastic.member import ElasticMember, TrainingExtras
from hcsim.training.elastic.progress import NOTHING_YET, MemberProgress, Provenance, lineage_digest, most_right
from hcsim.training.elastic.recovery import watch_steps
from hcsim.training.elastic.synchronise import (
    Holding,
    check_alike,
    check_arrived,
    follow_links,
    routes_between,
    same_intent,
)
from hcsim.training.elastic.transfer import StateArrays, gather_echoed, relay
from hcsim.training.learner import StateArray, fingerprint_of_all
from hcsim.training.precision import compressor_of
from hcsim.training.recoverable import LocalProgress, SharedState
from hcsim.training.strategies import recoverable
from hcsim.training.trainer import encoded

OWN = "own/"
"""The prefix of a rank's own arrays in a compressor's state."""
MEMORY = "compressor/"


class ReplicatedMember(ElasticMember):
    """A member that holds a replica and votes."""

    def __init__(
        self, host: Host, source: MembershipSource, settings: Training, seed: int, extras: TrainingExtras
    ) -> None:
        first = len(settings.batch) if isinstance(settings.batch, tuple) else 1
        super().__init__(host, source, settings, seed, extras, ranks=first)
        self.method = recoverable(self.settings, self.learner)
        self._balance = self.balance(self.method, first)
        self.provenance = NOTHING_YET
        """The provenance when all members last synchronised."""
        self.refused: Counter[int] = Counter()
        """How often each step was dropped."""
        self._by_links = extras.by_links
        self._checkpoint: StateArrays | None = None
        self._reloaded = False
        """Whether the state is from a checkpoint; it then lacks later steps that may count."""
        self._due = 0
        """The step after which to save."""
        self._votes: CommitVote | None = None

    @cached_property
    def _intent(self) -> bytes:
        """The settings that must be the same on all members."""
        measure = "order" if self._by_links else "links or nothing"
        return encoded(self.intent(measure))

    @property
    def is_complete(self) -> bool:
        return self.has_begun and self.run.step >= self.settings.steps

    @property
    def votes_seen(self) -> VotesSeen | None:
        return self._votes.seen if self._votes is not None else None

    def reload(self, checkpoint: StateArrays) -> None:
        """Load the checkpoint once the first view has begun."""
        self._checkpoint = checkpoint

    def options(self, view: View) -> Options:
        """Return the options of a view's group: members of one home form a subgroup."""
        homes: dict[str, list[int]] = {}
        for rank, member in enumerate(view.members):
            homes.setdefault(member.home, []).append(rank)
        groups = tuple(map(tuple, homes.values()))
        wanted = len(groups) > 1 or "hierarchical" in (self.settings.strategy, self.settings.algorithm)
        return Options(timeout_s=self.settings.timeout_s, groups=groups if wanted else (), views_change=True)

    async def train(self, group: Group, view: View) -> bool:
        self._votes = None
        await self._synchronise(group, view)
        if self._by_links and self.source.ways is not None:
            await follow_links(group, view, self.source.ways)
        run = self.run
        run.keep_alive()
        self.began(view, run.step)
        if self.checkpoints is not None:
            self._due = self.checkpoints.after(run.step)
        votes = run.commit = self._votes = CommitVote(self, group, view)
        run.observer = self.observer
        watching = self.host.spawn(
            watch_steps(group, view, self.source, self.observer), name=f"watch the steps of view {view.epoch}"
        )
        try:
            await self.method.train(run)
        except CompressionError as error:
            # The others wait for this member's part of the exchange: all try the step again.
            votes.count_codec_failure(run.step, error)
            name = self.source.us.name
            raise CollectiveError(f"{name} can neither send nor take this step: {error}", peer=group.rank) from error
        finally:
            watching.cancel()
        if run.step >= run.settings.steps:
            return await votes.confirmed(run.step)
        if not votes.leavers:
            return False
        try:
            await self._hand_over(group, votes.leavers)
        except CollectiveError:
            if group.rank not in votes.leavers:
                raise
            # It is unknown whether the residual arrived. If this member stayed, it could be applied twice.
        if group.rank not in votes.leavers:
            return False
        await self.source.leave()
        return True

    async def applied(self) -> None:
        """Note that a step is done; rank 0 saves if a checkpoint is due."""
        run, checkpoints = self.run, self.checkpoints
        self.host.trace("applied", run.group.epoch, run.step)
        if checkpoints is not None and run.group.rank == 0 and run.step >= self._due:
            self._due = checkpoints.after(run.step)
            await checkpoints.save(self.host, self._saved(), run.step)
        if run.group.size > 1:  # a single member cannot be delayed by another
            self.observer.step_timer.settled(run.step, self.host.clock.elapsed())

    async def save(self) -> None:
        """Save the state before the step in flight: a member that completes that step has a newer one.

        Save nothing if there are local steps that were not exchanged: without a view no member learns of them."""
        unexchanged = self.method.progress(self.run).gone > self.run.step
        if self.checkpoints is not None and not unexchanged:
            self.run.drop()
            await self.checkpoints.save_last(self.host, self._saved(), self.run.step)

    # A view begins (see `synchronise`).

    async def _synchronise(self, group: Group, view: View) -> None:
        if not self.has_begun:
            compressor = compressor_of(self.settings, self.seed, 0)
            self.enter(group, self._dealt(view), compressor)
            if self._checkpoint is not None:
                self._reload(self._checkpoint)
        ours = np.array(self._header().numbers(), np.int64)
        headers = [MemberProgress.read(each) for each in await gather_echoed(group, ours)]
        right = most_right(headers, lineage_digest(view))
        await same_intent(group, self._intent, [header.intent for header in headers], right, view)
        await self._resolve(headers[right])
        progress = await self._level(group, view, headers, right)
        before = self.provenance.trained.epoch
        await self._compare_speeds(group)
        self._regroup(group, view, progress)
        self.host.trace("synchronised", view.epoch, self.run.step, before)

    async def _level(self, group: Group, view: View, headers: list[MemberProgress], right: int) -> list[LocalProgress]:
        """Bring all members to the same state; return the progress of each."""
        told = await self._told(group)
        # Among members of the newest trained view, prefer one with compressor state: with hierarchical training only
        # the representatives of the homes have any.
        of_newest = [rank for rank in range(group.size) if headers[rank].trained == headers[right].trained]
        right = max(of_newest, key=lambda r: (told[r].step, told[r].memory != 0, -r))
        check_alike(view, headers, told, right)
        model = [each.print != told[right].print or each.step != told[right].step for each in told]
        memory = [bool(each.compresses) and each.memory != told[right].memory for each in told]
        outdated = [header.trained != headers[right].trained for header in headers]
        givers = [
            not (model[rank] or outdated[rank]) and told[rank].memory == told[right].memory
            for rank in range(group.size)
        ]
        takers = [any(needs) for needs in zip(model, memory, outdated, strict=True)]
        routes = routes_between(view, givers, takers)
        giving = {t: self._snapshot(model=model[t], memory=memory[t]) for giver, t in routes if giver == group.rank}
        if routes:
            for snapshot in await relay(group, routes, giving):
                self._adopt(snapshot)
                self._check_sizes(view.nodes[group.rank])

        told = await self._told(group)
        check_arrived(told, routes)
        return [LocalProgress(each.samples, each.gone) for each in told]

    def _header(self) -> MemberProgress:
        run = self.run
        pending = run.pending.step if run.pending is not None else -1
        live = run.step > 0 and not self._reloaded
        return MemberProgress.of(self.provenance.trained, run.step, pending, self._intent, live=live)

    async def _resolve(self, truth: MemberProgress) -> None:
        """Apply or drop the pending update as the most right header says. An update of another trained view is resolved
        later."""
        run = self.run
        if run.pending is not None and truth.trained == self.provenance.trained:
            if truth.step > run.pending.step:
                await run.carry_out(run.pending)
            else:
                run.drop()

    async def _told(self, group: Group) -> list[Holding]:
        method = self.method
        await self.host.device.touch(method.synchronised.nbytes)
        held, memory = fingerprint_of_all(method.shared()), fingerprint_of_all(self._memory())
        ours = Holding(held, memory, method.compresses(group), self.run.step, *method.progress(self.run))
        return [Holding(*map(int, each)) for each in await gather_echoed(group, np.array(ours, np.int64))]

    def _regroup(self, group: Group, view: View, progress: list[LocalProgress]) -> None:
        """Go on with the members of the view, which hold the same state now."""
        run = self.run
        sizes = self.provenance.sizes or self._given_sizes(view)
        self.provenance = self.provenance.next(view, run.step, self._since, sizes)
        self._reloaded = False
        compressor = compressor_of(self.settings, self.seed, group.rank)
        # The shared state of an unused compressor would drift from the others', so only the residual is kept.
        kept = run.compressor.state() if self.method.compresses(group) else self._residual()
        compressor.restore({name: array for name, array in kept.items() if not isinstance(array, Phantom)})
        self.method.take_over(progress)
        run = self.enter(group, self._dealt(view), compressor)
        run.balanced_at = run.step
        run.balance = self._balance if self._balance is not None and self._balance.divides else None

    @property
    def _since(self) -> tuple[int, int]:
        gone, since = self.method.progress(self.run).gone, self.provenance.since
        return since if gone <= since[0] else (gone, self.run.batches.position(gone))

    def _dealt(self, view: View) -> Batches:
        given, balance = self.provenance.sizes, self._balance
        sizes: Sequence[int] = self.batch_sizes(len(view.members))
        if isinstance(self.settings.batch, tuple):
            sizes = [given.get(n, 0) for n in view.nodes]
        if not any(sizes):
            sizes = [1, *sizes[1:]]  # before the first synchronisation: nothing is dealt out of it
        turns = None
        if balance is not None and len(balance.costs) == len(view.members):
            sizes, turns = balance.best(sizes)
            self.method.follow(balance.costs, sum(sizes))
        return Batches.of(self.task, self.method.batch_sizes(sizes), self.seed, self.provenance.since, turns)

    async def _compare_speeds(self, group: Group) -> None:
        """Exchange what steps cost the members, if that decides what each of them does."""
        balance = self._balance
        if balance is not None:
            told = await gather_echoed(group, balance.told().view(np.int64))
            balance.agree([each.view(np.float64) for each in told], group.rank)

    def _given_sizes(self, view: View) -> dict[str, int]:
        """Return the configured batch sizes by node. The list is for the members that training begins with, in their
        order."""
        batch = self.settings.batch
        if not isinstance(batch, tuple):
            return {}
        if len(batch) != len(view.members):
            raise ConfigError(
                f"batch = {list(batch)}: {len(batch)} batch sizes, and training begins with {len(view.members)} members"
            )
        return dict(zip(view.nodes, batch, strict=True))

    def _check_sizes(self, node: str) -> None:
        if isinstance(self.settings.batch, tuple) and node not in self.provenance.sizes:
            raise ConfigError(
                f"batch = {list(self.settings.batch)} is for the members that training began with, and we were not "
                "among them: give one figure for all"
            )

    # What is held, handed over, taken over and saved.

    def _snapshot(self, *, model: bool, memory: bool) -> StateArrays:
        """Return the state that another member lacks, which includes at least the provenance."""
        about = msgspec.structs.replace(self.provenance, step=self.run.step, since=self._since, memory=memory)
        arrays = {**(self.method.shared() if model else {}), **(self._memory() if memory else {})}
        return StateArrays(msgspec.msgpack.encode(about), arrays)

    def _adopt(self, snapshot: StateArrays) -> None:
        """Take over a received state. Keep this member's residual if all steps that led to it count."""
        about = snapshot.told(Provenance)
        own = self._own_that_counts(about)
        if "parameters" in snapshot.arrays:
            self.method.adopt(snapshot.arrays, about.step)
        memory = snapshot.arrays if about.memory else self._memory()
        state = own | {n.removeprefix(MEMORY): array for n, array in memory.items() if n.startswith(MEMORY)}
        self.run.compressor.restore({name: array for name, array in state.items() if not isinstance(array, Phantom)})
        self.provenance = about
        self.run.step = about.step

    def _own_that_counts(self, about: Provenance) -> SharedState:
        """Return this member's residual if all steps that it took part in count, and nothing otherwise."""
        run = self.run
        counted = about.past.counted(self.provenance.trained, about.step)
        if run.pending is not None:
            if counted is not None and counted > run.pending.step:
                run.compressor.commit(run.pending.step)
                run.pending = None
            run.drop()
        return {} if self._reloaded or counted is None or counted < run.step else self._residual()

    def _memory(self) -> SharedState:
        """Return the compressor state that must be the same on all members that compress."""
        return {MEMORY + n: array for n, array in self.run.compressor.state().items() if not n.startswith(OWN)}

    def _residual(self) -> SharedState:
        """Return this member's residual: its gradients that were not sent yet."""
        return {name: array for name, array in self.run.compressor.state().items() if name.startswith(OWN)}

    def _add_residual(self, residual: Mapping[str, StateArray]) -> None:
        """Add the residual of a leaving member to this member's."""
        state = self.run.compressor.state()
        for name, array in residual.items():
            assert not isinstance(array, Phantom)  # phantoms owe nothing
            state[name] = state[name] + array if name in state else array  # type: ignore[operator]
        self.run.compressor.restore(state)

    async def _hand_over(self, group: Group, leavers: tuple[int, ...]) -> None:
        """Send the residuals of leaving members to the first member that stays."""
        heirs = [rank for rank in range(group.size) if rank not in leavers]
        if not heirs:
            return
        routes = [(leaver, heirs[0]) for leaver in leavers]
        giving = {}
        if group.rank in leavers:
            giving = {heirs[0]: StateArrays(b"", self._residual())}
            state = self.run.compressor.state()  # somebody else owes it now
            self.run.compressor.restore({name: array for name, array in state.items() if not name.startswith(OWN)})
        for snapshot in await relay(group, routes, giving):
            self._add_residual(snapshot.arrays)

    def _saved(self) -> StateArrays:
        """Return the state that a restarted member needs to go on from here."""
        saved = self._snapshot(model=True, memory=True)
        return StateArrays(saved.about, {**saved.arrays, **self._residual()})

    def _reload(self, checkpoint: StateArrays) -> None:
        with fitting():
            self._adopt(checkpoint)
            self._add_residual({name: array for name, array in checkpoint.arrays.items() if name.startswith(OWN)})
        self._reloaded = True
