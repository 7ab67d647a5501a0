"""The sharing model against its certificate, a plain reference, and shares worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hcsim.errors import UsageError
from hcsim.virtual.rate_allocator import Flow, RateAllocator, Resource

SLACK = 1e-9


def certificate(flows: Sequence[Flow]) -> None:
    """Max-min fairness: no resource over capacity; each flow at its bound, or highest in a full resource."""
    resources = list(dict.fromkeys(resource for flow in flows for resource, _ in flow.uses))
    load = {r: sum(a * f.rate for f in flows for s, a in f.uses if s is r) for r in resources}
    top = {r: max(f.rate / f.weight for f in flows for s, _ in f.uses if s is r) for r in resources}
    for resource in resources:
        assert load[resource] <= resource.capacity * (1 + SLACK), f"{resource} carries {load[resource]}"
    for flow in flows:
        assert 0.0 <= flow.rate <= flow.bound * (1 + SLACK), f"{flow} is over its bound {flow.bound}"
        at_bound = flow.rate >= flow.bound * (1 - SLACK)
        held = any(
            load[r] >= r.capacity * (1 - SLACK) and flow.rate / flow.weight >= top[r] * (1 - SLACK)
            for r, _ in flow.uses
        )
        assert at_bound or held, f"{flow} could go faster: neither at its bound nor highest in a full resource"


def progressive_filling(flows: Sequence[Flow]) -> dict[int, float]:
    """The definition, step by step: raise all levels together, freeze what is held, go on."""
    rates = {flow.id: 0.0 for flow in flows}
    rising = list(flows)
    while rising:
        level = min(flow.bound / flow.weight for flow in rising)
        resources = dict.fromkeys(resource for flow in rising for resource, _ in flow.uses)
        levels = {}
        for resource in resources:
            using = [(f, a) for f in flows for r, a in f.uses if r is resource]
            frozen = sum(a * rates[f.id] for f, a in using if f not in rising)
            levels[resource] = max(0.0, resource.capacity - frozen) / sum(a * f.weight for f, a in using if f in rising)
        level = min(level, *levels.values())
        held = [
            flow
            for flow in rising
            if flow.bound / flow.weight <= level * (1 + 1e-12)
            or any(levels[r] <= level * (1 + 1e-12) for r, _ in flow.uses)
        ]
        for flow in held:
            rates[flow.id] = level * flow.weight
        rising = [flow for flow in rising if flow not in held]
    return rates


def shared(*flows: Flow) -> list[float]:
    """The rates when all of them run."""
    sharing = RateAllocator()
    for flow in flows:
        sharing.start(flow)
    sharing.solve()
    certificate(flows)
    return [flow.rate for flow in flows]


def ring(capacities: Sequence[float], ack: float) -> list[Flow]:
    """Flow i goes from host i to host i+1; its acknowledgements take a share of the way back."""
    egress = [Resource(f"egress {i}", capacity) for i, capacity in enumerate(capacities)]
    ingress = [Resource(f"ingress {i}", capacity) for i, capacity in enumerate(capacities)]
    flows = []
    for i in range(len(capacities)):
        j = (i + 1) % len(capacities)
        flows.append(Flow(i, ((egress[i], 1.0), (ingress[j], 1.0), (egress[j], ack), (ingress[i], ack))))
    return flows


def test_two_flows_on_one_link_get_half_each() -> None:
    link = Resource("link", 10.0)
    assert shared(Flow(1, ((link, 1.0),)), Flow(2, ((link, 1.0),))) == [5.0, 5.0]


def test_shares_follow_the_weights() -> None:
    link = Resource("link", 12.0)
    assert shared(Flow(1, ((link, 1.0),), weight=1.0), Flow(2, ((link, 1.0),), weight=3.0)) == [3.0, 9.0]


def test_what_a_bounded_flow_leaves_goes_to_the_others() -> None:
    link = Resource("link", 10.0)
    flows = [Flow(1, ((link, 1.0),), bound=2.0), Flow(2, ((link, 1.0),)), Flow(3, ((link, 1.0),))]
    assert shared(*flows) == [2.0, 4.0, 4.0]


def test_a_long_path_gets_the_share_of_its_narrowest_link() -> None:
    narrow, wide = Resource("narrow", 2.0), Resource("wide", 10.0)
    flows = [Flow(1, ((narrow, 1.0), (wide, 1.0))), Flow(2, ((narrow, 1.0),)), Flow(3, ((wide, 1.0),))]
    assert shared(*flows) == [1.0, 1.0, 9.0]


def test_wifi_stations_of_weight_one_all_get_the_throughput_that_the_slow_one_allows() -> None:
    air = Resource("air", 1.0)
    rates = shared(*(Flow(i, ((air, 1.0 / phy),)) for i, phy in enumerate((100.0, 100.0, 10.0))))
    assert rates == pytest.approx([1.0 / (1 / 100 + 1 / 100 + 1 / 10)] * 3)


def test_wifi_stations_weighted_by_their_speed_get_equal_airtime() -> None:
    air = Resource("air", 1.0)
    rates = shared(*(Flow(i, ((air, 1.0 / phy),), weight=phy) for i, phy in enumerate((100.0, 100.0, 10.0))))
    assert rates == pytest.approx([100 / 3, 100 / 3, 10 / 3])


@pytest.mark.parametrize(
    ("upload_bound", "rates"),
    [
        # Together until 1.03 x = 10 fills the uplink: it holds back the download by its acknowledgements.
        (inf, [10 / 1.03, 10 / 1.03]),
        # The bounded upload leaves room for the download's acknowledgements; now the downlink is full.
        (4.0, [4.0, 100.0 - 0.03 * 4.0]),
    ],
)
def test_acknowledgements_take_their_share_of_an_asymmetric_path(upload_bound: float, rates: list[float]) -> None:
    up, down = Resource("up", 10.0), Resource("down", 100.0)
    upload = Flow(1, ((up, 1.0), (down, 0.03)), bound=upload_bound)
    download = Flow(2, ((down, 1.0), (up, 0.03)))
    assert shared(upload, download) == pytest.approx(rates)


def test_a_resource_that_is_used_twice_counts_twice() -> None:
    air = Resource("air", 1.0)
    assert shared(Flow(1, ((air, 1.0 / 50.0), (air, 1.0 / 50.0)))) == [25.0]


def test_nothing_flows_through_a_closed_resource_and_the_others_do_not_mind() -> None:
    closed, link = Resource("closed", 0.0), Resource("link", 10.0)
    assert shared(Flow(1, ((closed, 1.0), (link, 1.0))), Flow(2, ((link, 1.0),))) == [0.0, 10.0]


def test_a_flow_bounded_to_nothing_takes_nothing() -> None:
    link = Resource("link", 10.0)
    assert shared(Flow(1, ((link, 1.0),), bound=0.0), Flow(2, ((link, 1.0),))) == [0.0, 10.0]


def test_a_capacity_or_a_bound_without_meaning_is_refused() -> None:
    link = Resource("link", 1.0)
    flow = Flow(1, ((link, 1.0),))
    for bad in (-1.0, inf, float("nan")):
        with pytest.raises(UsageError):
            Resource("bad", bad)
        with pytest.raises(UsageError):
            RateAllocator().set_capacity(link, bad)
    with pytest.raises(UsageError):
        RateAllocator().set_bound(flow, -1.0)


@pytest.mark.parametrize("bad", [{"uses": ()}, {"weight": 0.0}, {"bound": -1.0}])
def test_a_flow_without_meaning_is_refused(bad: dict[str, object]) -> None:
    good: dict[str, object] = {"uses": ((Resource("link", 1.0), 1.0),)}
    with pytest.raises(UsageError):
        Flow(1, **(good | bad))  # type: ignore[arg-type]


def test_a_coefficient_must_be_positive() -> None:
    with pytest.raises(UsageError):
        Flow(1, ((Resource("link", 1.0), 0.0),))


def test_solve_returns_the_started_flows_whose_rate_changed_in_order_of_their_ids() -> None:
    link, other = Resource("link", 10.0), Resource("other", 10.0)
    first, second, apart = Flow(1, ((link, 1.0),)), Flow(2, ((link, 1.0),)), Flow(3, ((other, 1.0),))
    sharing = RateAllocator()
    for flow in (apart, second, first):
        sharing.start(flow)
    assert sharing.solve() == [first, second, apart]
    assert sharing.solve() == []
    sharing.stop(second)
    assert sharing.solve() == [first]
    assert (first.rate, second.rate, apart.rate) == (10.0, 0.0, 10.0)


def test_stopped_and_started_again_in_one_instant_nothing_changes() -> None:
    flows = ring([1.0, 2.0, 3.0], 0.03)
    sharing = RateAllocator()
    for flow in flows:
        sharing.start(flow)
    sharing.solve()
    rates = [flow.rate for flow in flows]
    sharing.stop(flows[1])
    sharing.start(flows[1])
    assert sharing.solve() == []
    assert [flow.rate for flow in flows] == rates


def test_a_resource_is_full_only_while_flows_take_all_of_it() -> None:
    link = Resource("link", 10.0)
    flow = Flow(1, ((link, 1.0),), bound=4.0)
    sharing = RateAllocator()
    sharing.start(flow)
    sharing.solve()
    assert not sharing.is_full(link)
    sharing.set_bound(flow, inf)
    sharing.solve()
    assert sharing.is_full(link)
    sharing.stop(flow)
    sharing.solve()
    assert not sharing.is_full(link)
    sharing.start(flow)
    sharing.solve()
    assert sharing.is_full(link)


@pytest.mark.parametrize("capacity", [10.0, 4.0, 20.0, 0.0])
def test_a_flow_that_starts_again_alone_finds_what_is_there_now(capacity: float) -> None:
    link = Resource("link", 10.0)
    flow = Flow(1, ((link, 1.0),))
    sharing = RateAllocator()
    sharing.start(flow)
    assert sharing.solve() == [flow]
    sharing.stop(flow)
    sharing.solve()
    sharing.set_capacity(link, capacity)
    assert sharing.solve() == []
    assert flow.rate == 0.0
    sharing.start(flow)
    assert sharing.solve() == [flow] * (capacity > 0.0)
    assert flow.rate == capacity


def test_a_flow_that_starts_again_finds_who_came_meanwhile_and_not_who_went() -> None:
    link, other_link = Resource("link", 10.0), Resource("other link", 4.0)
    flow, other = Flow(1, ((link, 1.0),)), Flow(2, ((link, 1.0), (other_link, 1.0)))
    sharing = RateAllocator()
    for started, stopped, rates in (
        ([flow], [], (10.0, 0.0)),
        ([], [flow], (0.0, 0.0)),
        ([other], [], (0.0, 4.0)),
        ([flow], [], (6.0, 4.0)),
        ([], [flow], (0.0, 4.0)),
        ([], [other], (0.0, 0.0)),
        ([flow], [], (10.0, 0.0)),
        ([], [flow], (0.0, 0.0)),
        ([flow, other], [], (6.0, 4.0)),
    ):
        for one in started:
            sharing.start(one)
        for one in stopped:
            sharing.stop(one)
        sharing.solve()
        assert (flow.rate, other.rate) == rates


def test_a_resource_is_used_from_the_start_to_the_stop_of_a_flow_even_one_that_can_never_fill_it() -> None:
    wide, narrow = Resource("wide", 10.0), Resource("narrow", 1.0)
    flow = Flow(1, ((wide, 1.0), (narrow, 1.0)))
    sharing = RateAllocator()
    assert not sharing.is_used(wide)
    sharing.start(flow)
    assert sharing.is_used(wide)
    sharing.solve()
    assert sharing.is_used(wide)
    sharing.stop(flow)
    assert not sharing.is_used(wide)


def test_a_capacity_that_comes_back_is_shared_again() -> None:
    link = Resource("link", 10.0)
    flows = [Flow(1, ((link, 1.0),)), Flow(2, ((link, 1.0),))]
    sharing = RateAllocator()
    for flow in flows:
        sharing.start(flow)
    for capacity, share in ((10.0, 5.0), (0.0, 0.0), (8.0, 4.0)):
        sharing.set_capacity(link, capacity)
        sharing.solve()
        assert [flow.rate for flow in flows] == [share, share]


def test_a_wide_resource_counts_once_enough_flows_use_it() -> None:
    wide = Resource("wide", 5.0)
    flows = [Flow(i, ((wide, 1.0), (Resource(f"narrow {i}", 2.0), 1.0))) for i in range(4)]
    sharing = RateAllocator()
    for flow, share in zip(flows, (2.0, 2.0, 5 / 3, 5 / 4), strict=True):
        sharing.start(flow)
        sharing.solve()
        assert flow.rate == pytest.approx(share)
    certificate(flows)


def test_a_wide_resource_counts_once_its_capacity_falls_or_that_of_another_rises() -> None:
    for wide_capacity, narrow_capacity, share in ((1.0, 2.0, 1.0), (5.0, 9.0, 5.0), (0.0, 2.0, 0.0)):
        wide, narrow = Resource("wide", 5.0), Resource("narrow", 2.0)
        flow = Flow(1, ((wide, 1.0), (narrow, 1.0)))
        sharing = RateAllocator()
        sharing.start(flow)
        sharing.solve()
        sharing.set_capacity(wide, wide_capacity)
        sharing.set_capacity(narrow, narrow_capacity)
        sharing.solve()
        assert flow.rate == share


@pytest.mark.parametrize("capacity", [0.0, 1e-6])
def test_a_resource_that_all_but_closes_leaves_no_rounding_behind(capacity: float) -> None:
    link = Resource("link", 1e9)
    flow = Flow(1, ((link, 0.03),))
    sharing = RateAllocator()
    sharing.start(flow)
    sharing.solve()
    sharing.set_capacity(link, capacity)
    sharing.solve()
    assert flow.rate == capacity / 0.03


@pytest.mark.parametrize("step", [0.0, 0.001, 0.01, 0.25])
def test_a_ring_that_starts_and_stops_flow_by_flow_is_as_if_started_at_once(step: float) -> None:
    flows = ring([1.0 + step * i for i in range(24)], 0.03)
    sharing = RateAllocator()
    for flow in flows:
        sharing.start(flow)
        sharing.solve()
    reference = progressive_filling(flows)
    for flow in flows:
        sharing.stop(flow)
        sharing.solve()
        certificate([other for other in flows if other is not flow])
        sharing.start(flow)
        sharing.solve()
        certificate(flows)
    assert {flow.id: flow.rate for flow in flows} == pytest.approx(reference, rel=1e-9)


@pytest.mark.parametrize("step", [0.0, 0.01])
def test_a_whole_ring_started_or_stopped_by_halves_in_one_instant_is_fair(step: float) -> None:
    flows = ring([1.0 + step * (i * 37 % 64) for i in range(64)], 0.03)
    sharing = RateAllocator()
    for flow in flows:
        sharing.start(flow)
    assert sharing.solve() == flows
    certificate(flows)
    for flow in flows[::2]:
        sharing.stop(flow)
    sharing.solve()
    certificate(flows[1::2])


Ops = list[tuple[str, int, float]]

capacities = st.one_of(st.just(0.0), st.sampled_from([1.0, 10.0]), st.floats(0.1, 100.0))
bounds = st.one_of(st.just(inf), st.just(0.0), st.floats(0.01, 100.0))
amounts = st.one_of(st.just(1.0), st.just(0.03), st.floats(0.02, 3.0))
weights = st.one_of(st.just(1.0), st.floats(0.1, 10.0))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Resource], list[Flow]]:
    resources = [Resource(f"r{i}", draw(capacities)) for i in range(draw(st.integers(1, 8)))]
    flows = []
    for number in range(draw(st.integers(1, 12))):
        used = draw(st.lists(st.sampled_from(resources), min_size=1, max_size=4, unique=True))
        uses = tuple((resource, draw(amounts)) for resource in used)
        flows.append(Flow(number, uses, draw(weights), draw(bounds)))
    return resources, flows


def operations() -> st.SearchStrategy[Ops]:
    index = st.integers(0, 99)
    operation = st.one_of(
        st.tuples(st.sampled_from(["start", "start", "stop"]), index, st.just(0.0)),
        st.tuples(st.just("bound"), index, bounds),
        st.tuples(st.just("capacity"), index, capacities),
    )
    return st.lists(operation, min_size=1, max_size=30)


def apply(sharing: RateAllocator, resources: list[Resource], flows: list[Flow], op: tuple[str, int, float]) -> None:
    kind, index, value = op
    flow, resource = flows[index % len(flows)], resources[index % len(resources)]
    if kind == "start":
        sharing.start(flow)
    elif kind == "stop":
        sharing.stop(flow)
    elif kind == "bound":
        sharing.set_bound(flow, value)
    else:
        sharing.set_capacity(resource, value)


@pytest.mark.slow
@settings(max_examples=200)
@given(worlds(), operations(), st.sampled_from([1, 2, 12]))
def test_after_any_history_the_rates_are_those_of_progressive_filling(
    world: tuple[list[Resource], list[Flow]], ops: Ops, per_instant: int
) -> None:
    resources, flows = world
    sharing = RateAllocator()
    started: dict[int, Flow] = {}
    for number, op in enumerate(ops, start=1):
        apply(sharing, resources, flows, op)
        flow = flows[op[1] % len(flows)]
        if op[0] == "start":
            started[flow.id] = flow
        elif op[0] == "stop":
            started.pop(flow.id, None)
        if number % per_instant:
            continue
        before = {flow.id: flow.rate for flow in flows}
        changed = sharing.solve()
        running = [flow for flow in flows if flow.id in started]
        certificate(running)
        assert {f.id: f.rate for f in running} == pytest.approx(progressive_filling(running), rel=1e-6, abs=1e-9)
        assert all(f.rate == 0.0 for f in flows if f.id not in started)
        assert changed == [f for f in running if f.rate != before[f.id]]


def test_the_same_history_gives_the_same_bits() -> None:
    def run() -> list[str]:
        flows = ring([1.0 + (i * 7 % 11) / 3 for i in range(16)], 0.03)
        sharing = RateAllocator()
        log = []
        for turn in range(200):
            flow = flows[turn * 5 % 16]
            if turn % 3:
                sharing.start(flow)
            else:
                sharing.stop(flow)
            log += [f"{changed.id} {changed.rate.hex()}" for changed in sharing.solve()]
        return log

    assert run() == run()


def test_the_certificate_notices_an_unfair_share() -> None:
    link = Resource("link", 10.0)
    flows = [Flow(1, ((link, 1.0),)), Flow(2, ((link, 1.0),))]
    for rates, complaint in (((6.0, 4.0), "could go faster"), ((4.0, 4.0), "could go faster"), ((6.0, 6.0), "carries")):
        flows[0].rate, flows[1].rate = rates
        with pytest.raises(AssertionError, match=complaint):
            certificate(flows)
