"""`hcsim cluster`: the members of a cluster, and the status that its running nodes report."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rich import box
from rich.table import Table

from hcsim.cli import screen
from hcsim.cli.options import CLUSTER, INVITATION_PORT
from hcsim.cli.settings import seconds
from hcsim.cluster.joining import InvitationServer, Knock, find, knock, thank
from hcsim.cluster.messages import LinkStatus, StatusReply
from hcsim.cluster.status_client import StatusClient
from hcsim.errors import ConfigError, HcsimError
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.identity.trust_list import MOST_NAME, OTHER_CLUSTER, Invitation, TrustRecord
from hcsim.launch.real import ask_cluster
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
from hcsim.runtime.address import address_at, hosts_of, with_port
from hcsim.runtime.host import Host
from hcsim.transport.admission_queue import LogDeduplicator
from hcsim.units import did_you_mean

_ANSWER_S = 5.0
_NUMBERS = ("view", "round trip", "Gb/s")


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
        key = asyncio.run(_accept(invitation, home, cluster, peers, seconds("--look", look)))
        is_new = True
    load_trust(home, cluster, host_name())
    screen.say(
        f"this machine {'is now' if is_new else 'was already'} in the cluster {cluster!r}, as node {key.node_id}"
    )


def invite(home: Path, cluster: str, expires: str, uses: int, port: int) -> None:
    """Show an invitation, and wait for the machines that use it."""
    lasts_s = seconds("--expires", expires)
    name = "" if cluster == CLUSTER else f" --name {cluster}"

    def show(text: str) -> None:
        screen.note(f"on the other machine, run `hcsim cluster join{name}` and type this invitation:")
        screen.say(text)
        machines = screen.counted(uses, "machine")
        screen.note(f"it is for {machines}, for {expires}, and only while this command runs (Ctrl-C takes it back)")

    if not asyncio.run(_invite(home, cluster, lasts_s, uses, port, show)):
        raise HcsimError(f"the invitation has expired: it was for {expires}, and was not used up")


def list_members(home: Path, cluster: str) -> None:
    """Show the trust list of this machine."""
    trusted = load_trust(home, cluster, host_name())
    for node, name in trusted.list.members.items():
        screen.say(f"{node}  {screen.cell(name)}")
    for node, name in trusted.list.expelled.items():
        screen.say(f"{node}  {screen.cell(name)} (expelled)")


def rotate(home: Path, cluster: str, peers: Sequence[str], look: str, machine: str | None = None) -> None:
    """Replace the secret; first expel a machine, if one is named. Running members are informed at once."""
    found = asyncio.run(ask_cluster(home, cluster, peers, seconds("--look", look)))
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
    """Print the phrase with which machines join without an invitation, if this machine knows it."""
    phrase = load_trust(home, cluster, host_name()).phrase
    if phrase is None:
        raise HcsimError(
            f"this machine does not know the present phrase of the cluster {cluster!r}: it will learn it from a member "
            "when it meets one, or run `hcsim cluster invite` on a member instead"
        )
    screen.say(phrase)
    screen.note("whoever knows this phrase can join, until `hcsim cluster rotate`: do not send it where others read it")


def _node_of(machine: str, members: Mapping[str, str], found: StatusClient) -> tuple[str, ...]:
    """Return the nodes with that name on the trust list, that name in their status, or that id."""
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
    async with _alone_with(load_node_key(home), secret, LogDeduplicator(screen.note)) as host:
        invitation = Invitation(uses, host.clock.elapsed() + lasts_s)
        inviting = InvitationServer(host, trusted, first, invitation, screen.note)
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
    """Yield a host of this machine that admits peers with the same secret."""
    options = RealOptions("joining", seed=secrets.randbits(64), tls=ClusterTls(key, secret))
    async with RealHost(options, on_refused=lambda error: tell(f"a call was not taken: {error}")) as host:
        yield admitted(host, credentials(key, secret), tell)


def show_status(home: Path, cluster: str, peers: Sequence[str], look: str) -> None:
    """Query the cluster, and show two tables: the nodes and the connections between them."""
    survey = find_members(home, cluster, peers, look)
    told = by_seniority(survey)
    show_rows(("machine", "node", "", "view", "members", "addresses"), [node_row(each) for each in told.values()])
    show_links(told)
    for address, why in survey.failures.items():
        screen.note(f"{address} did not answer: {why}")


def by_seniority(survey: StatusClient) -> dict[str, StatusReply]:
    """Return the answers by node, the most senior member's first."""
    return {node: survey.told[node] for node in sorted(survey.told, key=lambda node: _seniority(survey.told[node]))}


