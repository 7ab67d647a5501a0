"""The search for the best way to train, in small homes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hcsim.config import Training
from hcsim.errors import ConfigError
from hcsim.plan.bounds import Bounds
from hcsim.plan.candidates import Candidate, candidates
from hcsim.plan.home import bought, home_in_words
from hcsim.plan.methods import Method, methods
from hcsim.plan.outlook import purchases, sensitivity, speedup
from hcsim.plan.plan import model_of
from hcsim.plan.search import Found, Request, Search, simulation_of
from hcsim.plan.simulation import Simulator, simulated
from hcsim.training.fitting import Room, fits_of

WIFI = "M4, M3 Pro on wifi6"
MIXED = "M4, M1 Air on wifi6; M3 Pro on 1gbe"
TOLERANCE = 1.02
PIPELINES = ("pipeline", "pipeline:schedule=gpipe", "pipeline:microbatches=32")


def request(words: str, task: str = "resnet50", **settings: object) -> Request:
    home = home_in_words(words)
    return Request(home, model_of(home, Training(task=task, **settings)), tuple(methods(1)))  # type: ignore[arg-type]


def found(asked: Request, simulator: Simulator | None = None) -> Found:
    return Search(asked, simulator or Simulator(1)).run()


def few(asked: Request) -> Request:
    """With a few methods whose simulation is short."""
    specs = (("single",), ("ddp",), ("ddp", "int8+ef"), ("local_sgd:8",))
    return replace(asked, methods=tuple(Method(*each) for each in specs))


def test_the_plan_is_the_best_of_all_candidates_and_simulates_a_part_of_them() -> None:
    asked = few(request(WIFI))
    plan = found(asked)
    allowed = [each for each in asked.methods if asked.allows(each)]
    all_s = {
        each: simulated(simulation_of(asked, each, is_long=True)).sample_s * asked.learning(each.method).most
        for each in candidates(asked.home, allowed, asked.model.samples, [1, 1])
    }
    assert plan.best.quality_s <= 1.001 * min(all_s.values())
    assert plan.simulated < plan.candidates


def test_no_candidate_is_faster_than_its_bound() -> None:
    asked = few(request(WIFI))
    for each in found(asked).ranked:
        assert each.result.sample_s >= 0.95 * each.bound_s


def test_a_bound_of_a_ring_is_its_closed_form_on_equal_ports() -> None:
    """2 (n − 1)/n of 102 MB of gradients, at 1 Gb/s."""
    asked = request("4 x M4 on 1gbe")
    bound_s = Bounds(asked.home, asked.model).sample_s(
        Candidate(Method("ddp"), tuple(n.name for n in asked.home.nodes))
    )
    gradients = sum(block.length for block in asked.model.task.blocks) * 4
    exchange_s = 2 * 3 / 4 * gradients / 125e6
    assert bound_s * asked.model.samples == pytest.approx(exchange_s, rel=0.4)
    assert bound_s * asked.model.samples >= exchange_s


def test_a_bound_of_a_pipeline_is_its_closed_form_on_like_machines() -> None:
    """n stages and m microbatches take (m + n − 1)/m of the time that n machines need together."""
    asked = request("4 x M4 on thunderbolt", "llama-7b", batch=16)
    names = tuple(node.name for node in asked.home.nodes)
    bounds = Bounds(asked.home, asked.model)
    by_number = {m: bounds.sample_s(Candidate(Method(f"pipeline:microbatches={m}"), names)) for m in (4, 32, 1000)}
    assert by_number[4] / by_number[32] == pytest.approx((7 / 4) / (35 / 32))
    assert by_number[1000] == pytest.approx(67 / 64 * asked.model.samples / (4 * bounds.speeds()[0]) / 64, rel=0.02)


@pytest.mark.parametrize("spec", ["pipeline", "pipeline:schedule=gpipe", "zero1", "zero2", "zero3"])
def test_no_divided_model_is_faster_than_its_bound(spec: str) -> None:
    asked = request("M4, M1, M3 Pro on 10gbe", "gpt2", batch=3)
    each = Candidate(Method(spec), tuple(node.name for node in asked.home.nodes))
    bound_s = Bounds(asked.home, asked.model).sample_s(each)
    assert simulated(simulation_of(asked, each)).sample_s >= 0.95 * bound_s


def test_what_no_machine_can_hold_alone_is_divided_among_them() -> None:
    settings = {"precision": "bf16", "recompute": True, "momentum": 0.0, "batch": 16}
    asked = request("4 x M4 32GB on thunderbolt", "llama-7b", **settings)
    plan = found(replace(asked, methods=tuple(Method(each) for each in ("single", "ddp", *PIPELINES))))
    assert plan.alone is None
    assert plan.best.candidate.method.strategy == "pipeline:microbatches=32"
    assert len(plan.best.candidate.nodes) == 4


def test_a_plan_is_never_slower_than_the_fastest_machine_alone() -> None:
    for words in ("M1 Air, M4 Max on wifi5", "2 x M4 on 10gbe"):
        plan = found(few(request(words)))
        assert plan.alone is not None
        assert plan.best.quality_s <= plan.alone.quality_s


def test_over_slow_air_one_machine_alone_is_best_if_only_what_learns_alike_may_be_chosen() -> None:
    asked = request("M4, M1 on wifi5")
    plan = found(replace(asked, methods=(Method("single"), Method("ddp"))))
    assert plan.best.candidate.nodes == ("m4",)


def test_a_method_of_which_nothing_is_known_is_shown_and_not_chosen_unless_asked_for() -> None:
    far = Method("local_sgd:16", "int8")
    asked = replace(request(WIFI), methods=(Method("single"), Method("ddp"), far))
    assert found(asked).best.candidate.method != far
    assert far in [each.candidate.method for each in found(asked).ranked]
    assert found(replace(asked, asked=frozenset({far}))).best.candidate.method == far


def test_unlike_machines_get_unlike_shares() -> None:
    asked = replace(request("M4, M3 Pro on 10gbe"), methods=(Method("single"), Method("local_sgd:8")))
    best = found(asked).best
    assert best.candidate.by_speed
    small, large = best.result.sizes
    assert small < large
    assert small + large == asked.model.samples


def test_what_does_not_fit_is_not_chosen() -> None:
    asked = replace(request("M1 8GB, M4 Max on 10gbe", "gpt2", batch=4), methods=(Method("single"), Method("ddp")))
    plan = found(asked)
    rooms = {node.name: Room.of(node) for node in asked.home.nodes}
    for each in plan.ranked:
        nodes = each.candidate.nodes
        fits = fits_of(each.candidate.settings(asked.model), [rooms[name] for name in nodes], asked.model.task)
        assert all(fit.fits for fit in fits), each
    ignoring = found(replace(asked, ignore_memory=True))
    assert len(ignoring.best.candidate.nodes) >= len(plan.best.candidate.nodes)


def test_where_nothing_fits_it_is_said_what_would() -> None:
    with pytest.raises(ConfigError, match=r"gpt2 fits into none of these machines.*what would do: --set batch=2"):
        found(few(request("2 x M1 8GB on 1gbe", "gpt2")))


def test_a_machine_that_has_no_room_for_all_samples_of_a_step_takes_fewer_at_a_time_alone() -> None:
    asked = replace(request("2 x M4 on 10gbe", "gpt2", batch=6), methods=(Method("single"), Method("ddp")))
    plan = found(asked)
    assert plan.alone is not None
    assert plan.alone.result.step_s / plan.alone.result.sample_s < asked.model.samples
    assert len(plan.best.candidate.nodes) == 2


def test_a_faster_network_makes_no_plan_slower() -> None:
    before_s = float("inf")
    for network in ("wifi5", "10gbe"):
        quality_s = found(few(request(f"2 x M4 on {network}"))).best.quality_s
        assert quality_s <= TOLERANCE * before_s
        before_s = quality_s


def test_purchases_are_planned_anew_and_a_machine_more_helps() -> None:
    asked, simulator = replace(request("2 x M4 on 10gbe"), methods=(Method("single"), Method("ddp"))), Simulator(1)
    plan = found(asked, simulator)
    [change] = purchases(plan, asked, ["M4 Max"], simulator)
    assert change.ratio > 1.5
    assert "new-m4-max" in change.nodes
    assert len(bought(asked.home, "M4 Max").home.nodes) == 3


def test_a_machine_more_never_makes_a_plan_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are so many that the search leaves out the machines of the plan."""
    asked, simulator = (
        replace(request("M4 Max, M1, M4 on 10gbe"), methods=(Method("single"), Method("ddp"))),
        Simulator(1),
    )
    plan = found(asked, simulator)
    monkeypatch.setattr("hcsim.plan.candidates.MOST_SUBSETS", 1)
    [change] = purchases(plan, asked, ["M1 Air"], simulator)
    assert change.ratio >= 1 / TOLERANCE


def test_half_the_air_makes_a_plan_slower_and_a_cable_faster() -> None:
    asked, simulator = replace(request(MIXED), methods=(Method("single"), Method("local_sgd:8"))), Simulator(1)
    plan = found(asked, simulator)
    changes = {each.words: each.ratio for each in sensitivity(plan.best, asked, simulator)}
    assert changes["wifi6 at half its rate"] < 1 < changes["a cable for m4"]


def test_the_band_of_a_speed_up_is_around_it() -> None:
    asked, simulator = (
        replace(request("2 x M4 on 1gbe"), methods=(Method("single"), Method("local_sgd:8"))),
        Simulator(1),
    )
    plan = found(asked, simulator)
    band = speedup(plan, asked, simulator)
    assert band is not None
    assert band.p10 <= band.value <= band.p90
    assert band.p90 < 1.2 * band.value  # both are of the same chip: if it is slower, both are
