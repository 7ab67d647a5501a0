"""A coordinator: one known address where workers register, form a group, and report checkpoints.

It is the simplest way to form a cluster: start the coordinator and give every worker its address. A cluster
without a coordinator agrees on its members itself (`cluster.agreement`).

- `state`: registered workers and generations, as a pure state machine; `rounds`: barriers and checkpoints
- `service`: the coordinator's server; `worker`: its client, which sends heartbeats, and the membership source used in
  training
"""

from __future__ import annotations

from hcsim.cluster.coordinator.messages import (
    CommittedCheckpoint,
    CoordinatorPolicy,
    GenerationMember,
    GenerationRoster,
)
from hcsim.cluster.coordinator.service import Coordinator
from hcsim.cluster.coordinator.worker import CoordinatedMembership, CoordinatorClient

__all__ = [
    "CommittedCheckpoint",
    "CoordinatedMembership",
    "Coordinator",
    "CoordinatorClient",
    "CoordinatorPolicy",
    "GenerationMember",
    "GenerationRoster",
]
