"""The transformer of language_model.py over Wi-Fi: ranks learn by themselves, and talk every so many steps (DiLoCo).

    hcsim run examples/diloco_wifi.py --scenario two-macs-wifi -- --every 10
    hcsim run examples/diloco_wifi.py --scenario two-macs-wifi -- --every 1

The first sends a tenth of the bytes. At the end, each rank says how long it waited for the others.
"""

import argparse
import time

import torch
import torch.distributed as dist
from language_model import samples, text, transformer
from torch.nn.functional import cross_entropy

import hcsim.torch_backend  # noqa: F401  # for --backend hcsim
from hcsim.checkpoints.saver import Saver
from hcsim.training.modules.periodic import DiLoCo


def main() -> None:
    """One rank of the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--save", help="the folder of the checkpoints: one on each machine")
    asked = parser.parse_args()
    dist.init_process_group(asked.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformer()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = DiLoCo(model, every=asked.every)
    # Without a disk that all share, each part lies on two machines.
    saver = Saver(asked.save, model, inner, also={"outer": outer}, copies=min(2, world)) if asked.save else None
    characters, draws = text(), torch.Generator().manual_seed(rank)
    began, waited_s = time.perf_counter(), 0.0
    for step in range(asked.steps):
        inputs, targets = samples(characters, asked.batch, draws)
        inner.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        inner.step()
        computed = time.perf_counter()
        if outer.step(samples=asked.batch):
            waited_s += time.perf_counter() - computed
            if rank == 0:
                print(f"step {step + 1}: loss {loss.item():.3f} after {time.perf_counter() - began:.2f} s")
            if saver is not None:
                saver.save(step + 1)
    outer.exchange()
    if saver is not None:
        saver.wait()
    print(f"rank {rank}: {time.perf_counter() - began:.2f} s, {waited_s:.2f} s of them for the others")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
