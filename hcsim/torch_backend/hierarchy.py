"""Hierarchical all-reduce over torch groups: one backend within each machine, another between machines.

    two = Hierarchy.of([[0, 1], [2, 3]], within="gloo", between="hcsim")
    two.all_reduce(tensor)
    ddp.register_comm_hook(two, hierarchy_hook)

With m machines of n ranks each, a reduce-scatter within each machine gives its i-th rank the machine's sum of
the i-th part. The ranks with the same part all-reduce it between the machines, and an all-gather within each
machine distributes the parts. Every rank sends 2 (m - 1) / m of an n-th of the data to other machines, all
ranks of a machine at once. With machines of unequal sizes, the first rank of each machine reduces everything,
exchanges it with the other first ranks, and broadcasts the result.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup, ReduceOp

from hcsim.torch_backend.options import NAME, Options
from hcsim.torch_backend.tensors import DeviceCopies, Staging
from hcsim.torch_backend.work import future_in_turn

_SPLIT_FROM_BYTES = 1 << 16
"""Smaller tensors use the algorithm with fewer calls."""
_OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


class Hierarchy:
    """The groups of this rank: its machine's ranks, and its counterparts on the other machines."""

    def __init__(
        self,
        within: ProcessGroup,
        between: ProcessGroup | None,
        *,
        ranks: int,
        alike: bool,
        staging: Staging | None = None,
    ) -> None:
        """`between` is the group of the ranks at this rank's position in each machine; None if this rank has no
        such group. `alike`: all machines have the same size, so every rank has one. `ranks` is the number of
        ranks on all machines."""
        self._within = within
        self._between = between
        self._ranks = ranks
        self._alike = alike
        self._staging = staging or Staging()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="hcsim-hierarchy")

    @classmethod
    def of(
        cls,
        machines: Sequence[Sequence[int]],
        *,
        within: str | None = None,
        between: str = NAME,
        options: Options | None = None,
        staging: Staging | None = None,
    ) -> "Hierarchy":
        """Create the groups. All ranks of the program call this, with the same machines. If `within` is None, the
        backend of the program's group is used. `options` apply to the groups between machines."""
        places = [sorted(machine) for machine in machines]
        everyone = sorted(rank for machine in places for rank in machine)
        if everyone != list(range(dist.get_world_size())):
            raise ValueError(f"every rank is on one machine, not {machines}")
        alike = len({len(machine) for machine in places}) == 1
        us = dist.get_rank()
        # Every rank takes part in making every group, its own or not.
        local = [(machine, dist.new_group(machine, backend=within)) for machine in places]
        across = list(zip(*places, strict=True)) if alike else [tuple(machine[0] for machine in places)]
        far = [(ranks, dist.new_group(list(ranks), backend=between, pg_options=options)) for ranks in across]
        ours = next((group for ranks, group in far if us in ranks), None)
        here = next(group for ranks, group in local if us in ranks)
        return cls(here, ours, ranks=len(everyone), alike=alike, staging=staging)

    def all_reduce(self, tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM) -> None:
        """Reduce the tensors of all ranks in place; every rank gets the same bits."""
        if self._staging.copies(tensor).in_turn:
            self.start(tensor, op).wait()
            return
        self._reduce(tensor, op)

    def _reduce(self, tensor: Tensor, op: ReduceOp.RedOpType) -> None:
        if op not in _OPS:
            raise ValueError(f"{op} is not combined in two levels; sum, avg, min, max and product are")
        if not tensor.is_contiguous():
            raise ValueError("the tensor has gaps: pass tensor.contiguous()")
        summed = ReduceOp.SUM if op == ReduceOp.AVG else op
        flat = tensor.detach().view(-1)
        if not self._alike:
            self._by_the_first(flat, summed)
        elif flat.numel() * flat.element_size() < _SPLIT_FROM_BYTES:
            self._by_all(flat, summed)
        else:
            whole = flat.numel() // self._within.size() * self._within.size()
            self._by_parts(flat[:whole], summed)
            if whole < flat.numel():
                self._by_all(flat[whole:], summed)
        if op == ReduceOp.AVG:
            flat /= self._ranks

    def start(self, tensor: Tensor, op: ReduceOp.RedOpType) -> torch.futures.Future[Tensor]:
        """Start an `all_reduce` without waiting for it; several are carried out in order."""
        copies = self._staging.copies(tensor)
        if copies.in_turn:
            return self._start_on_host(copies, tensor.detach(), op)
        devices: list[int | str | torch.device] = [] if tensor.device.type == "cpu" else [tensor.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        stream = _same_stream(tensor)

        def work() -> None:
            try:
                with stream():
                    self._reduce(tensor, op)
                    future.set_result(tensor)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        self._worker.submit(work)
        return future

    def _start_on_host(
        self, copies: DeviceCopies, tensor: Tensor, op: ReduceOp.RedOpType
    ) -> torch.futures.Future[Tensor]:
        """Reduce a copy in host memory, so that the worker does not use the device."""
        buffer = copies.buffer(tensor.numel(), tensor.dtype)
        fetched = copies.fetch([tensor], buffer)

        def work() -> None:
            if fetched is not None:
                fetched()
            self._reduce(buffer, op)

        reducing = self._worker.submit(work)

        def outcome() -> Tensor:
            reducing.result()
            with torch.no_grad():
                copies.put(buffer, [tensor])
            return tensor

        return future_in_turn(outcome)

    def _by_parts(self, flat: Tensor, op: ReduceOp.RedOpType) -> None:
        part = torch.empty(flat.numel() // self._within.size(), dtype=flat.dtype, device=flat.device)
        dist.reduce_scatter_single(part, flat, op, self._within)
        dist.all_reduce(part, op, self._between)
        dist.all_gather_single(flat, part, self._within)

    def _by_all(self, flat: Tensor, op: ReduceOp.RedOpType) -> None:
        dist.all_reduce(flat, op, self._within)
        dist.all_reduce(flat, op, self._between)

    def _by_the_first(self, flat: Tensor, op: ReduceOp.RedOpType) -> None:
        dist.reduce(flat, op=op, group=self._within, group_dst=0)
        if self._between is not None:
            dist.all_reduce(flat, op, self._between)
        dist.broadcast(flat, group=self._within, group_src=0)


def hierarchy_hook(state: Hierarchy, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients hierarchically, for DDP."""
    return state.start(bucket.buffer(), ReduceOp.AVG)


def _same_stream(tensor: Tensor) -> Callable[[], AbstractContextManager[object]]:
    """Return a context in which this thread's CUDA work is queued behind the caller's."""
    if tensor.device.type != "cuda":
        return nullcontext
    stream = torch.cuda.current_stream(tensor.device)
    return lambda: torch.cuda.stream(stream)
