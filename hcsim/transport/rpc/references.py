"""Procedures that can be called by name, references to values that stay with their owner, and the encoding of
values.

A function that serves a call may `lend` a value: the other end gets a handle, which it can pass back as an
argument, or fetch. The owner counts how often it has sent the handle. When the holder drops the last copy, it
reports how often it has received the handle. So a handle that is in transit meanwhile keeps its value alive.
When the channel ends, all values are released.

A handle is dropped when Python frees it, in the thread of the event loop.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from hcsim.errors import CallRefused, HcsimError, RemoteProtocolError, UsageError
from hcsim.transport.rpc.messages import OUR_ERRORS, ArraySpec, EncodedValue, Limits, ReferenceSpec

R = TypeVar("R")


class Procedure(Generic[R]):
    """The name, argument types and result type of a function, as known to callers and servers."""

    def __init__(self, name: str, arguments: Mapping[str, Any], result: type[R], defaults: Sequence[Any] = ()) -> None:
        self.name = name
        self.result: Any = result
        required = len(arguments) - len(defaults)
        fields = [
            (argument, kind)
            if place < required
            else (argument, kind, msgspec.field(default=defaults[place - required]))
            for place, (argument, kind) in enumerate(arguments.items())
        ]
        try:
            self.arguments = msgspec.defstruct("arguments", fields, array_like=True, forbid_unknown_fields=True)
            for kind in (self.arguments, result):
                msgspec.msgpack.Decoder(kind, dec_hook=fitting)
        except TypeError as error:
            raise UsageError(f"{name} cannot be called from afar: {error}") from None

    @classmethod
    def of(cls, function: Callable[..., Awaitable[R] | R], name: str = "") -> Procedure[R]:
        """Return the procedure of an annotated function."""
        name = name or function.__name__
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                raise UsageError(f"{name}: arguments are passed by position from afar, so {parameter} is not possible")
            if parameter.name not in hints:
                raise UsageError(f"{name}: what {parameter.name} is has to be annotated")
        if "return" not in hints:
            raise UsageError(f"{name}: what it returns has to be annotated")
        defaults = [parameter.default for parameter in parameters if parameter.default is not parameter.empty]
        return cls(name, {parameter.name: hints[parameter.name] for parameter in parameters}, hints["return"], defaults)

    def __repr__(self) -> str:
        return f"<procedure {self.name}>"


class ProcedureRegistry:
    """The functions that a peer may call, and the error classes that are sent by name.

    An array that a function returns is not copied, and must not be changed before it has been sent."""

    def __init__(self, errors: Sequence[type[HcsimError]] = ()) -> None:
        self.errors = {**OUR_ERRORS, **{error.__name__: error for error in errors}}
        self._served: dict[str, tuple[Procedure[Any], Callable[..., Any]]] = {}

    def add(self, function: Callable[..., Any], name: str = "") -> Procedure[Any]:
        """Serve a function under its name or another one, with the types of its annotations."""
        return self.serve(Procedure.of(function, name), function)

    def serve(self, procedure: Procedure[R], function: Callable[..., Awaitable[R] | R]) -> Procedure[R]:
        """Serve a known procedure by this function."""
        if procedure.name in self._served:
            raise UsageError(f"{procedure.name} is served already")
        self._served[procedure.name] = (procedure, function)
        return procedure

    def find(self, name: str) -> tuple[Procedure[Any], Callable[..., Any]] | None:
        return self._served.get(name)


T = TypeVar("T")
Handles: TypeAlias = "dict[tuple[int, int], RemoteRef[Any]]"
"""The references in a parcel, by (OURS or YOURS, number)."""
Fetch: TypeAlias = Callable[["RemoteRef[Any]", Any, "float | None"], Awaitable[Any]]

OURS, YOURS = 0, 1
"""The owner of a handle's value in a message, from the sender's perspective."""


class RemoteRef(Generic[T]):
    """A handle to a value at this or the other end of a channel."""

    __slots__ = ("__weakref__", "_book", "_type", "_value", "kind", "number")

    def __init__(self, kind: str, value: T | None = None, book: ReferenceTable | None = None, number: int = 0) -> None:
        self.kind = kind
        self.number = number
        self._value = value
        self._book = book
        """The references of the channel over which the peer lent it; None if the value is local."""
        self._type: Any = Any

    @classmethod
    def lend(cls, value: T, kind: type[T] | None = None) -> RemoteRef[T]:
        """Return a handle to a local value, to be returned or passed to the peer."""
        return cls(_kind_of(kind or type(value)), value)

    def __repr__(self) -> str:
        return f"<our {self.kind}>" if self._book is None else f"<{self.kind} {self.number} of {self._book.peer}>"

    @property
    def is_ours(self) -> bool:
        return self._book is None

    @property
    def value(self) -> T:
        """The local value. Raises `UsageError` if it is at the other end."""
        if self._book is not None:
            raise UsageError(f"{self!r} is not here: fetch it")
        return self._value  # type: ignore[return-value]

    async def fetch(self, *, deadline_s: float | None = None) -> T:
        """Return the local value, or a copy of the peer's."""
        if self._book is None:
            return self.value
        return await self._book.fetch(self, self._type, deadline_s)  # type: ignore[no-any-return]

    def typed(self, annotation: Any) -> RemoteRef[T]:
        """Return this handle after checking that its value is of the annotated type (`RemoteRef[Model]`)."""
        wanted = _wanted(annotation)
        if wanted is not Any:
            fits = isinstance(self._value, get_origin(wanted) or wanted) if self.is_ours else True
            if not fits or self.kind != _kind_of(wanted):
                raise ValueError(f"a reference to {_kind_of(wanted)} is expected, this is {self!r}")
            self._type = wanted
        return self


