"""Which resources could ever be full.

No flow is faster than its narrowest resource lets it be when it is alone there. A resource that has
room for all its flows at that speed is never full: a 10 Gb/s port behind which only 1 Gb/s ports
send, say. It is loose, and the filling leaves it out; on a ring of unlike links that saves a fifth.

A resource once tight stays tight. Where a capacity changes, flows may come to go faster than was
thought: that resource then counts for no flow's speed any more, and it and all that its flows use
is tight from then on.
"""

from __future__ import annotations

from math import inf

from hcsim.virtual.filling import TOLERANCE, Flow, Resource, end_solitude


def admit(flow: Flow) -> None:
    """Take note of a flow that starts for the first time."""
    fastest = min((resource.capacity / amount for resource, amount in flow.uses if resource.fixed), default=inf)
    for resource, amount in flow.uses:
        resource.members.append(flow)
        resource.demand += amount * fastest
        if resource.demand >= resource.capacity * (1.0 - TOLERANCE):
            _tighten(resource)
    flow.tight = tuple((resource, amount) for resource, amount in flow.uses if resource.tight)


def dismiss(flow: Flow) -> None:
    """Forget a flow that will not start again. What it made tight stays so."""
    for resource, _ in flow.uses:
        if flow in resource.members:
            resource.members.remove(flow)


def unfix(resource: Resource) -> None:
    """Take note that a resource's capacity changes."""
    if resource.fixed:
        resource.fixed = False
        _tighten(resource)
        for flow in resource.members:
            for used, _ in flow.uses:
                _tighten(used)


def _tighten(resource: Resource) -> None:
    if resource.tight:
        return
    resource.tight = True
    for flow in resource.members:
        end_solitude(flow)
        flow.tight = tuple((used, amount) for used, amount in flow.uses if used.tight)
        for used, amount in flow.tight:
            if used is resource and flow.settled:
                resource.flows[flow.id] = (flow, amount)
                resource.load += amount * flow.rate
