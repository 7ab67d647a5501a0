"""`hcsim plan`: from the machines that one owns to what to do with them."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hcsim.cli import screen
from hcsim.cli.settings import Settings
from hcsim.config import Training
from hcsim.errors import ConfigError
from hcsim.files import write_whole
from hcsim.plan.home import bought, home_of
from hcsim.plan.methods import LearningCost, Method
from hcsim.plan.outlook import ALL_MACHINES, Band, Change, MachineTime, standard_purchases
from hcsim.plan.plan import Plan, Wishes, job_text, make_plan, model_of, tokens_of
from hcsim.plan.search import Ranked
from hcsim.plan.simulation import Simulator
from hcsim.registry import load_plugin

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_SHOWN, _SHOWN_UNKNOWN = 6, 3
_NAMED = 4
_NOTABLE = 0.02
"""What changes the speed by less is not worth a line."""
_KINDS = {
    "compute": "computing",
    "encode": "encoding",
    "network": "the network",
    "fault": "faults",
    "other": "handling messages",
}


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments and options of `hcsim plan`."""

    home: str
    model: str | None = None
    params: str | None = None
    tokens: int | None = None
    strategies: tuple[str, ...] = ()
    compressors: tuple[str, ...] = ()
    buy: tuple[str, ...] = ()
    what_if: bool = False
    by_samples: bool = False
    ignore_memory: bool = False
    settings: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    out: Path | None = None
    json: bool = False
    workers: int | None = None
    dask: str | None = None


def plan(options: PlanOptions) -> None:
    """Find the best way to train, and show it."""
    for plugin in options.plugins:
        load_plugin(plugin)
    _check_out(options.out)
    home = home_of(options.home)
    settings = Settings(options.settings, {"training.task": _task(options)})
    usual = Training()
    given = settings.take("training", usual)
    model = model_of(home, given)
    settings.finish({"memory": "as --ignore-memory"})
    for each in options.buy:
        bought(home, each)  # refuses what is unknown before the search
    buys = options.buy + (standard_purchases(home) if options.what_if else ())
    strategies = options.strategies or ((given.strategy,) if given.strategy != usual.strategy else ())
    compressors = options.compressors or ((given.compressor,) if given.compressor != usual.compressor else ())
    wishes = Wishes(strategies, compressors, options.by_samples, options.ignore_memory, buys)
    simulator = Simulator(options.workers or os.cpu_count() or 1, options.dask)
    with simulator.open(), _progress(simulator):
        found = make_plan(home, model, wishes, simulator)
    if options.out is not None:
        _write(options.out, job_text(found, _why(found)))
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(as_json(found)), indent=2).decode() + "\n")
    else:
        show(found)
    if options.out is not None:
        screen.note(f"the job is in {options.out}: simulate it with `hcsim run {options.out}`, "
                    f"and start it on each machine with `hcsim run --real {options.out}`")  # fmt: skip


def _check_out(out: Path | None) -> None:
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    if out is not None and out.is_dir():
        raise ConfigError(f"--out {out}: this is a folder; give the name of a file")


def _write(out: Path, text: str) -> None:
    try:
        write_whole(out, text.encode())
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None


def _task(options: PlanOptions) -> str:
    """Return the task's spec."""
    if options.params is not None:
        if options.model is not None:
            raise ConfigError(f"{options.model}, --params: give one of them")
        tokens = "" if options.tokens is None else f",tokens={options.tokens}"
        return f"transformer:{_number('--params', options.params):g}{tokens}"
    if options.model is None:
        raise ConfigError("say what is trained: a task (resnet50, llama-7b:lora=16, …), or --params 100M --tokens 2048")
    if options.model.endswith(".py"):
        raise ConfigError(
            f"{options.model}: how large a script's model is cannot be seen from outside: give --params 100M "
            "(and --tokens 2048), or the task that is most like it (`hcsim list tasks`)"
        )
    if options.tokens is not None:
        raise ConfigError(f"--tokens {options.tokens}: only with --params; else write {options.model}:tokens=…")
    return options.model


def _number(option: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgbt]?)", text.strip().lower())
    if found is None:
        raise ConfigError(f"{option} {text}: give a number, such as 100M or 7B")
    return float(found[1]) * _SCALES[found[2]]


