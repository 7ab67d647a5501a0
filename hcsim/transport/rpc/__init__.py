"""Remote procedure calls over one channel: both ends call and serve at the same time.

- `references`: procedures with the types of their arguments and results, handles to values that stay with their
  owner, and values encoded as parcels (msgpack, with arrays beside it)
- `messages`: the messages and their limits
- `transfers`: the messages in transit, whose arrays are sent in pieces
- `endpoint`: one end of a channel, with calls in both directions
"""

from __future__ import annotations

from hcsim.transport.rpc.endpoint import Endpoint, serving_endpoint
from hcsim.transport.rpc.messages import Limits
from hcsim.transport.rpc.references import Procedure, ProcedureRegistry, RemoteRef

__all__ = ["Endpoint", "Limits", "Procedure", "ProcedureRegistry", "RemoteRef", "serving_endpoint"]
