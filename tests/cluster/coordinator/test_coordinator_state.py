"""The coordinator's mind without a clock or a network: any order of events, any names, any silences."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hcsim.cluster.coordinator import CoordinatorPolicy, GenerationRoster
from hcsim.cluster.coordinator.messages import Register
from hcsim.cluster.coordinator.rounds import CoordinatorEffect, NotifyWorker, PersistedState, ResolveCall
from hcsim.cluster.coordinator.state import TRANSITIONS, CoordinatorState, StageEvent, WorkerStage
from hcsim.cluster.diagnosis import Accusation, Findings
from hcsim.errors import CallRefused, ConfigError, HcsimError

names = st.sampled_from(["a", "b", "c", "d", "e"])


class Coordinated(RuleBasedStateMachine):
    """Workers that register, ask, report, leave, fall silent and start again, at random."""

    @initialize(workers=st.integers(1, 4), least=st.integers(1, 4))
    def begin(self, workers: int, least: int) -> None:
        self.now = 100.0
        policy = CoordinatorPolicy(
            workers=workers, least=min(workers, least), heartbeat_s=1.0, silence_s=5.0, form_s=20.0, leave_s=3.0
        )
        self.state = CoordinatorState(policy, "test", PersistedState(), self.now)
        self.lives: dict[str, Register] = {}
        self.answers: dict[int, ResolveCall] = {}
        self.questions = 0
        self.formed: list[GenerationRoster] = []
        self.told: dict[str, int] = {}

    def do(self, effects: list[CoordinatorEffect]) -> None:
        for effect in effects:
            if isinstance(effect, ResolveCall):
                assert effect.question not in self.answers, "a question is answered once"
                self.answers[effect.question] = effect
                if isinstance(effect.value, GenerationRoster) and effect.value not in self.formed:
                    assert not self.formed or effect.value.generation > self.formed[-1].generation
                    self.formed.append(effect.value)
            elif isinstance(effect, NotifyWorker) and effect.notice.over:
                self.told[effect.worker] = effect.notice.generation

    def ask(self, event: Any) -> int:
        self.questions += 1
        try:
            self.do(event(self.questions))
        except HcsimError as error:
            self.answers[self.questions] = ResolveCall(self.questions, error=error)
        return self.questions

    def who(self, name: str) -> Register:
        return self.lives.get(name, Register(name, 0, "nowhere:1"))

    @rule(name=names, life=st.integers(1, 2))
    def register(self, name: str, life: int) -> None:
        who = Register(name, life, f"{name}:1")
        try:
            registered, effects = self.state.register(who, self.now)
        except CallRefused:
            return
        assert 0 <= registered.rank < self.state.policy.workers
        self.lives[name] = who
        self.do(effects)

    @rule(name=names)
    def ready(self, name: str) -> None:
        self.ask(lambda question: self.state.ready(self.who(name), self.state.generation, question, self.now))

    @rule(name=names)
    def leave(self, name: str) -> None:
        self.ask(lambda question: self.state.leave(self.who(name), question, self.now))

    @rule(name=names, barrier=st.sampled_from(["x", "y"]))
    def barrier(self, name: str, barrier: str) -> None:
        generation = self.state.generation
        self.ask(lambda question: self.state.barrier(self.who(name), generation, barrier, question, self.now))

    @rule(name=names, step=st.integers(0, 2), digest=st.sampled_from(["p", "q"]))
    def checkpoint(self, name: str, step: int, digest: str) -> None:
        who, generation = self.who(name), self.state.generation
        before = self.state.rounds.committed
        try:
            self.do(self.state.begin(who, generation, step, self.now))
        except HcsimError:
            return
        self.ask(lambda question: self.state.report(who, generation, step, digest, question))
        after = self.state.rounds.committed
        if after is not None and after != before:
            assert before is None or after.step > before.step
            assert [rank for rank, _ in after.digests] == [peer.rank for peer in self.formed[-1].peers]

    @rule(question=st.integers(1, 40))
    def give_up(self, question: int) -> None:
        if question <= self.questions and question not in self.answers:
            self.answers[question] = ResolveCall(question)
            self.state.gave_up(question)

    @rule(name=names)
    def lose_connection(self, name: str) -> None:
        self.state.lost(self.who(name))

    @rule(alive=st.sets(names), seconds=st.floats(0.1, 1.0))
    def time_passes(self, alive: set[str], seconds: float) -> None:
        self.now = min(self.now + seconds, self.state.due_s(self.now))
        for name in sorted(alive & {*self.state.workers}):
            _, effects = self.state.heartbeat(self.state.workers[name].who, self.state.generation, self.now)
            self.do(effects)
        self.do(self.state.tick(self.now))

    @invariant()
    def ranks_are_unique_and_within_the_world(self) -> None:
        if hasattr(self, "state"):
            ranks = [entry.rank for entry in self.state.workers.values()]
            assert len({*ranks}) == len(ranks)
            assert all(0 <= rank < self.state.policy.workers for rank in ranks)

    @invariant()
    def whoever_works_works_in_the_generation_or_was_told(self) -> None:
        if hasattr(self, "state"):
            members = [peer.worker for peer in self.state.roster.peers] if self.state.roster else []
            for name, entry in self.state.workers.items():
                if entry.stage is WorkerStage.WORKING and name not in members:
                    assert name in self.told

    def teardown(self) -> None:
        """Once everybody is well, whoever asks is answered."""
        if not hasattr(self, "state"):
            return
        state = self.state
        for _ in range(60):  # whoever fell silent goes, rounds end
            self.now = state.due_s(self.now)
            self.do(state.tick(self.now))
            if not state.workers:
                break
        assert not state.workers
        for number in range(state.policy.workers):
            _, effects = state.register(Register(f"n{number}", 1, "somewhere:1"), self.now)
            self.do(effects)
        asked = [
            self.ask(lambda question, entry=entry: state.ready(entry.who, state.generation, question, self.now))
            for entry in tuple(state.workers.values())
        ]
        for _ in range(100):
            self.now = state.due_s(self.now)
            for entry in tuple(state.workers.values()):
                self.do(state.heartbeat(entry.who, state.generation, self.now)[1])
            self.do(state.tick(self.now))
        assert all(question in self.answers for question in asked)
        assert [question for question in range(1, self.questions + 1) if question not in self.answers] == []


TestCoordinated = pytest.mark.slow(Coordinated.TestCase)
TestCoordinated.settings = settings(max_examples=150, stateful_step_count=40)


def test_every_stage_but_the_last_can_end():
    for stage in WorkerStage:
        ways = [turn for turn in StageEvent if (stage, turn) in TRANSITIONS]
        assert bool(ways) == (stage is not WorkerStage.GONE)
    assert all((stage, StageEvent.EVICTED) in TRANSITIONS for stage in WorkerStage if stage is not WorkerStage.GONE)


@pytest.mark.parametrize("key", ["heartbeat_s", "silence_s", "form_s", "leave_s", "barrier_s", "checkpoint_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused_by_its_key(key, value):
    with pytest.raises(ConfigError, match=key):
        CoordinatorPolicy(workers=2, **{key: value})


@pytest.mark.parametrize("changes", [{"workers": 0}, {"workers": -1}, {"least": 0}, {"least": 3}, {"silence_s": 1.5}])
def test_numbers_that_make_no_cluster_are_refused_by_their_key(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        CoordinatorPolicy(**{"workers": 2, **changes})


def test_a_name_belongs_to_the_node_that_first_proved_to_have_it():
    state = CoordinatorState(CoordinatorPolicy(workers=2), "test", PersistedState(), 0.0)
    state.register(Register("a", 1, "a:1"), 0.0, "node-a")
    for thief in ("node-b", ""):
        with pytest.raises(CallRefused, match="belongs to another node"):
            state.register(Register("a", 2, "b:1"), 100.0, thief)
    restarted = CoordinatorState(CoordinatorPolicy(workers=2), "test", state.kept(), 200.0)
    with pytest.raises(CallRefused, match="belongs to another node"):
        restarted.register(Register("a", 2, "b:1"), 200.0, "node-b")
    assert restarted.register(Register("a", 2, "a:1"), 200.0, "node-a")[0].rank == 0


def coordinated(count: int, **policy: int) -> tuple[CoordinatorState, list[Register]]:
    """Workers that have registered."""
    state = CoordinatorState(CoordinatorPolicy(workers=4, begin=count, **policy), "test", PersistedState(), 0.0)
    workers = [Register(f"w{number}", 1, f"w{number}:1", f"w{number}") for number in range(count)]
    for who in workers:
        state.register(who, 0.0)
    return state, workers


def answered(effects: list[CoordinatorEffect]) -> dict[int, Any]:
    return {each.question: each.error or each.value for each in effects if isinstance(each, ResolveCall)}


def test_members_come_out_of_a_generation_together_and_take_in_who_waits():
    state, (a, b) = coordinated(2)
    state.ready(a, 0, 1, 0.0)
    first = answered(state.ready(b, 0, 2, 0.0))[1]
    c = Register("w2", 1, "w2:1", "w2")
    state.register(c, 1.0)
    state.ready(c, 0, 3, 1.0)
    assert not answered(state.ready(a, first.generation, 4, 1.0, why=""))
    assert not state.heartbeat(b, first.generation, 1.0)[0].over
    roster = answered(state.ready(b, first.generation, 5, 1.0, why=""))[4]
    assert [peer.worker for peer in roster.peers] == ["w0", "w1", "w2"]
    assert [peer.since for peer in roster.peers] == [1, 1, 2]
    assert roster.reason == "w2 joined"


def test_who_does_not_come_out_of_a_generation_is_not_waited_for_for_ever():
    state, (a, b) = coordinated(2)
    state.ready(a, 0, 1, 0.0)
    state.ready(b, 0, 2, 0.0)
    state.ready(a, 1, 3, 1.0, why="")
    for second in range(1, 62):
        state.heartbeat(a, 1, float(second))
        state.heartbeat(b, 1, float(second))
        state.tick(float(second))
    assert "came out of it 60 s before w1 (rank 1)" in state.heartbeat(b, 1, 62.0)[0].over


def test_who_asks_when_all_is_done_is_told_that_it_is_or_that_it_is_too_late():
    state, (a, b, c) = coordinated(3)
    for question, who in enumerate((a, b, c)):
        state.ready(who, 0, question, 0.0)
    state.leave(a, 3, 1.0, "sum", orderly=True)
    assert answered(state.ready(b, 1, 4, 1.0, "lost a word", "sum"))[4].peers == ()
    assert "ended without this machine: w0 finished it" in str(answered(state.ready(c, 1, 5, 1.0, "was away"))[5])
    assert CoordinatorState(state.policy, "test", state.kept(), 2.0).outcomes == {"sum": "w0"}
    for question, who in enumerate((b, c), 6):
        state.leave(who, question, 1.0, orderly=True)
    assert not state.workers
    state.register(a, 2.0)
    assert not answered(state.ready(a, 1, 8, 20.0))  # the next work begins with three again
    assert state.roster is None


def test_who_was_started_otherwise_is_told_in_what():
    state, _ = coordinated(1)
    with pytest.raises(
        ConfigError, match=r"w0 leads, and was started otherwise: wire.segment is left out on w0 and 4096 B"
    ):
        state.register(Register("x", 1, "x:1", "x", terms={"wire.segment": "4096 B"}), 0.0)


def test_a_coordinator_without_a_memory_goes_on_from_the_numbers_of_its_workers():
    state = CoordinatorState(CoordinatorPolicy(workers=2, begin=1), "test", PersistedState(), 0.0)
    state.register(Register("a", 1, "a:1", generation=7), 0.0)
    state.ready(Register("a", 1, "a:1"), 7, 1, 0.0)
    assert not answered(state.tick(4.9))  # others who worked may call again
    assert answered(state.tick(5.1))[1].generation == 8


def test_a_machine_that_proves_who_it_is_is_let_in_at_once_when_it_starts_again_where_it_was():
    state = CoordinatorState(CoordinatorPolicy(workers=2), "test", PersistedState(), 0.0)
    state.register(Register("a", 1, "a:1"), 0.0, "node-a")
    with pytest.raises(CallRefused, match="is here already"):
        state.register(Register("a", 2, "elsewhere:1"), 0.1, "node-a")
    assert state.register(Register("a", 2, "a:1"), 0.2, "node-a")[0].rank == 0


def test_who_kept_the_others_from_working_is_not_let_in_sooner_by_registering_again():
    state, (a, b, c) = coordinated(3)
    for question, who in enumerate((a, b, c)):
        state.ready(who, 0, question, 0.0)
    blamed = (Accusation("w2", "it does not answer"),)
    for question, who in enumerate((a, b), 3):
        found = Findings(state.line, 1, fruitless=1, checking=True, checked=True, ended=True, accusations=blamed)
        state.ready(who, 1, question, 1.0, "gave up", found=[found])
    state.ready(c, 1, 5, 1.0, "gave up", found=[Findings(state.line, 1, checking=True, checked=True, ended=True)])
    assert [peer.worker for peer in state.roster.peers] == ["w0", "w1"]
    again = Register("w2", 2, c.address)
    state.lost(c)
    effects = state.register(again, 2.0)[1]
    assert not [effect for effect in effects if isinstance(effect, NotifyWorker)]
    state.ready(again, 0, 6, 2.0)
    assert not state.heartbeat(a, 2, 2.0)[0].superseded