@contextmanager
def _progress(simulator: Simulator) -> Iterator[None]:
    """Show how many simulations are done."""
    console = screen.Screen(stderr=True)
    columns = (TextColumn("simulating"), BarColumn(), TextColumn("{task.completed}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        line = bar.add_task("", total=None)
        simulator.told = lambda done, expected: bar.update(line, completed=done, total=max(done, expected))
        yield


# What is shown.


def show(found: Plan) -> None:
    """Show the plan, from what to do to what would change it."""
    console = screen.Screen(markup=False, emoji=False, highlight=False)
    console.print(Text(_home_line(found), style="dim"))
    console.print(Panel(Group(*_advice(found)), box=box.ROUNDED, padding=(0, 2), expand=False))
    for heading, table in _tables(found):
        console.print(Text(heading, style="bold"))
        console.print(Padding(table, (0, 0, 1, 0)) if isinstance(table, Text) else table)


def _home_line(found: Plan) -> str:
    nodes, model = found.request.home.nodes, found.request.model
    names = ", ".join(f"{node.name} ({_machine(node.machine)})" for node in nodes)
    if len(nodes) > 2 * _NAMED:
        kinds = Counter(_machine(node.machine) for node in nodes)
        names = ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.items())
    return f"{model.base.task}, {screen.counted(model.samples, 'sample')} a step, on {names}"


def _machine(machine: Any) -> str:
    return screen.cell(machine if isinstance(machine, str) else machine.name)


def _advice(found: Plan) -> Iterator[Text]:
    best, alone = found.best, found.found.alone
    yield Text(_what_to_do(found), style="bold")
    if alone is None:
        yield Text(f"None of the machines could train it alone; together they do {_rate(found, best)}.")
    elif best.candidate.nodes == alone.candidate.nodes:
        if len(found.request.home.nodes) == 1:
            yield Text(f"{_rate(found, best)}.")
            return
        yield Text("No way to train on several of them is faster than this one alone.")
    elif found.speedup is not None:
        yield Text.assemble((f"{found.speedup.value:.2f} ×", "bold green"), _faster_than(found, alone, found.speedup))
    for line in _remarks(found):
        yield Text(line)


def _faster_than(found: Plan, alone: Ranked, band: Band) -> str:
    """Return than what the plan is how much faster, but for the figure itself."""
    best, name = found.best, alone.candidate.nodes[0]
    rates = f"{_rate(found, best)}, against {_number_of(_per_s(found, alone))}"
    spread = f"(p10–p90 {band.p10:.2f}–{band.p90:.2f})"
    if best.learning.most == 1.0:
        return f" as fast as {name} alone {spread}: {rates}"
    more = alone.result.sample_s / best.result.sample_s
    return f" as fast as {name} alone to the same loss {spread}: {rates}, which is {more:.2f} ×"


def _what_to_do(found: Plan) -> str:
    best = found.best
    names = best.candidate.nodes
    if len(names) == 1:
        return f"Train on {names[0]} alone."
    on = _joined(names) if len(names) <= _NAMED else f"{_who(found, names)} machines"
    method = best.candidate.method
    compressed = "" if method.compressor == "none" else f", compressed with {method.compressor}"
    if best.result.sizes:
        share = ", ".join(f"{size} on {name}" for size, name in zip(best.result.sizes, names, strict=True))
        shares = f"Of the samples of a step, {share}."
    else:
        each = screen.counted(found.request.model.samples // len(names), "sample")
        shares = "All samples go through all of them." if method.family == "pipeline" else f"{each} a step on each."
    paces = ""
    if best.result.paces:
        paces = " Steps of a period: " + ", ".join(map(str, best.result.paces)) + "."
    return f"Train with {method.strategy}{compressed}, on {on}. {shares}{paces}"


def _remarks(found: Plan) -> Iterator[str]:
    best, alone, model = found.best, found.found.alone, found.request.model
    out = [node.name for node in found.request.home.nodes if node.name not in best.candidate.nodes]
    whole = next((each.ratio for each in found.changes if each.words == ALL_MACHINES), None)
    if out and len(best.candidate.nodes) > 1:
        why = "" if whole is None else f": with all machines it would be {whole:.2f} × as fast"
        yield f"Leave out {_joined(out)}{why}."
    yield _learning_line(best.learning, found.request.by_samples)
    if alone is not None and (samples := alone.candidate.settings(model).batch) and alone.result.step_s:
        fits = round(alone.result.step_s / alone.result.sample_s)
        if fits < model.samples:
            yield f"{alone.candidate.nodes[0]} alone has room for {fits} of the {samples} samples at a time."
    if found.finer is not None and found.finer.ratio > 1 + 2 * _NOTABLE:
        few = f"{screen.counted(model.samples, 'sample')} a step are hard to share out"
        yield (f"{few}: with {found.finer.words} it would be {found.finer.ratio:.2f} × as fast, "
               "by steps that learn from more samples.")  # fmt: skip
    unknown = [each for each in found.alternatives(chosen=False) if each.learning.evidence == "unknown"]
    if unknown and alone is not None and unknown[0].quality_s < best.quality_s * (1 - _NOTABLE):
        method, ratio = unknown[0].candidate.method, alone.quality_s / unknown[0].quality_s
        yield (f"{method} would do {ratio:.2f} × as many samples a second; how much it learns from them was not "
               f"measured. To have it all the same: {_words(method)}.")  # fmt: skip


def _words(method: Method) -> str:
    """Return the options that ask for a method."""
    compressor = "" if method.compressor == "none" else f" --compressor {method.compressor}"
    return f"--strategy {method.strategy}{compressor}"


def _learning_line(learning: LearningCost, by_samples: bool) -> str:
    if by_samples:
        return "Samples a second were compared; how much is learned from them was not."
    if learning.evidence == "exact":
        return "A step learns what one machine alone would learn from the same samples."
    if learning.evidence == "measured":
        often = f"{learning.least:.2f} to {learning.most:.2f} × as many samples"
        return f"To the same loss it took {often} as one machine alone: measured on a small model, yours may differ."
    return "How well it learns is not known: it was asked for."


def _tables(found: Plan) -> Iterator[tuple[str, Table | Text]]:
    yield "What else there is", _alternatives(found)
    yield "Where a step's time goes", _where(found)
    yield "", Text(_limit_line(found))
    changes = [each for each in found.changes if abs(each.ratio - 1) >= _NOTABLE and each.words != ALL_MACHINES]
    if changes:
        yield "If something changes, and the plan does not", _changed(changes, found)
    if found.purchases:
        yield "If you bought", _changed(found.purchases, found)
    if found.found.excluded:
        yield "What does not fit", _excluded(found)


def _alternatives(found: Plan) -> Table:
    table = _table(("how", "on"), (_unit(found), "learning", "speed-up"))
    known, unknown = found.alternatives(chosen=True), found.alternatives(chosen=False)
    alone = found.found.alone
    for each in [found.best, *known[:_SHOWN], *unknown[:_SHOWN_UNKNOWN]]:
        candidate = each.candidate
        is_doubtful = each.learning.evidence in ("unknown", "failed")
        speedup = "–" if alone is None else f"{alone.quality_s / each.quality_s:.2f} ×"
        table.add_row(
            str(candidate.method), f"{_who(found, candidate.nodes)}{', by speed' if candidate.by_speed else ''}",
            _number_of(_per_s(found, each)), _learning(each.learning), f"{speedup} ?" if is_doubtful else speedup,
            style="bold" if each is found.best else "dim" if is_doubtful else None,
        )  # fmt: skip
    return table


def _who(found: Plan, names: Sequence[str]) -> str:
    """Return which machines, as shortly as can be."""
    out = [node.name for node in found.request.home.nodes if node.name not in names]
    if not out:
        return f"all {len(names)}" if len(names) > 1 else names[0]
    return f"all but {', '.join(out)}" if len(out) <= min(2, len(names) - 1) else ", ".join(names)


def _where(found: Plan) -> Table:
    table = _table(("machine",), ("compute", "encode", "exposed", "idle"), ("waits most for",))
    for each in found.limits.machines[: 2 * _NAMED]:
        table.add_row(each.machine, *map(_percent, (each.compute, each.encode, each.exposed, each.idle)), _cause(each))
    if (more := len(found.limits.machines) - 2 * _NAMED) > 0:
        table.add_row(f"and {more} more")
    return table


def _cause(each: MachineTime) -> str:
    kind, _, where = each.cause.partition(" ")
    words = {
        "compute": "compute of",
        "encode": "encoding of",
        "network": "",
        "fault": "a fault of",
        "other": "timers of",
    }
    return f"{words.get(kind, kind)} {where}".strip() if each.exposed + each.idle > 0.005 else ""


def _limit_line(found: Plan) -> str:
    path = found.limits.path
    if not path:
        return ""
    parts = ", ".join(f"{_KINDS.get(kind, kind)} {_percent(share)}" for kind, share in path.items() if share >= 0.005)
    kind = next(iter(path))
    return f"What limits it is {_KINDS.get(kind, kind)}, above all {found.limits.place}: {parts} of the critical path."


def _changed(changes: Sequence[Change], found: Plan) -> Table:
    searched = any(each.method for each in changes)
    table = _table(("",), (_unit(found), "speed"), ("then",) if searched else ())
    tokens = tokens_of(found.request.model.base.task) or 1
    for each in changes:
        then = (f"{each.method} on {', '.join(each.nodes)}",) if searched else ()
        table.add_row(each.words, _number_of(tokens * each.samples_per_s), f"{each.ratio:.2f} ×", *then)
    return table


def _excluded(found: Plan) -> Table:
    table = _table(("strategy", "compressor", "on"), ("needs", "can use"))
    for candidate, fit in found.found.excluded[:_SHOWN]:
        usable = "unknown" if fit.room.usable_bytes is None else screen.size(fit.room.usable_bytes)
        method = candidate.method
        table.add_row(method.strategy, method.compressor, fit.room.name, screen.size(fit.need.total), usable)
    return table


def _table(left: Sequence[str], right: Sequence[str], last: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in last:
        table.add_column(heading)
    return table


def _learning(learning: LearningCost) -> str:
    if learning.evidence == "measured":
        return f"{learning.least:.2f}–{learning.most:.2f}"
    return {"exact": "exact", "unknown": "unknown", "failed": "failed"}[learning.evidence]


def _unit(found: Plan) -> str:
    return "samples/s" if tokens_of(found.request.model.base.task) is None else "tokens/s"


def _per_s(found: Plan, each: Ranked) -> float:
    return (tokens_of(found.request.model.base.task) or 1) / each.result.sample_s


def _rate(found: Plan, each: Ranked) -> str:
    what = "samples" if tokens_of(found.request.model.base.task) is None else "tokens"
    return f"{_number_of(_per_s(found, each))} {what} a second"


def _number_of(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "–"


def _joined(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _why(found: Plan) -> list[str]:
    lines = ["Written by `hcsim plan`.", "", _what_to_do(found)]
    alone, band = found.found.alone, found.speedup
    if alone is not None and band is not None and len(found.best.candidate.nodes) > 1:
        lines.append(f"{band.value:.2f} ×{_faster_than(found, alone, band)}.")
    return [*lines, *_remarks(found), ""]


# As JSON.


def as_json(found: Plan) -> dict[str, Any]:
    """Return all that was found."""
    request = found.request
    return {
        "task": request.model.base.task,
        "samples_per_step": request.model.samples,
        "machines": {node.name: _machine(node.machine) for node in request.home.nodes},
        "best": _ranked(found.best),
        "alone": None if found.found.alone is None else _ranked(found.found.alone),
        "speedup": None if found.speedup is None else msgspec.structs.asdict(found.speedup),
        "limits": msgspec.to_builtins(found.limits),
        "alternatives": [_ranked(each) for chosen in (True, False) for each in found.alternatives(chosen=chosen)],
        "changes": msgspec.to_builtins(found.changes),
        "purchases": msgspec.to_builtins(found.purchases),
        "excluded": [
            {"strategy": each.method.strategy, "compressor": each.method.compressor, "machines": each.nodes,
             "machine": fit.room.name, "needs_bytes": fit.need.total, "usable_bytes": fit.room.usable_bytes}
            for each, fit in found.found.excluded
        ],
        "candidates": found.found.candidates,
        "simulated": found.found.simulated,
    }  # fmt: skip


def _ranked(each: Ranked) -> dict[str, Any]:
    candidate, result, learning = each.candidate, each.result, each.learning
    return {
        "strategy": candidate.method.strategy,
        "compressor": candidate.method.compressor,
        "machines": list(candidate.nodes),
        "shares": "speed" if candidate.by_speed else "equal",
        "sizes": list(result.sizes),
        "paces": list(result.paces),
        "samples_per_s": 1 / result.sample_s,
        "samples_per_s_for_the_same_quality": 1 / each.quality_s,
        "learning": {"evidence": learning.evidence, "least": learning.least, "most": learning.most},
        "bound_samples_per_s": 1 / each.bound_s,
    }
