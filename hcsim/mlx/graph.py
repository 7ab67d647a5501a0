"""The work of an MLX graph: its kernels, with their FLOPs and bytes, before it is evaluated.

The graph, with the shapes of everything that is not computed yet, comes from `mx.export_function`. Each primitive
that is no view is one kernel; matrix products, convolutions and attention have FLOPs, all others are bound by memory.
A broadcast array counts with the bytes that it has in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx

from hcsim.mlx.arrays import MlxArray

_Named: TypeAlias = tuple[str, tuple[int, ...], Any]
"""An array of the graph: its name, shape and dtype."""

_FREE = (
    "AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends", "ExpandDims", "Flatten",
    "NumberOfElements", "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View",
)  # fmt: skip


class GraphKernel(NamedTuple):
    """One kernel."""

    flops: float
    moved_bytes: float


def kernels(arrays: Sequence[MlxArray]) -> list[GraphKernel]:
    """Return what is left to compute of these arrays. Raises ValueError for a graph with a compiled or a custom
    function."""
    if not arrays:
        return []
    graph = _Graph()
    mx.export_function(graph.take, lambda: arrays)
    return graph.kernels


class _Graph:
    def __init__(self) -> None:
        self.kernels: list[GraphKernel] = []
        self._stored_bytes: dict[str, float] = {}

    def take(self, part: Mapping[str, Any]) -> None:
        """Take one part of the graph, in the order of computation."""
        if part["type"] != "primitive":
            return
        inputs: Sequence[_Named] = part["inputs"]
        outputs: Sequence[_Named] = part["outputs"]
        read_bytes = sum(self._stored_bytes.get(name, _size_bytes(shape, dtype)) for name, shape, dtype in inputs)
        if part["name"] in _FREE:
            for name, shape, dtype in outputs:
                self._stored_bytes[name] = min(read_bytes, _size_bytes(shape, dtype))
            return
        written_bytes = sum(_size_bytes(shape, dtype) for _, shape, dtype in outputs)
        flops = _flops(part["name"], [shape for _, shape, _ in inputs], outputs[0][1])
        self.kernels.append(GraphKernel(flops, read_bytes + written_bytes))


def _flops(primitive: str, inputs: Sequence[tuple[int, ...]], output: tuple[int, ...]) -> float:
    """Return the FLOPs of a primitive by the shapes of its arrays."""
    match primitive:
        case "Matmul" | "AddMM" | "GatherMM" | "BlockMaskedMM" | "QuantizedMatmul" | "GatherQMM":
            return 2.0 * prod(output) * inputs[0][-1]
        case "Convolution":
            return 2.0 * prod(output) * prod(inputs[1][1:])
        case "ScaledDotProductAttention":
            queries, keys, values = inputs[:3]
            return 2.0 * prod(queries[:-1]) * keys[-2] * (queries[-1] + values[-1])
    return 0.0


def _size_bytes(shape: tuple[int, ...], dtype: Any) -> float:
    return float(prod(shape) * dtype.size)
