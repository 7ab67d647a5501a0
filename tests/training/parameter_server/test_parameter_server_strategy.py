"""The parameter server as a strategy of a group, in both worlds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hcsim import Group
from hcsim.config import Crash
from hcsim.config.training import Training
from hcsim.errors import ConfigError
from hcsim.launch.virtual import simulate_training
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.training.data import Batches
from hcsim.training.optimizer import Sgd, clip
from hcsim.training.parameter_server.messages import QUESTIONS, Join, LeaveRequest, Pull, Push
from hcsim.training.run import Point, Report, Run
from hcsim.training.strategies import check_training
from hcsim.training.tasks import task
from hcsim.training.trainer import train

SEED = 9
SIZES = (16, 8, 4)


class Keep:
    """Keeps the final parameters."""

    def __init__(self) -> None:
        self.parameters: Any = None

    def point(self, rank: int, point: Point) -> None:
        pass

    def finished(self, run: Run) -> None:
        self.parameters = run.learner.replica.parameters.copy()


def settings(**changes: Any) -> Training:
    given = {"task": "convex", "strategy": "parameter_server", "steps": 30, "lr": 0.05, "momentum": 0.9, "batch": SIZES}
    return Training(**(given | changes))


def trained(cluster: Any, what: Training, ranks: int = 3) -> tuple[list[Report], list[Any]]:
    keeps = [Keep() for _ in range(ranks)]

    async def program(group: Group) -> Report:
        return await train(group, what, SEED, None if what.task == "gpt2" else keeps[group.rank])

    reports = cluster.run(ranks, program)
    for report in reports:
        if isinstance(report, BaseException):
            raise report
    return reports, [keep.parameters for keep in keeps]


def alone(steps: int, max_norm: float | None = None) -> np.ndarray:
    """One process with the joined batches, written down independently of the strategies."""
    batches = Batches(1024, SIZES, SEED)
    replica = task("convex").replica(SEED)
    stepper = Sgd(lr=0.05, momentum=0.9).open(replica.parameters)
    for step in range(steps):
        replica.gradients[:] = 0
        replica.forward(np.concatenate([batches.batch(step, rank) for rank in range(len(SIZES))]))
        for block in reversed(range(len(replica.layout.blocks))):
            replica.backward(block)
        if max_norm is not None:
            clip(replica.gradients, max_norm)
        stepper.step(replica.gradients)
    return replica.parameters


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_in_sync_mode_the_result_is_that_of_one_process_with_the_joined_batch(cluster, max_norm):
    """Batches are unlike, and the last one of an epoch is short: the mean is over samples."""
    reports, parameters = trained(cluster, settings(steps=40, clip=max_norm))
    np.testing.assert_allclose(parameters[0], alone(40, max_norm), rtol=2e-5, atol=2e-6)
    assert {report.sha256 for report in reports} == {reports[0].sha256}
    assert [[point.step for point in report.points] for report in reports] == [list(range(1, 41))] * 3


def test_both_worlds_end_with_the_same_bits(virtual, real):
    (simulated, *_), _ = trained(virtual, settings())
    (measured, *_), _ = trained(real, settings())
    assert simulated.sha256 == measured.sha256
    assert simulated.sent_bytes == measured.sent_bytes


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(
    "strategy", ["parameter_server", "parameter_server:async", "parameter_server:bounded,staleness=4"]
)
def test_every_mode_learns_and_all_ranks_end_with_the_servers_model(cluster, strategy, ranks):
    reports, _ = trained(cluster, settings(strategy=strategy, batch=8, steps=60), ranks)
    assert len({report.sha256 for report in reports}) == 1
    assert {report.steps for report in reports} == {60}
    scores = [point.score for point in reports[0].points if point.score is not None]
    # Against the untrained model: real asynchronous workers may be late when the trained one is first looked at.
    convex = task("convex")
    assert scores[-1].gap < 0.5 * convex.score(convex.replica(SEED).parameters).gap


@pytest.mark.slow
def test_the_learning_rate_is_scaled_by_the_ranks_and_warms_up(virtual):
    """With the world's three ranks and no warm-up, scaling is the same as a threefold learning rate."""
    _, scaled = trained(virtual, settings(lr=0.01, scale_lr=True))
    _, threefold = trained(virtual, settings(lr=0.03))
    _, warmed = trained(virtual, settings(lr=0.01, scale_lr=True, warmup=10))
    np.testing.assert_allclose(scaled[0], threefold[0], rtol=1e-5, atol=1e-6)
    assert np.abs(warmed[0] - scaled[0]).max() > 1e-3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compressor", ["fp16", "int8", "topk:0.1+ef", "powersgd:2+ef", "onebit+ef", "zstd"])
