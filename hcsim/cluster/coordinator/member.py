"""A member of a coordinated cluster: the `Conductor` that takes its views from a coordinator's generations.

Members order themselves as they do without a coordinator: who has been there for longer comes first, newcomers last.
While the coordinator is away they go on, and call it again. Whoever needs it then, for a view or because it just came,
waits for it for a while, and ends with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from hcsim.cluster.conductor import Checker, Introduction
from hcsim.cluster.coordinator.messages import Register, Roster
from hcsim.cluster.coordinator.worker import PATIENCE_S, RETRY_S, Worker
from hcsim.cluster.diagnosis import Failure
from hcsim.cluster.rules import Terms
from hcsim.cluster.view import Member, View
from hcsim.cluster.ways import Ways
from hcsim.errors import HcsimError, WorkerLost
from hcsim.runtime.host import Host
from hcsim.transport.callers import one_line


class Coordinated:
    """This machine's part of a cluster that a coordinator holds together."""

    def __init__(
        self,
        host: Host,
        me: Introduction,
        coordinator: str,
        tell: Callable[[str], None] = lambda what: None,
        terms: Terms | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._host = host
        self._coordinator = coordinator
        self._tell: Callable[[str], None] = lambda what: tell(one_line(what))
        self._patience_s = patience_s
        self._us = Member(me.node, me.boot, me.name, me.address, me.home)
        self._identified = bool(me.namespace)
        own: Mapping[str, str] = terms or {}
        self._register = Register(me.node, me.boot, me.address, me.name, me.home, terms=dict(own))
        self._worker: Worker | None = None
        self._view: View | None = None
        self._broken = ""
        """Why the view that we are in is over for us."""
        self._outcome = ""

    async def start(self) -> None:
        """There is nothing to do before somebody asks for a view, and can be called: then we register."""

    async def stop(self, reason: str = "it was stopped") -> None:
        """Be no member any more."""
        if self._worker is not None:
            await self._worker.close()

    @property
    def us(self) -> Member:
        """This node, in this life."""
        return self._us

    @property
    def identified(self) -> bool:
        """In a cluster with a secret they do."""
        return self._identified

    @property
    def ways(self) -> Ways | None:
        """Nothing is measured."""
        return None

    async def view(self, after: int, outcome: str = "") -> View | None:
        """See `Conductor.view`."""
        worker = await self._joined()
        while True:
            why = self._broken
            if not why and worker.generation and worker.over(worker.generation).done():
                why = worker.over(worker.generation).result()
            try:
                roster = await worker.after(why, outcome)
            except WorkerLost as error:  # we were silent for too long, and register again
                self._host.trace("coordinated member", str(error))
                await self._host.clock.sleep(RETRY_S)
                continue
            if not roster.peers:
                return None
            if roster.generation > after:
                return self._adopted(roster)

    def over(self, epoch: int) -> asyncio.Future[str]:
        """Done once the view of that epoch cannot work any more."""
        assert self._worker is not None  # whoever asks has a view
        return self._worker.over(epoch)

    def superseded(self, epoch: int) -> bool:
        """Whether somebody waits to be in the next view, or would like to leave this one."""
        assert self._worker is not None
        return self._worker.superseded or self._worker.generation > epoch

    def preparing(self, epoch: int) -> bool:
        """Who asks to be let in has nothing left to prepare."""
        return False

    def will_be_let_in(self, epoch: int) -> bool:
        """Nobody works alone who waits for the coordinator's word."""
        return False

    def surveyed(self, epoch: int) -> None:
        """Nothing is measured."""

    def broken(self, epoch: int, failure: Failure) -> None:
        """Our work in that view failed; we say so when we ask for the next one."""
        if self._view is not None and epoch == self._view.epoch:
            self._broken = f"could not go on: {failure.reason}"

    def check_with(self, check: Checker | None) -> None:
        """Nobody is checked."""

    def finish(self, outcome: str) -> None:
        """The coordinator hears of it when we leave, which is at once."""
        self._outcome = outcome

    async def leave(self) -> None:
        """Be in no further view; returns when the others know, or after a deadline."""
        if self._worker is not None:
            await self._worker.leave(self._outcome, orderly=True)

    async def _joined(self) -> Worker:
        if self._worker is None:
            self._worker = await Worker.registered(
                self._host, self._coordinator, self._register, self._patience_s, self._tell
            )
            needed = self._worker.policy.needed
            self._tell(f"registered with the coordinator at {self._coordinator}; work begins with {needed}")
        return self._worker

    def _adopted(self, roster: Roster) -> View:
        before = -1 if self._view is None else self._view.epoch
        peers = sorted(roster.peers, key=lambda peer: (peer.since, peer.rank))
        members = tuple(
            Member(peer.node or peer.worker, peer.life, peer.name or peer.worker, peer.address, peer.home)
            for peer in peers
        )
        lineage = f"{roster.cluster}/{roster.line}"
        view = View(lineage, roster.generation, members, before, formed=True, reason=roster.reason)
        if view.rank(self._us) is None:
            raise HcsimError(
                f"the coordinator at {self._coordinator} takes us for another machine in view {view.epoch}"
            )
        self._view, self._broken = view, ""
        names = ", ".join(member.name for member in members)
        listed = ",".join(f"{member.name}#{member.boot:x}" for member in members)
        self._host.trace("view", lineage, view.epoch, before, listed)
        metrics = self._host.metrics
        metrics.gauge("hcsim_view_epoch").set(view.epoch)
        metrics.gauge("hcsim_view_members").set(len(members))
        metrics.gauge("hcsim_leader").set(view.rank(self._us) == 0)
        self._tell(f"view {view.epoch}: {names} ({view.reason})")
        return view
