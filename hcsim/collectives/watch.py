"""A look, now and then, at collectives that do not come to their end.

Ranks that call unlike collectives may all wait to receive: then no frame shows that they disagree. So whoever has been
in one for a while says which one it is to the lowest rank of its group, which compares what all say.
"""

from __future__ import annotations

from hcsim.collectives.agreement import Agreement
from hcsim.collectives.wiring import Ticket
from hcsim.errors import HcsimError
from hcsim.runtime.channel import EMPTY
from hcsim.runtime.frame import Header, Kind
from hcsim.transport.mesh import Mesh


async def watch(mesh: Mesh, agreement: Agreement, every_s: float) -> None:
    """Go on until cancelled; what has not ended from one look to the next is told, once."""
    before: list[Ticket] = []
    told: list[Ticket] = []
    while True:
        await mesh.host.clock.sleep(every_s)
        oldest = agreement.oldest()
        late = [ticket for ticket in oldest if ticket in before]
        for ticket in late:
            lowest = agreement.lowest[ticket.group]
            if ticket not in told and lowest != mesh.us.rank:
                mesh.host.spawn(_tell(mesh, lowest, ticket), name=f"tell rank {lowest} of {ticket}")
        before, told = oldest, late


async def _tell(mesh: Mesh, rank: int, ticket: Ticket) -> None:
    header = Header(
        0, Kind.WAITING, ticket.rank, ticket.bucket, ticket.epoch, ticket.group, ticket.operation, ticket.signature
    )
    try:
        link = await mesh.link(rank)
        await link.send(header, EMPTY)
    except HcsimError:
        pass  # it cannot be told; the operation learns by itself what is the matter
