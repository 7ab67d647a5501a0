"""A coordinator: one known place where workers register, meet, and report checkpoints.

It is the simple way to form a cluster: somebody starts the coordinator and gives everybody its address. A cluster
that has no such place agrees on its members by itself (`cluster.agreement`).

- `state`: who is there and who works together, as a pure state machine; `rounds`: barriers and checkpoints
- `service`: the coordinator; `worker`: its client, which sends the heartbeats, and the conductor of those that train
"""

from __future__ import annotations

from hcsim.cluster.coordinator.messages import Checkpoint, Peer, Policy, Roster
from hcsim.cluster.coordinator.service import Coordinator
from hcsim.cluster.coordinator.worker import Coordinated, Worker

__all__ = ["Checkpoint", "Coordinated", "Coordinator", "Peer", "Policy", "Roster", "Worker"]
