"""`hcsim plan`: from the machines that one owns to what to do with them."""

from __future__ import annotations

import os
import re
import shlex
import sys
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
from hcsim.cli.plan_page import page_of
from hcsim.cli.plan_words import (
    NAMED,
    cause_words,
    change_lines,
    faster_than,
    home_line,
    is_doubtful,
    learning_words,
    limit_line,
    machine_words,
    number_of,
    on_words,
    per_s,
    percent,
    rate,
    remarks,
    shown_alternatives,
    speedup_heading,
    speedup_words,
    together_line,
    unit,
    what_to_do,
    why,
)
from hcsim.cli.settings import Settings
from hcsim.config import Training
from hcsim.errors import ConfigError
from hcsim.files import write_whole
from hcsim.plan.home import bought, home_of
from hcsim.plan.outlook import Change, standard_purchases
from hcsim.plan.plan import Plan, Wishes, job_text, make_plan, model_of, tokens_of
from hcsim.plan.search import Ranked
from hcsim.plan.simulation import Simulator
from hcsim.registry import load_plugin
from hcsim.report.page import check_place, write_page

_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_EXCLUDED = 6


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
    report: Path | None = None


def plan(options: PlanOptions) -> None:
    """Find the best way to train, and show it."""
    for plugin in options.plugins:
        load_plugin(plugin)
    _check_out(options.out)
    check_place(options.report)
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
        _write(options.out, _file_of(found))
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(as_json(found)), indent=2).decode() + "\n")
    else:
        show(found)
    if options.report is not None:
        write_page(options.report, page_of(found, _command(options), _file_of(found)))
        screen.note(f"report in {options.report}")
    if options.out is not None:
        screen.note(f"the job is in {options.out}: simulate it with `hcsim run {options.out}`, "
                    f"and start it on each machine with `hcsim run --real {options.out}`")  # fmt: skip


def _file_of(found: Plan) -> str:
    return job_text(found, why(found))


def _command(options: PlanOptions) -> str:
    """Return the command that makes the same plan: without what says where it is made and shown."""
    words = ["hcsim", "plan", options.home, *([options.model] if options.model is not None else [])]
    for option, value in (("--params", options.params), ("--tokens", options.tokens)):
        words += [option, str(value)] if value is not None else []
    for option, values in (
        ("--strategy", options.strategies), ("--compressor", options.compressors), ("--buy", options.buy),
        ("--set", options.settings), ("--plugin", options.plugins),
    ):  # fmt: skip
        words += [word for each in values for word in (option, each)]
    flags = {"--what-if": options.what_if, "--by-samples": options.by_samples}
    flags["--ignore-memory"] = options.ignore_memory
    return shlex.join([*words, *(flag for flag, is_given in flags.items() if is_given)])


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
    console.print(Text(home_line(found), style="dim"))
    console.print(Panel(Group(*_advice(found)), box=box.ROUNDED, padding=(0, 2), expand=False))
    for heading, table in _tables(found):
        console.print(Text(heading, style="bold"))
        console.print(Padding(table, (0, 0, 1, 0)) if isinstance(table, Text) else table)


def _advice(found: Plan) -> Iterator[Text]:
    best, alone = found.best, found.found.alone
    yield Text(what_to_do(found), style="bold")
    if alone is None:
        yield Text(together_line(found))
    elif best.candidate.nodes == alone.candidate.nodes:
        if len(found.request.home.nodes) == 1:
            yield Text(f"{rate(found, best)}.")
            return
        yield Text("No way to train on several of them is faster than this one alone.")
    elif found.speedup is not None:
        yield Text.assemble((f"{found.speedup.value:.2f} ×", "bold green"), faster_than(found, alone, found.speedup))
    for line in remarks(found):
        yield Text(line)


def _tables(found: Plan) -> Iterator[tuple[str, Table | Text]]:
    yield "What else there is", _alternatives(found)
    yield "Where a step's time goes", _where(found)
    yield "", Text(limit_line(found))
    if changes := change_lines(found):
        yield "If something changes, and the plan does not", _changed(changes, found)
    if found.purchases:
        yield "If you bought", _changed(found.purchases, found)
    if found.found.excluded:
        yield "What does not fit", _excluded(found)


def _alternatives(found: Plan) -> Table:
    table = _table(("how", "on"), (unit(found), "learning", *speedup_heading(found)))
    for each in shown_alternatives(found):
        table.add_row(
            str(each.candidate.method), on_words(found, each), number_of(per_s(found, each)),
            learning_words(each.learning), *speedup_words(found, each),
            style="bold" if each is found.best else "dim" if is_doubtful(each) else None,
        )  # fmt: skip
    return table


def _where(found: Plan) -> Table:
    table = _table(("machine",), ("compute", "encode", "exposed", "idle"), ("waits most for",))
    for each in found.limits.machines[: 2 * NAMED]:
        table.add_row(
            each.machine, *map(percent, (each.compute, each.encode, each.exposed, each.idle)), cause_words(each)
        )
    if (more := len(found.limits.machines) - 2 * NAMED) > 0:
        table.add_row(f"and {more} more")
    return table


def _changed(changes: Sequence[Change], found: Plan) -> Table:
    searched = any(each.method for each in changes)
    table = _table(("",), (unit(found), "speed"), ("then",) if searched else ())
    tokens = tokens_of(found.request.model.base.task) or 1
    for each in changes:
        then = (f"{each.method} on {', '.join(each.nodes)}",) if searched else ()
        table.add_row(each.words, number_of(tokens * each.samples_per_s), f"{each.ratio:.2f} ×", *then)
    return table


def _excluded(found: Plan) -> Table:
    table = _table(("strategy", "compressor", "on"), ("needs", "can use"))
    for candidate, fit in found.found.excluded[:_EXCLUDED]:
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


# As JSON.


def as_json(found: Plan) -> dict[str, Any]:
    """Return all that was found."""
    request = found.request
    return {
        "task": request.model.base.task,
        "samples_per_step": request.model.samples,
        "machines": {node.name: machine_words(node.machine) for node in request.home.nodes},
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
