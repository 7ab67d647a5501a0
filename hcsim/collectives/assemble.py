"""Waiting for all ranks of a group, before its first operation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from hcsim.collectives.group import Group
from hcsim.collectives.options import Options

Missing: TypeAlias = Callable[[list[int]], None]
"""Told which ranks we still wait for, whenever that changes."""


async def assemble(group: Group, wait_s: float, missing: Missing) -> None:
    """Return when every rank is there: all call the first, which tells those who have whom it still waits for."""
    if group.size == 1:
        return
    patient = group.subgroup(range(group.size), Options(timeout_s=wait_s))
    if group.rank:
        missing([0])
        await patient.send(np.zeros(1, np.uint8), 0)
        while True:
            is_absent = np.zeros(group.size, np.uint8)
            await patient.recv(is_absent, 0)
            missing(np.flatnonzero(is_absent).tolist())
            if not is_absent.any():
                return
    absent = list(range(1, group.size))

    async def hear(rank: int) -> None:
        await patient.recv(np.zeros(1, np.uint8), rank)
        absent.remove(rank)
        missing(absent)
        is_absent = np.isin(np.arange(group.size), absent).astype(np.uint8)
        await asyncio.gather(*(patient.send(is_absent, there) for there in np.flatnonzero(is_absent == 0)[1:].tolist()))

    missing(absent)
    await asyncio.gather(*(hear(rank) for rank in range(1, group.size)))
