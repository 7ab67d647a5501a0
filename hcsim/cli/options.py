"""The options of `hcsim run`, `bench` and `rank`, each defined once, and the new place of each option that has
moved.

Everything without an option is set by `--set` (see settings.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup

from hcsim.cli.errors import BAD_INPUT

CLUSTER = "home"
"""What a machine calls its cluster where nobody says."""
INVITATION_PORT = 52418
DASHBOARD = "127.0.0.1:52419"
"""Where the page of a cluster or of a run is served, unless another place is given."""


def names_of(kind: str) -> Callable[[str], Iterable[str]]:
    """Return a shell completion for the names of a kind."""

    def complete(incomplete: str) -> list[str]:
        from hcsim.cli.names import completions

        return [name for name in completions(kind) if name.startswith(incomplete)]

    return complete


def _option(text: str, *names: str, kind: str = "", least: int | None = None, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, min=least, metavar=metavar, autocompletion=names_of(kind) if kind else None)


Text = str | None
Number = int | None
File = Path | None

Plugins = Annotated[
    list[str] | None, _option("Load a module or a file of yours; may be repeated.", metavar="MODULE|FILE")
]
Set = Annotated[
    list[str] | None,
    _option("Any other setting, see `hcsim list settings`; may be repeated.", kind="set", metavar="KEY=VALUE"),
]
Task = Annotated[Text, _option("What is learned: digits, text, gpt2, …", kind="tasks", metavar="NAME")]
Seed = Annotated[Number, _option("Of the model, its batches, jitter, loss and faults.", metavar="N")]
Save = Annotated[File, _option("Write the model that was learned to this file.", metavar="FILE")]
Trace = Annotated[File, _option("Write every event to this file, as JSON lines.", metavar="FILE")]
Timeline = Annotated[File, _option("Write a timeline to look at in ui.perfetto.dev.", metavar="FILE")]
_CHAKRA = "Write execution traces of MLCommons Chakra: PREFIX.0.et, PREFIX.1.et, …"
ReportPage = Annotated[File, _option("Write a page about the run, as HTML.", "--report", metavar="FILE")]
Operation = Annotated[Text, _option("all_reduce, broadcast, all_gather, …", kind="operations", metavar="NAME")]


class RunOptions(msgspec.Struct, frozen=True):
    """The arguments and options of `hcsim run`."""

    what: Annotated[
        Text,
        typer.Argument(
            metavar="[SCENARIO|SCRIPT.py]",
            help="A scenario or job file, a shipped scenario's name, - for standard input, or a torch script.",
            autocompletion=names_of("scenarios"),
        ),
    ] = None
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]", help="What a script is given, after --.", show_default=False),
    ] = None

    real: Annotated[bool, _option("On real machines, this one among them.", "--real")] = False
    scenario: Annotated[
        Text, _option("For a script: the cluster that it runs on.", kind="scenarios", metavar="NAME|FILE")
    ] = None
    nodes: Annotated[Number, _option("How many nodes work begins with, or a script runs on.", least=1, metavar="N")] = (
        None
    )
    plugin: Plugins = None
    task: Task = None
    strategy: Annotated[Text, _option("ddp, local_sgd:8, diloco:16, …", kind="strategies", metavar="NAME")] = None
    compressor: Annotated[Text, _option("none, topk:0.01+ef, int8, …", kind="compressors", metavar="NAME")] = None
    steps: Annotated[Number, _option("How many steps are trained.", metavar="N")] = None
    seed: Seed = None
    set: Set = None
    hosts: Annotated[Text, _option("Real: machines to start the same on, over ssh.", metavar="A,B,…|FILE")] = None
    state: Annotated[File, typer.Option(hidden=True)] = None  # the short form of a setting
    save: Save = None
    trace: Trace = None
    timeline: Timeline = None
    chakra: Annotated[File, typer.Option("--chakra", help=_CHAKRA, metavar="PREFIX", hidden=True)] = None
    report: ReportPage = None
    dashboard: Annotated[
        bool,
        typer.Option(
            "--dashboard", help="Show it as a page: a real run at once, a virtual one when it ends.", hidden=True
        ),
    ] = False


class BenchOptions(msgspec.Struct, frozen=True):
    """The argument and options of `hcsim bench`."""

    scenario: Annotated[
        Text,
        typer.Argument(
            metavar="[SCENARIO]",
            help="A scenario file, or the name of a shipped one.",
            autocompletion=names_of("scenarios"),
        ),
    ] = None

    operation: Operation = None
    size: Annotated[Text, _option('Bytes of each rank, such as "64 MiB".', metavar="SIZE")] = None
    dtype: Annotated[Text, _option("float32, bfloat16, int64, …", kind="dtypes", metavar="NAME")] = None
    repeat: Annotated[Number, _option("How many times it is done.", metavar="N")] = None
    algorithm: Annotated[Text, _option("ring, tree, … or auto.", kind="algorithms", metavar="NAME")] = None
    seed: Annotated[Number, _option("Of jitter, loss and faults.", metavar="N")] = None
    plugin: Plugins = None
    set: Set = None
    trace: Trace = None
    timeline: Timeline = None
    chakra: Annotated[File, _option(_CHAKRA, metavar="PREFIX")] = None
    report: ReportPage = None


class ReplayOptions(msgspec.Struct, frozen=True):
    """The arguments and options of `hcsim replay`."""

    traces: Annotated[
        File, typer.Argument(metavar="TRACES", help="PREFIX of PREFIX.0.et, …; or one rank's file, which all ranks do.")
    ] = None
    scenario: Annotated[
        Text,
        typer.Argument(
            metavar="SCENARIO",
            help="A scenario file, or the name of a shipped one.",
            autocompletion=names_of("scenarios"),
        ),
    ] = None

    nodes: Annotated[Number, _option("How many ranks do what one rank's file says.", least=1, metavar="N")] = None
    times: Annotated[
        Text, _option('Of computations: "recorded", or "modelled" by FLOPs and bytes.', metavar="WHICH")
    ] = None
    repeat: Annotated[Number, _option("How many times it is done.", least=1, metavar="N")] = None
    seed: Annotated[Number, _option("Of jitter, loss and faults.", metavar="N")] = None
    plugin: Plugins = None
    set: Set = None
    trace: Trace = None
    timeline: Timeline = None


class RankOptions(msgspec.Struct, frozen=True):
    """The argument and options of `hcsim rank`."""

    job: Annotated[
        Text, typer.Argument(metavar="[JOB FILE]", help="What is done, a [job] or [training]; - for standard input.")
    ] = None

    peers: Annotated[Text, _option("host:port of all ranks in order; the default port is 52416.", metavar="A,B,…")] = (
        None
    )
    rank: Annotated[Number, _option("Which of the peers we are, from 0.", metavar="N")] = None
    wait: Annotated[Text, _option('How long to wait for the others (default "5 min").', metavar="TIME")] = None
    tls_cert: Annotated[File, _option("Our certificate (PEM).", metavar="FILE")] = None
    tls_key: Annotated[File, _option("Its key.", metavar="FILE")] = None
    tls_ca: Annotated[File, _option("The authority that signed all ranks' certificates.", metavar="FILE")] = None
    insecure: Annotated[bool, _option("Allow plaintext beyond this machine.", "--insecure")] = False
    operation: Operation = None
    task: Task = None
    seed: Annotated[Number, _option("Of the model and its batches.", metavar="N")] = None
    plugin: Plugins = None
    set: Set = None
    save: Save = None
    timeline: Timeline = None


class ProbeOptions(msgspec.Struct, frozen=True):
    """The arguments and options of `hcsim probe`."""

    script: Annotated[
        File, typer.Argument(metavar="[SCRIPT.py]", help="Measure the kernels of this torch training script instead.")
    ] = None
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]", help="What the script is given, after --.", show_default=False),
    ] = None

    out: Annotated[
        Path, typer.Option("--out", "-o", help="The twin: a scenario to begin, or to which this machine is added.")
    ] = Path("twin.toml")
    device: Annotated[str, typer.Option(help="auto, mps, cuda or cpu.")] = "auto"
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Keep the machine busy for so long, for the speed that it sustains; the longest time of a script.",
        ),
    ] = None
    task: Annotated[Text, _option("Measure the steps of this task instead.", kind="tasks")] = None
    of_cluster: Annotated[
        bool, typer.Option("--cluster", help="Have the members of a running cluster measure the links between them.")
    ] = False
    name: Annotated[Text, typer.Option(help="With --cluster: what this machine calls it.")] = None
    peer: Annotated[list[str] | None, typer.Option(help="With --cluster: host or host:port of a member.")] = None
    hosts: Annotated[
        list[str] | None, typer.Option(help="Measure these machines too, through ssh: A,B,… or a hostfile.")
    ] = None
    program: Annotated[str, typer.Option(help="What hcsim is called on the other machines.")] = "hcsim"
    member: Annotated[bool, typer.Option("--member", hidden=True)] = False
    report: Annotated[File, typer.Option(help="Write a page that shows the twin beside the catalogue, as HTML.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False


CommandT = TypeVar("CommandT", bound=Callable[..., None])


def taking(kind: type[msgspec.Struct]) -> Callable[[CommandT], CommandT]:
    """Return a decorator that gives a command with any keywords a typer parameter for each field of the struct."""

    def with_parameters(command: CommandT) -> CommandT:
        hints = get_type_hints(kind, include_extras=True)
        defaults = zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True)
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
             for name, default in defaults]
        )  # fmt: skip
        return command

    return with_parameters


_NOW = {"--metrics-port": "metrics"}
"""Options whose setting has another name."""


class Command(TyperCommand):
    """A command whose error for an unknown option names the setting or the command that has it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and say where an unknown option has gone."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer has a copy of click, and which class this is depends on its version
            option = getattr(error, "option_name", None)
            own = [name for parameter in self.params for name in parameter.opts]
            words = None if option is None or option in own else _elsewhere(ctx, str(option), given)
            if words is None:
                raise
        raise _refused(words)


