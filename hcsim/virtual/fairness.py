"""Progressive filling: the weighted max-min fair rates of some flows in what all others leave.

Raise the levels x/w of all flows together until a resource is full or a flow meets its bound,
freeze those that are held, and go on with the rest (Bertsekas and Gallager, Data Networks, 6.5.2).

There are three ways to do it, for speed alone. One flow takes what is left. A few are filled
round by round, O(n²). Many are filled from a heap of resources by the level at which each will be
full, O(n log n) for a bounded number of uses. Such a level only rises while flows elsewhere freeze,
so an entry may be out of date in the heap, and is put right when it comes to the top.

A resource's load is a running sum; `offenders` takes it anew wherever flows are held.

Which resources could ever be full is known beforehand. No flow is faster than its narrowest resource
lets it be when it is alone there. A resource that has room for all its flows at that speed is never
full: a 10 Gb/s port behind which only 1 Gb/s ports send, say. It is loose, and the filling leaves it
out; on a ring of unlike links that saves a fifth.

A resource once tight stays tight. Where a capacity changes, flows may come to go faster than was
thought: that resource then counts for no flow's speed any more, and it and all that its flows use
is tight from then on.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from math import inf

from hcsim.errors import UsageError

TOLERANCE = 1e-12
"""Relative; what differs by less is equal. Well above the rounding of a sum over a thousand flows
(1e-13), and far below a nanosecond in a transfer of minutes."""

FEW = 8
"""Up to here rounds are quicker than a heap, or as quick (measured)."""


class Resource:
    """Something with a capacity: one direction of a wire, the air around an access point."""

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
        """The level at which it holds flows back; infinite where it surely holds none."""
        self.stale = False
        self.members: list[Flow] = []
        """All flows that were ever started through it."""
        self.demand = 0.0
        """What its members would take if each went as fast as its other resources ever allow."""
        self.tight = False
        """Whether it could be full; a resource that is not tight takes no part in the filling."""
        self.fixed = True
        """Whether its capacity never changed."""

    def __repr__(self) -> str:
        return f"Resource({self.name!r}, {self.capacity!r})"


class Flow:
    """One stream's claim to a share. One unit of its rate takes `amount` of each (resource, amount) it uses."""

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
        """Those of its uses that could ever be full."""
        self.weight = weight
        self.bound = bound
        self.rate = 0.0
        self.level = 0.0
        self.limit: Resource | None = None
        """The full resource that holds it; None at its bound."""
        self.open = False
        """Being filled, and not yet frozen."""
        self.wanted = self.settled = self.noted = self.inside = False
        self.previous = 0.0
        self.alone = False
        """Nobody else is in what could hold it back, and it has all that it can take there."""
        self.resting: float | None = None
        """Its rate while it went, if it has stopped and nobody has come meanwhile: its place and level are kept."""

    def __repr__(self) -> str:
        return f"Flow({self.id}, rate={self.rate!r})"


def _fill_one(flow: Flow) -> list[Resource]:
    """Give the flow what others leave; return the resources in which the certificate may now fail."""
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
    """Give a flow that shares with nobody all it can take."""
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


def end_solitude(flow: Flow) -> None:
    """Somebody else comes, or what a flow that was alone has found there changes: if it rests, its place is free."""
    flow.alone = False
    if flow.resting is not None:
        flow.resting = flow.limit = None
        flow.level = 0.0
        for resource, _ in flow.tight:
            resource.flows.clear()
            resource.load = 0.0
            resource.level = inf


def fill(flows: list[Flow]) -> list[Resource]:
    """Give the flows their shares of what others leave; return the resources in which the certificate may now fail."""
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
    """Check the certificate in a resource: the flows that have to be filled again; none if all is well."""
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
