"""What round trips and lost segments say about the links between machines: delay, jitter, stalls, loss, and queues.

- Loss of a line is what is lost while a flow takes half of its rate, when no queue is full.
- A queue that a flow has filled delays whatever comes behind it by its length over the rate at which it drains. With
  congestion control by loss (CUBIC) a queue stands between 0.7 of its size and all of it, so the 90th percentile of
  round trips under load, less the median of idle ones, is nearly the delay of a full queue. Segments that were lost
  show that it was full. If none were, as with BBR in a deep queue, or where windows are smaller than the queue, the
  queue is at least so long.
- A stall is a round trip many times longer than the usual one, and longer than anything but a closed medium makes it.

Lengths of queues are in bytes of data, as the simulator's rates are.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hcsim.config import Machine, Tcp
from hcsim.config.machine import Basis
from hcsim.runtime.host import Medium
from hcsim.twin.links import Flow, Sending, Surveyed

Pair = tuple[int, int]

FEWEST_LOST = 3
"""Fewer lost segments are no sign of anything: a probe of a tail may have been sent too early."""
_NO_LOSS_CHANCE = 3.0
"""A loss of which none was seen in n segments is below 3/n, with 95 % confidence."""
_STALL_S, _STALL_SHARE = 0.05, 10.0
_MIDDLE = (0.15, 0.75)
"""The part of a flow's time in which others at the same time go on for sure."""
_SHORTEST_QUEUE_BYTES = 8 << 10
_OVERLOADED = 0.9
"""Two flows that together reach more than this share of their rates alone do not fill their target's port."""


class Survey(NamedTuple):
    """What was measured between the machines of these names, by rank."""

    found: Surveyed
    names: Sequence[str]
    costs_s: Mapping[str, float]
    """What each machine's processor needs to send and to receive a small message, which is no latency of a line."""
    tcp: Tcp
    basis: Basis

    def rate_Bps(self, source: int, target: int) -> float:
        """Return the rate alone that there would be without loss."""
        kept = 1.0 - pair_loss(self.found, (source, target)) if self.tcp.loss_model == "bbr" else 1.0
        return self.found.rate_Bps(source, target) / kept

    def kind(self, one: int, other: int) -> Medium | None:
        """Return the medium of a pair, if both ends know the same one."""
        media = {self.found.media_of(one, other), self.found.media_of(other, one)}
        return Medium(media.pop()) if len(media) == 1 and "" not in media else None

    def idle_s(self, one: int, other: int) -> tuple[float, ...]:
        """Return the round trips of a pair, in whichever direction, while nothing else is sent."""
        return tuple(
            trip for call in self.found.calls if {call.source, call.target} == {one, other} for trip in call.idle_s
        )


def message_cost_s(machine: Machine | str) -> float:
    """Return what a machine's processor needs to send and to receive a small message; 0 if it was not measured."""
    messages = machine.messages if isinstance(machine, Machine) else None
    return 0.0 if messages is None else messages.send_s + messages.receive_s


def percentile(samples: Sequence[float], percent: int) -> float:
    if len(samples) < 2:
        return samples[0]
    return statistics.quantiles(samples, n=100, method="inclusive")[percent - 1]


class Delay(NamedTuple):
    """What a line adds, one way."""

    latency_s: float
    jitter_s: float


def delay_of(survey: Survey, pair: Pair) -> Delay:
    """Return the delay between two ranks. Where it varies by more than itself, the shortest counts, and jitter comes
    on top; otherwise the median. Stalls are no jitter."""
    trips_s = survey.idle_s(*pair)
    least_s, middle_s = min(trips_s), statistics.median(trips_s)
    varies = middle_s > 1.5 * least_s and middle_s - least_s > 0.5e-3
    own_s = sum(survey.costs_s.get(survey.names[rank], 0.0) for rank in pair)
    latency_s = max((least_s if varies else middle_s) - own_s, least_s / 10) / 2
    usual_s = [trip for trip in trips_s if trip <= _longest_usual_s(middle_s)]
    wide = varies or statistics.fmean(usual_s) - middle_s > 0.25e-3
    return Delay(latency_s, (statistics.fmean(usual_s) - (least_s if varies else middle_s)) / 2 if wide else 0.0)


def _longest_usual_s(middle_s: float) -> float:
    return max(_STALL_S, _STALL_SHARE * middle_s)


def pair_loss(found: Surveyed, pair: Pair) -> float:
    """Return the share of segments that a line loses in this direction; 0 if too few were lost to tell."""
    paced = [each for each in found.sendings_of("paced") if (each.source, each.target) == pair]
    sent, lost = sum(each.segments for each in paced), sum(each.lost for each in paced)
    return lost / sent if lost >= FEWEST_LOST else 0.0


def most_loss(found: Surveyed, pair: Pair) -> float | None:
    """Return the loss that is not ruled out by a flow which lost nothing to speak of; None if nobody counted."""
    sent = sum(each.segments for each in found.sendings_of("paced") if (each.source, each.target) == pair)
    return _NO_LOSS_CHANCE / sent if sent else None


