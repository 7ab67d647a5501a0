"""References to values that stay with their owner.

Whoever serves a call may `lend` a value: the other end gets a handle, which it can pass back as an argument, or fetch.
The owner counts how often it sent the handle; the holder says how often it got it when it drops the last one, so a
handle that is on its way while the last one is dropped keeps its value alive. When the channel ends, all is released.

A handle is dropped when Python frees it, in the thread of the event loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeAlias, TypeVar, get_origin

import msgspec

from hcsim.errors import CallRefused, RemoteProtocolError, UsageError
from hcsim.transport.rpc.messages import Loan, Parcel

T = TypeVar("T")
Handles: TypeAlias = "dict[tuple[int, int], RemoteRef[Any]]"
"""The references in a parcel, by (OURS or YOURS, number)."""
Fetch: TypeAlias = Callable[["RemoteRef[Any]", Any, "float | None"], Awaitable[Any]]

OURS, YOURS = 0, 1
"""Whose value a handle in a message stands for, as its sender sees it."""


class RemoteRef(Generic[T]):
    """A handle to a value here or at the other end of a channel."""

    __slots__ = ("__weakref__", "_book", "_type", "_value", "kind", "number")

    def __init__(self, kind: str, value: T | None = None, book: Refs | None = None, number: int = 0) -> None:
        self.kind = kind
        self.number = number
        self._value = value
        self._book = book
        """Where it was lent to us; None: it is ours."""
        self._type: Any = Any

    @classmethod
    def lend(cls, value: T, kind: type[T] | None = None) -> RemoteRef[T]:
        """A handle to our value, to be returned to or passed to the other end."""
        return cls(_kind_of(kind or type(value)), value)

    def __repr__(self) -> str:
        return f"<our {self.kind}>" if self._book is None else f"<{self.kind} {self.number} of {self._book.peer}>"

    @property
    def is_ours(self) -> bool:
        """Whether the value is on this side."""
        return self._book is None

    @property
    def value(self) -> T:
        """The value, where it is ours."""
        if self._book is not None:
            raise UsageError(f"{self!r} is not here: fetch it")
        return self._value  # type: ignore[return-value]

    async def fetch(self, *, deadline_s: float | None = None) -> T:
        """The value itself, or a copy of the other side's."""
        if self._book is None:
            return self.value
        return await self._book.fetch(self, self._type, deadline_s)  # type: ignore[no-any-return]

    def typed(self, annotation: Any) -> RemoteRef[T]:
        """The same handle, if it stands for what the annotation says (`RemoteRef[Model]`)."""
        wanted = _wanted(annotation)
        if wanted is not Any:
            fits = isinstance(self._value, get_origin(wanted) or wanted) if self.is_ours else True
            if not fits or self.kind != _kind_of(wanted):
                raise ValueError(f"a reference to {_kind_of(wanted)} is expected, this is {self!r}")
            self._type = wanted
        return self


class Refs:
    """What is lent over one channel, in both directions."""

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
        """How many of our values the peer holds."""
        return len(self._lent)

    # Sending.

    def pack(self, ref: RemoteRef[Any], loans: list[Loan], back: list[int]) -> bytes:
        """The handle as it travels; what it lends is noted among the loans, what it gives back there."""
        if ref.is_ours:
            number = self._lend(ref)
            loans.append(Loan(number, ref.kind))
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
        """The peer has dropped it, or it was never sent."""
        if self._closed:
            return
        if self._times.get(number, 0) < times:
            raise RemoteProtocolError(f"{self.peer} released reference {number}, which it does not hold", self.peer)
        self._times[number] -= times
        if not self._times[number]:
            del self._times[number]
            del self._numbers[self._lent.pop(number)]

    # Receiving.

    def take(self, parcel: Parcel) -> Handles:
        """Hold what a parcel lends us or gives back; dropping what this returns lets it go."""
        lent = {(OURS, loan.number): self._hold(loan) for loan in parcel.loans}
        back = {(YOURS, number): self._lent[number] for number in parcel.back if number in self._lent}
        return {**lent, **back}

    def _hold(self, loan: Loan) -> RemoteRef[Any]:
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
        """The channel has ended: neither side holds anything any more."""
        self._closed = True
        self._lent.clear()
        self._numbers.clear()
        self._times.clear()


def unpack_ref(data: memoryview, taken: Handles) -> RemoteRef[Any]:
    """The handle in a parcel."""
    side, number = msgspec.msgpack.decode(data, type=tuple[int, int])
    ref = taken.get((side, number))
    if ref is None:
        raise CallRefused(f"reference {number} is not known here, or has been released")
    return ref


def _wanted(annotation: Any) -> Any:
    return annotation.__args__[0] if get_origin(annotation) is RemoteRef else Any


def _kind_of(kind: Any) -> str:
    return str(getattr(get_origin(kind) or kind, "__name__", kind))
