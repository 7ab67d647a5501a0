"""One answer to: who is here, does it work, how fast, when is it done, what went wrong.

It is put together from the status of each node, running or replayed, and it is what a page or a terminal shows. All
times in it are the watcher's; those that a node tells are of its own clock and are moved by the difference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec

from hcsim.cluster.messages import LinkStatus, StatusReply
from hcsim.cluster.status_client import ClusterWatch
from hcsim.cluster.view import View
from hcsim.runtime.address import hosts_of
from hcsim.runtime.host import Chip, Interface, Readings
from hcsim.telemetry.history import HistoryStep, RunHistory
from hcsim.transport.admission_queue import one_line

RECENT_STEPS = 10
"""The number of steps over which speed and phases are averaged."""
STALLED_S = 10.0
"""The least time without a step after which a training counts as stalled."""
_STALLED_STEPS = 5.0
"""The same, in steps of the usual time."""
_SAME_NEWS_S = 10.0
"""All members of a view have the same to say, at nearly the same time."""
MOST_EVENTS = 100
MOST_LINKS = 64
"""The number of links that are shown. Of more, those in trouble and the slowest are."""
_MOST_NAMED = 3
"""The number of machines that are out and that the headline and the hint name."""

NodeState: TypeAlias = Literal["leads", "member", "waits", "suspected", "out", "silent", "done"]
_GONE: tuple[NodeState, ...] = ("out", "silent", "suspected")
State: TypeAlias = Literal["nobody", "waiting", "working", "stalled", "done"]
Tone: TypeAlias = Literal["plain", "good", "bad"]
_BAD = re.compile(
    r"\bwas lost\b|\blost\)|left out|expelled|refused|not taken|cannot|does not answer|not ready|failed|fault:"
)
_GOOD = re.compile(r"\bjoined\b|training begins|training goes on|answers again|healed")


class NodeReport(msgspec.Struct, frozen=True):
    """What is known of one node at the moment."""

    reply: StatusReply
    """Its last one."""
    history: RunHistory
    heard_s: float
    """When the reply came, on the watcher's clock."""
    failure: str = ""
    """Why it does not answer now; empty if it does."""

    def when_s(self, at_s: float) -> float:
        """Return a moment of the node's clock on the watcher's."""
        details = self.reply.details
        return at_s if details is None else self.heard_s + at_s - details.now_s


class StepTimes(msgspec.Struct, frozen=True):
    """The seconds of a step by purpose. The parts may overlap."""

    compute_s: float
    encode_s: float
    wait_s: float
    whole_s: float


class NodeOverview(msgspec.Struct, frozen=True):
    """One machine."""

    node: str
    name: str
    state: NodeState
    why: str = ""
    """Why it is not at work."""
    address: str = ""
    chip: Chip | None = None
    readings: Readings = Readings()
    step: int = 0
    phases: StepTimes | None = None


class LinkOverview(msgspec.Struct, frozen=True):
    """The connection between two machines, with the way that is in use."""

    one: str
    """A node."""
    other: str
    ends: tuple[str, str]
    """The addresses in use, the one's first; empty if unknown."""
    media: tuple[str, ...]
    there_bps: float | None
    back_bps: float | None
    latency_s: float | None
    trouble: str = ""


class EventOverview(msgspec.Struct, frozen=True):
    """A message of a node."""

    at_s: float
    who: str
    text: str
    tone: Tone


class TrainingOverview(msgspec.Struct, frozen=True):
    """How far the work is."""

    title: str
    step: int
    steps: int
    """How many there are to be; 0 if nobody knows."""
    ranks: int
    loss: float
    last_s: float
    """When the last step was done."""
    step_s: float | None
    samples_per_s: float | None
    left_s: float | None
    """The time until the last step, at the present speed."""
    curve: tuple[tuple[int, float], ...]
    """Steps and losses."""
    held_out: tuple[tuple[int, float], ...]


class Overview(msgspec.Struct, frozen=True):
    """A cluster at one moment."""

    title: str
    now_s: float
    state: State
    headline: str
    """The answer in one sentence."""
    hint: str = ""
    """What went wrong, and what a person can do about it."""
    epoch: int = -1
    """Of the view that works, or that has the most members; -1 if there is none."""
    nodes: tuple[NodeOverview, ...] = ()
    links: tuple[LinkOverview, ...] = ()
    training: TrainingOverview | None = None
    events: tuple[EventOverview, ...] = ()
    """The oldest first."""