class ReferenceTable:
    """The values lent over one channel, in both directions."""

    def __init__(
        self,
        peer: str,
        max_refs: int,
        dropped: Callable[[int, int], None],
        fetch: Fetch,
    ) -> None:
        self.peer = peer
        self.fetch = fetch
        self._max_refs = max_refs
        self._dropped = dropped
        self._lent: dict[int, RemoteRef[Any]] = {}
        self._numbers: dict[RemoteRef[Any], int] = {}
        self._times: dict[int, int] = {}
        self._last = 0
        self._held: weakref.WeakValueDictionary[int, RemoteRef[Any]] = weakref.WeakValueDictionary()
        self._receipts: dict[int, list[int]] = {}
        self._closed = False

    @property
    def lent(self) -> int:
        """The number of local values that the peer holds."""
        return len(self._lent)

    # Sending.

    def pack(self, ref: RemoteRef[Any], loans: list[ReferenceSpec], back: list[int]) -> bytes:
        """Encode a handle; append to `loans` if the value is local, or to `back` if it is the peer's."""
        if ref.is_ours:
            number = self._lend(ref)
            loans.append(ReferenceSpec(number, ref.kind))
            return msgspec.msgpack.encode((OURS, number))
        if ref._book is not self or self._closed:
            raise UsageError(f"{ref!r} cannot be sent to {self.peer}: it came over another channel, or that has ended")
        back.append(ref.number)
        return msgspec.msgpack.encode((YOURS, ref.number))

    def _lend(self, ref: RemoteRef[Any]) -> int:
        if ref not in self._numbers:
            if len(self._lent) >= self._max_refs:
                raise UsageError(f"{self.peer} holds {self._max_refs} of our values already: it has to drop some first")
            self._last += 1
            self._numbers[ref] = self._last
            self._lent[self._last] = ref
        number = self._numbers[ref]
        self._times[number] = self._times.get(number, 0) + 1
        return number

    def released(self, number: int, times: int) -> None:
        """Release a value that the peer has dropped, or that was never sent."""
        if self._closed:
            return
        if self._times.get(number, 0) < times:
            raise RemoteProtocolError(f"{self.peer} released reference {number}, which it does not hold", self.peer)
        self._times[number] -= times
        if not self._times[number]:
            del self._times[number]
            del self._numbers[self._lent.pop(number)]

    # Receiving.

    def take(self, parcel: EncodedValue) -> Handles:
        """Hold the references in a parcel; they are released when the returned handles are dropped."""
        lent = {(OURS, loan.number): self._hold(loan) for loan in parcel.loans}
        back = {(YOURS, number): self._lent[number] for number in parcel.back if number in self._lent}
        return {**lent, **back}

    def _hold(self, loan: ReferenceSpec) -> RemoteRef[Any]:
        ref = self._held.get(loan.number)
        if ref is None:
            ref = self._held[loan.number] = RemoteRef(loan.kind, book=self, number=loan.number)
            receipts = self._receipts[loan.number] = [0]
            weakref.finalize(ref, self._drop, loan.number, receipts).atexit = False
        self._receipts[loan.number][0] += 1
        return ref

    def _drop(self, number: int, receipts: list[int]) -> None:
        if self._receipts.get(number) is receipts:
            del self._receipts[number]
        if not self._closed:
            self._dropped(number, receipts[0])

    def close(self) -> None:
        """Release everything: the channel has ended."""
        self._closed = True
        self._lent.clear()
        self._numbers.clear()
        self._times.clear()


def unpack_ref(data: memoryview, taken: Handles) -> RemoteRef[Any]:
    side, number = msgspec.msgpack.decode(data, type=tuple[int, int])
    ref = taken.get((side, number))
    if ref is None:
        raise CallRefused(f"reference {number} is not known here, or has been released")
    return ref


def _wanted(annotation: Any) -> Any:
    return annotation.__args__[0] if get_origin(annotation) is RemoteRef else Any


def _kind_of(kind: Any) -> str:
    return str(getattr(get_origin(kind) or kind, "__name__", kind))


