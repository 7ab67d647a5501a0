"""The compression of one model's gradients over the steps of a program.

The residuals of error feedback, and other state of the compressor, are kept with the group.
"""

from __future__ import annotations

import itertools

import numpy as np

from hcsim.calls import Compression, GroupCall, check_compressor
from hcsim.engine import EngineGroup

_instances = itertools.count(1)


class KeptCompression:
    """A compression with state, and its current step."""

    def __init__(self, group: EngineGroup, spec: str, seed: int, name: str) -> None:
        check_compressor(spec, remembered=True)
        self.step = 0
        self._group = group
        self._identity = Compression(spec=spec, seed=seed, key=name, instance=next(_instances))

    def describe(self, tensors: tuple[tuple[str, tuple[int, ...]], ...], *, last: bool) -> Compression:
        """Return the compression of tensors that are summed up in one call; `last`: the step ends with it."""
        kept = self._identity
        how = Compression(
            spec=kept.spec, seed=kept.seed, key=kept.key, instance=kept.instance, step=self.step, tensors=tensors
        )  # fmt: skip
        self.step += last
        return how

    def memory(self) -> bytes:
        """Return the state of this rank, between steps."""
        call = GroupCall(operation="memory_size", compression=self._identity)
        memory = np.empty(self._group.start(call, []).wait(None), np.uint8)
        self._group.start(GroupCall(operation="memory", compression=self._identity), [memory]).wait(None)
        return memory.tobytes()

    def restore(self, memory: bytes) -> None:
        """Replace the state of this rank."""
        call = GroupCall(operation="restore", compression=self._identity)
        self._group.start(call, [np.frombuffer(bytearray(memory), np.uint8)]).wait(None)

    def load(self, spec: str, step: int, memory: bytes) -> None:
        """Go on with a state that was saved."""
        if spec != self._identity.spec:
            raise ValueError(f"the state is of {spec}, and this is {self._identity.spec}")
        self.restore(memory)
        self.step = step
