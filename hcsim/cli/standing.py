"""`hcsim cluster status` and `forget`: what running nodes say about themselves and each other, and are told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from hcsim.cli import screen
from hcsim.cli.options import look_s
from hcsim.cluster.inquiry import Survey
from hcsim.cluster.messages import Link, Told
from hcsim.errors import HcsimError
from hcsim.identity.trust_list import OTHER_CLUSTER
from hcsim.launch import ask_cluster
from hcsim.runtime.address import hosts_of
from hcsim.units import did_you_mean

_NUMBERS = ("view", "round trip", "Gb/s")


def show_status(home: Path, cluster: str, peers: Sequence[str], look: str) -> None:
    """Ask, and show two tables: the nodes, and what connects them."""
    survey = _survey(home, cluster, peers, look)
    told = {node: survey.told[node] for node in sorted(survey.told, key=lambda node: _seniority(survey.told[node]))}
    _print(("machine", "node", "", "view", "members", "addresses"), [_node(each) for each in told.values()])
    links = [_link(each, link, told) for each in told.values() for link in each.links]
    if links:
        _print(("from", "to", "out of", "into", "medium", "round trip", "Gb/s", ""), links)
    for address, why in survey.failures.items():
        screen.note(f"{address} did not answer: {why}")


def forget_machine(machine: str, home: Path, cluster: str, peers: Sequence[str], look: str) -> None:
    """Say that a machine is gone for good, unless it is there."""
    found = _survey(home, cluster, peers, look)
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


def _forget(node: str, machine: str, found: Survey, home: Path, cluster: str) -> None:
    controls = [each.status.control for each in found.told.values()]
    survey = asyncio.run(ask_cluster(home, cluster, controls, 0.0, node))
    names = ", ".join(each.status.us.name for each in survey.told.values())
    screen.say(f"{machine} is not waited for any more: {names} will go on without it")
    its_own = [link.control for each in found.told.values() for link in each.links if link.node == node]
    for address, why in survey.failures.items():
        if address not in its_own:
            screen.note(f"{address} was not told: {why}")


def _survey(home: Path, cluster: str, peers: Sequence[str], look: str) -> Survey:
    survey = asyncio.run(ask_cluster(home, cluster, peers, look_s(look)))
    if not survey.told:
        tried = "".join(f"\n  {address}: {why}" for address, why in survey.failures.items())
        raise HcsimError(
            f"no node of the cluster {cluster!r} answers: looked around on the local network for {look}. Does "
            f"`hcsim run --real` run on a machine? If it does, name one with --peer{tried}{_foreign(survey)}"
        )
    return survey


def _foreign(survey: Survey) -> str:
    """Machines of other clusters: one of them may be looked for."""
    seen = ", ".join(f"{screen.cell(name)} at {place}" for name, place in survey.foreign.items())
    return (
        f"\n  machines of another cluster are here: {seen}; if they belong to this one, {OTHER_CLUSTER}" if seen else ""
    )


def _seniority(told: Told) -> tuple[str, int, str]:
    us, view = told.status.us, told.view
    rank = view.rank(us)
    return view.lineage, len(view.members) if rank is None else rank, us.name


def _node(told: Told) -> tuple[str, ...]:
    us, view = told.status.us, told.view
    if view.rank(us) is None:
        role = "waits to be taken in"
    elif not view.formed:
        role = "waits for others"
    else:
        role = "leads" if view.leader.node == us.node else "member"
    members = ", ".join(member.name for member in view.members)
    return us.name, us.node[:8], role, str(view.epoch), members, ", ".join(hosts_of(told.status.control)[0])


def _link(told: Told, link: Link, everybody: Mapping[str, Told]) -> tuple[str, ...]:
    """The way that what is computed takes, or else the control channel, and what was measured between the two."""
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


def _media(address: str, told: Told | None) -> list[str]:
    """What the interface of a node at that address is made of, as far as anybody knows."""
    if told is None or not address:
        return []
    return [interface.medium.value for interface in told.interfaces if address in interface.addresses][:1]


def _print(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(screen.cell, row))
    screen.show(table)
