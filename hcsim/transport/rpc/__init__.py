"""Remote calls over one channel: both ends call and serve at the same time.

- `procedures`: what can be called, with the types of its arguments and its result
- `values`: arguments and results as a parcel: msgpack, and arrays beside it
- `refs`: handles to values that stay with their owner
- `messages`, `inbox`, `outbox`: what travels, put together and sent in turns
- `failures`: how errors travel
- `calling`, `serving`: the two directions, over a `line`
- `endpoint`: one end of a channel
"""

from __future__ import annotations

from hcsim.transport.rpc.endpoint import Endpoint, serving_endpoint
from hcsim.transport.rpc.messages import Limits
from hcsim.transport.rpc.references import Procedure, Registry, RemoteRef

__all__ = ["Endpoint", "Limits", "Procedure", "Registry", "RemoteRef", "serving_endpoint"]
