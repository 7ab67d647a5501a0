"""What a plan says, in words: for the terminal, for the page and for the job's file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hcsim.cli import screen
from hcsim.cli.timeline import CAUSE_WORDS, KIND_WORDS
from hcsim.plan.methods import LearningCost, Method
from hcsim.plan.outlook import ALL_MACHINES, Band, Change, MachineTime
from hcsim.plan.plan import Plan, tokens_of
from hcsim.plan.search import Ranked

NAMED = 4
"""More machines are not named one by one."""
_SHOWN, _SHOWN_UNKNOWN = 6, 3
NOTABLE = 0.02
"""What changes the speed by less is not worth a line."""
_PARTS_OF = {
    "zero1": "Each holds a part of the optimizer's state.",
    "zero2": "Each holds a part of the gradients and of the optimizer's state.",
    "zero3": "Each holds a part of the parameters, the gradients and the optimizer's state.",
    "pipeline": "Each holds some layers of the model, and all samples pass through all of them.",
}
"""What a strategy that divides the model does, by its name."""


def what_to_do(found: Plan) -> str:
    best = found.best
    names = best.candidate.nodes
    if len(names) == 1:
        return f"Train on {names[0]} alone."
    on = joined(names) if len(names) <= NAMED else f"{who(found, names)} machines"
    method = best.candidate.method
    compressed = "" if method.compressor == "none" else f", compressed with {method.compressor}"
    if best.result.sizes:
        share = ", ".join(f"{size} on {name}" for size, name in zip(best.result.sizes, names, strict=True))
        shares = f"Of the samples of a step, {share}."
    else:
        each = screen.counted(found.request.model.samples // len(names), "sample")
        shares = "" if method.family == "pipeline" else f"{each} a step on each."
    paces = ""
    if best.result.paces:
        paces = "Steps of a period: " + ", ".join(map(str, best.result.paces)) + "."
    divided = _PARTS_OF.get(method.family, "")
    return " ".join(filter(None, (f"Train with {method.strategy}{compressed}, on {on}.", divided, shares, paces)))


def faster_than(found: Plan, alone: Ranked, band: Band) -> str:
    """Return than what the plan is how much faster, but for the figure itself."""
    best, name = found.best, alone.candidate.nodes[0]
    rates = f"{rate(found, best)}, against {number_of(per_s(found, alone))}"
    spread = f"(p10–p90 {band.p10:.2f}–{band.p90:.2f})"
    if best.learning.most == 1.0:
        return f" as fast as {name} alone {spread}: {rates}"
    more = alone.result.sample_s / best.result.sample_s
    return f" as fast as {name} alone to the same loss {spread}: {rates}, which is {more:.2f} ×"


def remarks(found: Plan) -> Iterator[str]:
    best, alone, model = found.best, found.found.alone, found.request.model
    out = [node.name for node in found.request.home.nodes if node.name not in best.candidate.nodes]
    whole = next((each.ratio for each in found.changes if each.words == ALL_MACHINES), None)
    if out and len(best.candidate.nodes) > 1:
        why = "" if whole is None else f": with all machines it would be {whole:.2f} × as fast"
        yield f"Leave out {joined(out)}{why}."
    yield learning_line(best.learning, found.request.by_samples)
    if alone is not None and (samples := alone.candidate.settings(model).batch) and alone.result.step_s:
        fits = round(alone.result.step_s / alone.result.sample_s)
        if fits < model.samples:
            faster = "; if steps of so few do for you, it is faster alone" if alone.quality_s < best.quality_s else ""
            yield f"{alone.candidate.nodes[0]} alone has room for {fits} of the {samples} samples at a time{faster}."
    if found.finer is not None and found.finer.ratio > 1 + 2 * NOTABLE:
        few = f"{screen.counted(model.samples, 'sample')} a step are hard to share out"
        yield (f"{few}: with {found.finer.words} it would be {found.finer.ratio:.2f} × as fast, "
               "by steps that learn from more samples.")  # fmt: skip
    unknown = [each for each in found.alternatives(chosen=False) if each.learning.evidence == "unknown"]
    if unknown and alone is not None and unknown[0].quality_s < best.quality_s * (1 - NOTABLE):
        method, ratio = unknown[0].candidate.method, alone.quality_s / unknown[0].quality_s
        yield (f"{method} would do {ratio:.2f} × as many samples a second; how much it learns from them was not "
               f"measured. To have it all the same: {asking_for(method)}.")  # fmt: skip


def asking_for(method: Method) -> str:
    """Return the options that ask for a method."""
    compressor = "" if method.compressor == "none" else f" --compressor {method.compressor}"
    return f"--strategy {method.strategy}{compressor}"


def learning_line(learning: LearningCost, by_samples: bool) -> str:
    if by_samples:
        return "Samples a second were compared; how much is learned from them was not."
    if learning.evidence == "exact":
        return "A step learns what one machine alone would learn from the same samples."
    if learning.evidence == "measured":
        often = f"{learning.least:.2f} to {learning.most:.2f} × as many samples"
        return f"To the same loss it took {often} as one machine alone: measured on a small model, yours may differ."
    return "How well it learns is not known: it was asked for."


def limit_line(found: Plan) -> str:
    path = found.limits.path
    if not path:
        return ""
    parts = ", ".join(f"{KIND_WORDS[kind]} {percent(share)}" for kind, share in path.items() if share >= 0.005)
    kind = next(iter(path))
    return f"What limits it is {KIND_WORDS[kind]}, above all {found.limits.place}: {parts} of the critical path."


def cause_words(each: MachineTime) -> str:
    kind, _, where = each.cause.partition(" ")
    return CAUSE_WORDS[kind].format(where) if kind and each.exposed + each.idle > 0.005 else ""


def home_line(found: Plan) -> str:
    nodes, model = found.request.home.nodes, found.request.model
    names = ", ".join(f"{node.name} ({machine_words(node.machine)})" for node in nodes)
    if len(nodes) > 2 * NAMED:
        kinds = Counter(machine_words(node.machine) for node in nodes)
        names = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.items())
    return f"{model.base.task}, {screen.counted(model.samples, 'sample')} a step, on {names}"


def machine_words(machine: Any) -> str:
    return screen.cell(machine if isinstance(machine, str) else machine.name)


def who(found: Plan, names: Sequence[str]) -> str:
    """Return which machines, as shortly as can be."""
    out = [node.name for node in found.request.home.nodes if node.name not in names]
    if not out:
        return f"all {len(names)}" if len(names) > 1 else names[0]
    return f"all but {', '.join(out)}" if len(out) <= min(2, len(names) - 1) else ", ".join(names)


def change_lines(found: Plan) -> list[Change]:
    """Return what changes the plan's speed by so much that it is worth saying."""
    return [each for each in found.changes if abs(each.ratio - 1) >= NOTABLE and each.words != ALL_MACHINES]