ARRAY, REF = 1, 2
"""The msgpack extension types."""

DTYPES: dict[str, np.dtype[Any]] = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (
        np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
        np.float16, np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16,
    )
}  # fmt: skip
"""The dtypes of arrays that can be sent."""


class PackedValue:
    """A parcel and the bytes of its arrays."""

    def __init__(self, parcel: EncodedValue, arrays: Sequence[memoryview]) -> None:
        self.parcel = parcel
        self.arrays = arrays


def pack(value: Any, refs: ReferenceTable, limits: Limits) -> PackedValue:
    """Encode a value as a parcel. Raises `UsageError` if it cannot be sent; then no value stays lent."""
    arrays: list[NDArray[Any]] = []
    specs: list[ArraySpec] = []
    loans: list[ReferenceSpec] = []
    back: list[int] = []

    def hook(part: Any) -> Any:
        if isinstance(part, np.ndarray):
            if part.dtype.name not in DTYPES:
                raise UsageError(f"an array of {part.dtype} cannot be sent")
            specs.append(ArraySpec(part.dtype.name, part.shape))
            arrays.append(part)
            return msgspec.msgpack.Ext(ARRAY, (len(arrays) - 1).to_bytes(4, "big"))
        if isinstance(part, RemoteRef):
            return msgspec.msgpack.Ext(REF, refs.pack(part, loans, back))
        raise UsageError(f"a {type(part).__name__} cannot be sent")

    try:
        parcel = EncodedValue(msgspec.msgpack.encode(value, enc_hook=hook), tuple(specs), tuple(loans), tuple(back))
        objection = oversized(parcel, limits)
        if objection:
            raise UsageError(objection)
    except (UsageError, TypeError, ValueError, OverflowError, RecursionError) as error:
        unlend(loans, refs)
        raise error if isinstance(error, UsageError) else UsageError(f"this cannot be sent: {error}") from None
    return PackedValue(parcel, [_bytes_of(array) for array in arrays])


def unlend(loans: Sequence[ReferenceSpec], refs: ReferenceTable) -> None:
    """Take back loans that have not been sent."""
    for loan in loans:
        refs.released(loan.number, 1)


def oversized(parcel: EncodedValue, limits: Limits) -> str:
    """Return the reason why a parcel exceeds the limits, or an empty string."""
    if len(parcel.body) > limits.max_body_bytes:
        return (
            f"without arrays it has {len(parcel.body)} bytes, and at most {limits.max_body_bytes} are allowed; "
            "large data belong in arrays"
        )
    if len(parcel.arrays) > limits.max_arrays:
        return f"it has {len(parcel.arrays)} arrays, and at most {limits.max_arrays} are allowed"
    if (size_bytes := arrays_bytes(parcel)) > limits.max_array_bytes:
        return f"its arrays have {size_bytes} bytes, and at most {limits.max_array_bytes} are allowed"
    if any(math.prod(max(length, 1) for length in spec.shape) > limits.max_array_bytes for spec in parcel.arrays):
        return "the shape of one of its arrays is too large"
    unknown = [spec.dtype for spec in parcel.arrays if spec.dtype not in DTYPES]
    return f"arrays of {unknown[0]!r} are not known here" if unknown else ""


def arrays_bytes(parcel: EncodedValue) -> int:
    return sum(math.prod(spec.shape) * DTYPES[spec.dtype].itemsize for spec in parcel.arrays if spec.dtype in DTYPES)


def unpack(parcel: EncodedValue, arrays: Sequence[NDArray[Any]], taken: Handles, kind: Any) -> Any:
    """Decode the value in a parcel as that type."""

    def extension(code: int, data: memoryview) -> Any:
        if code == ARRAY and int.from_bytes(data, "big") < len(arrays):
            return arrays[int.from_bytes(data, "big")]
        if code == REF:
            return unpack_ref(data, taken)
        raise CallRefused(f"extension {code} of msgpack means nothing here")

    return msgspec.msgpack.decode(parcel.body, type=kind, ext_hook=extension, dec_hook=fitting)


def fitting(kind: Any, value: Any) -> Any:
    """Return the array or reference after checking its annotated type."""
    wanted = get_origin(kind) or kind
    if not isinstance(value, wanted):
        raise ValueError(f"{wanted.__name__} expected, this is {type(value).__name__}")
    if isinstance(value, RemoteRef):
        return value.typed(kind)
    dtypes = [get_args(part)[0] for part in get_args(kind) if get_origin(part) is np.dtype]
    if dtypes and isinstance(dtypes[0], type) and not np.issubdtype(value.dtype, dtypes[0]):
        raise ValueError(f"an array of {dtypes[0].__name__} expected, this one is of {value.dtype}")
    return value


def _bytes_of(array: NDArray[Any]) -> memoryview:
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=False)
    return native.reshape(-1).view(np.uint8).data
