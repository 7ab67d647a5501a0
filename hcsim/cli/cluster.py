"""`hcsim cluster`: which machines belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hcsim.cli import screen
from hcsim.cli.plainly import plainly

app = typer.Typer(help="Say which machines belong together.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Option(help="What this machine calls the cluster.")]
DEFAULT_NAME = "home"


def home() -> Path:
    """Where this machine keeps its key and its clusters."""
    from hcsim.real.keys import default_home  # loads cryptography

    return default_home()


@app.command()
def create(name: Name = DEFAULT_NAME) -> None:
    """Make a new cluster, and print the phrase by which other machines join it."""
    with plainly():
        from hcsim.real.keys import load_node_key, new_secret, save_secret

        key = load_node_key(home())
        secret = new_secret()
        save_secret(home(), name, secret)
        screen.note(f"created the cluster {name!r} with this machine in it, as node {key.node_id}")
        _show(secret.phrase(), name)


@app.command()
def join(
    phrase: Annotated[list[str] | None, typer.Argument(help="As `hcsim cluster create` printed it.")] = None,
    name: Name = DEFAULT_NAME,
) -> None:
    """Make this machine a member; without PHRASE it is asked for, and stays out of the shell's history."""
    with plainly():
        from hcsim.identity.namespace import ClusterSecret
        from hcsim.real.keys import load_node_key, save_secret

        secret = ClusterSecret.from_phrase(" ".join(phrase) if phrase else typer.prompt("join phrase", err=True))
        key = load_node_key(home())
        is_new = save_secret(home(), name, secret)
        screen.say(
            f"this machine {'is now' if is_new else 'was already'} in the cluster {name!r}, as node {key.node_id}"
        )


@app.command()
def phrase(name: Name = DEFAULT_NAME) -> None:
    """Print the join phrase again."""
    with plainly():
        from hcsim.real.keys import load_secret

        _show(load_secret(home(), name).phrase(), name)


Peers = Annotated[
    list[str] | None, typer.Option(help="host or host:port of a node, where the local network does not show it.")
]
Look = Annotated[str, typer.Option(help="How long to look around on the local network.")]


@app.command()
def status(name: Name = DEFAULT_NAME, peer: Peers = None, look: Look = "3 s") -> None:
    """Ask the nodes that run now: who is there, who leads, and how they are connected."""
    with plainly():
        from hcsim.cli.standing import show_status

        show_status(home(), name, tuple(peer or ()), look)


@app.command()
def forget(
    machine: Annotated[str, typer.Argument(help="What the others call it.")],
    name: Name = DEFAULT_NAME,
    peer: Peers = None,
    look: Look = "3 s",
) -> None:
    """Tell the nodes that run now that a machine is gone for good: they no longer wait for its word."""
    with plainly():
        from hcsim.cli.standing import forget_machine

        forget_machine(machine, home(), name, tuple(peer or ()), look)


def _show(phrase: str, name: str) -> None:
    option = "" if name == DEFAULT_NAME else f" --name {name}"
    screen.note("on each of the other machines, run:")
    screen.say(f"hcsim cluster join {phrase}{option}")
    screen.note("whoever knows this phrase can join: do not send it over a channel that others read")
