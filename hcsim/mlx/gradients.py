"""Averages of gradients, as `mlx.nn.average_gradients` computes them, with hcsim's compressors.

Gradients of one type are put together in buckets of `all_reduce_size` bytes, so that the many small tensors of a
LoRA take few messages. All buckets are in flight at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten, tree_map_with_path

from hcsim.calls import Compression, GroupCall, check_compressor
from hcsim.engine.compression import KeptCompression
from hcsim.mlx.arrays import MlxArray, Writable, evaluate
from hcsim.mlx.group import Group, whole

NONE = "none"
_MOST_BYTES = 32 << 20
_WITH_STATE = "make an hcsim.mlx.GradientCompression of it once, and pass that as compressor"


class GradientCompression:
    """The compression of one model's gradients, whose state is kept from step to step."""

    def __init__(self, compressor: str, *, group: Group | None = None, seed: int = 0, name: str = "gradients") -> None:
        """All ranks pass the same arguments. `compressor` is a spec as everywhere in the toolkit: "topk:0.01+ef",
        "int8+ef", "powersgd:4+ef". Without "+ef" what is not sent is lost. Models that are trained side by side need
        different names."""
        check_compressor(compressor, remembered=True)
        self.compressor = compressor
        among = whole(group)
        self._kept = KeptCompression(among.line, compressor, seed, name) if among.size() > 1 else None

    def describe(self, tensors: tuple[tuple[str, tuple[int, ...]], ...], *, last: bool) -> Compression:
        """Return the compression of tensors that are summed up in one call; `last`: the step ends with it."""
        assert self._kept is not None  # who is alone sums up nothing
        return self._kept.describe(tensors, last=last)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and the compressor's other state, between steps. It differs between ranks."""
        step, memory = (0, b"") if self._kept is None else (self._kept.step, self._kept.memory())
        return {"compressor": self.compressor, "step": step, "memory": memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._kept is not None:
            self._kept.load(state["compressor"], state["step"], state["memory"])


def average_gradients(
    gradients: Any,
    group: Group | None = None,
    all_reduce_size: int = _MOST_BYTES,
    communication_stream: object = None,
    *,
    communication_type: Any = None,
    compressor: str | GradientCompression = NONE,
) -> Any:
    """Return the averages of the gradients of all ranks, which have the same tree of arrays.

    With `communication_type` they are sent as that type. A compressor that remembers what it has not sent
    ("topk:0.01+ef") is passed as a `GradientCompression`."""
    among = whole(group)
    named: list[tuple[str, MlxArray]] = tree_flatten(gradients)
    if isinstance(compressor, str) and compressor != NONE:
        check_compressor(compressor, remembered=False, instead=_WITH_STATE)
    if among.size() == 1 or not named:
        return gradients
    sent = named
    if communication_type is not None:
        sent = [(name, array.astype(communication_type)) for name, array in named]
    evaluate(*(array for _, array in sent))
    buckets = _buckets(sent, all_reduce_size)
    started = []
    for number, members in enumerate(buckets):
        together = Writable.join([sent[member][1] for member in members])
        tensors = tuple((sent[member][0], tuple(sent[member][1].shape)) for member in members)
        how = _compression(compressor, tensors, last=number == len(buckets) - 1)
        call = GroupCall(operation="all_reduce", op="mean", compression=how)
        started.append((members, together, among.start(call, together.flat)))
    averages: dict[str, MlxArray] = {}
    for members, together, pending in started:
        pending.wait(None)
        ends = list(accumulate(sent[member][1].size for member in members))
        parts = mx.split(together.take((ends[-1],)), ends[:-1])
        for member, part in zip(members, parts, strict=True):
            name, original = named[member]
            averages[name] = part.reshape(original.shape).astype(original.dtype)
    return tree_map_with_path(lambda name, _: averages[name], gradients)


def _compression(
    compressor: str | GradientCompression, tensors: tuple[tuple[str, tuple[int, ...]], ...], *, last: bool
) -> Compression | None:
    if isinstance(compressor, GradientCompression):
        return compressor.describe(tensors, last=last)
    return None if compressor == NONE else Compression(spec=compressor, tensors=tensors)


class _Filling(msgspec.Struct):
    members: list[int]
    size_bytes: int = 0


def _buckets(named: Sequence[tuple[str, MlxArray]], most_bytes: int) -> list[list[int]]:
    """Put arrays of one type together, in their order, until a bucket has reached `most_bytes`."""
    filling: dict[str, _Filling] = {}
    buckets = []
    for member, (_, array) in enumerate(named):
        bucket = filling.setdefault(str(array.dtype), _Filling([]))
        if not bucket.members:
            buckets.append(bucket.members)
        bucket.members.append(member)
        bucket.size_bytes += array.nbytes
        if bucket.size_bytes >= most_bytes:
            del filling[str(array.dtype)]
    return buckets
