"""Handwritten digits, data parallel: a first script for a cluster of one's own.

    hcsim run examples/image_classifier.py --scenario four-macs-1gbe
    torchrun --nproc-per-node 2 examples/image_classifier.py --backend hcsim --save digits

With --save it goes on from its last checkpoint, with as many ranks as there are then.
"""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import hcsim.torch_backend  # noqa: F401  # for --backend hcsim
from hcsim.checkpoints.loader import load
from hcsim.checkpoints.saver import Saver
from hcsim.errors import NoCheckpoint

HELD_OUT = 397


def network() -> nn.Module:
    """For images of 8 × 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def images_and_labels() -> tuple[Tensor, Tensor]:
    """In an order that is the same on all ranks."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(found.target)[order]


def main() -> None:
    """One rank of the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="of all ranks together")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--save", help="the folder of the checkpoints")
    asked = parser.parse_args()
    dist.init_process_group(asked.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = images_and_labels()
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first, saver = 0, None
    if asked.save:
        saver = Saver(asked.save, model, optimizer)
        try:
            saved = load(asked.save)
        except NoCheckpoint:
            pass
        else:
            saved.restore(model, optimizer)
            first = saved.step
    began = time.perf_counter()
    for epoch in range(first, asked.epochs):
        order = torch.randperm(len(images) - HELD_OUT, generator=torch.Generator().manual_seed(epoch)) + HELD_OUT
        for batch in order[: len(order) // asked.batch * asked.batch].split(asked.batch):
            mine = batch[rank::world]
            optimizer.zero_grad()
            loss = cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
        if saver is not None:
            saver.save(epoch + 1)
        with torch.no_grad():
            right = (model.module(images[:HELD_OUT]).argmax(1) == labels[:HELD_OUT]).float().mean()
        if rank == 0:
            print(f"epoch {epoch}: {right:.1%} right after {time.perf_counter() - began:.2f} s")
    if saver is not None:
        saver.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
