"""`hcsim cluster invite`, `join`, `members`, `expel` and `rotate`: who belongs to a cluster."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from hcsim.cli import screen
from hcsim.cli.cluster import DEFAULT_NAME, INVITATION_PORT
from hcsim.cli.options import expires_s, look_s
from hcsim.cluster.inquiry import Survey
from hcsim.cluster.joining import Inviting, Knock, find, knock, thank
from hcsim.cluster.once import Once
from hcsim.errors import ConfigError, HcsimError
from hcsim.identity.key import NodeKey
from hcsim.identity.namespace import ClusterSecret
from hcsim.identity.trust_list import MOST_NAME, Invitation, TrustRecord
from hcsim.launch import ask_cluster
from hcsim.node import admitted
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.interfaces import host_name, reachable_at
from hcsim.real.keys import (
    TrustFile,
    credentials,
    has_joined,
    load_node_key,
    load_secret,
    load_trust,
    new_secret,
    save_secret,
)
from hcsim.real.tls import ClusterTls
from hcsim.runtime.address import address_at, with_port
from hcsim.runtime.host import Host
from hcsim.units import did_you_mean

_ANSWER_S = 5.0


def join(text: str, home: Path, cluster: str, peers: Sequence[str], look: str) -> None:
    """Make this machine a member, by an invitation or by the cluster's phrase."""
    invitation = ClusterSecret.from_invitation(text)
    if invitation is None:
        first, *later = ClusterSecret.from_phrases(text)
        key = load_node_key(home)
        is_new = save_secret(home, cluster, first)
        for secret in later:
            TrustFile(home, cluster).add(TrustRecord(secret=secret.data))
    else:
        key = asyncio.run(_accept(invitation, home, cluster, peers, look_s(look)))
        is_new = True
    load_trust(home, cluster, host_name())
    screen.say(
        f"this machine {'is now' if is_new else 'was already'} in the cluster {cluster!r}, as node {key.node_id}"
    )


def invite(home: Path, cluster: str, expires: str, uses: int, port: int) -> None:
    """Show an invitation, and wait for those who use it."""
    lasts_s = expires_s(expires)
    name = "" if cluster == DEFAULT_NAME else f" --name {cluster}"

    def show(text: str) -> None:
        screen.note(f"on the other machine, run `hcsim cluster join{name}` and type this invitation:")
        screen.say(text)
        machines = screen.counted(uses, "machine")
        screen.note(f"it is for {machines}, for {expires}, and only while this command runs (Ctrl-C takes it back)")

    if not asyncio.run(_invite(home, cluster, lasts_s, uses, port, show)):
        raise HcsimError(f"the invitation has expired: it was for {expires}, and was not used up")


def list_members(home: Path, cluster: str) -> None:
    """Show the trust list as this machine knows it."""
    trusted = load_trust(home, cluster, host_name())
    for node, name in trusted.list.members.items():
        screen.say(f"{node}  {screen.cell(name)}")
    for node, name in trusted.list.expelled.items():
        screen.say(f"{node}  {screen.cell(name)} (expelled)")


def rotate(home: Path, cluster: str, peers: Sequence[str], look: str, machine: str | None = None) -> None:
    """Replace the secret; first expel a machine, if one is named. Members that run now learn of it at once."""
    found = asyncio.run(ask_cluster(home, cluster, peers, look_s(look)))
    trusted = load_trust(home, cluster, host_name())  # what those who answered knew is in it
    expelled: tuple[str, ...] = ()
    if machine is not None:
        expelled = _node_of(machine, trusted.list.members, found)
        if load_node_key(home).node_id in expelled:
            raise ConfigError(f"{machine} is this machine: run that on another member")
    trusted.rotate(new_secret(), expelled)
    if machine is not None:
        screen.say(f"{machine} is expelled: its key is never admitted again")
    screen.note("the secret is a new one: the old phrase admits nobody any more (`hcsim cluster invite` does)")
    screen.note(f"members are: {', '.join(map(screen.cell, trusted.list.members.values()))}")
    controls = [told.status.control for told in found.told.values() if told.status.us.node not in expelled]
    told = asyncio.run(ask_cluster(home, cluster, controls, 0.0)).told if controls else {}
    names = ", ".join(each.status.us.name for node, each in sorted(told.items()) if node not in expelled)
    screen.note(f"told: {names or 'nobody, as no other member answers'}; the others learn it when they meet a member")


