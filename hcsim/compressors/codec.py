"""Base classes of the compressors in this package, and their costs.

A codec is written for flat arrays. `_encode` makes a payload; `_mix_body` checks one and puts, adds or
subtracts its values. Elementwise codecs do this a chunk at a time (`ChunkedCompressor`).

`WORK` holds the cost of encoding and decoding as memory traffic, the unit that carries over to other machines.
A factor is the number of bytes that a plain copy would have moved in the same time, for each byte of input. A
copy itself reads and writes each byte and has the factor 2. The factors were measured in one thread on 25
million normally distributed floats (Neoverse-N1, copying at 15 GB/s) by

    python -m experiments.compressors

(int4, int2, blocktopk and dcttopk on a Xeon of 2.5 GHz, copying at 5.1 GB/s; random-k when it still read all of the
tensor, as it does with error feedback and in a sum, which is how it trains). The settings are 1 % for what has a
ratio, PowerSGD at rank 4, and zstd at level 1; other settings are taken to cost the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from math import prod
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hcsim.compressors.base import Array, ByteArray, CompressorStateDict, Ident, PayloadKind, TensorShape
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
from hcsim.runtime.host import CodecCall, Work


class CodecCost(NamedTuple):
    """Bytes moved for each byte of the tensor."""

    encode: float
    decode: float


WORK = {
    "none": CodecCost(2.0, 2.0),
    "topk": CodecCost(8.2, 1.1),
    "randomk": CodecCost(2.3, 2.2),
    "fp16": CodecCost(7.1, 6.5),
    "bf16": CodecCost(3.1, 2.2),
    "int8": CodecCost(3.5, 2.5),
    "int8:block": CodecCost(3.7, 2.6),
    "int8:stochastic": CodecCost(21.2, 2.5),
    "int4": CodecCost(5.4, 6.2),
    "int2": CodecCost(56.7, 3.4),
    "blocktopk": CodecCost(14.2, 2.2),
    "dcttopk": CodecCost(207.0, 186.0),
    "onebit": CodecCost(4.8, 1.2),
    "powersgd": CodecCost(6.9, 3.5),
    "zstd": CodecCost(57.3, 20.9),
}
COMPENSATE = 3.0
"""The factor of adding a residual to a tensor: two arrays are read and one is written."""


Unpack: TypeAlias = Callable[[int, Array], None]
"""Decodes the elements from an index on into an array: all of them, or a chunk."""
Mix: TypeAlias = np.ufunc | None
"""How decoded values are combined with the output; None replaces it."""


class BaseCompressor(ABC):
    """A stateless compressor."""

    codec: ClassVar[Codec]
    kind: ClassVar[PayloadKind]
    sized: ClassVar[bool] = True
    chunk: ClassVar[int] = CHUNK
    parameter: int = 0
    """The codec's parameter in the header."""

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._payloads: dict[str, ByteArray] = {}
        self._scratch: Array | None = None

    @property
    def spec(self) -> str:
        return self._spec

    @abstractmethod
    def size_bytes(self, shape: TensorShape) -> int: ...

    def most_bytes(self, shape: TensorShape) -> int:
        """Return `size_bytes`: all payloads have this size."""
        return self.size_bytes(shape)

    @abstractmethod
    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        """Return the payload with its header; reject a NaN or an infinity."""

    @abstractmethod
    def _mix_body(self, body: ByteArray, flat: Array, shape: TensorShape, of: Ident, mix: Mix) -> None: ...

    def encode(self, tensor: Array, of: Ident) -> ByteArray:
        return self._encode(as_array(tensor, of.name), tensor.shape, of)

    def decode(self, payload: ByteArray, out: Array, of: Ident) -> None:
        self._mix(payload, out, of, None)

    def add(self, payload: ByteArray, out: Array, of: Ident) -> None:
        self._mix(payload, out, of, np.add)

    def subtract(self, payload: ByteArray, out: Array, of: Ident) -> None:
        self._mix(payload, out, of, np.subtract)

    def _mix(self, payload: ByteArray, out: Array, of: Ident, mix: Mix) -> None:
        flat = as_array(out, of.name)
        check_header(payload, self._header(flat.size), of.name)
        if self.sized:
            check_size(payload, self.size_bytes(out.shape), of.name)
        with np.errstate(over="ignore", invalid="ignore"):  # a sum that is too large is found when it is used
            self._mix_body(payload[HEADER_BYTES:], flat, out.shape, of, mix)

    def _header(self, elements: int) -> bytes:
        return header(self.codec, self.parameter, elements)

    def _payload(self, name: str, shape: TensorShape) -> ByteArray:
        """Return a payload to be filled, with its header.

        Its memory is reused, since fresh pages cost more than filling them."""
        payload = self._payloads.get(name)
        if payload is None or payload.size != self.size_bytes(shape):
            payload = self._payloads[name] = np.empty(self.size_bytes(shape), np.uint8)
        payload[:HEADER_BYTES] = np.frombuffer(self._header(prod(shape)), np.uint8)
        return payload

    @property
    def scratch(self) -> Array:
        """Return a buffer for one chunk."""
        if self._scratch is None:
            self._scratch = np.empty(self.chunk, np.float32)
        return self._scratch

    def for_feedback(self) -> BaseCompressor:
        """Return the compressor itself: most compressors send a part of the input unchanged."""
        return self

    def encode_work(self, shape: TensorShape) -> Work:
        return self._work(shape, self._factors().encode, decodes=False)

    def decode_work(self, shape: TensorShape) -> Work:
        return self._work(shape, self._factors().decode, decodes=True)

    def _work(self, shape: TensorShape, factor: float, *, decodes: bool) -> Work:
        size_bytes = FLOAT_BYTES * prod(shape)
        if not factor:
            return Work()
        call = CodecCall(self.spec, decodes, size_bytes, factor * size_bytes)
        return Work(moved_bytes=factor * size_bytes, codecs=(call,))

    def _factors(self) -> CodecCost:
        return WORK[self.codec.name.lower()]

    def commit(self, step: int) -> None:  # noqa: B027 - there is nothing to do where nothing is remembered
        """Do nothing: there is no state."""

    def abandon(self, step: int) -> None:  # noqa: B027
        """Do nothing: there is no state."""

    def state(self) -> CompressorStateDict:
        return {}

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Accept only an empty state."""
        if state:
            raise UsageError(f"{self.spec} remembers nothing, but the state has {', '.join(sorted(state))}")


class ChunkedCompressor(BaseCompressor):
    """Decodes a chunk at a time, so that the chunk is still in the cache when it is added to the tensor."""

    @abstractmethod
    def _unpacker(self, body: ByteArray, elements: int, of: Ident) -> Unpack:
        """Validate the body as far as possible, and return the function that decodes chunks."""

    def _mix_body(self, body: ByteArray, flat: Array, shape: TensorShape, of: Ident, mix: Mix) -> None:
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
    """A quantising codec as a plugin writes one: two functions over flat arrays, and the size of the payload.

    This class validates tensors and payloads. `register_compressor` calls the subclass with the argument
    after the colon of a spec, the run's seed and the rank."""

    name: ClassVar[str]
    kind = PayloadKind.QUANTISED
    traffic: ClassVar[CodecCost] = CodecCost(8.0, 4.0)
    """The cost of encoding and decoding: bytes moved for each byte of the tensor (a plain copy moves 2)."""

    def __init__(self, argument: str = "", seed: int = 0, rank: int = 0) -> None:
        super().__init__(f"{self.name}:{argument}" if argument else self.name)

    @abstractmethod
    def body_bytes(self, elements: int) -> int:
        """Return the length of the body for this number of elements."""

    @abstractmethod
    def pack(self, flat: Array, of: Ident) -> ByteArray:
        """Encode a flat array of finite floats; return the body as uint8."""

    @abstractmethod
    def unpack(self, body: ByteArray, elements: int) -> Array:
        """Decode this number of floats from a body of the right length, whose contents are not trusted."""

    def size_bytes(self, shape: TensorShape) -> int:
        return HEADER_BYTES + self.body_bytes(prod(shape))

    def _encode(self, flat: Array, shape: TensorShape, of: Ident) -> ByteArray:
        check_input(flat, of.name)
        body = self.pack(flat, of)
        if body.dtype != np.uint8 or body.shape != (self.body_bytes(flat.size),):
            raise UsageError(
                f"{self.spec}: pack made {body.size} × {body.dtype}, where body_bytes says {self.body_bytes(flat.size)}"
            )
        payload = self._payload(of.name, shape)
        payload[HEADER_BYTES:] = body
        return payload

    def _mix_body(self, body: ByteArray, flat: Array, shape: TensorShape, of: Ident, mix: Mix) -> None:
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

    def _factors(self) -> CodecCost:
        return self.traffic


