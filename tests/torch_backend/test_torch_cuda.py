"""Tensors on a CUDA device, through the backend: the same numbers as on the CPU."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WORLD, STEPS = 2, 10


def _rank(rank: int, port: int, device: str, folder: str) -> None:
    import hcsim.torch_backend  # noqa: F401

    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ.update(meeting)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("hcsim")
    _collectives(rank, device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)).double()
    replica = nn.parallel.DistributedDataParallel(model.to(device), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    stream = torch.cuda.Stream() if device == "cuda" else None
    for _ in range(STEPS):
        batch = torch.randn(16, 64, generator=generator, dtype=torch.float64).to(device)
        with torch.cuda.stream(stream):  # not the default one: results have to wait for the right stream
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream())
            optimizer.zero_grad()
            replica(batch).square().mean().backward()
            optimizer.step()
    if stream is not None:
        stream.synchronize()
    torch.save([parameter.detach().cpu() for parameter in model.parameters()], Path(folder, f"{device}-{rank}"))
    dist.destroy_process_group()


def _collectives(rank: int, device: str) -> None:
    large = torch.full((1 << 20,), rank + 1.0, device=device)
    work = dist.all_reduce(large, async_op=True)
    small = torch.arange(3, device=device) + rank
    dist.all_reduce(small, op=dist.ReduceOp.MAX)
    assert work is not None
    work.wait()
    assert torch.equal(large, torch.full_like(large, WORLD * (WORLD + 1) / 2))
    assert small.tolist() == [0 + WORLD - 1, 1 + WORLD - 1, 2 + WORLD - 1]
    parts = [torch.empty(2, 2, device=device, dtype=torch.bfloat16) for _ in range(WORLD)]
    dist.all_gather(parts, torch.full((2, 2), rank, device=device, dtype=torch.bfloat16))
    assert [part[1, 1].item() for part in parts] == list(range(WORLD))
    there = torch.arange(WORLD * 2.0, device=device).view(WORLD, 2).t()  # not in one piece
    back = torch.empty(2, WORLD, device=device).t()
    dist.all_to_all_single(back.contiguous(), there.contiguous())
    message = torch.full((5,), 7.0, device=device) if rank == 0 else torch.zeros(5, device=device)
    if rank == 0:
        dist.send(message, 1, tag=4)
    elif rank == 1:
        dist.recv(message, 0, tag=4)
        assert message.tolist() == [7.0] * 5


def compare(folder: Path) -> float:
    """Train on both; the largest difference of a parameter."""
    trained = {}
    for device in ("cpu", "cuda"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(_rank, (port, device, str(folder)), nprocs=WORLD)
        trained[device] = [torch.load(folder / f"{device}-{rank}") for rank in range(WORLD)]
        first, second = trained[device]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), f"replicas differ on {device}"
    pairs = zip(trained["cpu"][0], trained["cuda"][0], strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_ddp_with_cuda_tensors_equals_ddp_on_the_cpu(tmp_path: Path) -> None:
    assert compare(tmp_path) < 1e-12


if __name__ == "__main__":
    print("largest difference", compare(Path(sys.argv[1])))
