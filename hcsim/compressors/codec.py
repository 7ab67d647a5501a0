"""What all compressors of this package share.

A codec is written for flat arrays. `_encode` makes a payload; `_mix_body` checks one and puts, adds or subtracts
what it says. Where elements stand for themselves this is done a chunk at a time (`ChunkedCompressor`).

`WORK` says what encoding and decoding cost, in the one currency that carries over to other machines: memory traffic.

A factor is how many bytes a plain copy would have moved in the same time, for each byte of input: a copy itself
reads and writes each byte and has the factor 2. Measured in one thread on 25 million normally distributed
floats (Neoverse-N1, copying at 15 GB/s) by

    python -m experiments.compressors

(random-k when it still read all of the tensor, as it does with error feedback and in a sum, which is how it trains).
Top-k and random-k at 1 %, PowerSGD at rank 4, zstd at level 1; other settings are taken to cost the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import prod
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hcsim.compressors.base import Array, Bytes, Ident, Kind, Shape, State
from hcsim.compressors.encoding import (
    CHUNK,
    FLOAT_BYTES,
    HEADER_BYTES,
    Codec,
    as_array,
    check_decoded,
    check_header,
    check_input,
    check_size,
    header,
    plugin_codec,
)
from hcsim.errors import UsageError
from hcsim.runtime.host import Work


class Factors(NamedTuple):
    """Bytes moved for each byte of the tensor."""

    encode: float
    decode: float


WORK = {
    "none": Factors(2.0, 2.0),
    "topk": Factors(8.2, 1.1),
    "randomk": Factors(2.3, 2.2),
    "fp16": Factors(7.1, 6.5),
    "bf16": Factors(3.1, 2.2),
    "int8": Factors(3.5, 2.5),
    "int8:block": Factors(3.7, 2.6),
    "int8:stochastic": Factors(21.2, 2.5),
    "onebit": Factors(4.8, 1.2),
    "powersgd": Factors(6.9, 3.5),
    "zstd": Factors(57.3, 20.9),
}
COMPENSATE = 3.0
"""Of adding a residual to a tensor: two arrays are read and one is written."""


Unpack: TypeAlias = Callable[[int, Array], None]
"""Decodes the elements from the given one on into an array: all of them, or a chunk."""
Mix: TypeAlias = np.ufunc | None
"""How what is decoded meets what is there: None replaces it."""


class BaseCompressor(ABC):
    """A compressor that remembers nothing."""

    codec: ClassVar[Codec]
    kind: ClassVar[Kind]
    sized: ClassVar[bool] = True
    chunk: ClassVar[int] = CHUNK
    """Elements that are worked on at a time."""
    parameter: int = 0
    """What the header says beside the codec."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._payloads: dict[str, Bytes] = {}
        self._scratch: Array | None = None

    @property
    def spec(self) -> str:
        """As it is written in files and tables."""
        return self._spec

    @abstractmethod
    def size_bytes(self, shape: Shape) -> int:
        """The size of the payload for such a tensor."""

    def most_bytes(self, shape: Shape) -> int:
        """The same, where that is the size of each."""
        return self.size_bytes(shape)

    @abstractmethod
    def _encode(self, flat: Array, shape: Shape, of: Ident) -> Bytes:
        """The payload with its header; refuses to send a NaN or an infinity."""

    @abstractmethod
    def _mix_body(self, body: Bytes, flat: Array, shape: Shape, of: Ident, mix: Mix) -> None:
        """Decode what stands behind a header that is right."""

    def encode(self, tensor: Array, of: Ident) -> Bytes:
        """The payload, valid until a tensor of that name is encoded again."""
        return self._encode(as_array(tensor, of.name), tensor.shape, of)

    def decode(self, payload: Bytes, out: Array, of: Ident) -> None:
        """Put what the payload says into `out`."""
        self._mix(payload, out, of, None)

    def add(self, payload: Bytes, out: Array, of: Ident) -> None:
        """Add what the payload says to `out`."""
        self._mix(payload, out, of, np.add)

    def subtract(self, payload: Bytes, out: Array, of: Ident) -> None:
        """Take what the payload says from `out`."""
        self._mix(payload, out, of, np.subtract)

    def _mix(self, payload: Bytes, out: Array, of: Ident, mix: Mix) -> None:
        flat = as_array(out, of.name)
        check_header(payload, self._header(flat.size), of.name)
        if self.sized:
            check_size(payload, self.size_bytes(out.shape), of.name)
        with np.errstate(over="ignore", invalid="ignore"):  # a sum that is too large is found when it is used
            self._mix_body(payload[HEADER_BYTES:], flat, out.shape, of, mix)

    def _header(self, elements: int) -> bytes:
        return header(self.codec, self.parameter, elements)

    def _payload(self, name: str, shape: Shape) -> Bytes:
        """A payload with its header, to be filled.

        It is the same memory as last time, since fresh pages cost more than filling them.
        """
        payload = self._payloads.get(name)
        if payload is None or payload.size != self.size_bytes(shape):
            payload = self._payloads[name] = np.empty(self.size_bytes(shape), np.uint8)
        payload[:HEADER_BYTES] = np.frombuffer(self._header(prod(shape)), np.uint8)
        return payload

    @property
    def scratch(self) -> Array:
        """Memory for one chunk."""
        if self._scratch is None:
            self._scratch = np.empty(self.chunk, np.float32)
        return self._scratch

    def for_feedback(self) -> BaseCompressor:
        """Most compressors send a part of the input as it is."""
        return self

    def encode_work(self, shape: Shape) -> Work:
        """Measured; see `work`."""
        return Work(moved_bytes=self._factors().encode * FLOAT_BYTES * prod(shape))

    def decode_work(self, shape: Shape) -> Work:
        """Measured; see `work`."""
        return Work(moved_bytes=self._factors().decode * FLOAT_BYTES * prod(shape))

    def _factors(self) -> Factors:
        return WORK[self.codec.name.lower()]

    def commit(self, step: int) -> None:  # noqa: B027 - there is nothing to do where nothing is remembered
        """Nothing is remembered."""

    def abandon(self, step: int) -> None:  # noqa: B027
        """Nothing is remembered."""

    def state(self) -> State:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Accepts nothing but nothing."""
        if state:
            raise UsageError(f"{self.spec} remembers nothing, but the state has {', '.join(sorted(state))}")


class ChunkedCompressor(BaseCompressor):
    """Decodes a chunk at a time, so that what is added to the tensor is still in the cache."""

    @abstractmethod
    def _unpacker(self, body: Bytes, elements: int, of: Ident) -> Unpack:
        """Check all that can be checked before, and give what decodes chunks."""

    def _mix_body(self, body: Bytes, flat: Array, shape: Shape, of: Ident, mix: Mix) -> None:
        unpack = self._unpacker(body, flat.size, of)
        if mix is None:
            unpack(0, flat)
            return
        for lo in range(0, flat.size, self.chunk):
            into = flat[lo : lo + self.chunk]
            decoded = self.scratch[: into.size]
            unpack(lo, decoded)
            mix(into, decoded, out=into)


class FlatCompressor(BaseCompressor):
    """A quantising codec as a plugin writes one: two functions over flat arrays, and the size of what they make.

    What is checked of tensors and payloads is checked here. `register_compressor` calls the class with what stands
    behind the colon of a spec, the run's seed and the rank."""

    name: ClassVar[str]
    """What its specs begin with."""
    kind = Kind.QUANTISED
    traffic: ClassVar[Factors] = Factors(8.0, 4.0)
    """What encoding and decoding cost: bytes moved for each byte of the tensor (a plain copy moves 2)."""

    def __init__(self, argument: str = "", seed: int = 0, rank: int = 0) -> None:
        super().__init__(f"{self.name}:{argument}" if argument else self.name)

    @abstractmethod
    def body_bytes(self, elements: int) -> int:
        """How long the body of each payload for so many elements is."""

    @abstractmethod
    def pack(self, flat: Array, of: Ident) -> Bytes:
        """The body for a flat array of finite floats, as uint8."""

    @abstractmethod
    def unpack(self, body: Bytes, elements: int) -> Array:
        """So many floats from a body of the right length; whatever else it says may be anything."""

    def size_bytes(self, shape: Shape) -> int:
        """The header and the body."""
        return HEADER_BYTES + self.body_bytes(prod(shape))

    def _encode(self, flat: Array, shape: Shape, of: Ident) -> Bytes:
        check_input(flat, of.name)
        body = self.pack(flat, of)
        if body.dtype != np.uint8 or body.shape != (self.body_bytes(flat.size),):
            raise UsageError(
                f"{self.spec}: pack made {body.size} × {body.dtype}, where body_bytes says {self.body_bytes(flat.size)}"
            )
        payload = self._payload(of.name, shape)
        payload[HEADER_BYTES:] = body
        return payload

    def _mix_body(self, body: Bytes, flat: Array, shape: Shape, of: Ident, mix: Mix) -> None:
        with np.errstate(all="ignore"):  # of a payload that makes no sense; what it decodes to is looked at
            values = np.asarray(self.unpack(body, flat.size), np.float32)
        if values.shape != flat.shape:
            raise UsageError(f"{self.spec}: unpack made {values.size} elements of {flat.size}")
        check_decoded(values, of.name)
        if mix is None:
            np.copyto(flat, values)
        else:
            mix(flat, values, out=flat)

    def _header(self, elements: int) -> bytes:
        return header(plugin_codec(self.name), self.parameter, elements)

    def _factors(self) -> Factors:
        return self.traffic


