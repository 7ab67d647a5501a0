"""Counts the kernels, FLOPs and bytes of the script's torch operations, for each kind of kernel.

A kernel takes as long as the slower of its arithmetic and its memory traffic (the roofline, see
`virtual.hardware`). So each kernel is counted as compute-bound or memory-bound, by the machine's balance: with
sums over both kinds, half of the work would hide behind the other half. FLOPs come from torch's own table.
Bytes are those of all input and output tensors. Views and other operations that move no data are free, and so
is the script's own Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hcsim.scripts.ipc import Computed
from hcsim.scripts.rank.simulator import SimulatorClient

MOST_KERNELS = 64
MOST_FLOPS = 1e9
"""Work is reported after so many FLOPs, or `MOST_KERNELS` kernels, so that other ranks can advance in
virtual time while this rank computes. After an answer the limit of kernels begins at one and doubles,
since other ranks may be waiting for this rank's next report."""

Formula: TypeAlias = Callable[[Sequence[Any], dict[str, Any], Any], float]

_FREE_NAMESPACES = ("c10d", "_c10d_functional", "prim", "profiler", "inductor")
_FREE = (
    "_unsafe_view", "_reshape_alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_",
    "resize_", "_local_scalar_dense", "lift_fresh", "_assert_async", "is_same_size", "record_stream",
)  # fmt: skip
_MADE_OF_OTHERS = ("DTensor", "AsyncCollectiveTensor")
"""Wrapper tensors: their operations on the inner plain tensors are counted instead."""
_WITHOUT_DATA = ("FakeTensor",)
"""Tensors without data, which torch uses to infer shapes."""


class WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active in the script's main thread, which also runs the backward pass."""

    def __init__(self, simulator: SimulatorClient, flops_per_byte: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._simulator = simulator
        self._flops_per_byte = flops_per_byte
        self._kinds: dict[OpOverload, Formula | None] = {}
        self.extra_s = 0.0
        """Time for operations other than torch's, such as reading the clock."""
        self.kernels = 0
        self._limit = 1
        self._flops = 0.0
        self._moved_bytes = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper would cost as much as we do

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types:
            if _among(types, _MADE_OF_OTHERS):
                return NotImplemented
            if _among(types, _WITHOUT_DATA):
                return func(*args, **(kwargs or {}))
        kind = self._kinds.get(func, _unseen)
        if kind is _unseen:
            kind = self._kinds[func] = _kind(func)
        if kind is _composite:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **kwargs) if kwargs else func(*args)
        if kind is not None:
            moved = _size_bytes(args) + (_size_bytes(result) if type(result) is not Tensor else result.nbytes)
            self.add(kind(args, kwargs or {}, result), moved)
        return result

    def add(self, flops: float, moved_bytes: float) -> None:
        """Count one kernel."""
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
        done = Computed(self._flops, self._moved_bytes, self.kernels, self.extra_s)
        self._flops = self._moved_bytes = self.extra_s = 0.0
        self.kernels = 0
        return done


def _size_bytes(values: Any) -> int:
    if isinstance(values, Tensor):
        return values.nbytes if values.layout is torch.strided else 0
    total = 0
    if isinstance(values, tuple | list):
        for value in values:
            if type(value) is Tensor or type(value) is torch.nn.Parameter:
                total += value.nbytes
            elif isinstance(value, Tensor | tuple | list):
                total += _size_bytes(value)
    return total


def _among(types: Sequence[type], names: Sequence[str]) -> bool:
    return any(kind.__name__ in names for kind in types)


def _kind(func: OpOverload) -> Formula | None:
    """Return the formula of its FLOPs; None for an operation that is free."""
    packet = func.overloadpacket
    if func.namespace in _FREE_NAMESPACES or packet.__name__ in _FREE or packet.__name__.startswith("sym_"):
        return None
    if any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns):
        return None
    formula = flop_registry.get(packet)
    if formula is not None:
        return _by_formula(formula)
    if torch._C._dispatch_has_kernel_for_dispatch_key(func._name, "CompositeImplicitAutograd"):
        return _composite
    return _nothing


def _by_formula(formula: Callable[..., Any]) -> Formula:
    of_shapes = getattr(formula, "__wrapped__", None)
    if of_shapes is None:
        return lambda args, kwargs, result: float(formula(*args, out_val=result, **kwargs))

    def flops(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
        named = {name: _shape(value) for name, value in kwargs.items()}
        return float(of_shapes(*map(_shape, args), out_shape=_shape(result), **named))

    return flops


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    return tuple(map(_shape, value)) if isinstance(value, tuple) else value


def _nothing(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    return 0.0


def _unseen(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    raise AssertionError("it is looked at first")


def _composite(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    raise AssertionError("it is taken apart, and its parts are counted")
