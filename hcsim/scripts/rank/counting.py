"""Counts the kernels, FLOPs and bytes of the script's torch operations, for each kind of kernel.

A kernel takes as long as the slower of its arithmetic and its memory traffic (the roofline, see
`virtual.hardware`). So each kernel is counted as compute-bound or memory-bound, by the machine's balance: with
sums over both kinds, half of the work would hide behind the other half. For a machine whose kernels were measured
they are counted by kind and size as well (see `torch_kernels`). The script's own Python is free.
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

from hcsim.scripts.environment import Grouping
from hcsim.scripts.ipc import Computed
from hcsim.scripts.rank.simulator import SimulatorClient
from hcsim.torch_kernels import VIEW, Kernel, KernelMode, KernelTally, Operation, kernel_of, signature_of, size_bytes

MOST_KERNELS = 64
MOST_FLOPS = 1e9
"""Work is reported after so many FLOPs, or `MOST_KERNELS` kernels, so that other ranks can advance in
virtual time while this rank computes. After an answer the limit of kernels begins at one and doubles,
since other ranks may be waiting for this rank's next report."""


class WorkCounter(KernelMode):  # type: ignore[no-untyped-call]
    """Active in the script's main thread, which also runs the backward pass."""

    def __init__(self, simulator: SimulatorClient, flops_per_byte: float, by: Grouping | None = None) -> None:
        super().__init__()
        self._simulator = simulator
        self._flops_per_byte = flops_per_byte
        self._tally = KernelTally() if by is not None else None
        self._signed = by == "signature"
        self.extra_s = 0.0
        """Time for operations other than torch's, such as reading the clock."""
        self.kernels = 0
        self._limit = 1
        self._flops = 0.0
        self._moved_bytes = 0.0

    def launch(self, func: OpOverload, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The signature first: an operation may change its arguments.
        signature = signature_of(func, args, kwargs) if self._signed else ""
        result = func(*args, **kwargs)
        moved_bytes = size_bytes(args) + size_bytes(result)
        flops = operation.flops(args, kwargs, result)
        if self._tally is not None:
            self._tally.add(kernel_of(operation, flops, moved_bytes, args, result), signature)
        self._count(flops, moved_bytes)
        return result

    def viewed(self) -> None:
        if self._tally is not None and not self._signed:
            self._tally.add(VIEW)

    def step_ended(self) -> None:
        """Count the next kernels as those of another step."""
        if self._tally is not None:
            self._tally.step_ended()

    def add(self, flops: float, moved_bytes: float) -> None:
        """Count a kernel that is not torch's."""
        if self._tally is not None:
            self._tally.add(Kernel("matmul" if flops > moved_bytes else "elementwise", flops, moved_bytes, "float32"))
        self._count(flops, moved_bytes)

    def _count(self, flops: float, moved_bytes: float) -> None:
        if flops > self._flops_per_byte * moved_bytes:
            self._flops += flops
        else:
            self._moved_bytes += moved_bytes
        self.kernels += 1
        if self.kernels >= self._limit or self._flops >= MOST_FLOPS:
            self._simulator.tell_work()
            self._limit = min(2 * self._limit, MOST_KERNELS)

    def answered(self) -> None:
        self._limit = 1

    def take(self) -> Computed | None:
        if not self.kernels and not self.extra_s:
            return None
        groups = self._tally.take() if self._tally is not None else ()
        done = Computed(self._flops, self._moved_bytes, self.kernels, self.extra_s, groups)
        self._flops = self._moved_bytes = self.extra_s = 0.0
        self.kernels = 0
        return done
