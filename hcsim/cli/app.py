"""The commands and their options; each imports its work when it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from hcsim.cli import screen
from hcsim.errors import ConfigError, HcsimError, UsageError

app = typer.Typer(
    help="Collectives on a home cluster: in a simulated one, or on your own machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Text = str | None

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130


@contextmanager
def _plainly() -> Iterator[None]:
    """Tell a person what is wrong in a line. A programming error keeps its traceback."""
    try:
        yield
    except (ConfigError, UsageError) as error:
        screen.complain(str(error))
        raise typer.Exit(BAD_INPUT) from None
    except HcsimError as error:
        screen.complain(str(error))
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        screen.note("interrupted")
        raise typer.Exit(INTERRUPTED) from None


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
@app.command()
def run(
    scenario: Annotated[Text, typer.Argument(help="A scenario file, or the name of a shipped one.")] = None,
    operation: Annotated[Text, typer.Option(help="all_reduce, broadcast, all_gather, …")] = None,
    algorithm: Annotated[Text, typer.Option(help="ring, tree, … or auto.")] = None,
    size: Annotated[Text, typer.Option(help='Bytes per rank, such as "64 MiB".')] = None,
    dtype: Annotated[Text, typer.Option(help="float32, bfloat16, int64, …")] = None,
    repeat: Annotated[int | None, typer.Option(help="How often the job is done.")] = None,
    timeout: Annotated[Text, typer.Option(help='How long one operation may take, such as "30 s".')] = None,
    seed: Annotated[int | None, typer.Option(help="Virtual: seed of jitter, loss and faults.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Virtual: write every event to this file, as JSON lines.")] = None,
    real: Annotated[bool, typer.Option("--real", help="Run over TCP; a scenario then only gives the job.")] = False,
    peers: Annotated[
        Text, typer.Option(help="Real: host:port of all ranks in order; the default port is 52416.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Real: which of the peers we are, from 0.")] = None,
    wait: Annotated[Text, typer.Option(help='Real: how long to wait for the others (default "5 min").')] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Real: our certificate (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Real: its key.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Real: the authority that signed all members' certificates.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Real: allow plaintext beyond this machine.")] = False,
    stripes: Annotated[int | None, typer.Option(min=1, help="Connections per peer; the same on all ranks.")] = None,
    segment: Annotated[Text, typer.Option(help='Piece that a message is cut into, such as "1 MiB".')] = None,
) -> None:
    """Run a job: in a scenario's virtual cluster, or with --real on this and other machines."""
    with _plainly():
        from hcsim.cli import options

        job = {"operation": operation, "algorithm": algorithm, "size": size, "dtype": dtype, "repeat": repeat}
        wire = options.wire(stripes, segment, wait)
        if real:
            options.refuse("in a virtual run", {"--seed": seed, "--trace": trace})
            tls = options.tls(tls_cert, tls_key, tls_ca)
            place = options.Place(options.peers(peers), rank, tls, insecure)
            from hcsim.cli.real import run_real

            done = run_real(options.real_job(scenario, {**job, "timeout": timeout}), place, wire)
        else:
            tls_files = {"--tls-cert": tls_cert, "--tls-key": tls_key, "--tls-ca": tls_ca}
            only_real = {"--peers": peers, "--rank": rank, "--wait": wait, **tls_files, "--insecure": insecure or None}
            options.refuse("with --real", only_real)
            chosen = options.scenario(scenario, seed, {**job, "timeout": timeout})
            from hcsim.cli.virtual import run_virtual

            done = run_virtual(chosen, wire, trace)
    if not done:
        raise typer.Exit(FAILED)
