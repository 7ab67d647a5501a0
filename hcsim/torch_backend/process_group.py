"""torch.distributed's process group over an hcsim group.

torch's C++ and Python code call the methods by torch's names, with lists of tensors in several historical
layouts. Each method becomes one or several `GroupCall`s over flat arrays.

An all-reduce of sparse tensors (gradients of embeddings) is an all-gather of all elements, which every rank
sums. Each rank first gathers the number of elements of the other ranks, and blocks until these have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, ReduceOp

from hcsim.calls import ANY_SOURCE, Compression, GroupCall, check_compressor
from hcsim.engine import Engine, EngineGroup, GroupSpec, PendingCall, chosen_engine
from hcsim.errors import CollectiveTimeout, HcsimError
from hcsim.torch_backend.options import DEVICES, NAME, Options
from hcsim.torch_backend.tensors import Factor, FlatTensors, Staging
from hcsim.torch_backend.work import CallTimedOut, PendingWork, translated

Tensors: TypeAlias = list[Tensor] | Tensor
StartedCall: TypeAlias = tuple[PendingCall, Sequence[FlatTensors]]
"""A call in flight, and the flat arrays to copy back into tensors after it."""

_REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.PREMUL_SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
_COMPRESSED = ("sum", "mean")
"""Reductions that the group's compression applies to."""
_BARRIER_TAG = (1 << 32) - 1
"""The tag of a monitored barrier's messages, beyond those that a torch program can use."""


def create(options: Any, backend_options: object | None, staging: Staging | None = None) -> ProcessGroup:
    chosen = _options(backend_options)
    ranks = tuple(options.global_ranks_in_group)
    whole = dist.group.WORLD if ranks and dist.is_initialized() else None
    parent = whole.engine_group if isinstance(whole, HcsimGroup) else None
    timeout_s = options.timeout.total_seconds()
    place = GroupSpec(options.group_id, options.group_rank, options.group_size, timeout_s, parent, ranks)
    return HcsimGroup(_engine().open(place, options.store), options.store, timeout_s, chosen, ranks, staging)


def _engine() -> Engine:
    if (chosen := chosen_engine()) is not None:
        return chosen
    from hcsim.engine.local import local_engine  # a simulated rank has no real network

    return local_engine()


def _options(given: object | None) -> Options:
    if given is None:
        return Options()
    if not isinstance(given, Options):
        raise ValueError(f"pg_options of the backend hcsim are hcsim.torch_backend.Options, not {type(given).__name__}")
    if given.compression:
        check_compressor(given.compression, remembered=False)
    return given


