"""Weighted max-min fair rates for flows over shared resources, kept up to date by local repair.

Flow f has rate x_f ≤ bound b_f and weight w_f; one unit of it takes a_fr of resource r, which has
capacity C_r. Progressive filling (`fairness.py`) gives the only rates for which this certificate
holds: no resource is over its capacity, and every flow is at its bound or has a full resource in
which its level x_f/w_f is largest.

Because the rates are unique, any way to reach the certificate is right, so a change is repaired
where it happened. The flows that changed, and those held by a resource that changed, are filled
again in what all others leave. Then the certificate is checked in the resources whose load moved.
Where it fails, the flows concerned are filled again, and so on until it fails nowhere. A flow's
share depends only on flows of lower level, so the failure at the lowest level is repaired first:
what is repaired stays so. The exception is a flow that waits for two others to give way, each in
another resource. So where a flow fails that was just filled, its part is filled again together with
the new offenders.

Cost: O(its uses) for a flow that is alone in its resources or disturbs nobody; else proportional to
the flows whose rates change and their neighbours, not to all. A change fades by the ratio of the
coefficients at each hop (0.03 for acknowledgements) and ends below `TOLERANCE`. Should repairs not
end soon, which rounding could cause, all flows met so far are filled as one region that can only
grow.

A flow that is alone when it stops rests in its place until somebody else comes: where it starts
again before that, it goes on as it went, and only the flow itself is looked at.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf
from operator import attrgetter

from hcsim.errors import UsageError
from hcsim.virtual.fairness import (
    TOLERANCE,
    Flow,
    Resource,
    admit,
    dismiss,
    end_solitude,
    fill,
    fill_alone,
    offenders,
    unfix,
)

__all__ = ["Flow", "Resource", "Sharing"]

PATIENCE = 4
"""Repairs per flow of the region before it is filled as a whole. One or two is usual."""

_by_id = attrgetter("id")


class Sharing:
    """Keeps the rates of all started flows. Changes are noted, and take effect with `solve`."""

    def __init__(self) -> None:
        self._noted: list[Flow] = []
        self._recast: dict[Resource, None] = {}
        self._over: list[Flow] = []

    def start(self, flow: Flow) -> None:
        """The flow wants its share."""
        flow.wanted = True
        if not flow.noted:
            flow.noted = True
            self._noted.append(flow)

    def stop(self, flow: Flow) -> None:
        """The flow gives its share back."""
        flow.wanted = False
        if not flow.noted:
            flow.noted = True
            self._noted.append(flow)

    def set_bound(self, flow: Flow, bound: float) -> None:
        """The flow, started or not, goes no faster than that from now on."""
        if not bound >= 0.0:
            raise UsageError(f"flow {flow.id} cannot have a bound of {bound}")
        flow.bound = bound
        if not flow.noted:
            flow.noted = True
            self._noted.append(flow)

    def set_capacity(self, resource: Resource, capacity: float) -> None:
        """The resource has that capacity from now on."""
        if not 0.0 <= capacity < inf:
            raise UsageError(f"{resource.name} cannot have a capacity of {capacity}")
        if capacity != resource.capacity:
            for flow, _ in tuple(resource.flows.values()):
                end_solitude(flow)
            unfix(resource)
            resource.capacity = capacity
            self._recast[resource] = None

    def forget(self, flow: Flow) -> None:
        """The flow will not be started again."""
        self.stop(flow)
        self._over.append(flow)

    def is_full(self, resource: Resource) -> bool:
        """Whether the flows take all there is, as of the last `solve`."""
        flows = resource.flows
        rests = len(flows) == 1 and all(flow.resting is not None for flow, _ in flows.values())
        load = 0.0 if rests else resource.load
        return resource.capacity - load <= TOLERANCE * resource.capacity

    def is_used(self, resource: Resource) -> bool:
        """Whether a started flow uses the resource, noted ones included."""
        return any(flow.wanted for flow in resource.members) or any(
            flow.wanted and resource in dict(flow.uses) for flow in self._noted
        )

    def solve(self) -> list[Flow]:
        """Bring all rates up to date; return the started flows whose rate changed, by id.

        A stopped flow has rate 0 afterwards and is not among them.
        """
        changed: list[Flow] = []
        region: list[Flow] = []
        for flow in self._take_changes():
            if not flow.alone:
                for resource, _ in flow.tight:
                    if len(resource.flows) > 1:
                        region.append(flow)
                        break
                else:
                    fill_alone(flow)
            if flow.alone:
                flow.inside = False
                if flow.rate != flow.previous:
                    changed.append(flow)
        if region and (touched := fill(region)):
            _repair(region, touched)
        for flow in region:
            flow.inside = False
            if flow.rate != flow.previous:
                changed.append(flow)
        if len(changed) > 1:
            changed.sort(key=_by_id)
        return changed

    def _take_changes(self) -> list[Flow]:
        """Let flows in and out of their resources; return those that have to be filled."""
        region: list[Flow] = []
        disturbed: list[Resource] = []
        for flow in self._noted:
            flow.noted = False
            if not flow.wanted:
                if flow.settled:
                    _leave(flow, disturbed)
            elif not flow.settled:
                if flow.resting is None or not _goes_on(flow, flow.resting):
                    _enter(flow, disturbed)
                flow.inside = True
                region.append(flow)
            elif flow.rate > flow.bound or (flow.limit is None and flow.rate < flow.bound):
                _join(flow, region)
        self._noted.clear()
        if self._recast:
            for resource in self._recast:
                _empty(resource, region, disturbed)
            self._recast.clear()
        for resource in disturbed:
            for flow, _ in resource.flows.values():
                if flow.limit is resource and not flow.inside:
                    _join(flow, region)
        while self._over:
            dismiss(self._over.pop())
        return region


def _goes_on(flow: Flow, rate: float) -> bool:
    """Whether the flow takes up again the rate with which it rests: nothing has changed it."""
    if rate > flow.bound or (flow.limit is None and rate < flow.bound):
        end_solitude(flow)
        return False
    flow.settled = True
    flow.previous = 0.0
    flow.rate = rate
    flow.resting = None
    return True


def _enter(flow: Flow, disturbed: list[Resource]) -> None:
    flow.settled = True
    flow.previous = 0.0
    if not flow.tight:
        admit(flow)
    for resource, amount in flow.tight:
        flows = resource.flows
        if len(flows) == 1:
            ((other, _),) = flows.values()
            if other.alone:
                end_solitude(other)
        flows[flow.id] = (flow, amount)
        if resource.level != inf:
            disturbed.append(resource)


def _leave(flow: Flow, disturbed: list[Resource]) -> None:
    flow.settled = False
    rate = flow.rate
    if flow.alone:
        flow.resting = rate
        flow.rate = 0.0
        return
    for resource, amount in flow.tight:
        flows = resource.flows
        del flows[flow.id]
        if not flows:
            resource.load = 0.0
            resource.level = inf
        else:
            resource.load -= amount * rate
            if resource.level != inf:
                disturbed.append(resource)
    flow.rate = flow.level = 0.0
    flow.limit = None


def _empty(resource: Resource, region: list[Flow], disturbed: list[Resource]) -> None:
    """Fill the resource's flows from nothing: the difference to a far larger old rate would be all rounding."""
    for flow, _ in resource.flows.values():
        if not flow.inside:
            _join(flow, region)
        for used, amount in flow.tight:
            used.load -= amount * flow.rate
            if used.level != inf:
                disturbed.append(used)
        flow.rate = 0.0
    resource.load = 0.0


def _join(flow: Flow, region: list[Flow]) -> None:
    flow.inside = True
    flow.alone = False
    flow.previous = flow.rate
    region.append(flow)


def _repair(region: list[Flow], touched: list[Resource]) -> None:
    """Fill again where the certificate fails, lowest level first. All flows that are met join the region."""
    part = region.copy()
    suspects: list[tuple[float, int, Resource]] = []
    order = count()
    repairs = 0
    while True:
        for resource in touched:
            if offenders(resource):
                heappush(suspects, (resource.level, next(order), resource))
        failing: list[Flow] = []
        while suspects and not failing:
            failing = offenders(heappop(suspects)[2])
        if not failing:
            return
        size = len(region)
        for flow in failing:
            if not flow.inside:
                _join(flow, region)
        repairs += 1
        if repairs <= PATIENCE * (8 + size):
            part = _united(part, failing)
        elif len(part) < len(region):
            part = region.copy()
        else:
            touched = []
            continue
        touched = fill(part)


def _united(part: list[Flow], failing: list[Flow]) -> list[Flow]:
    if not any(flow in part for flow in failing):
        return failing
    return part + [flow for flow in failing if flow not in part]
