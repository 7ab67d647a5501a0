"""Remote calls over one channel: both ends call and serve at the same time.

- `references`: procedures, with the types of their arguments and results; values as parcels; handles to values
- `messages`: what travels
- `boxes`: messages whose arrays are put together and sent in turns
- `endpoint`: one end of a channel, which calls and serves
"""

from __future__ import annotations

from hcsim.transport.rpc.endpoint import Endpoint, serving_endpoint
from hcsim.transport.rpc.messages import Limits
from hcsim.transport.rpc.references import Procedure, Registry, RemoteRef

__all__ = ["Endpoint", "Limits", "Procedure", "Registry", "RemoteRef", "serving_endpoint"]