def overview(
    title: str,
    now_s: float,
    reports: Sequence[NodeReport],
    news: Sequence[EventOverview] = (),
    refusals: Mapping[str, str] = MappingProxyType({}),
) -> Overview:
    """Put the reports of all nodes together; `news` are events that the watcher itself has noticed, and `refusals` why
    nodes are not to be watched, by control address."""
    here = [each for each in reports if not each.failure]
    view = _best_view(here or reports)
    training = _training(reports, now_s)
    events = _events(reports, news)
    nodes = _nodes(reports, view, events, refusals)
    state = _state(here, view, training, now_s)
    needed = max((each.reply.details.needed for each in here if each.reply.details is not None), default=0)
    headline = _headline(state, nodes, training, now_s, needed)
    hint = _hint(state, nodes, events)
    epoch = -1 if view is None else view.epoch
    return Overview(title, now_s, state, headline, hint, epoch, nodes, _links(reports), training, events)


def watched(title: str, watch: ClusterWatch, now_s: float, offset_s: float) -> Overview:
    """Return how a watched cluster stands; `offset_s` moves times of the watch's clock to those of `now_s`."""
    reports = [
        NodeReport(each.reply, each.history, each.heard_s + offset_s, each.failure)
        for each in watch.nodes
        if each.reply is not None
    ]
    news = [EventOverview(each.at_s + offset_s, "", each.text, tone_of(each.text)) for each in watch.messages]
    seen = overview(title, now_s, reports, news, watch.refusals)
    if seen.state != "nobody":
        return seen
    if watch.looks_still:
        return msgspec.structs.replace(seen, state="waiting", headline="Looking for the cluster")
    failures = [watch.failure] if watch.failure else []
    failures += [f"{address} does not answer: {why}" for address, why in watch.silent.items()]
    hint = "does `hcsim run --real` run on a machine? If it does, name one with --peer"
    if watch.refusals:
        return msgspec.structs.replace(seen, hint=one_line("; ".join(watch.refusals.values())))
    return msgspec.structs.replace(seen, hint=one_line("; ".join((hint, *failures))))


def _best_view(reports: Sequence[NodeReport]) -> View | None:
    """Return the view that goes on where clusters meet, and of one lineage the newest."""
    views = [each.reply.view for each in reports]
    if not views:
        return None
    best = min(views, key=lambda view: view.standing)
    return max((view for view in views if view.lineage == best.lineage), key=lambda view: view.epoch)


def _nodes(
    reports: Sequence[NodeReport], view: View | None, events: Sequence[EventOverview], refusals: Mapping[str, str]
) -> tuple[NodeOverview, ...]:
    members = {} if view is None else {member.node: member for member in view.members}
    known = {each.reply.status.us.node: each for each in reports}
    links: dict[str, list[LinkStatus]] = {}
    for each in reports:
        for link in [] if each.failure else each.reply.links:
            links.setdefault(link.node, []).append(link)
    names = {node: found[0].name for node, found in links.items()}
    names |= {node: member.name for node, member in members.items()}
    names |= {node: each.reply.status.us.name for node, each in known.items()}
    order = [*members, *(node for node in sorted(names, key=lambda node: names[node]) if node not in members)]
    controls = {each.reply.status.us.node: each.reply.status.control for each in reports}
    controls |= {node: found[0].control for node, found in links.items() if node not in controls}
    return tuple(
        _node(
            node,
            names[node],
            view,
            known.get(node),
            links.get(node, []),
            events,
            refusals.get(controls.get(node, ""), ""),
        )
        for node in order
    )


