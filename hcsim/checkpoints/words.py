"""What ranks tell each other about checkpoints: bytes that are decoded by type, never pickles."""

from __future__ import annotations

import torch
import torch.distributed as dist


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Our rank, and of how many; a program that has not met others is the only one."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def gathered(mine: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Everyone's bytes, by rank. All ranks call this."""
    _, world = place(group)
    if world == 1:
        return [mine]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    lengths = [int(size) for size in sizes]
    rooms = [torch.zeros(max(lengths), dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(rooms, as_tensor(mine.ljust(max(lengths), b"\0")), group=group)
    return [room[:length].numpy().tobytes() for room, length in zip(rooms, lengths, strict=True)]


def as_tensor(data: bytes) -> torch.Tensor:
    """Bytes that can be sent."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
