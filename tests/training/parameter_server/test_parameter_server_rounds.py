"""What the server decides, for any order of calls, pushes, repetitions, losses and hours of the clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hcsim.errors import UsageError
from hcsim.training.parameter_server.messages import (
    AwaitEnd,
    Join,
    JoinReply,
    KeepAlive,
    Pull,
    Push,
    PushAccepted,
    PushStale,
    RequestRefused,
    TrainingDone,
)
from hcsim.training.parameter_server.rounds import (
    ApplyUpdate,
    SendModel,
    SendReply,
    ServerEffect,
    ServerPolicy,
    ServerRounds,
)
from hcsim.training.parameter_server.server import recall, records

NAMES = ("a", "b", "c")
WORKERS = st.sampled_from(NAMES)
POLICY = ServerPolicy(quorum=2, deadline_s=10.0, grace_s=1.0, patience_s=60.0, linger_s=5.0)


def join(worker: str, life: int = 1, contributes: bool = True) -> Join:
    return Join("job", worker, life, "model", contributes)


def push(sequence: int, version: int, samples: int = 1) -> Push:
    return Push(sequence, version, samples, "none", ())


def machine(policy: ServerPolicy = POLICY, total: int = 100, workers: str = "abc") -> ServerRounds:
    """A server with workers that have joined."""
    rounds = ServerRounds(policy, total, awaited=workers)
    for worker in workers:
        rounds.joined(join(worker), 0.0)
    return rounds


def answers(effects: list[ServerEffect], worker: str) -> list[Any]:
    return [effect.answer for effect in effects if isinstance(effect, SendReply) and effect.worker == worker]


def updates(effects: list[ServerEffect]) -> list[tuple[str, ...]]:
    return [tuple(c.worker for c in effect.contributions) for effect in effects if isinstance(effect, ApplyUpdate)]


# A round.


def test_a_round_ends_when_all_have_pushed_and_is_summed_in_the_order_of_names():
    rounds = machine()
    assert rounds.pushed("c", push(1, 0), "gc", "", 1.0) == []
    assert rounds.pushed("a", push(1, 0), "ga", "", 2.0) == []
    effects = rounds.pushed("b", push(1, 0), "gb", "", 3.0)
    assert updates(effects) == [("a", "b", "c")]
    assert [answers(effects, worker) for worker in NAMES] == [[PushAccepted(1, 1)]] * 3


def test_at_the_deadline_a_quorum_is_enough_and_later_pushes_of_that_round_are_stale():
    rounds = machine()
    rounds.pushed("a", push(1, 0), "ga", "", 1.0)
    rounds.pushed("b", push(1, 0), "gb", "", 5.0)
    assert updates(rounds.tick(10.9)) == []
    assert rounds.due_s(10.9) == 11.0
    assert updates(rounds.tick(11.0)) == [("a", "b")]
    assert answers(rounds.pushed("c", push(1, 0), "gc", "", 12.0), "c") == [PushStale(1, 1)]


def test_without_a_quorum_the_round_goes_on_after_its_deadline_until_there_is_one():
    rounds = machine()
    rounds.pushed("a", push(1, 0), "ga", "", 1.0)
    effects = rounds.tick(11.0)
    assert updates(effects) == []
    assert answers(effects, "a") == [KeepAlive()]
    assert updates(rounds.pushed("b", push(1, 0), "gb", "", 15.0)) == [("a", "b")]


def test_who_missed_a_round_is_not_waited_for_until_it_is_heard_again():
    rounds = machine()
    for worker in "ab":
        rounds.pushed(worker, push(1, 0), "g", "", 1.0)
    rounds.tick(11.0)
    rounds.pushed("a", push(2, 1), "g", "", 12.0)
    assert updates(rounds.pushed("b", push(2, 1), "g", "", 12.0)) == [("a", "b")]
    rounds.asked("c", Pull(0), 13.0)
    rounds.pushed("a", push(3, 2), "g", "", 14.0)
    assert updates(rounds.pushed("b", push(3, 2), "g", "", 14.0)) == []
    assert updates(rounds.pushed("c", push(1, 2), "g", "", 15.0)) == [("a", "b", "c")]


def test_a_lost_connection_is_waited_for_a_little_and_then_no_more():
    rounds = machine()
    rounds.lost("c", 1.0)
    rounds.pushed("a", push(1, 0), "g", "", 1.1)
    rounds.pushed("b", push(1, 0), "g", "", 1.1)
    assert updates(rounds.tick(1.9)) == []
    assert updates(rounds.tick(2.0)) == [("a", "b")]


def test_who_leaves_is_not_waited_for_and_needs_no_quorum():
    rounds = machine()
    rounds.pushed("a", push(1, 0), "g", "", 1.0)
    assert updates(rounds.left("b", 1.0)) == []
    assert updates(rounds.left("c", 1.0)) == [("a",)]


def test_a_worker_that_comes_later_takes_part_in_the_next_round():
    rounds = machine(workers="ab")
    rounds.joined(join("z"), 1.0)
    for worker in "ab":
        assert updates(rounds.pushed(worker, push(1, 0), "g", "", 2.0)) == []
    assert updates(rounds.pushed("z", push(1, 0), "g", "", 3.0)) == [("a", "b", "z")]


# Repetitions.


def test_a_repeated_push_gets_the_same_answer_and_does_not_count_again():
    rounds = machine(workers="a")
    first = rounds.pushed("a", push(1, 0), "g", "", 1.0)
    again = rounds.pushed("a", push(1, 0), "g", "", 2.0)
    assert updates(first) == [("a",)]
    assert updates(again) == []
    assert answers(first, "a") == answers(again, "a") == [PushAccepted(1, 1)]
    assert not rounds.wants("a", push(1, 0))


def test_a_push_that_is_repeated_while_its_round_lasts_counts_once():
    rounds = machine(workers="ab")
    rounds.pushed("a", push(1, 0), "g", "", 1.0)
    rounds.lost("a", 1.1)
    rounds.joined(join("a"), 1.2)
    assert rounds.pushed("a", push(1, 0), "g", "", 1.3) == []
    assert updates(rounds.pushed("b", push(1, 0), "g", "", 1.4)) == [("a", "b")]


def test_a_worker_that_starts_again_takes_its_unanswered_push_back_and_goes_on_with_the_next_number():
    rounds = machine(workers="ab")
    rounds.pushed("a", push(1, 0), "old", "", 1.0)
    rounds.pushed("b", push(1, 0), "g", "", 1.0)
    rounds.pushed("a", push(2, 1), "lost", "", 2.0)
    rounds.lost("a", 2.1)
    assert answers(rounds.joined(join("a", life=2), 2.2), "a") == [JoinReply(1, 1)]
    rounds.pushed("a", push(2, 1), "new", "", 2.3)
    (applied,) = [e for e in rounds.pushed("b", push(2, 1), "g", "", 2.4) if isinstance(e, ApplyUpdate)]
    assert [c.gradient for c in applied.contributions] == ["new", "g"]


def test_a_worker_is_not_told_what_became_of_a_push_of_its_earlier_life():
    """It may have come to the same number with another server, which knew nothing of that life."""
    rounds = machine(workers="a")
    rounds.pushed("a", push(1, 0), "old", "", 1.0)
    rounds.lost("a", 1.1)
    rounds.joined(join("a", life=2), 1.2)
    assert answers(rounds.pushed("a", push(1, 0), "new", "", 1.3), "a") == [
        RequestRefused(1, "a later push has been answered already")
    ]


def test_a_second_worker_of_the_same_name_is_refused_while_the_first_is_there():
    rounds = machine()
    assert "connected already" in rounds.objection(join("a", life=2))
    assert rounds.objection(join("a")) == ""  # the same one, calling again
    rounds.lost("a", 1.0)
    assert rounds.objection(join("a", life=2)) == ""


def test_a_fault_is_refused_and_neither_counts_nor_holds_up_the_round_beyond_its_deadline():
    rounds = machine()
    assert answers(rounds.pushed("a", push(1, 0), None, "not finite", 1.0), "a") == [RequestRefused(1, "not finite")]
    for worker in "bc":
        rounds.pushed(worker, push(1, 0), "g", "", 2.0)
    assert updates(rounds.tick(12.0)) == [("b", "c")]


# Other modes.


def test_asynchronous_pushes_count_at_once_with_their_share_of_the_samples():
    rounds = machine(ServerPolicy(mode="async"))
    rounds.pushed("a", push(1, 0, samples=30), "g", "", 1.0)
    rounds.pushed("b", push(1, 0, samples=10), "g", "", 1.0)
    rounds.pushed("c", push(1, 0, samples=20), "g", "", 1.0)
    (applied,) = [e for e in rounds.pushed("b", push(2, 0, samples=10), "g", "", 1.0) if isinstance(e, ApplyUpdate)]
    assert applied.share == pytest.approx(10 / 60)
    assert rounds.version == 4


def test_bounded_refuses_what_is_too_old_and_lets_who_is_too_far_ahead_wait_for_the_slowest():
    rounds = machine(ServerPolicy(mode="bounded", staleness=2, deadline_s=10.0), workers="ab")
    for number in range(3):
        assert rounds.asked("a", Pull(number - 1), 1.0) == [SendModel("a", number, known=False)]
        rounds.pushed("a", push(number + 1, number), "g", "", 1.0)
    assert rounds.asked("a", Pull(2), 1.0) == []
    assert answers(rounds.pushed("b", push(1, 0), "g", "", 2.0), "b") == [PushStale(1, 3)]
    effects = rounds.pushed("b", push(2, 1), "g", "", 3.0)
    assert answers(effects, "b") == [PushAccepted(2, 4)]
    assert SendModel("a", 4, known=False) in effects


def test_bounded_waits_for_a_silent_worker_only_until_its_deadline_nor_until_it_has_caught_up():
    rounds = machine(ServerPolicy(mode="bounded", staleness=0, deadline_s=10.0), workers="ab")
    rounds.pushed("a", push(1, 0), "g", "", 9.0)
    assert rounds.asked("a", Pull(0), 9.0) == []
    assert rounds.tick(10.0) == [SendModel("a", 1, known=False)]
    for number in range(1, 5):
        rounds.pushed("a", push(number + 1, number), "g", "", 11.0)
    rounds.asked("b", Pull(0), 12.0)
    assert rounds.asked("a", Pull(4), 12.0) == [SendModel("a", 5, known=False)]


def test_the_model_is_given_only_if_it_is_another_version():
    rounds = machine()
    assert rounds.asked("a", Pull(-1), 1.0) == [SendModel("a", 0, known=False)]
    assert rounds.asked("a", Pull(0), 1.0) == [SendModel("a", 0, known=True)]


# The end.


def test_after_the_last_update_everybody_is_told_and_the_server_stays_until_all_have_left():
    rounds = machine(total=1, workers="ab")
    rounds.asked("b", AwaitEnd(), 0.5)
    rounds.left("b", 0.5)
    effects = rounds.pushed("a", push(1, 0), "g", "", 1.0)
    assert answers(effects, "a") == [PushAccepted(1, 1), TrainingDone(1)]
    assert answers(effects, "b") == [TrainingDone(1)]
    assert answers(rounds.pushed("a", push(2, 1), "g", "", 1.0), "a") == [PushStale(2, 1)]
    rounds.left("a", 1.1)
    assert not rounds.over(1.2)
    rounds.left("b", 1.3)
    assert rounds.over(1.3)


def test_who_does_not_leave_is_waited_for_a_short_time_at_the_end():
    rounds = machine(total=1, workers="a")
    rounds.pushed("a", push(1, 0), "g", "", 1.0)
    assert not rounds.over(5.9)
    assert rounds.due_s(1.0) == 6.0
    assert rounds.over(6.0)


def test_who_was_silent_for_long_before_the_end_is_not_waited_for():
    rounds = machine(total=2, workers="ab")
    rounds.pushed("a", push(1, 0), "g", "", 1.0)
    rounds.pushed("b", push(1, 0), "g", "", 1.0)
    rounds.left("b", 1.0)
    rounds.pushed("a", push(2, 1), "g", "", 8.0)
    rounds.left("a", 8.1)
    assert rounds.over(8.1)


def test_training_ends_when_all_have_left():
    rounds = machine(workers="ab")
    rounds.left("a", 1.0)
    assert answers(rounds.left("b", 1.0), "a") == [TrainingDone(0)]


def test_without_updates_training_ends_with_an_error_that_names_who_is_missing():
    rounds = machine()
    rounds.pushed("a", push(1, 0), "g", "", 1.0)
    (done,) = [answer for answer in answers(rounds.tick(60.0), "a") if isinstance(answer, TrainingDone)]
    assert done.error == "no update for 60 s, 1 of at least 2 pushed, waiting for b, c"


@pytest.mark.parametrize("wrong", [{"quorum": 0}, {"staleness": -1}, {"deadline_s": 0.0}, {"patience_s": float("inf")}])
def test_a_policy_that_has_no_meaning_is_refused(wrong: dict[str, Any]):
    with pytest.raises(UsageError, match="positive"):
        ServerPolicy(**wrong)


def test_a_server_with_workers_that_an_earlier_one_had_to_do_without_waits_for_their_calls() -> None:
    before = machine()
    before.regroup("a")
    after = ServerRounds(POLICY, 100, awaited="bc", now=1.0)
    recall(records(before), after, 1.0)
    after.regroup("bc")
    after.tick(1.0)
    assert after.ended is None
    after.joined(join("b"), 1.1)
    after.left("b", 1.2)
    assert after.ended is None
    after.left("c", 1.3)
    assert after.ended == TrainingDone(0)


# Everything, in any order.


class AnyOrder(RuleBasedStateMachine):
    """Workers that do anything a correct worker does, at any time; the test keeps its own books."""

    policy = POLICY

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.rounds = ServerRounds(self.policy, total=30, awaited=NAMES[:2])
        self.lives = dict.fromkeys(NAMES, 0)
        self.there: dict[str, bool] = dict.fromkeys(NAMES, False)
        self.sequences = dict.fromkeys(NAMES, 0)
        self.versions = dict.fromkeys(NAMES, -1)
        self.open: dict[str, Push] = {}
        self.applied: dict[tuple[str, int, int], int] = {}
        self.verdicts: dict[tuple[str, int, int], object] = {}
        self.version = 0
        self.waiting: dict[str, float] = {}
        self.spoke = dict.fromkeys(NAMES, 0.0)

    def hear(self, effects: list[ServerEffect]) -> None:
        for effect in effects:
            match effect:
                case ApplyUpdate(contributions, share):
                    assert 0 <= share <= 1
                    assert contributions
                    self.version += 1
                    workers = [c.worker for c in contributions]
                    assert workers == sorted(workers)
                    for c in contributions:
                        assert c.gradient not in self.applied, "counted twice"
                        self.applied[c.gradient] = self.version
                        lag = self.version - 1 - c.gradient[2]
                        assert 0 <= lag <= {"sync": 0, "bounded": self.policy.staleness}.get(self.policy.mode, lag)
                case SendModel(worker, version, _):
                    assert version == self.version
                    self.versions[worker] = version
                    self.waiting.pop(worker, None)
                case SendReply(worker, answer):
                    self.answered(worker, answer)
        assert self.rounds.version == self.version

    def answered(self, worker: str, answer: object) -> None:
        if isinstance(answer, KeepAlive):
            assert self.now >= self.spoke[worker] + self.policy.deadline_s, "told to wait too often"
            self.spoke[worker] = self.now
            if worker in self.waiting:  # it may have called again, and not yet have repeated its question
                self.waiting[worker] = self.now
        else:
            self.waiting.pop(worker, None)
        if not isinstance(answer, PushAccepted | PushStale | RequestRefused):
            return
        sent = self.open.get(worker)
        assert sent is not None
        assert sent.sequence == answer.sequence
        key = (worker, sent.sequence, sent.version)
        assert self.verdicts.setdefault(key, answer) == answer, "two answers to one push"
        assert (key in self.applied) == isinstance(answer, PushAccepted)
        if isinstance(answer, PushAccepted):
            assert self.applied[key] == answer.version

    def then(self, effects: list[ServerEffect]) -> None:
        self.hear(effects)
        self.hear(self.rounds.tick(self.now))

    @rule(worker=WORKERS, starts_again=st.booleans())
    def call(self, worker: str, starts_again: bool) -> None:
        life = self.lives[worker] + (starts_again or not self.lives[worker])
        caller = join(worker, life)
        if self.rounds.objection(caller):
            assert self.there[worker]
            return
        if life != self.lives[worker]:
            self.open.pop(worker, None)
            self.versions[worker] = -1
        self.lives[worker], self.there[worker] = life, True
        self.spoke[worker] = self.now
        self.waiting.pop(worker, None)
        effects = self.rounds.joined(caller, self.now)
        (welcome,) = [answer for answer in answers(effects, worker) if isinstance(answer, JoinReply)]
        if worker not in self.open:
            self.sequences[worker] = welcome.sequence
        assert welcome.accepted == sum(name == worker for name, _, _ in self.applied)
        self.then(effects)

    @precondition(lambda self: any(self.there.values()))
    @rule(worker=WORKERS)
    def pull(self, worker: str) -> None:
        if self.there[worker] and worker not in self.waiting:
            self.waiting[worker] = self.spoke[worker] = self.now
            self.then(self.rounds.asked(worker, Pull(self.versions[worker]), self.now))

    @rule(worker=WORKERS, samples=st.integers(0, 3))
    def push_something_new(self, worker: str, samples: int) -> None:
        answered = worker not in self.open or self.judged(worker)
        if self.there[worker] and worker not in self.waiting and answered and self.versions[worker] >= 0:
            self.sequences[worker] += 1
            self.open[worker] = push(self.sequences[worker], self.versions[worker], samples)
            self.send(worker)

    @rule(worker=WORKERS)
    def work(self, worker: str) -> None:
        """What a worker does most of the time."""
        if not self.there[worker]:
            self.call(worker, False)
        self.pull(worker)
        self.push_something_new(worker, 1)

    @rule(worker=WORKERS)
    def push_again(self, worker: str) -> None:
        if self.there[worker] and worker in self.open:
            self.send(worker)

    @rule(worker=WORKERS)
    def lose(self, worker: str) -> None:
        if self.there[worker]:
            self.there[worker] = False
            self.waiting.pop(worker, None)
            self.then(self.rounds.lost(worker, self.now))

    @rule(worker=WORKERS)
    def leave(self, worker: str) -> None:
        if self.there[worker] and worker not in self.waiting:
            self.then(self.rounds.left(worker, self.now))

    @rule(seconds=st.sampled_from([0.1, 0.9, 5.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self.rounds.due_s(self.now)) < until:
            assert due > self.now, "time stands still"
            self.now = due
            self.hear(self.rounds.tick(due))
        self.now = until
        self.hear(self.rounds.tick(until))

    def judged(self, worker: str) -> bool:
        sent = self.open[worker]
        return (worker, sent.sequence, sent.version) in self.verdicts or self.rounds.ended is not None

    def send(self, worker: str) -> None:
        sent = self.open[worker]
        self.waiting[worker] = self.spoke[worker] = self.now
        wanted = self.rounds.wants(worker, sent)
        gradient = (worker, sent.sequence, sent.version) if wanted else None
        self.then(self.rounds.pushed(worker, sent, gradient, "", self.now))

    @invariant()
    def nobody_waits_without_a_word(self) -> None:
        for since in self.waiting.values():
            assert self.now < since + self.policy.deadline_s

    def teardown(self) -> None:
        """Once nothing happens any more, it ends, and nobody is left waiting."""
        policy = self.policy
        # A round may still end at its deadline; after that, there are no updates.
        last_s = self.now + policy.deadline_s + policy.patience_s + policy.linger_s
        while not (self.rounds.ended and self.rounds.over(self.now)):
            self.now = self.rounds.due_s(self.now)
            self.hear(self.rounds.tick(self.now))
            assert self.now <= last_s
        assert not self.waiting


class AnyOrderBounded(AnyOrder):
    policy = ServerPolicy(mode="bounded", staleness=1, deadline_s=10.0, patience_s=60.0)


class AnyOrderAsync(AnyOrder):
    policy = ServerPolicy(mode="async", deadline_s=10.0, patience_s=60.0)


_settings = settings(max_examples=60, stateful_step_count=40)
TestSync = pytest.mark.slow(AnyOrder.TestCase)
TestBounded = pytest.mark.slow(AnyOrderBounded.TestCase)
TestAsync = AnyOrderAsync.TestCase
TestSync.settings = TestBounded.settings = TestAsync.settings = _settings
