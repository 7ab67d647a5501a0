"""`hcsim cluster`: manages which machines belong to a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hcsim.cli.errors import errors_told
from hcsim.cli.options import CLUSTER, INVITATION_PORT

app = typer.Typer(help="Say which machines belong together.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Option(help="What this machine calls the cluster.")]


def home() -> Path:
    """Return the folder in which this machine keeps its key and its clusters."""
    from hcsim.real.keys import default_home  # loads cryptography

    return default_home()


@app.command()
def create(name: Name = CLUSTER) -> None:
    """Make a new cluster that contains this machine, and print the phrase with which other machines join it."""
    with errors_told():
        from hcsim.cli import screen
        from hcsim.real.interfaces import host_name
        from hcsim.real.keys import load_node_key, load_trust, new_secret, save_secret

        key = load_node_key(home())
        secret = new_secret()
        save_secret(home(), name, secret)
        load_trust(home(), name, host_name())
        option = "" if name == CLUSTER else f" --name {name}"
        screen.note(f"created the cluster {name!r} with this machine in it, as node {key.node_id}")
        screen.note(f"on each of the other machines, run `hcsim cluster join{option}` and type this phrase:")
        screen.say(secret.phrase())
        screen.note(
            "whoever knows it can join, until `hcsim cluster rotate`; `hcsim cluster invite` makes an invitation that "
            "works once"
        )


Peers = Annotated[
    list[str] | None, typer.Option(help="host or host:port of a node, where the local network does not show it.")
]
Look = Annotated[str, typer.Option(help="How long to look around on the local network.")]
Inviter = Annotated[
    list[str] | None,
    typer.Option(help="host or host:port of the machine that invites, where the local network does not show it."),
]


@app.command()
def join(
    phrase: Annotated[
        list[str] | None, typer.Argument(help="The invitation or phrase, or - to read it from standard input.")
    ] = None,
    name: Name = CLUSTER,
    peer: Inviter = None,
    look: Look = "10 s",
) -> None:
    """Make this machine a member, by an invitation or the phrase.

    Without PHRASE, the command asks for it, so that it appears in no shell history and in no process list."""
    with errors_told():
        from hcsim.cli import membership

        if phrase == ["-"]:
            text = sys.stdin.readline()
        else:
            text = " ".join(phrase) if phrase else typer.prompt("invitation or phrase", err=True)
        membership.join(text, home(), name, tuple(peer or ()), look)


@app.command()
def invite(
    name: Name = CLUSTER,
    expires: Annotated[str, typer.Option(help="How long it is good for.")] = "10 min",
    uses: Annotated[int, typer.Option(min=1, max=64, help="How many machines may join by it.")] = 1,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where this machine waits for the other.")
    ] = INVITATION_PORT,
) -> None:
    """Print an invitation to the cluster, and wait until the other machine has joined with it."""
    with errors_told():
        from hcsim.cli import membership as work

        work.invite(home(), name, expires, uses, port)


@app.command()
def members(name: Name = CLUSTER) -> None:
    """Print the members and the expelled machines of the cluster, as far as this machine knows them."""
    with errors_told():
        from hcsim.cli import membership as work

        work.list_members(home(), name)


@app.command()
def expel(
    machine: Annotated[str, typer.Argument(help="What the others call it, or its node id.")],
    name: Name = CLUSTER,
    peer: Peers = None,
    look: Look = "3 s",
) -> None:
    """Expel a machine for good, and replace the secret: its key is never admitted again."""
    with errors_told():
        from hcsim.cli import membership as work

        work.rotate(home(), name, tuple(peer or ()), look, machine)


@app.command()
def rotate(name: Name = CLUSTER, peer: Peers = None, look: Look = "3 s") -> None:
    """Replace the cluster's secret: the old phrase admits no machine any more. Members stay members."""
    with errors_told():
        from hcsim.cli import membership as work

        work.rotate(home(), name, tuple(peer or ()), look)


@app.command()
def phrase(name: Name = CLUSTER) -> None:
    """Print the phrase with which machines can join without an invitation."""
    with errors_told():
        from hcsim.cli import membership as work

        work.show_phrase(home(), name)


@app.command()
def status(
    name: Name = CLUSTER,
    peer: Peers = None,
    look: Look = "3 s",
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it, with the training, until Ctrl-C.")] = False,
) -> None:
    """Ask the running nodes for the members, the leader and the connections."""
    with errors_told():
        if watch:
            from hcsim.cli.watch import watch_cluster

            watch_cluster(home(), name, tuple(peer or ()))
        else:
            from hcsim.cli.membership import show_status

            show_status(home(), name, tuple(peer or ()), look)


@app.command()
def forget(
    machine: Annotated[str, typer.Argument(help="What the others call it.")],
    name: Name = CLUSTER,
    peer: Peers = None,
    look: Look = "3 s",
) -> None:
    """Tell the running nodes that a machine is gone for good: they no longer wait for it."""
    with errors_told():
        from hcsim.cli.membership import forget_machine

        forget_machine(machine, home(), name, tuple(peer or ()), look)


@app.command()
def unit(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND…", help="What the machine does: run --real job.toml --state FOLDER, …"),
    ] = None,
    name: Name = CLUSTER,
    launchd: Annotated[
        bool | None, typer.Option("--launchd/--systemd", help="For which system; left out: for this one.")
    ] = None,
) -> None:
    """Print a launchd or systemd file, so that this machine takes part whenever it is on."""
    with errors_told():
        from hcsim.cli.unit import print_unit

        print_unit(name, command or (), for_launchd=sys.platform == "darwin" if launchd is None else launchd)