def losses(found: Surveyed, shares: Mapping[Pair, Mapping[str, float]]) -> dict[str, float]:
    """Return the loss of each medium and line. `shares` tells how much of its loss each adds to that of a pair.

    It is the least-squares solution over all directions, each weighted by its segments. What stands for less than a
    segment is none."""
    names = sorted({name for each in shares.values() for name in each})
    counted: dict[Pair, tuple[int, int]] = {}
    for each in found.sendings_of("paced"):
        pair = each.source, each.target
        if pair in shares and each.segments:
            counted[pair] = each.segments, each.lost
    if sum(lost for _, lost in counted.values()) < FEWEST_LOST:
        return dict.fromkeys(names, 0.0)
    weights = np.sqrt([sent for sent, _ in counted.values()])
    rows = np.array([[shares[pair].get(name, 0.0) for name in names] for pair in counted])
    lost = np.array([lost / sent for sent, lost in counted.values()])
    solved = np.linalg.lstsq(rows * weights[:, None], lost * weights, rcond=None)[0]
    passed = rows.T @ [sent for sent, _ in counted.values()]
    return {
        name: float(each) if each * count >= 1.0 else 0.0
        for name, each, count in zip(names, solved, passed, strict=True)
    }


class Queue(NamedTuple):
    """The length of a queue."""

    size_bytes: float
    overflowed: bool
    """Whether it was full for sure; if not, it may be longer."""


def queue_of_port(survey: Survey, target: int, among: Sequence[int]) -> Queue | None:
    """Return the queue in front of a machine, if flows from two of these ranks have filled it."""
    found = survey.found
    sendings = [each for each in found.sendings_of("two into one") if each.target == target and each.source in among]
    flows = _at_once(found, sendings)
    alone_Bps = sum(found.rate_Bps(flow.source, flow.target) for flow in flows)
    total_Bps = sum(flow.rate_Bps for flow in flows)
    if len(sendings) < 2 or total_Bps > _OVERLOADED * alone_Bps:
        return None
    return _queue(survey, sendings, total_Bps)


def queue_of_flow(survey: Survey, pair: Pair) -> Queue | None:
    """Return the queue that a flow alone has filled on its way."""
    sendings = [each for each in survey.found.sendings_of("alone") if (each.source, each.target) == pair]
    return _queue(survey, sendings, survey.found.rate_Bps(*pair))


def _at_once(found: Surveyed, sendings: Sequence[Sending]) -> list[Flow]:
    keys = {(each.step, each.source, each.target) for each in sendings}
    return [flow for flow in found.flows if (flow.step, flow.source, flow.target) in keys]


def _queue(survey: Survey, sendings: Sequence[Sending], drained_Bps: float) -> Queue | None:
    waits_s, is_longer = [], False
    for each in sendings:
        idle_s = survey.idle_s(each.source, each.target)
        middle_s = statistics.median(idle_s)
        count = len(each.trips_s)
        loaded_s = each.trips_s[int(count * _MIDDLE[0]) : max(1, int(count * _MIDDLE[1]))]
        if loaded_s:
            waits_s.append(percentile(loaded_s, 90) - middle_s)
            is_longer = is_longer or statistics.median(loaded_s) > percentile(idle_s, 90)
    if not waits_s:
        return None
    wait_s = statistics.median(waits_s)
    size_bytes = wait_s * drained_Bps
    if not is_longer or size_bytes < _SHORTEST_QUEUE_BYTES:
        return None
    by_line = sum(pair_loss(survey.found, (each.source, each.target)) * each.segments for each in sendings)
    lost = sum(each.lost for each in sendings)
    return Queue(size_bytes, lost >= FEWEST_LOST + 2 * by_line)


def common_queue(queues: Sequence[Queue]) -> Queue | None:
    """Return the usual length. Those that overflowed count, if there are any."""
    full = [each for each in queues if each.overflowed]
    if not queues:
        return None
    return Queue(statistics.median(each.size_bytes for each in full or queues), bool(full))


def queue_basis(queue: Queue, basis: Basis) -> Basis:
    """Return where the length comes from."""
    if queue.overflowed:
        return Basis("measured", f"{basis.source}, by the delay at which it overflowed", basis.date)
    return Basis("estimated", f"{basis.source}: at least so long, as it did not overflow", basis.date)


class Stalls(NamedTuple):
    """How often and how long a medium carried nothing."""

    number: int
    watched_s: float
    shortest_s: float
    """The 10th percentile, as a lost message is late, too."""
    longest_s: float
    """The 90th percentile."""


def stalls_of(survey: Survey, pairs: Sequence[Pair]) -> Stalls:
    """Return the stalls of round trips between these pairs, idle and beside a paced flow. A message that was lost is
    also late: so many as the loss explains do not count."""
    found, lasting_s, watched_s, explained = survey.found, [], 0.0, 0.0
    paced = {(each.source, each.target): each for each in found.sendings_of("paced")}
    for call in found.calls:
        pair = call.source, call.target
        if pair not in pairs:
            continue
        trips_s = call.idle_s + (paced[pair].trips_s if pair in paced else ())
        watched_s += call.lasted_s + (paced[pair].lasted_s if pair in paced else 0.0)
        middle_s = statistics.median(call.idle_s)
        lasting_s += [trip - middle_s for trip in trips_s if trip > _longest_usual_s(middle_s)]
        explained += len(trips_s) * (pair_loss(found, pair) + pair_loss(found, pair[::-1]))
    count = len(lasting_s) - round(explained)
    if count < 1:
        return Stalls(0, watched_s, 0.0, 0.0)
    return Stalls(count, watched_s, percentile(lasting_s, 10), percentile(lasting_s, 90))