class CompressorMemory:
    """Arrays by the tensor's name; `prefix` is prepended to the names in a state."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._kept: dict[str, Array] = {}
        self._proposed: dict[str, Array] = {}
        self._spare: dict[str, Array] = {}
        self._step: int | None = None

    def kept(self, name: str, shape: TensorShape) -> Array | None:
        """Return the committed array, if there is one."""
        array = self._kept.get(name)
        if array is not None and array.shape != shape:
            raise UsageError(f"{name}: what is remembered of it has the shape {array.shape}, not {shape}")
        return array

    def propose(self, name: str, shape: TensorShape, step: int) -> Array:
        """Return an array to fill, which takes effect once the step is committed."""
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
        if step != self._step or name not in self._proposed:
            raise UsageError(f"{name}: nothing was proposed for it in step {step}")
        return self._proposed[name]

    def commit(self, step: int) -> None:
        if step != self._step:
            return
        for name, array in self._proposed.items():
            if name in self._kept:
                self._spare[name] = self._kept[name]
            self._kept[name] = array
        self._proposed = {}

    def abandon(self, step: int) -> None:
        if step == self._step:
            self._spare.update(self._proposed)
            self._proposed = {}

    def state(self) -> CompressorStateDict:
        """Return copies of the committed arrays."""
        return {self.prefix + name: array.copy() for name, array in self._kept.items()}

    def restore(self, state: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Replace all committed arrays by these."""
        restored = {}
        for key, array in state.items():
            if not key.startswith(self.prefix) or array.dtype != np.float32 or not np.isfinite(array).all():
                raise UsageError(f"{key} is not a state that can be restored here: expected finite float32 arrays "
                                 f"whose names begin with {self.prefix}")  # fmt: skip
            restored[key.removeprefix(self.prefix)] = np.array(array, np.float32)
        self._kept, self._proposed, self._spare = restored, {}, {}
