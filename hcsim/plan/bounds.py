"""A lower bound of the time that a candidate takes for a sample, without simulating it.

    compute    by the machines' profiles, with the shares that the training would have; nothing is faster
    encoding   what the compressor does with all tensors, on the same device
    network    the bytes that every rank has to send and to receive, at the rate of its link; on Wi-Fi, what all
               stations send and receive, at the rate of the air that they share; between homes, at that of the line

A ring's all-reduce of S bytes over n ranks has every rank send and receive 2 (n − 1)/n S, and no algorithm has less for
all of them (`collectives.cost.closed_form` has its time; latencies are left out here). An exchange in every step
overlaps with the backward pass at best, and not with the forward pass. One after many steps overlaps with nothing. A
strategy of which nothing is known here takes its compute alone.

So whatever has a bound above a time that was simulated is slower, and need not be simulated itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil
from typing import NamedTuple

from hcsim.compressors.base import PayloadKind
from hcsim.compressors.cast import Dense
from hcsim.compressors.feedback import ErrorFeedback
from hcsim.compressors.registry import make
from hcsim.config import Machine, Node, Scenario, Thunderbolt, Wifi
from hcsim.plan.candidates import Candidate, Model
from hcsim.runtime.host import joined_work
from hcsim.runtime.work_time import KernelTimes, seconds
from hcsim.training.balance import StepCost, paces, predicted, shares
from hcsim.training.layout import FLOAT_BYTES
from hcsim.training.learner import step_work
from hcsim.training.optimizer import Sgd
from hcsim.training.pipeline.strategy import Pipeline
from hcsim.training.precision import prepared
from hcsim.training.strategies import strategy
from hcsim.training.task import Task, forward_work
from hcsim.virtual.hardware import machine_of

_PERIODIC = ("local_sgd", "diloco")
_ALL_REDUCE = ("ddp", "hierarchical")
_SHARDED = ("zero1", "zero2", "zero3")


class Port(NamedTuple):
    """A machine's way to the others, at its best."""

    out_Bps: float
    in_Bps: float
    air: str
    """The access point, if every way goes over it."""


class Exchanged(NamedTuple):
    """What an exchange takes of a rank, at least."""

    out_bytes: float
    in_bytes: float