def together_line(found: Plan) -> str:
    """Return what the plan comes to where no machine could do it alone."""
    samples = screen.counted(found.request.model.samples, "sample")
    step = f"a step of {samples} takes {screen.duration(found.best.result.step_s)}"
    return f"None of the machines could train it alone; together they do {rate(found, found.best)}: {step}."


def speedup_heading(found: Plan) -> tuple[str, ...]:
    return () if found.found.alone is None else ("speed-up",)


def speedup_words(found: Plan, each: Ranked) -> tuple[str, ...]:
    """Return how many times as fast as the fastest machine alone it is, for the same quality; nothing if none can."""
    alone = found.found.alone
    if alone is None:
        return ()
    speedup = f"{alone.quality_s / each.quality_s:.2f} ×"
    return (f"{speedup} ?" if is_doubtful(each) else speedup,)


def is_doubtful(each: Ranked) -> bool:
    """Whether too little is known of how it learns."""
    return each.learning.evidence in ("unknown", "failed")


def on_words(found: Plan, each: Ranked) -> str:
    """Return on which machines, and how they share the samples."""
    return f"{who(found, each.candidate.nodes)}{', by speed' if each.candidate.by_speed else ''}"


def shown_alternatives(found: Plan) -> list[Ranked]:
    """Return the plan, and the best of what else there is."""
    known, unknown = found.alternatives(chosen=True), found.alternatives(chosen=False)
    return [found.best, *known[:_SHOWN], *unknown[:_SHOWN_UNKNOWN]]


def why(found: Plan) -> list[str]:
    lines = ["Written by `hcsim plan`.", "", what_to_do(found)]
    alone, band = found.found.alone, found.speedup
    if alone is not None and band is not None and len(found.best.candidate.nodes) > 1:
        lines.append(f"{band.value:.2f} ×{faster_than(found, alone, band)}.")
    return [*lines, *remarks(found), ""]


def learning_words(learning: LearningCost) -> str:
    if learning.evidence == "measured":
        return f"{learning.least:.2f}–{learning.most:.2f}"
    return {"exact": "exact", "unknown": "unknown", "failed": "failed"}[learning.evidence]


def unit(found: Plan) -> str:
    return "samples/s" if tokens_of(found.request.model.base.task) is None else "tokens/s"


def per_s(found: Plan, each: Ranked) -> float:
    return (tokens_of(found.request.model.base.task) or 1) / each.result.sample_s


def rate(found: Plan, each: Ranked) -> str:
    what = "samples" if tokens_of(found.request.model.base.task) is None else "tokens"
    return f"{number_of(per_s(found, each))} {what} a second"


def number_of(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "–"


def joined(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
