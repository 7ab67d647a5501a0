"""A run as a timeline, and the file of a finding: its scenario with the violations as comments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hcsim.config import FAULTS, AnyFault, Scenario, write_faults, write_scenario
from hcsim.fuzz.evidence import Evidence
from hcsim.fuzz.invariants import Breach
from hcsim.fuzz.trial import gather
from hcsim.training.run import Report

_LONGEST = 60
"""The number of lines of a timeline. Lines in the middle are omitted."""


def write_finding(scenario: Scenario, breaches: Sequence[Breach], invariant: str) -> str:
    """Return the scenario's file with the violations of its run as comments at the top."""
    evidence, _, _ = gather(scenario)
    found = [breach for breach in breaches if breach.invariant == invariant] or list(breaches)
    lines = [f"breaks {invariant}: {found[0].what if found else ''}", "", "What happens:"]
    lines += [f"  {line}" for line in _shortened(timeline(evidence))]
    lines += ["", "Again: hcsim fuzz --replay THIS_FILE"]
    head = [f"# {line}".rstrip() for text in lines for line in text.splitlines() or [""]]
    return "\n".join([*head, "", write_scenario(scenario)])


def timeline(evidence: Evidence) -> list[str]:
    """Return the events in the order of time. Hosts with the same message are combined."""
    lines: list[str] = []
    moments = sorted([*_faults(evidence), *_words(evidence), *_steps(evidence)], key=lambda each: each[0])
    for number, (time_s, who, what) in enumerate(moments):
        if number and moments[number - 1][1:] == (who, what):
            continue
        lines.append(f"{time_s:9.3f} s  {who + ':' if who else ''} {what}".rstrip())
    if evidence.phases.liveness_s:
        note = f"{evidence.phases.liveness_s:9.3f} s  from here on nothing changes any more: {_standing(evidence)}"
        lines.insert(sum(_time_s(line) <= evidence.phases.liveness_s for line in lines), note)
    return [*lines, *_ends(evidence)]


def _time_s(line: str) -> float:
    return float(line.partition(" s ")[0])


def _standing(evidence: Evidence) -> str:
    phases = evidence.phases
    sick = f"{', '.join(phases.sick)} may stay broken" if phases.sick else "all are well"
    return f"{sick}; {evidence.excused}" if evidence.excused else sick


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _LONGEST:
        return lines
    half = _LONGEST // 2
    return [*lines[:half], f"  … {len(lines) - 2 * half} lines …", *lines[-half:]]


def _faults(evidence: Evidence) -> Iterator[tuple[float, str, str]]:
    known = {repr(fault): fault for fault in evidence.scenario.faults}
    kinds = {kind.__name__ for kind in FAULTS.values()}
    for event in evidence.events:
        if event[1] != "fault":
            continue
        fault = known.get(str(event[3]))
        if fault is not None and event[2] in kinds:
            yield int(event[0]) / 1e9, "", f"FAULT {in_words(fault)}"
        elif event[2] in ("start", "heal", "thaw", "unclog", "recover", "unhang", "unblock", "mend", "give", "behave"):
            yield int(event[0]) / 1e9, "", f"{event[2]} {event[3]}"


def in_words(fault: AnyFault) -> str:
    given = [line for line in write_faults([fault]).splitlines()[1:] if line]
    kind, values = given[0].partition(" = ")[2].strip('"'), [line for line in given[1:] if not line.startswith("at ")]
    ends = "" if not fault.is_for_good else " for good"
    return f"{kind}{ends}: {', '.join(values)}"


def _words(evidence: Evidence) -> Iterator[tuple[float, str, str]]:
    """Yield messages, failed views and accusations. Hosts that send the same message in the same second are
    combined."""
    groups: dict[tuple[int, str], tuple[float, dict[str, None]]] = {}
    for said in evidence.said:
        _, hosts = groups.setdefault((int(said.time_s), said.text), (said.time_s, {}))
        hosts.setdefault(said.host)
    for (_, text), (time_s, hosts) in groups.items():
        yield time_s, ", ".join(hosts), text
    for event in evidence.events:
        if event[1] == "view failed":
            yield int(event[0]) / 1e9, str(event[2]), f"view {event[3]} failed: {event[4]}"
        elif event[1] == "accused":
            yield int(event[0]) / 1e9, str(event[2]), f"accuses {str(event[4])[:8]}: {event[5]}"


def _steps(evidence: Evidence) -> Iterator[tuple[float, str, str]]:
    """Yield the first step, the last one, and those before and after a pause."""
    done, before_s = 0, 0.0
    for each in evidence.steps:
        if each.step <= done:
            continue
        if not done or each.time_s > before_s + 5 or each.step >= evidence.training.steps:
            if done:
                yield before_s, "", f"step {done} is done"
            yield each.time_s, "", f"step {each.step} is done"
        done, before_s = each.step, each.time_s
    if done:
        yield before_s, "", f"step {done} is done, and no further one"


def _ends(evidence: Evidence) -> Iterator[str]:
    for host, result in evidence.results.items():
        if isinstance(result, Report):
            yield f"   at last  {host}: came to the end after {result.steps} steps"
        else:
            yield f"   at last  {host}: {type(result).__name__}: {result}"
