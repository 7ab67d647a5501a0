"""`hcsim cluster`: which machines belong together."""

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
    """Where this machine keeps its key and its clusters."""
    from hcsim.real.keys import default_home  # loads cryptography

    return default_home()


@app.command()
def create(name: Name = CLUSTER) -> None:
    """Make a new cluster with this machine in it, and print the phrase by which other machines join it."""
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

    Without PHRASE it is asked for: so it is in no shell history, and no list of processes shows it."""
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
    """Print an invitation to the cluster, and wait until the other machine has joined by it."""
    with errors_told():
        from hcsim.cli import membership as work

        work.invite(home(), name, expires, uses, port)


@app.command()
def members(name: Name = CLUSTER) -> None:
    """Print who belongs to the cluster, and who was expelled, as far as this machine knows."""
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
    """Replace the cluster's secret: the old phrase admits nobody any more. Members stay members."""
    with errors_told():
        from hcsim.cli import membership as work

        work.rotate(home(), name, tuple(peer or ()), look)


@app.command()
def phrase(name: Name = CLUSTER) -> None:
    """Print the phrase by which machines can join without an invitation."""
    with errors_told():
        from hcsim.cli import membership as work

        work.show_phrase(home(), name)


@app.command()
def status(name: Name = CLUSTER, peer: Peers = None, look: Look = "3 s") -> None:
    """Ask the nodes that run now: who is there, who leads, and how they are connected."""
    with errors_told():
        from hcsim.cli.membership import show_status

        show_status(home(), name, tuple(peer or ()), look)


@app.command()
def forget(
    machine: Annotated[str, typer.Argument(help="What the others call it.")],
    name: Name = CLUSTER,
    peer: Peers = None,
    look: Look = "3 s",
) -> None:
    """Tell the nodes that run now that a machine is gone for good: they no longer wait for its word."""
    with errors_told():
        from hcsim.cli.membership import forget_machine

        forget_machine(machine, home(), name, tuple(peer or ()), look)
