"""Schedules of a pipeline: the order of the passes of each stage.

GPipe runs all forwards, then all backwards, and keeps every microbatch's activations (Huang et al., NeurIPS
2019). 1F1B begins with as many forwards as there are later stages, then alternates, so that a stage keeps one
microbatch more than that at most (Narayanan et al., SOSP 2019). Both give the same gradients; they differ in
memory.

With p equal stages, m microbatches and a network that takes no time, both take (m + p - 1)(f + b) for a step, where f
and b are the times of a forward and of a backward pass through a stage: each stage idles for p - 1 of these, the
bubble.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

Schedule: TypeAlias = Literal["gpipe", "1f1b"]


def turns(schedule: Schedule, stage: int, stages: int, microbatches: int) -> Iterator[tuple[Literal["F", "B"], int]]:
    """Yield the passes of a stage in order: "F" (forward) or "B" (backward), and the microbatch."""
    ahead = microbatches if schedule == "gpipe" else min(stages - stage - 1, microbatches)
    for number in range(ahead):
        yield "F", number
    for number in range(ahead, microbatches):
        yield "F", number
        yield "B", number - ahead
    for number in range(microbatches - ahead, microbatches):
        yield "B", number


def most_kept(schedule: Schedule, stage: int, stages: int, microbatches: int) -> int:
    """Return the largest number of microbatches whose activations a stage keeps at once."""
    return microbatches if schedule == "gpipe" else min(stages - stage, microbatches)


def bubble(stages: int, microbatches: int) -> float:
    """Return the share of a step in which equal stages idle if the network takes no time."""
    return (stages - 1) / (microbatches + stages - 1)