def _refused(words: str) -> typer.Exit:
    from hcsim.cli.screen import complain

    complain(words)
    return typer.Exit(BAD_INPUT)


def _elsewhere(ctx: Any, option: str, args: list[str]) -> str | None:
    """Return where an option of another command or setting is found, or None if nothing has it."""
    from hcsim.cli.settings import setting_names, value_word

    if (option, ctx.info_name) == ("--real", "rank"):
        return "--real is what `hcsim rank` always is: leave it out"
    key = _NOW.get(option, option.removeprefix("--").replace("-", "_"))
    commands = ctx.parent.command.commands
    has = [
        f"`hcsim {name}`" for name in ("run", "bench", "rank")
        if name != ctx.info_name and any(option in parameter.opts for parameter in commands[name].params)
    ]  # fmt: skip
    of = f"an option of {' and '.join(has)}" if has else ""
    setting = ""
    if key in setting_names():
        setting = f"a setting{' here' if has else ''}: {value_word(key, _value(option, args))}"
    where = ", and ".join(filter(None, (of, setting)))
    return f"{option} is {where}" if where else None


def _value(option: str, args: list[str]) -> str | None:
    """Return the value that the option was given, if any."""
    for word, following in zip(args, [*args[1:], "-"], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option:
            return None if following.startswith("-") else following
    return None


class Commands(TyperGroup):
    """The commands. A renamed command's error says its new name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments name."""
        if args[:1] == ["scenarios"] and not ctx.resilient_parsing:
            raise _refused("`hcsim scenarios` is now `hcsim list scenarios`")
        return super().resolve_command(ctx, args)