def test_gradients_travel_compressed_and_the_model_still_learns(virtual, compressor):
    reports, _ = trained(virtual, settings(compressor=compressor, steps=60))
    plain, _ = trained(virtual, settings(steps=60))
    assert len({report.sha256 for report in reports}) == 1
    assert reports[1].sent_bytes < plain[1].sent_bytes
    assert reports[0].sent_bytes == plain[0].sent_bytes  # the model is pulled as it is
    scores = [point.score for point in reports[0].points if point.score is not None]
    assert scores[-1].gap < scores[0].gap


def test_the_bytes_of_a_worker_are_its_messages_its_gradients_and_their_headers(cluster):
    reports, _ = trained(cluster, settings(steps=3))
    layout = task("convex").replica(0).layout
    sizes = tuple(4 * tensor.length + 16 for tensor in layout.tensors)
    messages = [
        Join("epoch 0", "00001", (1 << 62) - 1, task("convex").fingerprint),
        *(Pull(version) for version in (-1, 0, 1, 2)),
        *(Push(version + 1, version, 16, "none", sizes) for version in range(3)),
        LeaveRequest("done"),
    ]
    asked_bytes = sum(HEADER_BYTES + len(QUESTIONS.encode(message)) for message in messages)
    expected = asked_bytes + 3 * (HEADER_BYTES + sum(sizes))
    assert reports[1].sent_bytes == pytest.approx(expected, abs=8)  # a drawn number may take fewer bytes


def test_a_model_of_shapes_takes_the_time_of_its_bytes(virtual):
    """Two workers pull and push half a gigabyte per step through the server's gigabit port, one way at a time.

    The last step ends with its push; the final pull comes after it."""
    reports, _ = trained(virtual, settings(task="gpt2", steps=2, batch=1, momentum=None, lr=None))
    nbytes = task("gpt2").replica(0).layout.size_bytes
    assert reports[1].sent_bytes == pytest.approx(2 * nbytes, rel=1e-3)
    assert reports[0].sent_bytes == pytest.approx(3 * 2 * nbytes, rel=1e-3)
    transfers_s = (2 + 2) * 2 * nbytes / 125e6
    assert reports[1].duration_s == pytest.approx(transfers_s, rel=0.1)
    assert reports[1].sha256 is None


@pytest.mark.slow
def test_ranks_that_are_lost_do_not_stop_the_others(virtual):
    async def program(group: Group) -> Report:
        return await train(group, settings(strategy="parameter_server:sync,deadline_s=1", steps=60, batch=8), SEED)

    outcome = virtual.outcome(4, program, faults=[Crash(at_s=0.01, node="mac-3")])
    reports = [result for result in outcome.results if isinstance(result, Report)]
    assert [report.rank for report in reports] == [0, 1, 2]
    assert len({report.sha256 for report in reports}) == 1
    assert {report.steps for report in reports} == {60}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server": "wss://ps.example.org"}, "give listen too"),
        ({"listen": "ws://127.0.0.1:8080"}, "give server too"),
        ({"server": "https://ps.example.org", "listen": "ws://127.0.0.1:8080"}, "server = .*https:// is not known"),
        ({"server": "wss://ps.example.org", "listen": "127.0.0.1"}, "listen = .* is not an address"),
        ({"server": "wss://ps.example.org", "listen": "ws://127.0.0.1:0"}, "listen = .*give the port"),
        ({"server": "ws://0.0.0.0:8080", "listen": "ws://0.0.0.0:8080"}, "give a name or an address"),
        ({"server": "wss://ps.example.org", "listen": "127.0.0.1:8080"}, "unlike kinds"),
        ({"server": "a:1", "listen": "b:1", "strategy": "ddp"}, "ddp has no server"),
    ],
)
def test_a_place_where_nobody_reaches_the_server_is_refused(changes, words):
    with pytest.raises(ConfigError, match=words):
        check_training(settings(**changes), 3, 1)


def test_a_simulation_has_no_tunnels():
    tunnel = settings(server="wss://ps.example.org", listen="ws://127.0.0.1:8080", batch=4)
    with pytest.raises(ConfigError, match="no tunnels"):
        simulate_training("four-macs-1gbe", tunnel)
    with pytest.raises(ConfigError, match="no tunnels"):
        simulate_cluster("four-macs-1gbe", tunnel)


@pytest.mark.slow
def test_a_server_at_a_place_of_its_own_teaches_the_same(virtual):
    (free, *_), _ = trained(virtual, settings())
    (placed, *_), _ = trained(virtual, settings(server="mac-0:7000", listen="0.0.0.0:7000"))
    assert free.sha256 == placed.sha256
