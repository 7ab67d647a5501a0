"""What must always hold, as checks over a run's trace and its results. Each says what it found, or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from experiments.faults.slopes import expected
from hcsim.compressors.base import Array
from hcsim.telemetry.trace import Event
from hcsim.training.run import Report


class Evidence(msgspec.Struct, frozen=True):
    """All that is known of a run."""

    seed: int
    steps: int
    batch: int
    exact: bool
    """Whether the parameters are those of a closed form: data parallel, nothing compressed."""
    events: Sequence[Event]
    results: Mapping[str, Report | BaseException]
    parameters: Mapping[str, Array]
    kept: Mapping[str, bool]
    """Whether a host never lost its memory."""

    def of_kind(self, kind: str, fields: int) -> Iterator[Event]:
        """The events of one kind, with so many fields."""
        return (event for event in self.events if event[1] == kind and len(event) == 3 + fields)


def violations(evidence: Evidence) -> list[str]:
    """Everything that did not hold."""
    found = []
    for law in LAWS:
        found += [f"{law.__name__}: {what}" for what in law(evidence)]
    return found


def one_view_per_epoch(evidence: Evidence) -> Iterator[str]:
    """At most one view, and so one leader, in each epoch of a lineage; and one successor of each view."""
    views: dict[tuple[object, ...], object] = {}
    for _, _, host, lineage, epoch, previous, members in evidence.of_kind("view", 4):
        if views.setdefault((lineage, epoch), members) != members:
            yield f"{host} has {members} in epoch {epoch}, others have {views[lineage, epoch]}"
        after = (lineage, "after", previous)
        if "," in str(members) and views.setdefault(after, epoch) != epoch:
            yield f"{host} has epoch {epoch} after {previous}, others have {views[after]}"


def epochs_never_go_back(evidence: Evidence) -> Iterator[str]:
    """Not even when a host is started anew."""
    newest: dict[object, int] = {}
    for _, _, host, _, epoch, _, _ in evidence.of_kind("view", 4):
        if not evidence.kept[str(host)]:
            continue
        if int(epoch) <= newest.get(host, -1):
            yield f"{host} went from epoch {newest[host]} to {epoch}"
        newest[host] = int(epoch)


def replicas_are_alike(evidence: Evidence) -> Iterator[str]:
    """Whoever votes on a step in an epoch holds the same model."""
    prints: dict[tuple[object, ...], tuple[object, object]] = {}
    for _, _, host, lineage, epoch, step, fingerprint in evidence.of_kind("voted", 4):
        first = prints.setdefault((lineage, epoch, step), (host, fingerprint))
        if first[1] != fingerprint:
            yield f"{host} and {first[0]} differ before step {step} in epoch {epoch}"


def steps_are_applied_in_order(evidence: Evidence) -> Iterator[str]:
    """Each once, from where the host was last in step with the others."""
    at: dict[object, int] = {}
    for event in evidence.events:
        if event[1] == "synchronised":
            at[event[2]] = int(event[4])
        elif event[1] == "applied":
            host, step = event[2], int(event[4])
            if step <= at.get(host, 0) or (evidence.exact and step != at.get(host, 0) + 1):
                yield f"{host} applied step {step} after step {at.get(host, 0)}"
            at[host] = step


def everybody_comes_to_the_end(evidence: Evidence) -> Iterator[str]:
    """Once faults have healed: one cluster, all in it, and training done, with the same parameters."""
    digests: dict[str | None, str] = {}
    for host, result in evidence.results.items():
        if isinstance(result, TimeoutError) and not str(result):
            yield f"{host} never came to an end"
        elif isinstance(result, BaseException):
            yield f"{host} ended with {type(result).__name__}: {result}"
        elif result.steps != evidence.steps:
            yield f"{host} ended after {result.steps} of {evidence.steps} steps"
        else:
            digests.setdefault(result.sha256, host)
    if len(digests) > 1:
        yield f"{' and '.join(digests.values())} ended with unlike parameters"


def nothing_is_lost_or_doubled(evidence: Evidence) -> Iterator[str]:
    """The parameters are the sum of exactly the contributions of those who took part, each once per step."""
    if not evidence.exact or not evidence.parameters:
        return
    sizes = [evidence.batch * members for members in _members_by_step(evidence)]
    want = expected(evidence.seed, sizes)
    for host, parameters in evidence.parameters.items():
        away = float(np.abs(parameters - want).max())
        if away > 1e-3:
            yield f"{host} is {away:.3g} away from the sum of what its members computed"


def _members_by_step(evidence: Evidence) -> list[int]:
    """How many took part in each step that counts: the last time that it was applied."""
    sizes: dict[object, int] = {}
    for _, _, _, epoch, _, members in evidence.of_kind("follows", 3):
        sizes[epoch] = int(members)
    counted: dict[int, int] = {}
    for event in evidence.events:
        if event[1] == "applied":
            counted[int(event[4])] = sizes[event[3]]
    return [counted[step] for step in sorted(counted)]


LAWS = (
    one_view_per_epoch,
    epochs_never_go_back,
    replicas_are_alike,
    steps_are_applied_in_order,
    everybody_comes_to_the_end,
    nothing_is_lost_or_doubled,
)
