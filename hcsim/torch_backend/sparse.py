"""The sum of everybody's sparse tensors, as embeddings have them for gradients: all get all elements, and add them up.

Each rank first learns how many elements the others have, for which it waits here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from hcsim.torch_backend.work import PendingWork

if TYPE_CHECKING:
    from hcsim.torch_backend.process_group import HcsimGroup


def sum_sparse(group: HcsimGroup, tensor: Tensor, opts: Any) -> PendingWork:
    """Put the sum, or the mean, of everybody's tensors into this one."""
    mean = opts is not None and opts.reduceOp == ReduceOp.AVG
    if opts is not None and not mean and opts.reduceOp != ReduceOp.SUM:
        raise ValueError("sparse tensors can be summed or averaged, and no other reduction is done: make them dense")
    ours = tensor.detach().coalesce()
    indices, values = ours.indices().t().contiguous(), ours.values()
    counts = _counts(group, len(indices), opts)
    all_indices = [indices.new_empty((count, *indices.shape[1:])) for count in counts]
    all_values = [values.new_empty((count, *values.shape[1:])) for count in counts]
    gathering = PendingWork.of_all(
        [group.allgather([all_indices], [indices], opts), group.allgather([all_values], [values], opts)]
    )

    def deliver() -> None:
        gathering.wait()
        elements = torch.cat(all_values)
        if mean:
            elements = elements / group.size()
        total = torch.sparse_coo_tensor(torch.cat(all_indices).t(), elements, tensor.shape)
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    return PendingWork(gathering.pending, [tensor], deliver)


def _counts(group: HcsimGroup, ours: int, opts: Any) -> list[int]:
    counts = torch.empty(group.size(), dtype=torch.int64)
    group.all_gather_single(counts, torch.tensor([ours]), opts).wait()
    return [int(count) for count in counts]
