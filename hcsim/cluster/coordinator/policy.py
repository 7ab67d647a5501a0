"""What a person decides about a coordinated cluster."""

from __future__ import annotations

import math

import msgspec

from hcsim.errors import ConfigError


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's; workers learn it when they register."""

    workers: int
    """How many there are to be at most: no rank is as high."""
    begin: int | None = None
    """With how many work begins; None: with all of them."""
    least: int = 1
    """With how many work goes on when others are lost."""
    heartbeat_s: float = 1.0
    """How often a worker says that it is alive."""
    silence_s: float = 5.0
    """A worker that says nothing for so long is evicted."""
    form_s: float = 60.0
    """How long workers that are ready wait for those that are registered and do something else."""
    leave_s: float = 10.0
    """How long somebody who leaves waits for the others to take notice."""
    barrier_s: float = 300.0
    checkpoint_s: float = 300.0
    """How long a round waits for its last worker."""

    def __post_init__(self) -> None:
        for key in ("heartbeat_s", "silence_s", "form_s", "leave_s", "barrier_s", "checkpoint_s"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{key} = {value:g}: the coordinator needs a time above zero")
        if not 1 <= self.workers <= 65535:
            raise ConfigError(f"workers = {self.workers}: a cluster has 1 to 65535 workers")
        if self.begin is not None and not 1 <= self.begin <= self.workers:
            raise ConfigError(f"begin = {self.begin}: work begins with 1 to {self.workers} workers")
        if not 1 <= self.least <= self.needed:
            raise ConfigError(f"least = {self.least}: work goes on with 1 to {self.needed} workers")
        if self.silence_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"silence_s = {self.silence_s:g}: at least two heartbeats ({2 * self.heartbeat_s:g} s) "
                "have to fit in, or healthy workers are evicted"
            )

    @property
    def needed(self) -> int:
        """With how many the first generation begins."""
        return self.workers if self.begin is None else self.begin
