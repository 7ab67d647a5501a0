"""Checks of the contracts of compressors, algorithms, strategies, tasks and faults, to call from your own
tests.

    from hcsim.testing import check_compressor

    def test_ternary() -> None:
        load_plugin("ternary.py")
        check_compressor("ternary")

The built-in ones pass them. An `AssertionError` says what does not hold, and for which input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, product

import numpy as np
from msgspec.structs import replace

from hcsim.collectives.algorithms import algorithms, buffer_elements, plan
from hcsim.collectives.plan import Shape, split
from hcsim.collectives.verify import PlanError, verify
from hcsim.compressors.base import Array, ByteArray, Compressor, Ident
from hcsim.compressors.feedback import OWED, SUFFIX
from hcsim.compressors.registry import make
from hcsim.config import Cluster, Fault, Restart, Scenario, Training, load_scenario, parse_scenario, write_scenario
from hcsim.errors import CompressionError, NotFinite, UsageError
from hcsim.launch.virtual import Outcome, simulate_training
from hcsim.launch.virtual_cluster import simulate_cluster
from hcsim.training.run import Point, Report, Run
from hcsim.training.strategies import strategy
from hcsim.training.task import Task
from hcsim.units import PositiveSeconds, Seconds

_SHAPES = ((0,), (1,), (7,), (1000,), (33, 65), (3, 3, 16, 8))
_SCALES = (1e-30, 1.0, 1e30)
_DAMAGED = 40
_OF = Ident("tensor", 0)
_WORLDS = range(1, 10)
_HOME = "four-macs-1gbe"


def check_compressor(spec: str) -> None:
    """Check that payloads match their specification, that damaged ones are rejected or decode to finite numbers,
    that error feedback loses nothing, and that ranks stay equal."""
    _require(make(spec, seed=1, rank=0).spec == make(make(spec, seed=1, rank=0).spec, seed=1, rank=0).spec, "its spec")
    draw = np.random.default_rng(1)
    for shape, scale in product(_SHAPES, _SCALES):
        tensor = (draw.standard_normal(shape) * scale).astype(np.float32)
        _check_payload(spec, tensor, f"{spec}, a tensor of shape {shape} and scale {scale:g}")
    _check_payload(spec, np.zeros((9, 9), np.float32), f"{spec}, a tensor of zeros")
    for value in (np.nan, np.inf, -np.inf):
        tensor = np.ones(100, np.float32)
        tensor[42] = value
        try:
            make(spec, seed=1, rank=0).encode(tensor, _OF)
        except NotFinite:
            continue
        raise AssertionError(f"{spec}: a tensor with {value} in it was encoded, and not refused by NotFinite")
    _check_feedback(spec)
    _check_runs(Training(task="digits", compressor=spec, steps=3), f"{spec} in training")
    _check_runs(Training(task="digits", compressor=spec + SUFFIX, steps=3), f"{spec + SUFFIX} in training")
    _check_runs(Training(task="gpt2", compressor=spec, steps=1), f"{spec} with a phantom")


def check_algorithm(operation: str, name: str, worlds: Iterable[int] = _WORLDS) -> None:
    """Verify the plans of all ranks together, for each number of ranks, length and root, against the operation's
    contract."""
    _require(name in algorithms(operation), f"{operation} has an algorithm {name}")
    for shape in _shapes(operation, worlds):
        try:
            plans = [plan(operation, name, rank, shape).by_rank() for rank in range(shape.world)]
            verify(operation, plans, [shape] * shape.world)
        except (PlanError, UsageError) as error:
            raise AssertionError(f"{name} of {operation} for {shape}: {error}") from error


def check_strategy(spec: str) -> None:
    """Check that it trains to the end and to one model, with data, compressed, and with phantoms, the same way
    each time.

    A strategy with `open` is also checked in a cluster, where a member is lost and comes back."""
    _check_runs(Training(task="digits", strategy=spec, steps=6), spec)
    _check_runs(Training(task="digits", strategy=spec, compressor="int8+ef", steps=6), f"{spec} with int8+ef")
    _check_runs(Training(task="gpt2", strategy=spec, steps=2), f"{spec} with a phantom")
    if hasattr(strategy(spec), "open"):
        _check_cluster(Training(task="digits", strategy=spec, compressor="int8+ef", steps=24, evaluate_every=12), spec)


def check_task(task: Task) -> None:
    """Check that a replica depends only on its seed, that the task's figures are consistent, and its gradients."""
    one, same, other = task.replica(1), task.replica(1), task.replica(2)
    _require(one.layout == same.layout, "replicas have one layout")
    _require(one.layout.length == sum(block.length for block in task.blocks), "blocks have all parameters, once")
    if task.phantom:
        return
    parameters, gradients = np.asarray(one.parameters), np.asarray(one.gradients)
    _require(np.array_equal(parameters, np.asarray(same.parameters)), "the same seed gives the same parameters")
    _require(not np.array_equal(parameters, np.asarray(other.parameters)), "another seed gives others")
    batch = np.arange(min(task.samples, task.defaults.batch))
    gradients.fill(0)
    one.forward(batch)
    for block in reversed(range(len(task.blocks))):
        one.backward(block)
    along = gradients / max(float(np.linalg.norm(gradients)), 1e-30)
    before, step = parameters.copy(), np.float32(1e-2)
    losses = []
    for sign in (-1, 1):
        parameters[...] = before + sign * step * along
        losses.append(one.forward(batch))
    parameters[...] = before
    slope, expected = (losses[1] - losses[0]) / (2 * float(step)), float(np.linalg.norm(gradients))
    _require(abs(slope - expected) <= 0.05 * expected + 1e-3, f"along the gradient the loss rises by {expected:.4g}"
             f" a unit, and it does by {slope:.4g}")  # fmt: skip