def _node(
    node: str,
    name: str,
    view: View | None,
    report: NodeReport | None,
    links: Sequence[LinkStatus],
    events: Sequence[EventOverview],
    refusal: str,
) -> NodeOverview:
    suspected = next((link.suspected for link in links if link.suspected), "")
    is_member = view is not None and view.member(node) is not None
    state: NodeState
    if report is not None and report.history.is_finished:
        state, why = "done", ""
    elif refusal and is_member and not suspected:  # it works, and the others say so
        state, why = "leads" if view is not None and view.leader.node == node else "member", refusal
    elif report is None or report.failure:
        failure = "" if report is None else report.failure
        state, why = "silent" if is_member else "out", suspected or _why_lost(name, events) or failure
    elif not is_member:
        waits = not suspected and not _why_lost(name, events)
        state = "waits" if waits else "out"
        why = "waits to be taken in" if waits else suspected or _why_lost(name, events)
    elif suspected:
        state, why = "suspected", suspected
    elif view is not None and not view.formed:
        state, why = "waits", "waits for others"
    else:
        state, why = "leads" if view is not None and view.leader.node == node else "member", ""
    if "nobody listens" in why:
        why = f"hcsim does not run there ({why})"
    if report is None:
        control = next((link.control for link in links), "")
        return NodeOverview(node, name, state, why, _first_host(control))
    details, steps = report.reply.details, report.history.steps()
    return NodeOverview(
        node,
        name,
        state,
        why,
        _first_host(report.reply.status.control),
        None if details is None else details.chip,
        Readings() if details is None or report.failure else details.readings,
        steps[-1].step if steps else 0,
        None if state in ("out", "silent") else _phases(steps[-RECENT_STEPS:]),
    )


def _first_host(address: str) -> str:
    return hosts_of(address)[0][0] if address else ""


def _why_lost(name: str, events: Sequence[EventOverview]) -> str:
    """Return why the others left this node out, in the words of their last message about it."""
    for event in reversed(events):
        if found := re.search(rf"\b{re.escape(name)} was lost: ([^;]+?)\)?(?:;|$)", event.text):
            return found[1]
        if re.search(rf"\b{re.escape(name)} lost\b", event.text):
            return "it was lost"
        if re.search(rf"\b{re.escape(name)}\b[^(]*\bjoined\)", event.text):
            return ""
    return ""


def _phases(steps: Sequence[HistoryStep]) -> StepTimes | None:
    if not steps:
        return None
    return StepTimes(
        median(step.compute_s for step in steps),
        median(step.encode_s for step in steps),
        median(step.wait_s for step in steps),
        median(step.whole_s for step in steps),
    )


def _links(reports: Sequence[NodeReport]) -> tuple[LinkOverview, ...]:
    """Return one link for each pair, with what either end knows of it."""
    interfaces = {each.reply.status.us.node: each.reply.interfaces for each in reports}
    found: dict[tuple[str, str], LinkOverview] = {}
    for each in reports:
        us = each.reply.status.us.node
        for link in [] if each.failure else each.reply.links:
            pair = (us, link.node) if us < link.node else (link.node, us)
            turned = pair[0] != us
            ends = (link.ends[1], link.ends[0]) if turned else link.ends
            there, back = (link.back_Bps, link.there_Bps) if turned else (link.there_Bps, link.back_Bps)
            known = found.get(pair)
            if known is not None:
                ends = known.ends if any(known.ends) else ends
                there = known.there_bps / 8 if known.there_bps else there
                back = known.back_bps / 8 if known.back_bps else back
            latency_s = link.latency_s if known is None or known.latency_s is None else known.latency_s
            trouble = link.suspected or (known.trouble if known is not None else "")
            media = [_medium(end, interfaces.get(node, ())) for end, node in zip(ends, pair, strict=True)]
            found[pair] = LinkOverview(
                *pair,
                ends=ends,
                media=tuple(dict.fromkeys(filter(None, media))),
                there_bps=None if there is None else 8 * there,
                back_bps=None if back is None else 8 * back,
                latency_s=latency_s,
                trouble=trouble,
            )
    links = [found[pair] for pair in sorted(found)]
    if len(links) > MOST_LINKS:
        links.sort(key=lambda link: (not link.trouble, min(link.there_bps or math.inf, link.back_bps or math.inf)))
    return tuple(links[:MOST_LINKS])


def _medium(address: str, interfaces: Iterable[Interface]) -> str:
    return next((each.medium.value for each in interfaces if address and address in each.addresses), "")


def _training(reports: Sequence[NodeReport], now_s: float) -> TrainingOverview | None:
    working = [each for each in reports if each.history.latest is not None]
    if not working:
        return None
    first = max(working, key=_progress)
    steps = first.history.steps()
    last = steps[-1]
    recent = steps[-RECENT_STEPS:]
    step_s = samples_per_s = left_s = None
    lasted_s = recent[-1].at_s - recent[0].at_s
    done = recent[-1].step - recent[0].step
    if done > 0 and lasted_s > 0:
        step_s = lasted_s / done
        before = [each.step for each in recent]
        samples = sum(each.samples * (each.step - step) for each, step in zip(recent[1:], before, strict=False))
        samples_per_s = samples / lasted_s if samples else None
        left_s = step_s * (first.history.total_steps - last.step) if first.history.total_steps else None
    merged: dict[int, HistoryStep] = {}
    for each in sorted(working, key=_progress):
        for step in each.history.steps():
            if step.step not in merged or merged[step.step].held_out is None:  # the first member alone evaluates
                merged[step.step] = step
    curve = [merged[step] for step in sorted(merged)]
    return TrainingOverview(
        first.history.title,
        last.step,
        first.history.total_steps,
        last.ranks,
        last.loss,
        first.when_s(last.at_s),
        step_s,
        samples_per_s,
        left_s,
        tuple((each.step, each.loss) for each in curve),
        tuple((each.step, each.held_out) for each in curve if each.held_out is not None),
    )


