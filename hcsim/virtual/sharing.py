"""Weighted max-min fair rates for flows over shared resources, brought up to date locally.

Flow f has rate x_f ≤ bound b_f and weight w_f; one unit of f takes a_fr of resource r, which has
capacity C_r. Progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2) raises all levels
x_f/w_f together until a resource is full or a flow meets its bound, freezes those, and goes on.
The result is the only allocation for which this certificate holds: no resource is over its
capacity, and every flow is at its bound or has a full resource in which its level is largest.

So a change is repaired where it happened. A region starts as the flows that changed and those
that a changed resource held back. It is filled against the capacity that all others leave, and
then the certificate is checked in the resources it uses. A flow outside that could now go
faster, or holds back a flow of the region while it stands higher, joins, and the region is
filled again. A region only grows, and the whole component is always right, so this ends.

Cost: a flow that disturbs nobody is O(its uses). A region of n flows fills in O(n log n) for a
fixed number of uses each. A ripple dies out by the ratio of the coefficients at each hop (0.03
for acknowledgements), so the region is small however many flows there are. Where it is not, each
round after the first few also takes in the neighbours, and the rounds stay few.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from math import inf
from operator import attrgetter

from hcsim.errors import UsageError

TOLERANCE = 1e-12
"""Relative; what differs by less is equal. Far above the rounding of a sum over a thousand flows
(1e-13), and far below one nanosecond in a transfer of minutes."""

_PATIENCE = 4
"""Rounds in which a region takes in only the flows that must join."""

_by_id = attrgetter("id")


class Resource:
    """Something with a capacity: one direction of a wire, the air around an access point."""

    __slots__ = ("capacity", "flows", "level", "load", "name", "need", "seen", "stale")

    def __init__(self, name: str, capacity: float) -> None:
        self.name = name
        self.capacity = capacity
        self.flows: dict[int, tuple[Flow, float]] = {}
        self.load = 0.0
        self.level = inf
        """The level at which it holds flows back; infinite where it surely holds none."""
        self.seen = 0
        self.need = 0.0
        self.stale = False

    def __repr__(self) -> str:
        return f"Resource({self.name!r}, {self.capacity!r})"


class Flow:
    """One stream's claim to a share; idle until started."""

    __slots__ = (
        "active", "bound", "id", "inside", "level", "limit", "noted", "open", "previous", "rate", "settled", "uses", "weight"
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
        self.weight = weight
        self.bound = bound
        self.rate = 0.0
        self.level = 0.0
        self.limit: Resource | None = None
        self.active = False
        self.settled = False
        self.noted = False
        self.open = False
        self.inside = False
        self.previous = 0.0

    def __repr__(self) -> str:
        return f"Flow({self.id}, rate={self.rate!r})"


class Sharing:
    """Keeps the rates of all started flows. Changes are noted, and take effect with `solve`."""

    def __init__(self) -> None:
        self._noted: list[Flow] = []
        self._recast: dict[Resource, None] = {}
        self._fills = 0

    def start(self, flow: Flow) -> None:
        """The flow wants its share."""
        flow.active = True
        if not flow.noted:
            flow.noted = True
            self._noted.append(flow)

    def stop(self, flow: Flow) -> None:
        """The flow gives its share back."""
        flow.active = False
        if not flow.noted:
            flow.noted = True
            self._noted.append(flow)

    def set_bound(self, flow: Flow, bound: float) -> None:
        """The flow, started or not, goes no faster than that from now on."""
        flow.bound = bound
        if not flow.noted:
            flow.noted = True
            self._noted.append(flow)

    def set_capacity(self, resource: Resource, capacity: float) -> None:
        """The resource has that capacity from now on."""
        if capacity != resource.capacity:
            resource.capacity = capacity
            self._recast[resource] = None

    def is_full(self, resource: Resource) -> bool:
        """Whether the flows take all there is, as of the last `solve`."""
        return resource.capacity - resource.load <= TOLERANCE * resource.capacity

    def solve(self) -> list[Flow]:
        """Bring all rates up to date; return the started flows whose rate changed, by id.

        A stopped flow has rate 0 afterwards and is not among them.
        """
        region = self._take_noted()
        if not region:
            return region
        rounds = 0
        while True:
            touched = _fill_one(region[0]) if len(region) == 1 else self._fill(region)
            size = len(region)
            for resource in touched:
                if resource.level != inf:
                    _admit(resource, region)
            if len(region) == size:
                break
            rounds += 1
            if rounds > _PATIENCE:
                _admit_neighbours(region, 2 * size)
        return _changed(region)

    def _take_noted(self) -> list[Flow]:
        region: list[Flow] = []
        freed: list[Resource] = []
        for flow in self._noted:
            flow.noted = False
            if flow.active:
                if not flow.settled:
                    flow.settled = True
                    for resource, amount in flow.uses:
                        resource.flows[flow.id] = (flow, amount)
                elif flow.rate <= flow.bound if flow.limit is not None else flow.rate == flow.bound:
                    continue
                flow.inside = True
                flow.previous = flow.rate
                region.append(flow)
            elif flow.settled:
                _leave(flow, freed)
        self._noted.clear()
        for resource in freed:
            for flow, _ in resource.flows.values():
                if flow.limit is resource and not flow.inside:
                    _join(flow, region)
        if self._recast:
            for resource in self._recast:
                for flow, _ in resource.flows.values():
                    if not flow.inside:
                        _join(flow, region)
            self._recast.clear()
        return region

    def _fill(self, region: list[Flow]) -> list[Resource]:
        """Progressive filling of the region in what the flows outside leave; returns the resources it uses."""
        self._fills += 1
        stamp = self._fills
        touched: list[Resource] = []
        for flow in region:
            flow.open = True
            rate, weight = flow.rate, flow.weight
            for resource, amount in flow.uses:
                if resource.seen != stamp:
                    resource.seen = stamp
                    resource.need = 0.0
                    resource.stale = False
                    touched.append(resource)
                resource.load -= amount * rate
                resource.need += amount * weight
        heap: list[tuple[float, int, Resource | Flow]] = [
            ((resource.capacity - resource.load) / resource.need, number, resource)
            for number, resource in enumerate(touched)
        ]
        heap += [(flow.bound / flow.weight, ~number, flow) for number, flow in enumerate(region) if flow.bound != inf]
        heapify(heap)
        left = len(region)
        while left:
            level, number, item = heap[0]
            if number < 0:
                heappop(heap)
                if item.open:
                    _freeze(item, item.bound / item.weight, None)
                    left -= 1
            elif item.stale:
                item.stale = False
                need = 0.0
                for flow, amount in item.flows.values():
                    if flow.open:
                        need += amount * flow.weight
                if need:
                    heapreplace(heap, (max(level, (item.capacity - item.load) / need), number, item))
                else:
                    heappop(heap)
            else:
                heappop(heap)
                if level < 0.0:
                    level = 0.0
                item.level = level
                for flow, _ in item.flows.values():
                    if flow.open:
                        _freeze(flow, level, item)
                        left -= 1
        return touched


def _freeze(flow: Flow, level: float, limit: Resource | None) -> None:
    flow.open = False
    rate = flow.bound if limit is None else level * flow.weight
    if abs(rate - flow.previous) <= TOLERANCE * rate:
        rate = flow.previous
        level = rate / flow.weight
    flow.rate = rate
    flow.level = level
    flow.limit = limit
    for resource, amount in flow.uses:
        resource.load += amount * rate
        resource.stale = True


def _fill_one(flow: Flow) -> list[Resource]:
    """The region of one flow: it takes what is left."""
    old = flow.rate
    rate = flow.bound
    limit = None
    for resource, amount in flow.uses:
        share = (resource.capacity - resource.load) / amount + old
        if share < rate:
            rate = share
            limit = resource
    if rate < 0.0:
        rate = 0.0
    if abs(rate - old) <= TOLERANCE * rate:
        rate = old
    flow.rate = rate
    flow.limit = limit
    level = flow.level = rate / flow.weight
    if limit is not None:
        limit.level = level
    change = rate - old
    touched = []
    for resource, amount in flow.uses:
        resource.load += amount * change
        if resource.level != inf:
            touched.append(resource)
    return touched


def _leave(flow: Flow, freed: list[Resource]) -> None:
    flow.settled = False
    rate = flow.rate
    for resource, amount in flow.uses:
        flows = resource.flows
        del flows[flow.id]
        if flows:
            resource.load -= amount * rate
            if resource.level != inf:
                freed.append(resource)
        else:
            resource.load = 0.0
            resource.level = inf
    flow.rate = flow.level = 0.0
    flow.limit = None


def _join(flow: Flow, region: list[Flow]) -> None:
    flow.inside = True
    flow.previous = flow.rate
    region.append(flow)


def _admit(resource: Resource, region: list[Flow]) -> None:
    """Check the certificate in a resource; the flows outside that contradict it join."""
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
        return
    spare = resource.capacity - load
    margin = TOLERANCE * resource.capacity
    if -margin <= spare <= margin:
        if held >= top * (1.0 - TOLERANCE):
            return
        for flow, _ in resource.flows.values():
            if not flow.inside and (flow.level > held * (1.0 + TOLERANCE) or flow.limit is resource):
                _join(flow, region)
    else:
        for flow, _ in resource.flows.values():
            if not flow.inside and (spare < 0.0 or flow.limit is resource):
                _join(flow, region)


def _admit_neighbours(region: list[Flow], size: int) -> None:
    for flow in region:
        for resource, _ in flow.uses:
            if resource.level != inf:
                for other, _ in resource.flows.values():
                    if not other.inside:
                        _join(other, region)
        if len(region) >= size:
            return


def _changed(region: list[Flow]) -> list[Flow]:
    changed = []
    for flow in region:
        flow.inside = False
        if flow.rate != flow.previous:
            changed.append(flow)
    if len(changed) > 1:
        changed.sort(key=_by_id)
    return changed
