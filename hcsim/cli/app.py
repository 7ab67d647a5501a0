"""The commands and their options; each imports its work when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hcsim.cli import cluster, screen
from hcsim.cli.panels import Sectioned
from hcsim.cli.plainly import FAILED, plainly

app = typer.Typer(
    help="Training and collectives on a home cluster: in a simulated one, or on your own machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(cluster.app, name="cluster")

Text = str | None

_WHERE = "Where"
_JOB = "Job (one collective operation)"
_TRAINING = "Training"
_EXCHANGE = "How ranks exchange data"
_CLUSTER = "Cluster (machines that find each other)"
_RANKS = "Ranks by hand (real, instead of a cluster)"
_OUTPUT = "Output"


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from hcsim import __version__

        typer.echo(f"hcsim {__version__}")
        raise typer.Exit


@app.command()
def scenarios() -> None:
    """List the scenarios that come with hcsim."""
    screen.scenarios()


# typer reads the options from the signature, so this one is as long as the list of options.
@app.command(cls=Sectioned)
def run(
    scenario: Annotated[
        Text,
        typer.Argument(help="A scenario file, the name of a shipped one, - for standard input, or a torch script."),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What a script is given, after --.", show_default=False)
    ] = None,
    where: Annotated[
        Text,
        typer.Option(
            "--scenario",
            help="For a script: the cluster that it runs on, a file or a shipped one.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    real: Annotated[
        bool, typer.Option("--real", help="Run for real; a scenario then only gives the job.", rich_help_panel=_WHERE)
    ] = False,
    seed: Annotated[
        int | None, typer.Option(help="Of the model, its batches, jitter, loss, faults.", rich_help_panel=_WHERE)
    ] = None,
    operation: Annotated[Text, typer.Option(help="all_reduce, broadcast, all_gather, …", rich_help_panel=_JOB)] = None,
    size: Annotated[Text, typer.Option(help='Bytes per rank, such as "64 MiB".', rich_help_panel=_JOB)] = None,
    dtype: Annotated[Text, typer.Option(help="float32, bfloat16, int64, …", rich_help_panel=_JOB)] = None,
    repeat: Annotated[int | None, typer.Option(help="How many times the job is done.", rich_help_panel=_JOB)] = None,
    task: Annotated[
        Text, typer.Option(help="What is learned (digits, text, convex, gpt2, …).", rich_help_panel=_TRAINING)
    ] = None,
    strategy: Annotated[
        Text, typer.Option(help="ddp, local_sgd:8, diloco:16, parameter_server, …", rich_help_panel=_TRAINING)
    ] = None,
    compressor: Annotated[
        Text, typer.Option(help="none, topk:0.01+ef, int8, powersgd:4+ef, …", rich_help_panel=_TRAINING)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="How many steps.", rich_help_panel=_TRAINING)] = None,
    batch: Annotated[int | None, typer.Option(help="Samples per rank and step.", rich_help_panel=_TRAINING)] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", rich_help_panel=_TRAINING)] = None,
    device: Annotated[
        Text, typer.Option(help="Real: cpu, mps, cuda, or auto (the default).", rich_help_panel=_TRAINING)
    ] = None,
    algorithm: Annotated[Text, typer.Option(help="ring, tree, … or auto.", rich_help_panel=_EXCHANGE)] = None,
    timeout: Annotated[
        Text, typer.Option(help='How long one operation may take, such as "30 s".', rich_help_panel=_EXCHANGE)
    ] = None,
    stripes: Annotated[
        int | None, typer.Option(min=1, help="Connections per peer; the same on all ranks.", rich_help_panel=_EXCHANGE)
    ] = None,
    segment: Annotated[
        Text, typer.Option(help='Piece that a message is cut into, such as "1 MiB".', rich_help_panel=_EXCHANGE)
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="With how many nodes work begins.", rich_help_panel=_CLUSTER)
    ] = None,
    cluster: Annotated[
        Text,
        typer.Option(help='Real: a cluster that this machine has joined (default "home").', rich_help_panel=_CLUSTER),
    ] = None,
    name: Annotated[
        Text,
        typer.Option(
            help="Real: what the others call this machine (default: its host name).", rich_help_panel=_CLUSTER
        ),
    ] = None,
    at: Annotated[
        Text, typer.Option(help="Real: addresses that the others reach this machine at.", rich_help_panel=_CLUSTER)
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="Real: a folder for what outlives a crash.", rich_help_panel=_CLUSTER)
    ] = None,
    hosts: Annotated[
        Text,
        typer.Option(help="Real: other machines to start the same on, through ssh: a,b,c.", rich_help_panel=_CLUSTER),
    ] = None,
    remote_hcsim: Annotated[
        Text, typer.Option(help='With --hosts: what hcsim is called there ("hcsim").', rich_help_panel=_CLUSTER)
    ] = None,
    peers: Annotated[
        Text, typer.Option(help="host:port of all ranks in order; the default port is 52416.", rich_help_panel=_RANKS)
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Which of the peers we are, from 0.", rich_help_panel=_RANKS)] = None,
    wait: Annotated[
        Text, typer.Option(help='How long to wait for the others (default "5 min").', rich_help_panel=_RANKS)
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Our certificate (PEM).", rich_help_panel=_RANKS)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.", rich_help_panel=_RANKS)] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="The authority that signed all members' certificates.", rich_help_panel=_RANKS)
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow plaintext beyond this machine.", rich_help_panel=_RANKS)
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the model that was learned to this file (safetensors).", rich_help_panel=_OUTPUT),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Virtual: write every event to this file, as JSON lines.", rich_help_panel=_OUTPUT),
    ] = None,
    metrics: Annotated[
        Path | None, typer.Option(help="Virtual: write the hosts' final metrics to this file.", rich_help_panel=_OUTPUT)
    ] = None,
    metrics_port: Annotated[
        Text,
        typer.Option(
            help="Real: serve metrics at this port of this machine, or at host:port.", rich_help_panel=_OUTPUT
        ),
    ] = None,
) -> None:
    """Run a job, train, or run a torch script: in a scenario's virtual cluster; or with --real on real machines."""
    asked = locals()
    with plainly():
        from hcsim.cli.request import Asked, perform

        done = perform(Asked(**asked))
    if not done:
        raise typer.Exit(FAILED)


