"""What a member has done so far: its last steps and its messages, for whoever asks how it stands.

The memory is bounded. When there are too many steps, every second one is dropped and from then on only every second
one is kept, so that those that are kept still span the whole run. The newest is always kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

MOST_STEPS = 512
MOST_MESSAGES = 200
LONGEST_MESSAGE = 400


class HistoryStep(msgspec.Struct, frozen=True, array_like=True):
    """A step of training, as one member saw it."""

    at_s: float
    """When it was done, on the member's clock."""
    step: int
    loss: float
    ranks: int = 1
    samples: int = 0
    """Of all ranks together; 0 if unknown."""
    compute_s: float = 0.0
    encode_s: float = 0.0
    wait_s: float = 0.0
    whole_s: float = 0.0
    """The time of the step. The three parts may overlap."""
    held_out: float | None = None
    """The loss on held-out data, if it was evaluated."""
    accuracy: float | None = None


class HistoryMessage(msgspec.Struct, frozen=True, array_like=True):
    """A message of a member to its user."""

    at_s: float
    text: str


class RunHistory:
    """The steps and messages of one member."""

    def __init__(
        self,
        title: str = "",
        total_steps: int = 0,
        note: Callable[[HistoryStep | HistoryMessage], None] = lambda record: None,
    ) -> None:
        """`title` is what the member works on, in words; `total_steps` is 0 if nobody knows how many there are.
        `note` is called with every record."""
        self._note = note
        self.title = title
        self.total_steps = total_steps
        self._steps: list[HistoryStep] = []
        self._stride = 1
        self._latest: HistoryStep | None = None
        self._messages: deque[HistoryMessage] = deque(maxlen=MOST_MESSAGES)

    def step(self, record: HistoryStep) -> None:
        """Add a step. One that is not later than the ones before replaces these: it is done again."""
        while self._steps and self._steps[-1].step >= record.step:
            self._steps.pop()
        self._latest = record
        self._note(record)
        if record.step % self._stride and record.held_out is None:
            return
        self._steps.append(record)
        if len(self._steps) > MOST_STEPS:
            self._stride *= 2
            self._steps = [each for each in self._steps if each.step % self._stride == 0]

    def extend(self, steps: Sequence[HistoryStep], messages: Sequence[HistoryMessage]) -> None:
        """Add what another history has returned; what is known already does not count twice."""
        for step in steps:
            self.step(step)
        self._messages.extend(each for each in messages if each not in self.messages(each.at_s))

    def say(self, at_s: float, text: str) -> None:
        """Add a message."""
        record = HistoryMessage(at_s, text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "…")
        self._messages.append(record)
        self._note(record)

    @property
    def latest(self) -> HistoryStep | None:
        return self._latest

    @property
    def is_finished(self) -> bool:
        """Whether the last of the steps that there are to be is done."""
        return self._latest is not None and 0 < self.total_steps <= self._latest.step

    def steps(self, since_s: float = -1.0) -> tuple[HistoryStep, ...]:
        """Return the steps that are kept and not earlier than this, in order; the newest is the last."""
        kept: Sequence[HistoryStep] = self._steps
        if self._latest is not None and (not kept or kept[-1].step < self._latest.step):
            kept = (*kept, self._latest)
        return tuple(each for each in kept if each.at_s >= since_s)

    def messages(self, since_s: float = -1.0) -> tuple[HistoryMessage, ...]:
        """Return the messages that are kept and not earlier than this, in order."""
        return tuple(each for each in self._messages if each.at_s >= since_s)