def check_fault(scenario: Scenario, fault: Fault) -> None:
    """Check that it reads back as written, changes the run, and replays. The scenario must have no faults of its
    own."""
    _require(not scenario.faults, "the scenario has no faults of its own")
    text = write_scenario(replace(scenario, faults=(fault,)))
    read = parse_scenario(text, "the scenario as it was written")
    _require(read.faults == (fault,), f"{fault} is read as it was written, and not as {read.faults}:\n{text}")
    settings = scenario.training or Training(steps=3, timeout_s=PositiveSeconds(60))
    struck = [_settled(simulate_training(read, settings)) for _ in range(2)]
    _require(struck[0] == struck[1], f"two runs with {fault} are the same run")
    _require(struck[0] != _settled(simulate_training(scenario, settings)), f"a run with {fault} is another one")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"does not hold: {what}")


def _check_payload(spec: str, tensor: Array, where: str) -> None:
    coder, other = (make(spec, seed=1, rank=0) for _ in range(2))
    before = tensor.copy()
    payload = coder.encode(tensor, _OF).copy()
    _require(np.array_equal(tensor, before), f"{where}: encoding leaves the tensor as it is")
    _require(np.array_equal(payload, other.encode(tensor, _OF)), f"{where}: encoding it again gives the same payload")
    size_bytes = coder.size_bytes(tensor.shape)
    _require(payload.size == size_bytes or not coder.sized, f"{where}: the payload has {size_bytes} bytes")
    _require(payload.size <= coder.most_bytes(tensor.shape), f"{where}: the payload is no longer than most_bytes says")
    decoded = np.full_like(tensor, np.nan)
    coder.decode(payload, decoded, _OF)
    _require(bool(np.isfinite(decoded).all()), f"{where}: decoding fills all of it with finite numbers")
    base = np.ones_like(tensor)
    for change, expected in ((coder.add, base + decoded), (coder.subtract, base - decoded)):
        changed = base.copy()
        change(payload, changed, _OF)
        near = np.allclose(changed, expected, rtol=1e-5, atol=1e-5)
        _require(near, f"{where}: what `add` and `subtract` do is what `decode` says")
    for damaged in _damaged(payload):
        out = np.zeros_like(tensor)
        try:
            coder.decode(damaged, out, _OF)
        except CompressionError:
            continue
        _require(bool(np.isfinite(out).all()), f"{where}: what a damaged payload decodes to is refused, or finite")
        _require(damaged.size == payload.size or not coder.sized, f"{where}: a payload of another length is refused")