@app.command()
def topology(
    scenario: Annotated[str, typer.Argument(help="A scenario file, or the name of a shipped one.")],
    picture: Annotated[Path | None, typer.Option(help="Draw it into this file (png, svg, pdf).")] = None,
) -> None:
    """Have a scenario's machines measure themselves and the lines between them."""
    with plainly():
        from hcsim.cli.topology import show_topology

        show_topology(scenario, picture)


@app.command()
def evaluate(model: Annotated[Path, typer.Argument(help="A model that `hcsim run --save` wrote.")]) -> None:
    """Score a saved model on data that it was not trained on."""
    with plainly():
        from hcsim.cli.train import evaluate_model

        evaluate_model(model)


@app.command()
def coordinator(
    workers: Annotated[int, typer.Option(help="How many workers there are to be.")],
    listen: Annotated[str, typer.Option(help="host:port to listen at.")] = "127.0.0.1:52415",
    least: Annotated[int, typer.Option(help="With how many work goes on when others are lost.")] = 1,
    heartbeat: Annotated[str, typer.Option(help="How often a worker says that it is alive.")] = "1 s",
    silence: Annotated[str, typer.Option(help="A worker that says nothing for so long is evicted.")] = "5 s",
    state: Annotated[Path | None, typer.Option(help="A folder for what it remembers when it starts again.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Our certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="The authority that signed all members' certificates.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plaintext beyond this machine.")] = False,
) -> None:
    """Be the place where workers register, meet and report checkpoints, until interrupted."""
    with plainly():
        from hcsim.cli import options
        from hcsim.cli.coordinator import serve

        policy = options.coordinator_policy(workers, least, heartbeat, silence)
        serve(listen, policy, options.tls(tls_cert, tls_key, tls_ca), insecure, state)
