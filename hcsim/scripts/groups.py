"""The groups of a script in the simulator: each rank's groups, and the state that the ranks share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.errors import UsageError
from hcsim.launch import DEFAULT_PORT
from hcsim.scripts.ipc import Opened
from hcsim.transport.hello import GroupMembership, Wire
from hcsim.virtual.host import VirtualHost


class GroupDirectory:
    """The address of each group on each rank, and each rank's incarnation. Shared by all ranks."""

    def __init__(self, hosts: Sequence[str], wire: Wire) -> None:
        self.hosts = tuple(hosts)
        self.wire = wire
        self._ports: dict[str, int] = {}
        self._opened: dict[tuple[str, int], int] = {}

    def membership(self, opened: Opened, seat: int) -> GroupMembership:
        """Return this rank's membership of a group that is not a subgroup."""
        members = opened.ranks or tuple(range(opened.size))
        if len(members) != opened.size or max(members) >= len(self.hosts) or members[opened.rank] != seat:
            raise UsageError(
                f"rank {opened.rank} of {opened.size} cannot be here: this is rank {seat} of {len(self.hosts)}, "
                "as RANK and WORLD_SIZE say"
            )
        port = self._ports.setdefault(opened.name, DEFAULT_PORT + len(self._ports))
        epoch = self._opened[opened.name, seat] = self._opened.get((opened.name, seat), -1) + 1
        addresses = tuple(f"{self.hosts[member]}:{port}" for member in members)
        # A rank that computes for long is late, and not lost before a call would be.
        wire = msgspec.structs.replace(self.wire, connect_timeout_s=opened.timeout_s)
        return GroupMembership(opened.rank, addresses, f"script {opened.name}", epoch, wire)


class RankGroups:
    """One rank's groups."""

    def __init__(self, host: VirtualHost, seat: int, directory: GroupDirectory) -> None:
        self._host = host
        self._seat = seat
        self._directory = directory
        self._groups: dict[int, tuple[Group, int | None]] = {}
        """Each group, with the number of its parent group."""
        self._members: dict[int, tuple[int, ...]] = {}
        """The program's ranks in each group that is not a subgroup."""
        self.failed: dict[int, str] = {}
        """The reason of each rank whose script has failed."""
        self._opened = 0
        self._under_way: dict[int, list[asyncio.Task[Any]]] = {}

    async def open(self, opened: Opened) -> int:
        """Join a group; return the group's number."""
        options = Options(timeout_s=opened.timeout_s)
        if opened.parent is not None:
            group = self.group(opened.parent).subgroup(opened.ranks, options)
        else:
            us = self._directory.membership(opened, self._seat)
            group = await Group.open(self._host, us, options)
            self._members[self._opened + 1] = opened.ranks or tuple(range(opened.size))
        self._opened += 1
        self._groups[self._opened] = group, opened.parent
        for seat, reason in self.failed.items():
            self._fail(self._opened, seat, reason)
        return self._opened

    def group(self, line: int) -> Group:
        if line not in self._groups:
            raise UsageError("the group has been destroyed")
        return self._groups[line][0]

    def started(self, line: int, task: asyncio.Task[Any]) -> None:
        waiting = [other for other in self._under_way.get(line, ()) if not other.done()]
        self._under_way[line] = [*waiting, task]

    async def close(self, line: int, *, in_order: bool) -> None:
        """Leave the group; `in_order`: only after all its calls. Its parent group stays open."""
        if line not in self._groups:
            return
        group, parent = self._groups.pop(line)
        if in_order:
            await asyncio.gather(*self._under_way.pop(line, ()), return_exceptions=True)
        if parent is None:
            if not in_order:
                group.fail(f"rank {self._seat} has given up", group.rank)
            await group.close()

    def peer_failed(self, seat: int, reason: str) -> None:
        """Handle the failure of a rank's script: fail the groups that the rank is in, and those opened later."""
        self.failed[seat] = reason
        for line in self._groups:
            self._fail(line, seat, reason)

    def peer_began_anew(self, seat: int) -> None:
        """Handle the restart of another rank's machine, and of its script."""
        self.failed.pop(seat, None)

    def _fail(self, line: int, seat: int, reason: str) -> None:
        members = self._members.get(line, ())
        if seat in members:
            self._groups[line][0].fail(reason, members.index(seat))

    async def end(self, reason: str) -> None:
        """Leave all groups when the script ends. Send `reason` to the other members, if it is not empty."""
        for group, parent in self._groups.values():
            if parent is None:
                if reason:
                    group.fail(reason, group.rank)
                await group.close()
        self._groups.clear()
