"""The commands and their options; each imports its work when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hcsim.cli import cluster, screen
from hcsim.cli.asked import Asked, asking
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


@app.command(cls=Sectioned)
@asking
def run(asked: Asked) -> None:
    """Run a job, train, or run a torch script: in a scenario's virtual cluster; or with --real on real machines."""
    with plainly():
        from hcsim.cli.request import perform

        done = perform(asked)
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
) -> None:
    """Put random virtual clusters under random faults, and hold them to what must always hold."""
    with plainly():
        from hcsim.cli import options
        from hcsim.cli.fuzz import Search, replay_file, replay_seed, search

        options.only(
            "without --seed and --replay",
            {} if seed is None and replay is None
            else {"--seeds": seeds, "--minutes": minutes, "--state": state, "--json": json, "--workers": workers},
        )  # fmt: skip
        if seed is not None:
            options.only("without --seed", {"--replay": replay})
            done = replay_seed(seed, shrink, out)
        elif replay is not None:
            done = replay_file(replay)
        else:
            done = search(Search(seeds, first, minutes, workers, shrink, state, out, json))
    if not done:
        raise typer.Exit(FAILED)


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
