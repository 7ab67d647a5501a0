"""Weighted max-min fair rates for flows over shared resources, kept up to date by local repair.

Flow f has rate x_f ≤ bound b_f and weight w_f; one unit of it takes a_fr of resource r, which has
capacity C_r. Progressive filling gives the only rates for which this certificate
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
grow. A failure that remains after that is rounding, and is ignored.

A flow that stops while it has its resources to itself keeps its share reserved until another flow
starts there. If it restarts before that, it resumes at its old rate, and no other flow is examined.

Progressive filling. Raise the levels x/w of all flows together until a resource is full or a flow meets its bound,
freeze those that are held, and go on with the rest (Bertsekas and Gallager, Data Networks, 6.5.2).

There are three ways to do it, for speed alone. One flow takes what is left. A few are filled
round by round, O(n²). Many are filled from a heap of resources, by the level at which each will be
full, and of flows, by the level of their bound: O(n log n) for a bounded number of uses. Such a level
only rises while flows elsewhere freeze, so an entry may be out of date in the heap, and is corrected
when it comes to the top.

A resource's load is a running sum; `offenders` takes it anew wherever flows are held.

Which resources could ever be full is known beforehand. No flow is faster than its narrowest resource
lets it be when it is alone there. A resource that has room for all its flows at that speed is never
full: a 10 Gb/s port behind which only 1 Gb/s ports send, say. It is loose, and the filling leaves it
out; on a ring of unlike links that saves a fifth.

A resource once tight stays tight. Where a capacity changes, flows may come to go faster than was
thought: that resource then counts for no flow's speed any more, and it and all that its flows use
are tight from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf
from operator import attrgetter

from hcsim.errors import UsageError

TOLERANCE = 1e-12
"""The relative tolerance of comparisons. It is well above the rounding error of a sum over a thousand flows
(1e-13), and far below a nanosecond in a transfer of minutes."""

FEW = 8
"""Up to this number of flows, rounds are at least as fast as a heap (measured)."""

PATIENCE = 4
"""Repairs per flow of the region before the region is filled as a whole. One or two are usual."""

_by_id = attrgetter("id")


class Resource:
    """A shared capacity: one direction of a wire, or the air time of an access point."""

    __slots__ = (
        "capacity", "demand", "fixed", "flows", "level", "load", "members", "name", "stale", "tight"
    )  # fmt: skip

    def __init__(self, name: str, capacity: float) -> None:
        if not 0.0 <= capacity < inf:
            raise UsageError(f"{name} cannot have a capacity of {capacity}")
        self.name = name
        self.capacity = capacity
        self.flows: dict[int, tuple[Flow, float]] = {}
        self.load = 0.0
        self.level = inf
        """The level at which it limits flows; infinite where it certainly limits none."""
        self.stale = False
        self.members: list[Flow] = []
        """Flows that were started through it and are not forgotten."""
        self.demand = 0.0
        """The sum over all flows ever admitted of the rate that each has when it is alone. It never decreases."""
        self.tight = False
        """Whether it may saturate; a loose resource takes no part in the filling."""
        self.fixed = True
        """Whether its capacity has never changed."""

    def __repr__(self) -> str:
        return f"Resource({self.name!r}, {self.capacity!r})"


class Flow:
    """The claim of one stream to a share. A unit of its rate takes `amount` of each (resource, amount) in use."""

    __slots__ = (
        "alone", "bound", "id", "inside", "level", "limit", "noted", "open", "previous", "rate", "resting", "settled",
        "tight", "uses", "wanted", "weight",
    )  # fmt: skip

    def __init__(
        self, id: int, uses: tuple[tuple[Resource, float], ...], weight: float = 1.0, bound: float = inf
    ) -> None:
        if not uses or not weight > 0.0 or not bound >= 0.0 or not all(amount > 0.0 for _, amount in uses):
            raise UsageError(f"flow {id} needs a resource, positive coefficients and weight, and a bound of 0 or more")
        amounts: dict[Resource, float] = {}
        for resource, amount in uses:
            amounts[resource] = amounts.get(resource, 0.0) + amount
        self.id = id
        self.uses = tuple(amounts.items())
        self.tight: tuple[tuple[Resource, float], ...] = ()
        """The subset of its uses that may saturate."""
        self.weight = weight
        self.bound = bound
        self.rate = 0.0
        self.level = 0.0
        self.limit: Resource | None = None
        """The saturated resource that limits it; None at its own bound."""
        self.open = False
        """Whether it is being filled and not yet frozen."""
        self.wanted = self.settled = self.noted = self.inside = False
        self.previous = 0.0
        self.alone = False
        """Whether it is the only flow in every resource that could limit it, and has its full rate there."""
        self.resting: float | None = None
        """The last rate of a stopped flow, while no other flow has started: its share and level stay reserved."""

    def __repr__(self) -> str:
        return f"Flow({self.id}, rate={self.rate!r})"


def _fill_one(flow: Flow) -> list[Resource]:
    """Give the flow the remaining capacity; return the resources in which the certificate may now fail."""
    old = flow.rate
    rate = flow.bound
    limit = None
    for resource, amount in flow.tight:
        share = (resource.capacity - resource.load) / amount + old
        if share < rate:
            rate = share
            limit = resource
    if rate < 0.0:
        rate = 0.0
    if abs(rate - flow.previous) <= TOLERANCE * rate:
        rate = flow.previous
    flow.rate = rate
    flow.level = rate / flow.weight
    flow.limit = limit
    change = rate - old
    touched = []
    for resource, amount in flow.tight:
        resource.load += amount * change
        if resource.level != inf or resource is limit:
            touched.append(resource)
    if limit is not None:
        limit.level = flow.level
        if len(touched) == 1 and len(limit.flows) == 1:
            touched.clear()
    return touched


def fill_alone(flow: Flow) -> None:
    """Give a flow that shares no tight resource its full rate."""
    rate = flow.bound
    limit = None
    for resource, amount in flow.tight:
        share = resource.capacity / amount
        if share < rate:
            rate = share
            limit = resource
    flow.rate = rate
    flow.level = rate / flow.weight
    flow.limit = limit
    for resource, amount in flow.tight:
        resource.load = amount * rate
        resource.level = inf
    if limit is not None:
        limit.level = flow.level
    flow.alone = True


def end_exclusive_use(flow: Flow) -> None:
    """End the exclusive use of a flow's resources: another flow starts, or a capacity changes.

    A stopped flow gives up its reserved share."""
    flow.alone = False
    if flow.resting is not None:
        flow.resting = flow.limit = None
        flow.level = 0.0
        for resource, _ in flow.tight:
            resource.flows.clear()
            resource.load = 0.0
            resource.level = inf


def fill(flows: list[Flow]) -> list[Resource]:
    """Give the flows their fair shares of the remaining capacity; return the resources in which the certificate may
    now fail."""
    if len(flows) == 1:
        return _fill_one(flows[0])
    touched: dict[Resource, None] = {}
    for flow in flows:
        rate = flow.rate
        for resource, amount in flow.tight:
            resource.load -= amount * rate
    if len(flows) <= FEW:
        _fill_few(flows, touched)
    else:
        _fill_many(flows, touched)
    return list(touched)


def _fill_few(flows: list[Flow], touched: dict[Resource, None]) -> None:
    while len(flows) > 1:
        needs: dict[Resource, float] = {}
        level = inf
        limit = first = None
        for flow in flows:
            weight = flow.weight
            if flow.bound < level * weight:
                level = flow.bound / weight
                first = flow
            for resource, amount in flow.tight:
                if resource in needs:
                    needs[resource] += amount * weight
                else:
                    needs[resource] = amount * weight
        for resource, need in needs.items():
            share = (resource.capacity - resource.load) / need
            if share < level:
                level = share if share > 0.0 else 0.0
                limit = resource
        rest = []
        for flow in flows:
            if limit is not None and flow.id in limit.flows:
                _freeze(flow, level * flow.weight, limit, touched)
            elif limit is None and flow is first:
                _freeze(flow, flow.bound, None, touched)
            else:
                rest.append(flow)
        flows = rest
    for flow in flows:
        rate = flow.bound
        limit = None
        for resource, amount in flow.tight:
            share = (resource.capacity - resource.load) / amount
            if share < rate:
                rate = share if share > 0.0 else 0.0
                limit = resource
        _freeze(flow, rate, limit, touched)


def _fill_many(flows: list[Flow], touched: dict[Resource, None]) -> None:
    needs: dict[Resource, float] = {}
    for flow in flows:
        flow.open = True
        for resource, amount in flow.tight:
            needs[resource] = needs.get(resource, 0.0) + amount * flow.weight
    heap: list[tuple[float, int, Resource | Flow]] = []
    for resource, need in needs.items():
        resource.stale = False
        heap.append(((resource.capacity - resource.load) / need, len(heap), resource))
    heap += [(flow.bound / flow.weight, ~number, flow) for number, flow in enumerate(flows) if flow.bound != inf]
    heapify(heap)
    left = len(flows)
    while left:
        level, number, held = heap[0]
        if isinstance(held, Flow):
            heappop(heap)
            if held.open:
                _freeze(held, held.bound, None, touched)
                left -= 1
        elif held.stale:
            held.stale = False
            need = sum([amount * flow.weight for flow, amount in held.flows.values() if flow.open])
            if need:
                heapreplace(heap, (max(level, (held.capacity - held.load) / need), number, held))
            else:
                heappop(heap)
        else:
            heappop(heap)
            level = max(level, 0.0)
            for flow, _ in held.flows.values():
                if flow.open:
                    _freeze(flow, level * flow.weight, held, touched)
                    left -= 1


def _freeze(flow: Flow, rate: float, limit: Resource | None, touched: dict[Resource, None]) -> None:
    if abs(rate - flow.previous) <= TOLERANCE * rate:
        rate = flow.previous
    moved = rate != flow.rate
    flow.open = False
    flow.rate = rate
    flow.level = rate / flow.weight
    if limit is not None:
        limit.level = flow.level
        if (moved or limit is not flow.limit) and len(limit.flows) > 1:
            touched[limit] = None
    flow.limit = limit
    for resource, amount in flow.tight:
        resource.load += amount * rate
        resource.stale = True
        if moved and resource.level != inf:
            touched[resource] = None


def offenders(resource: Resource) -> list[Flow]:
    """Check the certificate in a resource; return the flows that have to be filled again."""
    load = top = 0.0
    held = inf
    for flow, amount in resource.flows.values():
        load += amount * flow.rate
        level = flow.level
        if level > top:
            top = level
        if level < held and flow.limit is resource:
            held = level
    resource.load = load
    resource.level = held
    if held == inf:
        return []
    spare = resource.capacity - load
    margin = TOLERANCE * resource.capacity
    if spare > margin:
        return [flow for flow, _ in resource.flows.values() if flow.limit is resource]
    if spare < -margin:
        return [flow for flow, _ in resource.flows.values()]
    if held >= top * (1.0 - TOLERANCE):
        return []
    return [flow for flow, _ in resource.flows.values() if flow.level > held or flow.limit is resource]


def admit(flow: Flow) -> None:
    """Register a flow that starts for the first time."""
    fastest = min((resource.capacity / amount for resource, amount in flow.uses if resource.fixed), default=inf)
    for resource, amount in flow.uses:
        resource.members.append(flow)
        resource.demand += amount * fastest
        if resource.demand >= resource.capacity * (1.0 - TOLERANCE):
            _tighten(resource)
    flow.tight = tuple((resource, amount) for resource, amount in flow.uses if resource.tight)


def dismiss(flow: Flow) -> None:
    """Unregister a flow that will not start again. Resources that it made tight stay tight."""
    for resource, _ in flow.uses:
        if flow in resource.members:
            resource.members.remove(flow)


def unfix(resource: Resource) -> None:
    """Register that the capacity of a resource changes."""
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
        end_exclusive_use(flow)
        flow.tight = tuple((used, amount) for used, amount in flow.uses if used.tight)
        for used, amount in flow.tight:
            if used is resource and flow.settled:
                resource.flows[flow.id] = (flow, amount)
                resource.load += amount * flow.rate


class RateAllocator:
    """The rates of all started flows. Changes are queued and take effect with `solve`."""

    def __init__(self) -> None:
        self._noted: list[Flow] = []
        self._changed_capacities: dict[Resource, None] = {}
        self._forgotten: list[Flow] = []

    def start(self, flow: Flow) -> None:
        flow.wanted = True
        if not flow.noted:
            flow.noted = True
            self._noted.append(flow)

    def stop(self, flow: Flow) -> None:
        flow.wanted = False
        if not flow.noted:
            flow.noted = True
            self._noted.append(flow)

    def set_bound(self, flow: Flow, bound: float) -> None:
        """Limit the rate of the flow, whether started or not."""
        if not bound >= 0.0:
            raise UsageError(f"flow {flow.id} cannot have a bound of {bound}")
        flow.bound = bound
        if not flow.noted:
            flow.noted = True
            self._noted.append(flow)

    def set_capacity(self, resource: Resource, capacity: float) -> None:
        if not 0.0 <= capacity < inf:
            raise UsageError(f"{resource.name} cannot have a capacity of {capacity}")
        if capacity != resource.capacity:
            for flow, _ in tuple(resource.flows.values()):
                end_exclusive_use(flow)
            unfix(resource)
            resource.capacity = capacity
            self._changed_capacities[resource] = None

    def forget(self, flow: Flow) -> None:
        """Remove a flow that will not be started again."""
        self.stop(flow)
        self._forgotten.append(flow)

    def is_full(self, resource: Resource) -> bool:
        """Return whether the flows used the whole capacity at the last `solve`."""
        flows = resource.flows
        rests = len(flows) == 1 and all(flow.resting is not None for flow, _ in flows.values())
        load = 0.0 if rests else resource.load
        return resource.capacity - load <= TOLERANCE * resource.capacity

    def is_used(self, resource: Resource) -> bool:
        """Return whether a started flow uses the resource, including queued starts."""
        return any(flow.wanted for flow in resource.members) or any(
            flow.wanted and resource in dict(flow.uses) for flow in self._noted
        )

    def started(self, resource: Resource) -> Iterator[tuple[Flow, float]]:
        """Yield the started flows that use the resource, and how much of it a byte takes, by id."""
        found = {flow.id: (flow, amount) for flow, amount in resource.flows.values() if flow.wanted}
        for flow in self._noted:
            amount = dict(flow.uses).get(resource) if flow.wanted else None
            if amount is not None:
                found[flow.id] = flow, amount
        yield from (found[id] for id in sorted(found))

    def solve(self) -> list[Flow]:
        """Update all rates; return the started flows whose rate has changed, by id.

        A stopped flow has rate 0 afterwards and is not among them."""
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
        """Apply the queued starts, stops, bounds, capacities and removals; return the flows that have to be filled."""
        region: list[Flow] = []
        disturbed: list[Resource] = []
        for flow in self._noted:
            flow.noted = False
            if not flow.wanted:
                if flow.settled:
                    _leave(flow, disturbed)
            elif not flow.settled:
                if flow.resting is None or not _try_resume(flow, flow.resting):
                    _enter(flow, disturbed)
                flow.inside = True
                region.append(flow)
            elif flow.rate > flow.bound or (flow.limit is None and flow.rate < flow.bound):
                _join(flow, region)
        self._noted.clear()
        if self._changed_capacities:
            for resource in self._changed_capacities:
                _reset_rates(resource, region, disturbed)
            self._changed_capacities.clear()
        for resource in disturbed:
            for flow, _ in resource.flows.values():
                if flow.limit is resource and not flow.inside:
                    _join(flow, region)
        while self._forgotten:
            dismiss(self._forgotten.pop())
        return region


def _try_resume(flow: Flow, rate: float) -> bool:
    """Resume a flow at its reserved rate, or give up the reservation if its bound has changed; return which."""
    if rate > flow.bound or (flow.limit is None and rate < flow.bound):
        end_exclusive_use(flow)
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
                end_exclusive_use(other)
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


def _reset_rates(resource: Resource, region: list[Flow], disturbed: list[Resource]) -> None:
    """Set the rates of the resource's flows to zero and queue them for filling.

    Subtracting from a far larger old rate would leave only rounding errors."""
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
    """Fill again where the certificate fails, lowest level first. All flows met join the region."""
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