def _progress(report: NodeReport) -> tuple[int, bool, int]:
    latest = report.history.latest
    return 0 if latest is None else latest.step, not report.failure, len(report.history.steps())


def _events(reports: Sequence[NodeReport], news: Sequence[EventOverview]) -> tuple[EventOverview, ...]:
    """Return the messages of all nodes, the same one of several nodes once."""
    all_of_them = list(news)
    for each in reports:
        name = each.reply.status.us.name
        all_of_them += [
            EventOverview(each.when_s(said.at_s), name, said.text, tone_of(said.text))
            for said in each.history.messages()
        ]
    told: dict[str, float] = {}
    events = []
    for event in sorted(all_of_them, key=lambda event: event.at_s):
        is_view = event.text.startswith("view ")  # there is one of each number
        if event.text not in told or (not is_view and event.at_s - told[event.text] > _SAME_NEWS_S):
            events.append(event)
        told[event.text] = event.at_s
    return tuple(events[-MOST_EVENTS:])


def tone_of(text: str) -> Tone:
    """Return whether a message is good or bad news."""
    return "bad" if _BAD.search(text) else "good" if _GOOD.search(text) else "plain"


def _state(here: Sequence[NodeReport], view: View | None, training: TrainingOverview | None, now_s: float) -> State:
    if training is not None and training.steps and training.step >= training.steps:
        return "done"
    if not here or view is None:
        return "nobody"
    if not view.formed or all(view.member(each.reply.status.us.node) is None for each in here):
        return "waiting"
    if training is None:
        return "working"
    patience_s = max(STALLED_S, _STALLED_STEPS * (training.step_s or 0.0))
    return "stalled" if now_s - training.last_s > patience_s else "working"


def _headline(
    state: State, nodes: Sequence[NodeOverview], training: TrainingOverview | None, now_s: float, needed: int
) -> str:
    at_work = sum(each.state in ("leads", "member", "suspected", "done") for each in nodes)
    here = sum(each.state in ("leads", "member", "waits") for each in nodes)
    required = f", {needed} are needed" if needed > here else ""
    sentence = {
        "nobody": "No node of the cluster answers",
        "waiting": f"Waiting: {_machines(here)} here{required}",
        "working": f"Working on {_machines(at_work)}",
        "stalled": "Stalled",
        "done": "Finished",
    }[state]
    if training is not None:
        reached = f"step {training.step:,}" + (f" of {training.steps:,}" if training.steps else "")
        if state == "stalled":
            sentence = f"Stalled: no step for {now_s - training.last_s:.0f} s, after {reached}"
        elif state == "done":
            sentence = f"Finished: {training.step:,} steps"
        elif state == "nobody":
            sentence += f" any more, after {reached}"
        else:
            sentence += f", {reached}"
    gone = [each.name for each in nodes if each.state in _GONE]
    if gone and state not in ("done", "nobody"):
        more = len(gone) - _MOST_NAMED
        sentence += "; out: " + ", ".join(gone[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return sentence


def _machines(count: int) -> str:
    return f"{count} machine{'s' if count != 1 else ''}"


def _hint(state: State, nodes: Sequence[NodeOverview], events: Sequence[EventOverview]) -> str:
    """Return why machines are out, or why nothing goes on, in the words of the members."""
    if state in ("done", "nobody"):
        return ""
    reasons = [f"{each.name}: {each.why}" for each in nodes if each.state in _GONE and each.why]
    if not reasons and state != "working" and events:
        reasons = [f"{events[-1].who}: {events[-1].text}" if events[-1].who else events[-1].text]
    more = len(reasons) - _MOST_NAMED
    return one_line("; ".join(reasons[:_MOST_NAMED]) + (f"; {more} more below" if more > 0 else ""))