class Memory:
    """Arrays by the tensor's name. `prefix` is what its names in a state begin with."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._kept: dict[str, Array] = {}
        self._proposed: dict[str, Array] = {}
        self._spare: dict[str, Array] = {}
        self._step: int | None = None

    def kept(self, name: str, shape: Shape) -> Array | None:
        """What counts, if there is anything."""
        array = self._kept.get(name)
        if array is not None and array.shape != shape:
            raise UsageError(f"{name}: what is remembered of it has the shape {array.shape}, not {shape}")
        return array

    def propose(self, name: str, shape: Shape, step: int) -> Array:
        """An array to fill with what is to count once the step is committed."""
        if self._proposed and step != self._step:
            raise UsageError(f"{name}: step {step} began, but step {self._step} was neither committed nor abandoned")
        self._step = step
        array = self._proposed.pop(name, None)
        if array is None:
            array = self._spare.pop(name, None)
        if array is None or array.shape != shape:
            array = np.empty(shape, np.float32)
        self._proposed[name] = array
        return array

    def proposed(self, name: str, step: int) -> Array:
        """What was proposed in this step."""
        if step != self._step or name not in self._proposed:
            raise UsageError(f"{name}: nothing was proposed for it in step {step}")
        return self._proposed[name]

    def commit(self, step: int) -> None:
        """What was proposed in this step counts."""
        if step != self._step:
            return
        for name, array in self._proposed.items():
            if name in self._kept:
                self._spare[name] = self._kept[name]
            self._kept[name] = array
        self._proposed = {}

    def abandon(self, step: int) -> None:
        """What was proposed in this step is forgotten."""
        if step == self._step:
            self._spare.update(self._proposed)
            self._proposed = {}

    def state(self) -> State:
        """Copies of what counts."""
        return {self.prefix + name: array.copy() for name, array in self._kept.items()}

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Only this counts from now on."""
        restored = {}
        for key, array in state.items():
            if not key.startswith(self.prefix) or array.dtype != np.float32 or not np.isfinite(array).all():
                raise UsageError(f"{key} is not a state that can be restored here: expected finite float32 arrays "
                                 f"whose names begin with {self.prefix}")  # fmt: skip
            restored[key.removeprefix(self.prefix)] = np.array(array, np.float32)
        self._kept, self._proposed, self._spare = restored, {}, {}
