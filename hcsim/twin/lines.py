"""The homes that members are in, and the lines to the internet between them.

Machines of one home answer each other within milliseconds, on any medium. Where the shortest round trip takes longer,
a line to the internet is between the two; so the homes are the groups of machines within which others are near.

A home's line sends and receives at the highest rates that any of its machines reached with one of another home. Delay,
jitter and loss between two homes are the sums of those of their lines, besides half of those of the two media at the
ends: the lines' parts are the least-squares solution over all pairs of homes. With two homes, each line has half.
The buffer of a line is the queue that a flow fills in front of the slower one of the two directions that it passes.
Between two homes alone nothing tells which one that is: the sender's is taken for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations, permutations, product
from typing import NamedTuple

import numpy as np

from hcsim.config import Wan
from hcsim.runtime.host import Medium
from hcsim.twin.quality import (
    Delay,
    Pair,
    Queue,
    Survey,
    common_queue,
    delay_of,
    queue_basis,
    queue_of_flow,
)
from hcsim.twin.timing import rounded
from hcsim.units import BitRate, Bytes, Seconds, Share

FAR_S = 5e-3
"""No medium of a home has a shortest round trip as long as this."""
_ALIKE, _FASTER = 0.9, 1.05
"""Of two lines whose rates differ by less, either may be the one that holds up a flow."""
_NEAR_BEST = 0.8
_SMALLEST_SHARE = 0.05
"""Of the delay between two homes: no line has less."""


class Home(NamedTuple):
    """The members of a home, by rank, and its name."""

    name: str
    ranks: tuple[int, ...]


def homes_of(survey: Survey, known: Mapping[str, str]) -> list[Home]:
    """Return the homes, the largest first. A home keeps the name that is known of one of its machines."""
    size = len(survey.names)
    near = {rank: rank for rank in range(size)}
    for one, other in combinations(range(size), 2):
        if min(survey.idle_s(one, other)) < FAR_S or survey.kind(one, other) is Medium.THUNDERBOLT:
            old, new = near[other], near[one]
            near = {rank: new if root == old else root for rank, root in near.items()}
    groups = [tuple(rank for rank in range(size) if near[rank] == root) for root in dict.fromkeys(near.values())]
    homes: list[Home] = []
    for ranks in sorted(groups, key=lambda ranks: (-len(ranks), min(survey.names[rank] for rank in ranks))):
        first = min(survey.names[rank] for rank in ranks)
        usual = f"{first}-home" if homes else "home"
        taken = [home.name for home in homes]
        names = [*(known.get(survey.names[rank], "") for rank in ranks), usual, f"{first}-home"]
        homes.append(Home(next(name for name in names if name and name not in taken), ranks))
    return homes


def lines(survey: Survey, homes: Sequence[Home], within: Mapping[str, Delay], loss: Mapping[str, float]) -> list[Wan]:
    """Return the homes' lines. `within` has the delay of each home's medium, `loss` the loss of each line by the name
    of its home."""
    across = {
        (one, other): [(i, j) for i, j in product(homes[one].ranks, homes[other].ranks)]
        for one, other in combinations(range(len(homes)), 2)
    }
    rows = np.array([[float(home in pair) for home in range(len(homes))] for pair in across])
    total = np.array([_between(survey, homes, within, pair, ways) for pair, ways in across.items()])
    parts = np.linalg.lstsq(rows, total, rcond=None)[0]
    least_s = _SMALLEST_SHARE * float(total[:, 0].min())
    rates_Bps = _rates_Bps(survey, homes)
    buffers = _buffers(survey, homes, rates_Bps)
    found = []
    for home, (latency_s, jitter_s), rates, buffer in zip(homes, parts, rates_Bps, buffers, strict=True):
        up_bps, down_bps = (line_rate(rate, _MTU, survey) for rate in rates)
        found.append(
            Wan(
                home.name, up_bps, down_bps, Seconds(rounded(max(float(latency_s), least_s), 3)),
                Seconds(rounded(max(float(jitter_s), 0.0), 3)), Share(rounded(loss.get(home.name, 0.0), 2)),
                None if buffer is None else Bytes(round(rounded(buffer.size_bytes, 3))),
                buffer_basis=None if buffer is None else queue_basis(buffer, survey.basis), basis=survey.basis,
            )
        )  # fmt: skip
    return found


_MTU = 1500


def line_rate(goodput_Bps: float, mtu: int, survey: Survey) -> BitRate:
    """Return the line rate that leaves this goodput."""
    tcp = survey.tcp
    headers = (mtu + tcp.framing_bytes) / (mtu - tcp.header_bytes) if tcp.headers else 1.0
    return BitRate(rounded(8 * goodput_Bps * headers))


def _between(
    survey: Survey, homes: Sequence[Home], within: Mapping[str, Delay], pair: Pair, ways: Sequence[Pair]
) -> tuple[float, float]:
    """Return the latency and the jitter of the two lines between two homes together."""
    delays = [delay_of(survey, way) for way in ways]
    ends = [within[homes[home].name] for home in pair]
    latency_s = statistics.median(each.latency_s for each in delays) - sum(end.latency_s for end in ends) / 2
    jitter_s = statistics.median(each.jitter_s for each in delays) - sum(end.jitter_s for end in ends) / 2
    return max(latency_s, 0.0), max(jitter_s, 0.0)


def _rates_Bps(survey: Survey, homes: Sequence[Home]) -> list[tuple[float, float]]:
    """Return what each line sends and receives. Where the sender's line may be what holds a flow up, that of the
    receiver counts as a little faster, so that one queue fills and not two."""
    best = {
        (one.name, other.name): _usual_best([survey.rate_Bps(*pair) for pair in product(one.ranks, other.ranks)])
        for one, other in permutations(homes, 2)
    }
    ups = {one.name: max(best[one.name, other.name] for other in homes if other != one) for one in homes}
    downs = {
        one.name: max(
            best[other.name, one.name] * (_FASTER if best[other.name, one.name] > _ALIKE * ups[other.name] else 1.0)
            for other in homes
            if other != one
        )
        for one in homes
    }
    return [(ups[home.name], downs[home.name]) for home in homes]


def _usual_best(rates_Bps: Sequence[float]) -> float:
    """Return the median of those that are near the best, which alone may have been measured too high."""
    return statistics.median(rate for rate in rates_Bps if rate > _NEAR_BEST * max(rates_Bps))


def _buffers(survey: Survey, homes: Sequence[Home], rates_Bps: Sequence[tuple[float, float]]) -> list[Queue | None]:
    found: list[list[Queue]] = [[] for _ in homes]
    for one, other in permutations(range(len(homes)), 2):
        slower = one if rates_Bps[one][0] <= rates_Bps[other][1] else other
        queues = (queue_of_flow(survey, pair) for pair in product(homes[one].ranks, homes[other].ranks))
        found[slower] += [queue for queue in queues if queue is not None]
    return [common_queue(queues) for queues in found]
