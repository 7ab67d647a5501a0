"""A plain torch.distributed script, as one finds them: data parallel training of a small convolutional network."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def network(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    before = 3
    for stage in range(4):
        after = width << stage
        layers += [nn.Conv2d(before, after, 3, stride=1 + (stage > 0), padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(network(asked.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draws = torch.Generator().manual_seed(rank)
    began = time.perf_counter()
    for step in range(asked.steps):
        inputs = torch.randn(asked.batch, 3, 32, 32, generator=draws)
        labels = torch.randint(0, 10, (asked.batch,), generator=draws)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f} after {time.perf_counter() - began:.4f} s")
    total = sum(value.double().sum().item() for value in model.parameters())
    print(f"rank {rank}: parameters sum to {total:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