class HcsimGroup(ProcessGroup):
    """A process group whose calls are carried out by a `EngineGroup`."""

    def __init__(
        self,
        group: EngineGroup,
        store: Store,
        timeout_s: float,
        options: Options,
        ranks: Sequence[int] = (),
        staging: Staging | None = None,
    ) -> None:
        """`ranks` are the members' ranks in the whole program; empty if the group is the whole program."""
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # the form of a Python group
        self.engine_group = group
        self._store = store
        self._name = ""
        self._description = ""
        self._timeout_s = timeout_s
        self._staging = staging or Staging()
        self._options = options
        self._ranks = ranks or range(group.size)
        self._together: list[PendingWork] | None = None

    # What torch asks of a group; its C++ side by the names in capitals, where a Python group has to answer for itself.

    def name(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def get_group_store(self) -> Store:
        return self._store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_backend(self, device: torch.device) -> HcsimGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in DEVICES]

    getBackendName = name  # noqa: N815
    setGroupName = _set_group_name  # noqa: N815
    setGroupDesc = _set_group_desc  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    # Collectives.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> PendingWork:
        """Reduce the tensors of all ranks, in place."""
        return self.allreduce_coalesced(_listed(tensors), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> PendingWork:
        """Reduce several tensors in one message."""
        if any(tensor.is_sparse for tensor in tensors):
            return PendingWork.of_all([sum_sparse(self, tensor, opts) for tensor in tensors])
        call = GroupCall(operation="all_reduce")
        return self._work([self._reduce(tensor, opts, call) for tensor in tensors], tensors)

    def allreduce_compressed(self, tensor: Tensor, compression: Compression, *, mean: bool = True) -> PendingWork:
        """Average or sum the tensors of all ranks in place, with this compression."""
        flat = self._flat([tensor], reduced=True)
        call = GroupCall(operation="all_reduce", op="mean" if mean else "sum", compression=compression)
        return self._work([self._start(call, None, [flat], [flat])], [tensor])

    def reduce(self, tensors: Tensors, opts: Any) -> PendingWork:
        (tensor,) = _listed(tensors)
        return self._work([self._reduce(tensor, opts, GroupCall(operation="reduce", root=opts.rootRank))], [tensor])

    def broadcast(self, tensors: Tensors, opts: Any) -> PendingWork:
        (tensor,) = _listed(tensors)
        flat = self._flat([tensor], read=self.rank() == opts.rootRank)
        call = GroupCall(operation="broadcast", root=opts.rootRank)
        return self._work([self._start(call, opts, [flat], [] if self.rank() == opts.rootRank else [flat])], [tensor])

    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> PendingWork:
        """Gather the tensors of all ranks, by rank, into a list on every rank."""
        pairs = zip(output_tensors, input_tensors, strict=True)
        started = [self._gather(outputs, source, opts) for outputs, source in pairs]
        return self._work(started, [tensor for outputs in output_tensors for tensor in outputs])

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> PendingWork:
        """Gather the tensors of all ranks, by rank, into one tensor on every rank."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> PendingWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._work([self._gather([output], source, opts) for output, source in pairs], outputs)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> PendingWork:
        """Gather the lists of tensors of all ranks; `output_lists` has one list for each rank."""
        return self.allgather([list(of_input) for of_input in zip(*output_lists, strict=True)], inputs, opts)

    def gather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any) -> PendingWork:
        outputs = output_tensors[0] if self.rank() == opts.rootRank else []
        flats = [self._flat(input_tensors), *([self._flat(outputs, read=False)] if outputs else [])]
        _check_alike(flats, self.size())
        call = GroupCall(operation="gather", root=opts.rootRank)
        return self._work([self._start(call, opts, flats, flats[1:])], outputs)

    def scatter(self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any) -> PendingWork:
        """Send each rank its tensor of the root's list."""
        target = self._flat(output_tensors, read=False)
        flats = [target, *([self._flat(input_tensors[0])] if self.rank() == opts.rootRank else [])]
        _check_alike(flats, self.size())
        call = GroupCall(operation="scatter", root=opts.rootRank)
        return self._work([self._start(call, opts, flats, [target])], output_tensors)

    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> PendingWork:
        """Reduce the lists of tensors of all ranks; each rank gets the element at its rank."""
        pairs = zip(output_tensors, input_tensors, strict=True)
        return self._work([self._reduce_scatter(output, parts, opts) for output, parts in pairs], output_tensors)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> PendingWork:
        """Reduce the tensors of all ranks; each rank gets its part."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PendingWork:
        pairs = zip(outputs, inputs, strict=True)
        return self._work([self._reduce_scatter(output, [source], opts) for output, source in pairs], outputs)

    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> PendingWork:
        """Send the i-th tensor to rank i, and receive one from each rank."""
        target, source = self._flat(output_tensors, read=False), self._flat(input_tensors)
        call = GroupCall(operation="all_to_all", counts=tuple(source.lengths), received=tuple(target.lengths))
        return self._work([self._start(call, opts, [source, target], [target])], output_tensors)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> PendingWork:
        """Exchange parts of one tensor, split along its first dimension: in equal parts unless the splits say
        otherwise."""
        here, there = self._flat([source]), self._flat([output], read=False)
        call = GroupCall(
            operation="all_to_all",
            counts=_split(source, input_splits, self.size()),
            received=_split(output, output_splits, self.size()),
        )
        return self._work([self._start(call, opts, [here, there], [there])], [output])

    def barrier(self, opts: Any = None) -> PendingWork:
        return self._work([self._start(GroupCall(operation="barrier"), opts, [], [])], [])

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        """A barrier whose failure names the absent ranks, at rank 0."""
        _monitored_barrier(self.engine_group, timeout.total_seconds(), self._ranks, name_all=wait_all_ranks)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages.

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> PendingWork:
        call = GroupCall(operation="send", root=dst, tag=tag)
        return self._work([self._start(call, None, [self._flat(tensors)], [])], tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> PendingWork:
        flat = self._flat(tensors, read=False)
        return self._work([self._start(GroupCall(operation="recv", root=src, tag=tag), None, [flat], [flat])], tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> PendingWork:
        return self.recv(tensors, ANY_SOURCE, tag)

    # Its life.

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> PendingWork:
        works, self._together = self._together or [], None
        return PendingWork.of_all(works)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        self._staging.close()
        self.engine_group.close()

    def abort(self) -> None:
        self.engine_group.abort()

    # What the calls have in common.

    def _flat(
        self, tensors: Sequence[Tensor], *, reduced: bool = False, read: bool = True, factor: Factor | None = None
    ) -> FlatTensors:
        """See `FlatTensors`."""
        return FlatTensors(self._staging.copies(tensors[0]), tensors, reduced=reduced, read=read, factor=factor)

    def _reduce(self, tensor: Tensor, opts: Any, call: GroupCall) -> StartedCall:
        flat = self._flat([tensor], reduced=True, factor=_factor(opts))
        call = _reducing(call, opts)
        if call.operation == "all_reduce" and call.op in _COMPRESSED and self._compresses(tensor):
            chosen = self._options
            how = Compression(spec=chosen.compression, seed=chosen.seed)
            call = msgspec.structs.replace(call, compression=how)
        gets_it = call.operation == "all_reduce" or self.rank() == call.root
        return self._start(call, opts, [flat], [flat] if gets_it else [])

    def _compresses(self, tensor: Tensor) -> bool:
        large = tensor.numel() * tensor.element_size() >= self._options.least_bytes
        fits = tensor.is_floating_point() and tensor.dtype != torch.float64  # what is encoded are float32s
        return bool(self._options.compression) and large and fits

    def _gather(self, outputs: list[Tensor], source: Tensor, opts: Any) -> StartedCall:
        target = self._flat(outputs, read=False)
        counts = tuple(target.lengths) if len(outputs) > 1 else ()
        return self._start(
            GroupCall(operation="all_gather", counts=counts), opts, [self._flat([source]), target], [target]
        )

    def _reduce_scatter(self, output: Tensor, parts: list[Tensor], opts: Any) -> StartedCall:
        source, target = (
            self._flat(parts, reduced=True, factor=_factor(opts)),
            self._flat([output], reduced=True, read=False),
        )
        counts = tuple(source.lengths) if len(parts) > 1 else ()
        call = _reducing(GroupCall(operation="reduce_scatter", counts=counts), opts)
        return self._start(call, opts, [source, target], [target])

    def _start(
        self, call: GroupCall, opts: Any, flats: Sequence[FlatTensors], filled: Sequence[FlatTensors]
    ) -> StartedCall:
        limit_s = opts.timeout.total_seconds() if opts is not None else 0.0
        if limit_s <= 0:
            limit_s = self._timeout_s
        call = msgspec.structs.replace(call, timeout_s=limit_s)
        arrays = [flat.array for flat in flats]
        return self._staging.start(flats, lambda: self.engine_group.start(call, arrays)), filled

    def _work(self, started: Sequence[StartedCall], results: list[Tensor]) -> PendingWork:
        def deliver() -> None:
            for _, filled in started:
                for flat in filled:
                    flat.back()

        in_turn = any(self._staging.copies(tensor).in_turn for tensor in results)
        work = PendingWork([pending for pending, _ in started], results, deliver, in_turn=in_turn)
        if self._together is not None:
            self._together.append(work)
        return work


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _reducing(call: GroupCall, opts: Any) -> GroupCall:
    chosen: Any = opts.reduceOp if opts is not None else ReduceOp.SUM
    return msgspec.structs.replace(call, op=_REDUCTIONS[getattr(chosen, "op", chosen)])


def _factor(opts: Any) -> Factor | None:
    """Return the factor of a pre-multiplied sum, if the options ask for one."""
    if opts is None or opts.reduceOp != ReduceOp.PREMUL_SUM:
        return None
    factor: Factor = opts.reduceOp.factor
    return factor.cpu() if isinstance(factor, Tensor) else factor


def _check_alike(flats: Sequence[FlatTensors], size: int) -> None:
    """Reject a list of the root of a gather or a scatter whose tensors do not all have the length of the other
    ranks' tensors."""
    ours, *lists = (flat.lengths for flat in flats)
    for lengths in lists:
        if lengths != ours * size:
            raise ValueError(f"{size} tensors of {ours[0]} elements are needed, not of {lengths}")


def _split(tensor: Tensor, rows: list[int], size: int) -> tuple[int, ...]:
    """Return how many elements of a tensor go to each rank."""
    total = tensor.shape[0] if tensor.dim() else 1
    if not rows:
        if total % size:
            raise ValueError(f"{total} rows cannot be divided equally among {size} ranks: give split sizes")
        rows = [total // size] * size
    if len(rows) != size or sum(rows) != total or min(rows) < 0:
        raise ValueError(f"split sizes {rows} do not divide {total} rows among {size} ranks")
    row = tensor.numel() // total if total else 0
    return tuple(count * row for count in rows)


def sum_sparse(group: HcsimGroup, tensor: Tensor, opts: Any) -> PendingWork:
    """Replace the tensor by the sum, or the mean, of the sparse tensors of all ranks."""
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

    return PendingWork(gathering.pending, [tensor], deliver, in_turn=gathering.in_turn)


def _counts(group: HcsimGroup, ours: int, opts: Any) -> list[int]:
    counts = torch.empty(group.size(), dtype=torch.int64)
    group.all_gather_single(counts, torch.tensor([ours]), opts).wait()
    return [int(count) for count in counts]


def _monitored_barrier(group: EngineGroup, timeout_s: float, ranks: Sequence[int], *, name_all: bool) -> None:
    """Wait for all ranks: every rank reports to rank 0, which releases all or names the absent ranks.

    `ranks` are the members' ranks in the whole program. With `name_all` rank 0 names all absent ranks rather
    than one."""
    others = range(1, group.size) if group.rank == 0 else range(1)
    first, second = ("recv", "send") if group.rank == 0 else ("send", "recv")
    troubles = _troubles({rank: _begin_message(group, first, rank, timeout_s) for rank in others})
    if group.rank == 0 and any(isinstance(trouble, CollectiveTimeout) for trouble in troubles.values()):
        late = sorted(troubles) if name_all else sorted(troubles)[:1]
        absent = [ranks[rank] for rank in late]
        raise CallTimedOut(
            f"the monitored barrier was not passed within {timeout_s:g} s:"
            f" rank {', '.join(map(str, absent))} did not come to it",
            absent[0],
        )
    troubles = troubles or _troubles({rank: _begin_message(group, second, rank, timeout_s) for rank in others})
    for trouble in troubles.values():
        raise translated(trouble) from trouble


def _begin_message(group: EngineGroup, operation: str, rank: int, timeout_s: float) -> PendingCall:
    call = GroupCall(operation=operation, root=rank, tag=_BARRIER_TAG, timeout_s=timeout_s)
    return group.start(call, [np.zeros(1, np.uint8)])


def _troubles(messages: dict[int, PendingCall]) -> dict[int, HcsimError]:
    troubles = {}
    for rank, message in messages.items():
        try:
            message.wait(None)
        except HcsimError as error:
            troubles[rank] = error
    return troubles
