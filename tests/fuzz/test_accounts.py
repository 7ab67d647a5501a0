"""What error feedback owes is accounted for, and nobody may wait for a machine that has left."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hcsim.config import parse_scenario
from hcsim.fuzz.evidence import Evidence, HostMessage
from hcsim.fuzz.invariants import nothing_is_lost_or_doubled, the_departed_are_not_waited_for
from hcsim.fuzz.phases import phases_of
from hcsim.fuzz.trial import gather

HOME = """
name = "accounts"
seed = 3
medium = [{ kind = "ethernet", name = "switch", rate = "1 Gb/s" }]

[[node]]
name = "mac"
count = 2
machine = { name = "slow", peak = "1 TFLOPS", memory = "100 GB/s", overhead = "30 ms" }
links = ["switch"]

[cluster]
nodes = 2
preset = "low_latency"

[training]
task = "slopes"
compressor = "topk:0.1+ef"
steps = 30
batch = 4
evaluate_every = 30
timeout = "10 s"
"""
SPOILED = '[[fault]]\nkind = "nan_gradient"\nat = "3 s"\nnode = "mac-1"\n'
LEFT = (
    '[[fault]]\nkind = "leave"\nat = "3 s"\nnode = "mac-2"\n[[fault]]\nkind = "restart"\nat = "4 s"\nnode = "mac-2"\n'
)
CRASHED = '[[fault]]\nkind = "restart"\nat = "3 s"\nnode = "mac-2"\ndown = "0 s"\n'
LEFT_SOON_AFTER = LEFT.replace("4 s", "6 s").replace("3 s", "5 s")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("faults", ["", SPOILED, LEFT], ids=["calm", "a step is dropped", "one leaves and returns"])
def test_parameters_and_what_is_owed_are_all_that_was_computed(faults: str):
    evidence, _, _ = gather(parse_scenario(HOME + faults, "accounts"))
    assert any(np.abs(residual).max() > 0.1 for residual in evidence.residuals.values())
    assert not [*nothing_is_lost_or_doubled(evidence)]
    forgotten = msgspec.structs.replace(
        evidence, residuals={host: 0 * residual for host, residual in evidence.residuals.items()}
    )
    assert [*nothing_is_lost_or_doubled(forgotten)]


@pytest.mark.parametrize("then", ["", LEFT_SOON_AFTER], ids=["and returns", "and leaves when it has returned"])
def test_what_a_crashed_member_owed_is_lost_and_nobody_is_held_to_it(then: str):
    evidence, _, _ = gather(parse_scenario(HOME + CRASHED + then, "accounts"))
    assert not [*nothing_is_lost_or_doubled(evidence)]


def restarted(node: str, at_s: int) -> str:
    return f'[[fault]]\nkind = "restart"\nat = "{at_s} s"\nnode = "{node}"\ndown = "1 ms"\n'


@pytest.mark.slow
def test_what_was_begun_anew_does_not_count_where_all_go_back_to_a_checkpoint() -> None:
    left = LEFT.replace("4 s", "5 s")
    lost = restarted("mac-1", 5) + restarted("mac-1", 9) + restarted("mac-2", 9)
    text = HOME.replace("topk:0.1+ef", "none").replace("steps = 30", "steps = 60") + left + lost
    evidence, _, _ = gather(parse_scenario(text, "accounts"))
    begun = [event[4] for event in evidence.of_kind("synchronised", 3) if event[2] == "mac-1"]
    assert begun == [0, 11, 0, 7, 11]
    assert not [*nothing_is_lost_or_doubled(evidence)]


def late(told: str, waited_s: float) -> list[str]:
    """What is found where mac-1 was told that at 10 s, and its view with mac-2 failed so much later."""
    scenario = parse_scenario(HOME, "accounts")
    events = [
        (9_000_000_000, "view", "mac-1", "line", 4, 3, "mac-1#1,mac-2#2"),
        (round((10 + waited_s) * 1e9), "view failed", "mac-1", 4, "all_gather #0 took longer than 20 s: rank 1"),
    ]
    evidence = Evidence(scenario, phases_of(scenario), events=events, said=[HostMessage(10.0, "mac-1", told)])
    return [*the_departed_are_not_waited_for(evidence)]


def test_nobody_waits_for_long_for_one_that_has_said_goodbye():
    assert late("mac-2 has gone: it has finished or left", 20.0)
    assert not late("mac-2 has gone: it has finished or left", 5.0)
    assert not late("mac-2 was lost", 20.0)
