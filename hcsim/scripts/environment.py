"""What a script finds in its environment."""

from __future__ import annotations

MASTER_PORT = 29500


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