def show_links(told: Mapping[str, StatusReply]) -> None:
    """Show the connections between these nodes, if there are any."""
    links = [link_row(each, link, told) for each in told.values() for link in each.links]
    if links:
        show_rows(("from", "to", "out of", "into", "medium", "round trip", "Gb/s", ""), links)


def forget_machine(machine: str, home: Path, cluster: str, peers: Sequence[str], look: str) -> None:
    """Report a machine as gone for good, unless it is present."""
    found = find_members(home, cluster, peers, look)
    awaited = found.awaited()
    nodes = dict.fromkeys(member.node for member in awaited if member.name == machine)
    if not nodes:
        if machine in [each.status.us.name for each in found.told.values()]:
            raise HcsimError(f"{machine} answers: it is not gone")
        names = list(dict.fromkeys(member.name for member in awaited))
        known = ", ".join(names) or "nobody"
        raise HcsimError(f"nobody waits for {machine!r}{did_you_mean(machine, names)}; waited for: {known}")
    for node in nodes:
        _forget(node, machine, found, home, cluster)


def _forget(node: str, machine: str, found: StatusClient, home: Path, cluster: str) -> None:
    controls = [each.status.control for each in found.told.values()]
    survey = asyncio.run(ask_cluster(home, cluster, controls, 0.0, node))
    names = ", ".join(each.status.us.name for each in survey.told.values())
    screen.say(f"{machine} is not waited for any more: {names} will go on without it")
    its_own = [link.control for each in found.told.values() for link in each.links if link.node == node]
    for address, why in survey.failures.items():
        if address not in its_own:
            screen.note(f"{address} was not told: {why}")


def find_members(home: Path, cluster: str, peers: Sequence[str], look: str) -> StatusClient:
    """Ask the running nodes of a cluster. Raises `HcsimError` if none answers."""
    survey = asyncio.run(ask_cluster(home, cluster, peers, seconds("--look", look)))
    if not survey.told:
        tried = "".join(f"\n  {address}: {why}" for address, why in survey.failures.items())
        raise HcsimError(
            f"no node of the cluster {cluster!r} answers: looked around on the local network for {look}. Does "
            f"`hcsim run --real` run on a machine? If it does, name one with --peer{tried}{_foreign(survey)}"
        )
    return survey


def _foreign(survey: StatusClient) -> str:
    """Return a note on machines of other clusters that answered: the caller may look for one of them."""
    seen = ", ".join(f"{screen.cell(name)} at {place}" for name, place in survey.foreign.items())
    return (
        f"\n  machines of another cluster are here: {seen}; if they belong to this one, {OTHER_CLUSTER}" if seen else ""
    )


def _seniority(told: StatusReply) -> tuple[str, int, str]:
    us, view = told.status.us, told.view
    rank = view.rank(us)
    return view.lineage, len(view.members) if rank is None else rank, us.name


def node_row(told: StatusReply) -> tuple[str, ...]:
    """Return the row of a node and its status."""
    us, view = told.status.us, told.view
    if view.rank(us) is None:
        role = "waits to be taken in"
    elif not view.formed:
        role = "waits for others"
    else:
        role = "leads" if view.leader.node == us.node else "member"
    members = ", ".join(member.name for member in view.members)
    return us.name, us.node[:8], role, str(view.epoch), members, ", ".join(hosts_of(told.status.control)[0])


def link_row(told: StatusReply, link: LinkStatus, everybody: Mapping[str, StatusReply]) -> tuple[str, ...]:
    """Return the row of the data channel between two nodes, or else of the control channel, and its measurements."""
    ours, theirs = link.ends
    theirs = theirs or (hosts_of(link.address)[0][0] if link.address else "")
    other = everybody.get(link.node)
    media = dict.fromkeys((*_media(ours, told), *_media(theirs, other)))
    latency = "–" if link.latency_s is None else screen.duration(link.latency_s)
    return (
        told.status.us.name,
        link.name,
        ours or "–",
        theirs or "–",
        " – ".join(media) or "–",
        latency,
        "/".join(dict.fromkeys(f"{rate * 8 / 1e9:.2g}" for rate in (link.there_Bps, link.back_Bps) if rate)) or "–",
        link.suspected,
    )


def _media(address: str, told: StatusReply | None) -> list[str]:
    """Return the media of a node's interface at that address, as far as they are known."""
    if told is None or not address:
        return []
    return [interface.medium.value for interface in told.interfaces if address in interface.addresses][:1]


def show_rows(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Show a table whose contents come from other machines."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(screen.cell, row))
    screen.show(table)
