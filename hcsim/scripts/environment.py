"""Which rank a process is, and what its script finds in its environment."""

from __future__ import annotations

import msgspec

MASTER_PORT = 29500


class Seat(msgspec.Struct, frozen=True):
    """Which rank a process is, and what it runs."""

    rank: int
    world: int
    first: str
    """The host of rank 0."""
    script: str
    arguments: tuple[str, ...]
    flops_per_byte: float
    """Work that is denser than this is held up by the machine's arithmetic, other work by its memory."""
    seed: int
    """Of what its script draws before it has set a seed."""
    life: int = 1
    """How often the machine has been started."""


def environment(rank: int, world: int, first: str, life: int) -> dict[str, str]:
    """What torchrun would have set: one process on each machine."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(world),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "ROLE_NAME": "default",
        "MASTER_ADDR": first,
        "MASTER_PORT": str(MASTER_PORT),
        "TORCHELASTIC_RUN_ID": "hcsim",
        "TORCHELASTIC_RESTART_COUNT": str(life - 1),
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
