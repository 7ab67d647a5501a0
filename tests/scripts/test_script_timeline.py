"""The timeline of a script on a virtual cluster."""

from __future__ import annotations

from hcsim.telemetry.timeline import Timeline
from tests.scripts.conftest import Runner
from tests.telemetry.test_timeline import with_speeds

SCRIPT = """
    dist.init_process_group("hcsim")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(64, 300)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
"""


def test_the_timeline_of_a_script_has_its_steps_and_the_rank_that_all_wait_for(run_well: Runner) -> None:
    timeline = Timeline(lambda data: None)
    run_well(with_speeds({"fast": 1000.0, "slow": 1.0}), SCRIPT, sink=timeline)
    analysis = timeline.end()
    assert [step.number for step in analysis.steps] == [1, 2, 3, 1, 2, 3]
    for step in analysis.steps:
        assert step.compute_ns + step.encode_ns + step.exposed_ns + step.idle_ns == step.whole_ns
        if step.machine == "fast":
            assert step.causes[0][0] == ("compute", "slow")
    computed_ns = {each.machine: each.length_ns for each in analysis.path if each.kind == "compute"}
    assert computed_ns["slow"] > 0