def _damaged(payload: ByteArray) -> Iterator[ByteArray]:
    draw = np.random.default_rng(2)
    yield payload[:-1].copy()
    yield np.append(payload, np.uint8(0))
    for _ in range(_DAMAGED):
        damaged = payload.copy()
        at = draw.integers(0, payload.size, 1 + payload.size // 4)
        damaged[at] = draw.integers(0, 256, at.size, dtype=np.uint8)
        yield damaged


def _check_feedback(spec: str) -> None:
    """Check that, over all steps, the decoded tensors and the residual add up to the input."""
    coder: Compressor = make(spec + SUFFIX, seed=1, rank=0)
    draw = np.random.default_rng(3)
    given, decoded = np.zeros((16, 24), np.float32), np.zeros((16, 24), np.float32)
    for step in range(5):
        tensor = draw.standard_normal(given.shape).astype(np.float32)
        of = Ident("tensor", step)
        coder.add(coder.encode(tensor, of), decoded, of)
        coder.commit(step)
        given += tensor
    lost = float(np.linalg.norm(given - decoded) / np.linalg.norm(given))
    _require(lost < 1, f"{spec + SUFFIX}: what is lost is less than the tensor (it is {lost:.3g} of it)")
    residual = sum(
        (np.asarray(array, np.float32) for name, array in coder.state().items() if name.startswith(OWED)), 0 * given
    )
    error = float(np.abs(given - decoded - residual).max())
    _require(error <= 1e-4, f"{spec + SUFFIX}: what was sent and what is owed is what was given, but for {error:.2g}")


def _shapes(operation: str, worlds: Iterable[int]) -> Iterator[Shape]:
    for world in worlds:
        for length in (0, 1, world, 3 * world + 1, 1000):
            parts = split(length, world)
            counts = tuple(hi - lo for lo, hi in pairwise(parts))
            for root in sorted({0, world // 2, world - 1}):
                if operation == "all_to_all":
                    yield Shape(world=world, sent=(length,) * world, received=(length,) * world)
                else:
                    shape = Shape(world=world, length=length, counts=counts, root=root)
                    if buffer_elements(operation, shape) or operation == "barrier" or length == 0:
                        yield shape


def _check_runs(settings: Training, where: str) -> None:
    home = load_scenario(_HOME)
    reports = simulate_training(home, settings).values()
    again = simulate_training(home, settings).values()
    _require(reports == again or _without_losses(reports) == _without_losses(again), f"{where}: two runs are the same")
    _require(all(report.steps == settings.steps for report in reports), f"{where}: all ranks take all steps")
    _require(len({report.sha256 for report in reports}) == 1, f"{where}: all ranks end with the same model")
    _require(all(report.duration_s > 0 for report in reports), f"{where}: it takes time")


def _check_cluster(settings: Training, spec: str) -> None:
    """Restart a member half way through: the others must admit it again and transfer their state to it."""
    home = replace(load_scenario(_HOME), cluster=Cluster(preset="low_latency"))
    times = _Times()
    calm = simulate_cluster(home, settings, observer=times)
    halfway = calm.seconds - (times.by_step[settings.steps] - times.by_step[settings.steps // 2])
    lost = Restart(at_s=Seconds(halfway), node=home.nodes[1].name, down_s=Seconds(0.1))
    struck = [simulate_cluster(replace(home, faults=(lost,)), settings) for _ in range(2)]
    _require(_settled(struck[0]) == _settled(struck[1]), f"{spec}, a member lost: two runs are the same")
    for outcome, where in ((calm, "in a cluster"), (struck[0], "in a cluster that loses a member")):
        reports = outcome.values()
        _require(all(report.steps == settings.steps for report in reports), f"{spec} {where}: all steps are taken")
        _require(len({report.sha256 for report in reports}) == 1, f"{spec} {where}: all members end with one model")


class _Times:
    """The end times of the steps, on any rank."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def point(self, rank: int, point: Point) -> None:
        self.by_step[point.step] = point.time_s

    def finished(self, run: Run) -> None:
        pass


def _without_losses(reports: list[Report]) -> list[tuple[object, ...]]:
    """Remove the losses of phantoms: they are NaN, which is unequal to itself."""
    return [(r.rank, r.steps, r.duration_s, r.sent_bytes, r.sha256) for r in reports]


def _settled(outcome: Outcome[Report]) -> tuple[object, ...]:
    return outcome.trace_sha256, outcome.seconds, tuple(map(repr, outcome.results))
