"""The commands and their options. Each command imports its implementation when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hcsim.cli import cluster
from hcsim.cli.errors import FAILED, errors_told
from hcsim.cli.options import (
    CLUSTER,
    DASHBOARD,
    BenchOptions,
    Command,
    Commands,
    ProbeOptions,
    RankOptions,
    ReplayOptions,
    RunOptions,
    names_of,
    taking,
)

app = typer.Typer(
    cls=Commands,
    help="Training and collectives on a home cluster: in a simulated one, or on your own machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from hcsim import __version__

        typer.echo(f"hcsim {__version__}")
        raise typer.Exit


@app.command(cls=Command)
@taking(RunOptions)
def run(**options: Any) -> None:
    """Train, or run a torch script: on a virtual cluster, or for real.

    A scenario without anything to learn has a job, which is done instead."""
    with errors_told():
        from hcsim.cli import request

        done = request.run(RunOptions(**options))
    _end(done)


@app.command(cls=Command)
@taking(BenchOptions)
def bench(**options: Any) -> None:
    """Time and check one collective operation on a virtual cluster."""
    with errors_told():
        from hcsim.cli import request

        done = request.bench(BenchOptions(**options))
    _end(done)


@app.command(cls=Command)
@taking(ReplayOptions)
def replay(**options: Any) -> None:
    """Do what execution traces of MLCommons Chakra say, on a virtual cluster."""
    with errors_told():
        from hcsim.cli import request

        done = request.replay(ReplayOptions(**options))
    _end(done)


@app.command(cls=Command)
@taking(RankOptions)
def rank(**options: Any) -> None:
    """Be one rank of several that are started by hand, for real.

    They do one collective operation, or train (--task). In clusters, machines find each other: `hcsim run --real`."""
    with errors_told():
        from hcsim.cli import request

        done = request.rank(RankOptions(**options))
    _end(done)


@app.command("list")
def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]",
            help="scenarios, machines, media, strategies, compressors, algorithms, tasks, faults or settings.",
            autocompletion=names_of("kinds"),
        ),
    ] = None,
    plugin: Annotated[list[str] | None, typer.Option(help="Load a module or a file of yours; may be repeated.")] = None,
) -> None:
    """List scenarios, strategies, settings and all else that has a name.

    What installed plugins bring is among them."""
    with errors_told():
        from hcsim.cli.names import show_names
        from hcsim.registry import load_plugin

        for each in plugin or ():
            load_plugin(each)
        show_names(kind)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def sweep(context: typer.Context) -> None:
    """Run a sweep of simulated runs; write tables and figures."""
    from experiments.sweep import main

    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command()(main)
    alone(args=context.args, prog_name=context.command_path)


@app.command()
def doctor(
    hosts: Annotated[
        list[str] | None, typer.Option(help="Examine these machines too, through ssh: A,B,… or a hostfile.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, mps, cuda or cpu.")] = "auto",
    look: Annotated[
        str | None, typer.Option(help="How long to look for other machines. [default: 3 s; with others 8 s]")
    ] = None,
    program: Annotated[str, typer.Option(help="What hcsim is called on the other machines.")] = "hcsim",
    of_cluster: Annotated[
        bool, typer.Option("--cluster", help="Ask the members of a running cluster instead, and compare them.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="With --cluster: what this machine calls it.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="With --cluster: host or host:port of a member.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Examine this machine before it joins a cluster: what stands in the way, and the remedy."""
    with errors_told():
        from hcsim.cli import doctor as work
        from hcsim.cli.request import only

        if of_cluster:
            only("without --cluster", {"--hosts": hosts})
            asked = cluster.home(), name or CLUSTER, peer or ()
            healthy = work.doctor_of_cluster(*asked, look or "3 s", as_json=json)
        else:
            only("with --cluster", {"--name": name, "--peer": peer})
            healthy = work.doctor(hosts or (), device, look, program, as_json=json)
    _end(healthy)


@app.command()
@taking(ProbeOptions)
def probe(**options: Any) -> None:
    """Measure this machine, a script on it, or the links of a cluster, and write what was found into a scenario: its
    twin."""
    with errors_told():
        from hcsim.cli import request

        request.probe(ProbeOptions(**options))


