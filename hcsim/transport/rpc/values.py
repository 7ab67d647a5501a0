"""Arguments and results as parcels: what msgspec can encode, arrays beside it, references by number.

An array may stand anywhere in a value. It is not copied into msgpack: its bytes follow as frames and land in
memory that is allocated for it once its size is known to be allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args, get_origin

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from hcsim.errors import CallRefused, UsageError
from hcsim.transport.rpc.messages import ArraySpec, Limits, Loan, Parcel
from hcsim.transport.rpc.refs import Handles, Refs, RemoteRef, unpack_ref

ARRAY, REF = 1, 2
"""Extension types of msgpack."""

DTYPES: dict[str, np.dtype[Any]] = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (
        np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
        np.float16, np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16,
    )
}  # fmt: skip
"""What an array that travels may consist of."""


class Packed:
    """A parcel and the bytes of its arrays."""

    def __init__(self, parcel: Parcel, arrays: Sequence[memoryview]) -> None:
        self.parcel = parcel
        self.arrays = arrays


def pack(value: Any, refs: Refs, limits: Limits) -> Packed:
    """Make a parcel of a value. What cannot be sent is refused, and nothing stays lent."""
    arrays: list[NDArray[Any]] = []
    specs: list[ArraySpec] = []
    loans: list[Loan] = []
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
        parcel = Parcel(msgspec.msgpack.encode(value, enc_hook=hook), tuple(specs), tuple(loans), tuple(back))
        objection = oversized(parcel, limits)
        if objection:
            raise UsageError(objection)
    except (UsageError, TypeError, ValueError, OverflowError, RecursionError) as error:
        unlend(loans, refs)
        raise error if isinstance(error, UsageError) else UsageError(f"this cannot be sent: {error}") from None
    return Packed(parcel, [_bytes_of(array) for array in arrays])


def unlend(loans: Sequence[Loan], refs: Refs) -> None:
    """What was to be lent has not been sent."""
    for loan in loans:
        refs.released(loan.number, 1)


def oversized(parcel: Parcel, limits: Limits) -> str:
    """What is too large about a parcel, if anything is."""
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


def arrays_bytes(parcel: Parcel) -> int:
    """Of all its arrays."""
    return sum(math.prod(spec.shape) * DTYPES[spec.dtype].itemsize for spec in parcel.arrays if spec.dtype in DTYPES)


def unpack(parcel: Parcel, arrays: Sequence[NDArray[Any]], taken: Handles, kind: Any) -> Any:
    """The value in a parcel, as that type."""

    def extension(code: int, data: memoryview) -> Any:
        if code == ARRAY and int.from_bytes(data, "big") < len(arrays):
            return arrays[int.from_bytes(data, "big")]
        if code == REF:
            return unpack_ref(data, taken)
        raise CallRefused(f"extension {code} of msgpack means nothing here")

    return msgspec.msgpack.decode(parcel.body, type=kind, ext_hook=extension, dec_hook=fitting)


def fitting(kind: Any, value: Any) -> Any:
    """The array or reference, if it is of the annotated kind."""
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
