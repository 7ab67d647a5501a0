"""When the ranks of a program exchange what they have learned: every H steps, weighted by their samples.

What is exchanged, and how, is for the classes that derive from this one: `hcsim.training.modules.periodic` for torch,
`hcsim.mlx.periodic` for MLX.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from hcsim.errors import UsageError


class PeriodicExchange(ABC):
    """The ranks exchange their changes on every `every`-th call of `step`."""

    def __init__(self, every: int) -> None:
        if every < 1:
            raise UsageError(f"ranks exchange their changes every 1, 2, … steps, not every {every}")
        self._every = every
        self._steps = 0
        self._samples = 0

    @property
    def steps(self) -> int:
        """Inner steps since the last exchange."""
        return self._steps

    def step(self, samples: int = 1) -> bool:
        """Count an inner step on `samples` samples; return whether the ranks have exchanged. All ranks must call
        this alike."""
        self._steps += 1
        self._samples += samples
        if self._steps < self._every:
            return False
        self.exchange()
        return True

    def exchange(self) -> None:
        """Exchange now, whatever the number of steps, for example at the end of a run. Ranks are weighted by their
        samples."""
        if self._steps:
            self._exchange(self._samples)
            self._steps = self._samples = 0

    @abstractmethod
    def _exchange(self, samples: int) -> None:
        """Exchange the changes that came of this rank's `samples` samples."""


def sample_weight(samples: int, of_all: int, ranks: int) -> float:
    """Return by what a rank multiplies its change, so that the mean over the ranks is weighted by samples."""
    return samples * ranks / max(of_all, 1)