def show_phrase(home: Path, cluster: str) -> None:
    """Print the phrase by which newcomers join without an invitation, if this machine knows it."""
    phrase = load_trust(home, cluster, host_name()).phrase
    if phrase is None:
        raise HcsimError(
            f"this machine does not know the present phrase of the cluster {cluster!r}: it will learn it from a member "
            "when it meets one, or run `hcsim cluster invite` on a member instead"
        )
    screen.say(phrase)
    screen.note("whoever knows this phrase can join, until `hcsim cluster rotate`: do not send it where others read it")


def _node_of(machine: str, members: Mapping[str, str], found: Survey) -> tuple[str, ...]:
    """The node of that name on the trust list, or as a running machine calls itself, or of that id."""
    names = {node: [name] for node, name in members.items()}
    for told in found.told.values():
        for us in (told.status.us, *told.view.members):
            names.setdefault(us.node, []).append(us.name)
    nodes = [node for node, called in names.items() if node in members and machine in called]
    nodes = nodes or [node for node in members if len(machine) >= 8 and node.startswith(machine.lower())]
    if len(nodes) > 1:
        raise ConfigError(f"several machines are called {machine!r}: say which by its node id: {', '.join(nodes)}")
    if not nodes:
        known = list(dict.fromkeys(members.values()))
        hint = did_you_mean(machine, known)
        raise ConfigError(f"no member is called {machine!r}{hint}; members are: {', '.join(known)}")
    return tuple(nodes)


async def _invite(home: Path, cluster: str, lasts_s: float, uses: int, port: int, show: Callable[[str], None]) -> bool:
    first, trusted = load_secret(home, cluster), load_trust(home, cluster, host_name())
    trusted.check_listed()
    secret = new_secret()
    async with _alone_with(load_node_key(home), secret, Once(screen.note)) as host:
        invitation = Invitation(uses, host.clock.elapsed() + lasts_s)
        inviting = Inviting(host, trusted, first, invitation, screen.note)
        address = address_at(reachable_at(host.interfaces()), port)
        show(secret.invitation())
        return await inviting.serve(address, secret.namespace.hex())


async def _accept(secret: ClusterSecret, home: Path, cluster: str, peers: Sequence[str], look_s: float) -> NodeKey:
    key = load_node_key(home)
    has = load_secret(home, cluster).namespace if has_joined(home, cluster) else b""
    places = [with_port(peer, INVITATION_PORT) for peer in peers]
    failures: list[str] = []
    async with _alone_with(key, secret, lambda what: None) as host:
        if not places and (found := await find(host, secret.namespace.hex(), look_s)):
            places = [found]
        for place in places:
            try:
                ours = Knock(key.public, host_name()[:MOST_NAME], has)
                welcome, channel = await knock(host, place, ours, _ANSWER_S)
            except HcsimError as error:
                failures.append(f"\n  {place}: {error}")
                continue
            TrustFile(home, cluster).add(welcome.record)
            save_secret(home, cluster, ClusterSecret(welcome.first))
            await thank(channel)
            return key
    if not places:
        raise HcsimError(
            "nobody on the local network waits with this invitation: `hcsim cluster invite` has to run on a member, "
            "and an invitation that was used or has expired is over; name that member's address with --peer if the "
            "network does not show it"
        )
    raise HcsimError(
        f"the invitation was not accepted; `hcsim cluster invite` on a member makes a new one{''.join(failures)}"
    )


@asynccontextmanager
async def _alone_with(key: NodeKey, secret: ClusterSecret, tell: Callable[[str], None]) -> AsyncIterator[Host]:
    """This machine, for whoever knows the same secret."""
    options = RealOptions("joining", seed=secrets.randbits(64), tls=ClusterTls(key, secret))
    async with RealHost(options, on_refused=lambda error: tell(f"a call was not taken: {error}")) as host:
        yield admitted(host, credentials(key, secret), tell)
