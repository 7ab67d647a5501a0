"""A script for torchrun that goes on from its checkpoint when it is started again. It never imports hcsim.

In its first life, the last rank kills itself in the middle of a step. torchrun then asks the others to end as soon as
it sees that, which may be before they have: they stay for what they have to say about their peer.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.torch_backend.models import STEPS, batch, loss_of, made, optimizer_of, weights_of

DIES_IN = 7


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group("hcsim")
    rank, size = dist.get_rank(), dist.get_world_size()
    model, saved = made(), folder / "checkpoint.pt"
    optimizer = optimizer_of(model)
    first = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["steps"]
    parallel = DistributedDataParallel(model)
    for step in range(first, STEPS):
        inputs, targets = batch(step, rank, size)
        optimizer.zero_grad()
        outputs = parallel(inputs)
        if step == DIES_IN and rank == size - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        loss_of(outputs, targets).backward()
        optimizer.step()
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": step + 1}
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").replace(saved)
    torch.save((first, weights_of(model)), folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