class Bounds:
    """Lower bounds for the candidates of one home and one model."""

    def __init__(self, home: Scenario, model: Model) -> None:
        self._home = home
        self._model = model
        self._task = prepared(model.task, model.base)
        self._nodes = {node.name: node for node in home.nodes}
        self._ports = {node.name: _port(home, node) for node in home.nodes}
        self._line_Bps = {line.home: (line.up_bps / 8, line.down_bps / 8) for line in home.wan}
        self._costs = cache(self._cost)
        self._encoding = cache(self._encode_s)
        self._payloads = cache(self._payload)

    def speeds(self) -> list[float]:
        """Return the samples a second of each machine alone, with all samples of a step."""
        samples = self._model.samples
        return [samples / self._costs(node.name).step_s(samples) for node in self._home.nodes]

    def sample_s(self, candidate: Candidate) -> float:
        """Return the least time for a sample."""
        names, samples, family = candidate.nodes, self._model.samples, candidate.method.family
        costs = [self._costs(name) for name in names]
        if len(names) == 1:
            return costs[0].step_s(samples) / samples
        sizes = shares(costs, samples) if candidate.by_speed else (samples // len(names),) * len(names)
        compute_s = [cost.step_s(size) for cost, size in zip(costs, sizes, strict=True)]
        encoding_s = [self._encoding(name, candidate.method.compressor, len(names)) for name in names]
        working_s = [own + encoding for own, encoding in zip(compute_s, encoding_s, strict=True)]
        network_s = self._network_s(candidate)
        if family in _ALL_REDUCE:
            forward_s = min(map(self._forward_s, names, sizes))
            return max(*working_s, forward_s + network_s) / samples
        if family in _PERIODIC:
            return self._periodic_s(candidate, sizes, compute_s, max(encoding_s) + network_s)
        if family in _SHARDED or family == "parameter_server":  # every worker takes as many steps
            return max(*compute_s, network_s) / samples
        if family == "pipeline":
            return self._pipelined_s(candidate, costs)
        return 1.0 / sum(1.0 / cost.sample_s for cost in costs)

    def _pipelined_s(self, candidate: Candidate, costs: Sequence[StepCost]) -> float:
        """Return the least time of a sample in a pipeline. Of m microbatches the last m − 1 leave it one after the
        other, at best at the speed of all stages together; the first has to pass through all of them, and the fastest
        machine alone would not take longer for it. Alike machines come to the known (m + n − 1)/m of n stages."""
        chosen = strategy(candidate.method.strategy)
        assert isinstance(chosen, Pipeline)
        together_s = 1.0 / sum(1.0 / cost.sample_s for cost in costs)
        samples = self._model.samples
        number = ceil(samples / ceil(samples / chosen.microbatches))
        return ((number - 1) * together_s + min(cost.sample_s for cost in costs)) / number

    def _periodic_s(
        self, candidate: Candidate, sizes: Sequence[int], compute_s: Sequence[float], between_s: float
    ) -> float:
        chosen = strategy(candidate.method.strategy)
        every: int = getattr(chosen, "every", 1)
        counts = (
            paces(compute_s, sizes, every) if getattr(chosen, "pace", "alike") == "speed" else (every,) * len(sizes)
        )
        lasts_s = max(count * own for count, own in zip(counts, compute_s, strict=True))
        return (lasts_s + between_s) / sum(count * size for count, size in zip(counts, sizes, strict=True))

    def _network_s(self, candidate: Candidate) -> float:
        """Return how long the network takes for an exchange at least."""
        names, ports = candidate.nodes, [self._ports[name] for name in candidate.nodes]
        both = list(zip(self._exchanged(candidate), ports, strict=True))
        longest_s = max(max(each.out_bytes / port.out_Bps, each.in_bytes / port.in_Bps) for each, port in both)
        for air in {port.air for port in ports if port.air}:
            taken = (
                each.out_bytes / port.out_Bps + each.in_bytes / port.in_Bps for each, port in both if port.air == air
            )
            longest_s = max(longest_s, sum(taken))
        homes = {self._nodes[name].home for name in names}
        if len(homes) > 1:
            whole = self._payloads(candidate.method.compressor)[0]
            lines = [self._line_Bps[home] for home in homes if home in self._line_Bps]
            longest_s = max([longest_s, *(whole / min(line) for line in lines)])
        return longest_s

    def _exchanged(self, candidate: Candidate) -> list[Exchanged]:
        n, family = len(candidate.nodes), candidate.method.family
        sent_bytes, kind = self._payloads(candidate.method.compressor)
        if family == "parameter_server":  # workers push gradients to the first machine, and pull parameters
            whole_bytes = self._payloads("none")[0]
            server = Exchanged((n - 1) * whole_bytes, (n - 1) * sent_bytes)
            return [server, *[Exchanged(sent_bytes, whole_bytes)] * (n - 1)]
        if kind is PayloadKind.SPARSE:
            return [Exchanged(sent_bytes, (n - 1) * sent_bytes)] * n
        if family == "hierarchical":
            return [Exchanged(sent_bytes / n, sent_bytes / n)] * n
        ring_bytes = (3 if family == "zero3" else 2) * (n - 1) / n * sent_bytes  # zero3 gathers parameters twice
        return [Exchanged(ring_bytes, ring_bytes)] * n

    def _cost(self, name: str) -> StepCost:
        node, task = self._nodes[name], self._task
        machine, times = self._machine(node)
        update = Sgd(lr=1.0, momentum=0.0).work(sum(block.length for block in task.blocks))

        def step_s(samples: int) -> float:
            return sum(seconds(machine, work, times=times) for work in (*step_work(task, samples), update))

        return predicted(step_s, max(1, self._model.samples // len(self._nodes)))

    def _forward_s(self, name: str, samples: int) -> float:
        machine, times = self._machine(self._nodes[name])
        return seconds(machine, forward_work(self._task, samples), times=times) if samples else 0.0

    @staticmethod
    def _machine(node: Node) -> tuple[Machine, KernelTimes]:
        machine = machine_of(node)
        return machine, KernelTimes(machine)

    def _encode_s(self, name: str, spec: str, ranks: int) -> float:
        """Return what a rank spends on encoding its tensors and on decoding what comes."""
        compressor = make(spec, seed=0, rank=0)
        inner = compressor.inner if isinstance(compressor, ErrorFeedback) else compressor
        if isinstance(inner, Dense):
            return 0.0
        machine, times = self._machine(self._nodes[name])
        shapes = [shape for block in self._task.blocks for _, shape in block.shapes]
        encode_s = seconds(machine, joined_work(map(inner.encode_work, shapes), 1.0), times=times)
        decode_s = seconds(machine, joined_work(map(inner.decode_work, shapes), 1.0), times=times)
        return encode_s + decode_s * (ranks if inner.kind is PayloadKind.SPARSE else 1)

    def _payload(self, spec: str) -> tuple[float, PayloadKind]:
        compressor = make(spec, seed=0, rank=0)
        return payload_bytes(self._task, spec), compressor.kind


def payload_bytes(task: Task, spec: str) -> float:
    """Return the bytes of all gradients, as they are sent."""
    compressor = make(spec, seed=0, rank=0)
    narrow = task.blocks[0].element_bytes / FLOAT_BYTES if spec == "none" else 1.0
    return narrow * sum(compressor.size_bytes(shape) for block in task.blocks for _, shape in block.shapes)


def _port(home: Scenario, node: Node) -> Port:
    """Return the best rates that the machine's links have together."""
    media = {medium.name: medium for medium in home.media}
    out_Bps = in_Bps = 0.0
    airs: list[str] = []
    for link in node.links:
        medium = media[link.medium]
        if isinstance(medium, Thunderbolt):
            rates = [rate for cable in medium.cables if node.name in cable.between
                     for rate in (cable.forward_bps, cable.backward_bps)]  # fmt: skip
            out_Bps, in_Bps = out_Bps + sum(rates) / 8, in_Bps + sum(rates) / 8
            airs.append("")
            continue
        nominal = medium.phy_rate_bps if isinstance(medium, Wifi) else medium.rate_bps
        share = medium.efficiency if isinstance(medium, Wifi) else 1.0
        out_Bps += share * (link.up_bps or link.rate_bps or nominal) / 8
        in_Bps += share * (link.down_bps or link.rate_bps or nominal) / 8
        airs.append(medium.name if isinstance(medium, Wifi) else "")
    air = airs[0] if len(set(airs)) == 1 else ""
    unlimited = float("inf")
    return Port(out_Bps or unlimited, in_Bps or unlimited, air)