@app.command()
def twin(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A twin, as `hcsim probe` writes it.")],
    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Show how well a twin has predicted real runs, and what of it to measure again."""
    with errors_told():
        from hcsim.cli import twin as work

        work.show_twin(file, as_json=json)


@app.command()
def plan(
    home: Annotated[
        str,
        typer.Argument(
            metavar="HOME",
            help='Machines in words, such as "M4, M1 Air on wifi6; M3 Pro on 1gbe"; a scenario, or a twin.',
            autocompletion=names_of("scenarios"),
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A task: resnet50, transformer:1e8,tokens=2048, llama-7b:lora=16, …",
            autocompletion=names_of("tasks"),
        ),
    ] = None,
    params: Annotated[str | None, typer.Option(help="In place of a task: a transformer with so many, as 100M.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="With --params: of one sample.")] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="Only this one; may be repeated.", autocompletion=names_of("strategies")),
    ] = None,
    compressor: Annotated[
        list[str] | None,
        typer.Option(help="Only this one; may be repeated.", autocompletion=names_of("compressors")),
    ] = None,
    buy: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help='What would a "2.5gbe switch" do, or an "M4 mini"? May be repeated.'),
    ] = None,
    what_if: Annotated[bool, typer.Option("--what-if", help="Ask so of the usual things.")] = False,
    by_samples: Annotated[
        bool, typer.Option("--by-samples", help="Compare samples a second, however much is learned from them.")
    ] = False,
    ignore_memory: Annotated[
        bool, typer.Option("--ignore-memory", help="Consider also what does not fit into the machines.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A setting of the training, such as batch=32 or precision=bf16."
        ),
    ] = None,
    plugin: Annotated[list[str] | None, typer.Option(help="Load a module or a file of yours; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the job to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; left out, one for each core.")] = None,
    dask: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Dask cluster: tcp://host:8786, or ssh:host,host to start one."),
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with all of it: plan.html.")] = None,
) -> None:
    """Find the fastest way to train a model on the machines of a home: with which of them, how, and why."""
    with errors_told():
        from hcsim.cli import plan as work
        from hcsim.cli.request import only

        only("without --dask", {"--workers": workers} if dask is not None else {})
        options = work.PlanOptions(
            home=home, model=model, params=params, tokens=tokens, strategies=tuple(strategy or ()),
            compressors=tuple(compressor or ()), buy=tuple(buy or ()), what_if=what_if, by_samples=by_samples,
            ignore_memory=ignore_memory, settings=tuple(settings or ()), plugins=tuple(plugin or ()), out=out,
            json=json, workers=workers, dask=dask, report=report,
        )  # fmt: skip
        work.plan(options)


@app.command()
def selftest(
    checks: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CHECK]…", help="Only these, such as channels:tcp, collectives or elastic."),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(help="Test these machines too, and what is between, through ssh: A,B,… or a hostfile."),
    ] = None,
    program: Annotated[str, typer.Option(help="What hcsim is called on the other machines.")] = "hcsim",
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    member: Annotated[bool, typer.Option("--member", hidden=True)] = False,
) -> None:
    """Test whether hcsim does on this machine what it does everywhere else, within five minutes.

    The report has no secrets, and no names of people or machines."""
    with errors_told():
        from hcsim.cli import selftest as work

        passed = work.take_part() if member else work.selftest(checks or (), hosts or (), program, as_json=json)
    _end(passed)


@app.command()
def dashboard(
    record: Annotated[
        Path | None,
        typer.Argument(metavar="[RECORD]", help="A virtual run to look at again: a file of `hcsim run --trace`."),
    ] = None,
    listen: Annotated[
        str, typer.Option(help="address:port to serve at; beyond this machine it takes TLS and a token.")
    ] = DASHBOARD,
    name: cluster.Name = CLUSTER,
    peer: cluster.Peers = None,
) -> None:
    """Serve a page that shows the running cluster: who is here, how fast it is, what went wrong.

    It finds the nodes as `hcsim cluster status` does."""
    with errors_told():
        from hcsim.cli import dashboard as work

        if record is None:
            work.show_cluster(listen, cluster.home(), name, tuple(peer or ()))
        else:
            work.show_record(listen, record)


@app.command()
def topology(
    scenario: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO",
            help="A scenario file, or the name of a shipped one.",
            autocompletion=names_of("scenarios"),
        ),
    ],
    picture: Annotated[Path | None, typer.Option(help="Draw it into this file (png, svg, pdf).")] = None,
) -> None:
    """Have machines measure themselves and the lines between them."""
    with errors_told():
        from hcsim.cli import screen
        from hcsim.cli.request import shipped_scenario
        from hcsim.cluster.topology import draw, table
        from hcsim.errors import ConfigError
        from hcsim.launch.virtual_cluster import measure_topology

        formats = (".png", ".svg", ".pdf")
        if picture is not None and picture.suffix not in formats:
            raise ConfigError(f"--picture {picture}: give a file that ends in {', '.join(formats)}")
        found = measure_topology(shipped_scenario(scenario))
        screen.say(table(found))
        if picture is not None:
            try:
                draw(found, picture)
            except OSError as error:
                raise ConfigError(f"{picture}: cannot be written: {error.strerror}") from None
            screen.note(f"drawn in {picture}")


@app.command()
def show(
    home: Annotated[
        str,
        typer.Argument(
            metavar="HOME",
            help="A scenario file, a twin, or the name of a shipped scenario.",
            autocompletion=names_of("scenarios"),
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The drawing, a file that ends in .svg.")] = Path("home.svg"),
) -> None:
    """Draw a home: its machines, and the switches, access points and cables that join them."""
    with errors_told():
        from hcsim.cli import screen
        from hcsim.cli.request import shipped_scenario
        from hcsim.errors import ConfigError
        from hcsim.files import write_whole
        from hcsim.report.home import drawing

        if out.suffix != ".svg":
            raise ConfigError(f"--out {out}: give a file that ends in .svg")
        scenario = shipped_scenario(home)
        if not scenario.nodes:
            raise ConfigError(f"{home}: there is no [[node]] in it, so there is nothing to draw")
        try:
            write_whole(out, drawing(scenario).encode())
        except OSError as error:
            raise ConfigError(f"{out}: cannot be written: {error.strerror}") from None
        screen.note(f"drawn in {out}")


@app.command()
def fuzz(
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds; without --minutes, 100.")] = None,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0, help="Take new seeds for so long.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Only this one, and tell all that happens.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Only this scenario's file, and tell all that happens.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; left out, one for each core.")] = None,
    shrink: Annotated[bool, typer.Option(help="Make what was found small.")] = True,
    state: Annotated[Path | None, typer.Option(help="A record: with it an interrupted search goes on.")] = None,
    out: Annotated[Path, typer.Option(help="The folder for small scenarios that break something.")] = Path("findings"),
    json: Annotated[Path | None, typer.Option(help="Write all that was found to this file.")] = None,
    dask: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on a Dask cluster: tcp://host:8786, or ssh:host,host to start one."),
    ] = None,
) -> None:
    """Search random faults for one that breaks what must hold."""
    with errors_told():
        from hcsim.cli.fuzz import FuzzOptions, replay_file, replay_seed, search
        from hcsim.cli.request import only

        only(
            "without --seed and --replay",
            {} if seed is None and replay is None
            else {
                "--seeds": seeds, "--minutes": minutes, "--state": state, "--json": json, "--workers": workers,
                "--dask": dask,
            },
        )  # fmt: skip
        if seed is not None:
            only("without --seed", {"--replay": replay})
            done = replay_seed(seed, shrink, out)
        elif replay is not None:
            done = replay_file(replay)
        else:
            only("without --dask", {"--workers": workers} if dask is not None else {})
            done = search(FuzzOptions(seeds, first, minutes, workers, shrink, state, out, json, dask))
    _end(done)


@app.command("dask-worker", hidden=True)
def dask_worker(port: Annotated[int, typer.Argument()], own: Annotated[int, typer.Argument()]) -> None:
    """Work for the machine that has started this through ssh, until that goes away."""
    with errors_told():
        from hcsim.pool.dask import serve

        serve(port, own)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model that `hcsim run --save` wrote.")],
) -> None:
    """Score a saved model on data that it was not trained on."""
    with errors_told():
        from hcsim.cli.training import evaluate_model

        evaluate_model(model)


@app.command()
def coordinator(
    workers: Annotated[int, typer.Option(help="How many workers there are to be, at most.")],
    listen: Annotated[str, typer.Option(help="host:port to listen at.")] = "127.0.0.1:52415",
    begin: Annotated[int | None, typer.Option(help="With how many work begins; left out: with all of them.")] = None,
    least: Annotated[int, typer.Option(help="With how many work goes on when others are lost.")] = 1,
    heartbeat: Annotated[str, typer.Option(help="How often a worker says that it is alive.")] = "1 s",
    silence: Annotated[str, typer.Option(help="A worker that says nothing for so long is evicted.")] = "5 s",
    state: Annotated[Path | None, typer.Option(help="A folder for what it remembers when it starts again.")] = None,
    name: Annotated[
        str | None,
        typer.Option("--cluster", help="Take members of this cluster, and nobody else (see `hcsim cluster`)."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Our certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="The authority that signed all members' certificates.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plaintext beyond this machine.")] = False,
) -> None:
    """Be the place where workers register, meet and checkpoint."""
    with errors_told():
        import asyncio

        from hcsim.cli.request import coordinator_policy, tls
        from hcsim.cli.screen import say
        from hcsim.errors import ConfigError
        from hcsim.launch.real import serve_coordinator

        policy, files = coordinator_policy(workers, begin, least, heartbeat, silence), tls(tls_cert, tls_key, tls_ca)
        if name is not None and (files is not None or insecure):
            raise ConfigError(
                "--cluster brings keys of its own: leave out --tls-cert, --tls-key, --tls-ca and --insecure"
            )
        member = None if name is None else (cluster.home(), name)
        serving = serve_coordinator(listen, policy, say, tls=files, insecure=insecure, state=state, member=member)
        asyncio.run(serving)


app.add_typer(cluster.app, name="cluster")


def _end(done: bool) -> None:
    if not done:
        raise typer.Exit(FAILED)
