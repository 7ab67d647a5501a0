"""Elastic training over real sockets: members come, go and fail, and learn what they learn in the virtual world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from hcsim.cluster.diagnosis import ViewFailure
from hcsim.cluster.membership_source import MemberCheck
from hcsim.cluster.view import Member, View
from hcsim.config import Training, load_scenario
from hcsim.real.host import RealHost, RealOptions
from hcsim.selftest.script import SEED, train
from hcsim.training.elastic.member import TrainingExtras
from hcsim.training.elastic.train import follow, prepare
from hcsim.training.run import Point, Report, Run
from hcsim.transport.groups import Wire
from hcsim.units import PositiveSeconds
from tests.switches import on_switch

GUARD_S = 30.0
CONVEX = Training(task="convex", steps=6, evaluate_every=6, timeout_s=PositiveSeconds(10))


class Board:
    """The views of a script, and who hears of them; all members are tasks of one process."""

    def __init__(self, addresses: Sequence[str], views: Sequence[Sequence[int]]) -> None:
        self.members = [Member(f"id-{rank}", 1, f"m{rank}", address) for rank, address in enumerate(addresses)]
        self.views = [View("board", e, tuple(self.members[m] for m in view)) for e, view in enumerate(views)]
        self.shown = 1
        self.changed = asyncio.Condition()
        self.over: dict[int, asyncio.Future[str]] = {}

    async def show(self, lost: str = "") -> None:
        """The next view."""
        if lost:
            self.ended(self.shown - 1).set_result(lost)
        self.shown = min(self.shown + 1, len(self.views))
        async with self.changed:
            self.changed.notify_all()

    def ended(self, epoch: int) -> asyncio.Future[str]:
        return self.over.setdefault(epoch, asyncio.get_running_loop().create_future())


class Reader:
    """One member's conductor."""

    identified = False
    ways = None

    def __init__(self, board: Board, us: Member) -> None:
        self._board = board
        self.us = us

    async def view(self, after: int, outcome: str = "") -> View:
        async with self._board.changed:
            while True:
                newest = self._board.views[self._board.shown - 1]
                if newest.epoch > after and newest.rank(self.us) is not None:
                    return newest
                await self._board.changed.wait()

    def over(self, epoch: int) -> asyncio.Future[str]:
        return self._board.ended(epoch)

    def superseded(self, epoch: int) -> bool:
        return self._board.shown - 1 > epoch

    def broken(self, epoch: int, failure: ViewFailure) -> None:
        assert self.over(epoch).done(), f"nothing breaks by itself here: {failure.reason}"

    def surveyed(self, epoch: int) -> None:
        pass

    def check_with(self, check: MemberCheck | None) -> None:
        pass

    def preparing(self, epoch: int) -> bool:
        return False

    def finish(self, outcome: str) -> None:
        pass

    def will_be_let_in(self, epoch: int) -> bool:
        return False

    async def leave(self) -> None:
        await self._board.show()


class Turning:
    """Shows the next view when the first member has done so many steps."""

    def __init__(self, act: Callable[[], None], at: int) -> None:
        self._act = act
        self._at = at

    def point(self, rank: int, point: Point) -> None:
        if rank == 0 and point.step == self._at:
            self._act()

    def finished(self, run: Run) -> None:
        pass


@pytest.mark.parametrize("strategy", ["ddp", "diloco:2", "zero2:copies=2", "zero3"])
def test_real_members_that_come_and_go_learn_what_virtual_ones_do(
    strategy: str, addresses: Callable[[int], list[str]]
) -> None:
    chosen = Training(task="convex", strategy=strategy, steps=6, evaluate_every=6, timeout_s=PositiveSeconds(10))

    async def main() -> list[Report]:
        board = Board(addresses(3), [(0, 1), (0, 1, 2)])
        running = asyncio.get_running_loop()
        turning = Turning(lambda: running.create_task(board.show()) and None, 3)

        async def member(number: int) -> Report:
            async with RealHost(RealOptions(name=f"m{number}", insecure=True)) as host:
                source = Reader(board, board.members[number])
                extras = TrainingExtras(turning if number == 0 else None)
                return await follow(prepare(host, source, chosen, SEED, extras), Wire())

        async with asyncio.timeout(GUARD_S):
            return await asyncio.gather(*map(member, range(3)))

    reports = asyncio.run(main())
    assert {report.steps for report in reports} == {6}
    virtual = train(on_switch("abc"), chosen, first="ab", plan=[(4, "abc")])
    assert {report.sha256 for report in reports} == {virtual.sha256()}


@pytest.mark.parametrize("strategy", ["ddp", "zero1:copies=2", "zero3:copies=2"])
def test_a_real_member_that_is_lost_is_done_without(strategy: str, addresses: Callable[[int], list[str]]) -> None:
    chosen = replace(CONVEX, strategy=strategy)

    async def main() -> list[Report | BaseException]:
        board = Board(addresses(3), [(0, 1, 2), (0, 1)])
        tasks: list[asyncio.Task[Report]] = []

        async def lose() -> None:
            await board.show(lost="by the script")
            tasks[2].cancel()

        running = asyncio.get_running_loop()
        turning = Turning(lambda: running.create_task(lose()) and None, 3)

        async def member(number: int) -> Report:
            async with RealHost(RealOptions(name=f"m{number}", insecure=True)) as host:
                source = Reader(board, board.members[number])
                extras = TrainingExtras(turning if number == 0 else None)
                return await follow(prepare(host, source, chosen, SEED, extras), Wire())

        tasks += [asyncio.create_task(member(number)) for number in range(3)]
        async with asyncio.timeout(GUARD_S):
            return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third = asyncio.run(main())
    assert isinstance(first, Report)
    assert isinstance(second, Report)
    assert isinstance(third, asyncio.CancelledError)
    assert first.sha256 == second.sha256
    ends = [train(on_switch("abc"), chosen, plan=[(step, "ab")]).sha256() for step in (3, 4)]
    assert first.sha256 in ends


@pytest.mark.slow
def test_over_the_internet_a_vote_of_three_takes_hardly_longer_than_one_of_four() -> None:
    """It crosses the line between the homes once, also where the members are no power of two.

    Gradients go by one algorithm here: by rule four double, and cross the line less often than three do."""
    homes = load_scenario("two-homes-wan")
    chosen = Training(task="convex", strategy="ddp", algorithm="tree", steps=20, evaluate_every=20)

    def duration_s(*first: str) -> float:
        return max(r.duration_s for r in train(homes, chosen, first=first).results.values() if isinstance(r, Report))

    three, four = duration_s("anna-1", "ben-1", "ben-2"), duration_s("anna-1", "anna-2", "ben-1", "ben-2")
    assert three < 1.1 * four
