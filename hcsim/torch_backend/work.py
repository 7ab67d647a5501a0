"""A call in flight, as a torch `Work`.

A callback of its future may start further calls and wait for them, so callbacks do not run in the thread that
ends calls. torch's C++ code, where DDP waits, only sees a future's error if a callback raised it. So the public
future is chained to an inner one by a callback.

Where a device may only be used by the program's threads in turn (`DeviceCopies.in_turn`), no thread of ours may
copy a result to it or run a callback, which would compute there. The future is complete when `get_future` returns
it, so that call waits. But during a backward pass DDP asks for the futures of all buckets, and waits for them when
the pass ends: then autograd completes the future, in a callback that it runs before DDP's own.

A failed call raises torch's own kind of error, which names the rank at fault.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import DistBackendError, Work

from hcsim.engine import PendingCall
from hcsim.errors import CollectiveError, CollectiveTimeout, DeadlineExceeded, UsageError


class CallFailed(DistBackendError):
    """A call on a group failed, and the group with it. Destroy the process group, and create one of the
    remaining ranks."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        """The failed rank, in the whole program's numbering, if known."""


class CallTimedOut(CallFailed):
    """The call exceeded the group's timeout, or its own."""


_WHAT_TO_DO = " (this group has ended: destroy_process_group(), then init_process_group() with whoever is left)"


def translated(error: BaseException) -> BaseException:
    """Translate an error to the type that users of torch expect."""
    if isinstance(error, UsageError):
        return ValueError(str(error))
    peer = error.peer if isinstance(error, CollectiveError) else None
    if isinstance(error, CollectiveTimeout):
        return CallTimedOut(str(error) + _WHAT_TO_DO, peer)
    if isinstance(error, CollectiveError):
        return CallFailed(str(error) + _WHAT_TO_DO, peer)
    if isinstance(error, DeadlineExceeded):
        return CallTimedOut(str(error))
    if isinstance(error, Exception):
        return CallFailed(str(error) or repr(error))
    return error


T = TypeVar("T")
S = TypeVar("S")


def _in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


class BackwardFuture(torch.futures.Future[T]):
    """A future that autograd completes at the end of the backward pass, or `wait` before that.

    Only Python sees its error. torch's C++ code need not: the callback raises it, which ends the backward pass."""

    def __init__(self, outcome: Callable[[], T]) -> None:
        super().__init__()
        self._find = outcome
        self._error: Exception | None = None
        torch.autograd.Variable._execution_engine.queue_callback(self._complete)

    def wait(self) -> T:
        with suppress(Exception):  # which this future has then
            self._complete()
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> torch.futures.Future[S]:
        """Return a future of what the callback makes of this one, whose `wait` completes this one too: what torch
        returns would wait for the end of the pass in the thread that has to come to it."""
        if self.done() or not _in_backward():
            return super().then(callback)

        def follow() -> S:
            with suppress(Exception):  # which the callback finds in this future
                self._complete()
            return callback(self)

        return BackwardFuture(follow)

    def _complete(self) -> None:
        if not self.done():
            try:
                self.set_result(self._find())
            except Exception as error:
                self._error = error
                self.set_exception(error)  # type: ignore[arg-type]  # torch's own annotation is wrong
        if self._error is not None:
            raise self._error


def future_in_turn(outcome: Callable[[], T]) -> torch.futures.Future[T]:
    """Return a future whose outcome, and what follows from it, is found in the threads of the program."""
    if _in_backward():
        return BackwardFuture(outcome)
    over: torch.futures.Future[None] = torch.futures.Future()
    future = over.then(lambda _: outcome())
    over.set_result(None)
    return future


class PendingWork(Work):
    """One or several calls that were started together."""

    def __init__(
        self, pending: Sequence[PendingCall], results: list[Tensor], deliver: Callable[[], None], *, in_turn: bool
    ) -> None:
        """`results` are the tensors that hold the results, once `deliver` has copied them there. `in_turn`: these are
        on a device that only the program's threads may use, one at a time."""
        super().__init__()
        self.in_turn = in_turn
        self.pending = pending
        self._results = results
        self._deliver: Callable[[], None] | None = deliver
        self._delivering = threading.Lock()
        self._source = -1
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    @classmethod
    def of_all(cls, works: Sequence[PendingWork]) -> PendingWork:
        def deliver() -> None:
            for work in works:
                work.wait()

        pending = [pending for work in works for pending in work.pending]
        results = [tensor for work in works for tensor in work._results]
        return cls(pending, results, deliver, in_turn=any(work.in_turn for work in works))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the results; raise the error of a failed call."""
        limit_s = timeout.total_seconds() if timeout else 0.0
        try:
            for pending in self.pending:
                self._source = pending.wait(limit_s if limit_s > 0 else None)
            self._settle()
        except Exception as error:
            if isinstance(error, DeadlineExceeded) and not self._over():
                raise translated(error) from error  # of this wait alone
            if self._error is None:
                self._error = translated(error)
            raise self._error from error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._over():
            return False
        self._look()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        self.is_completed()
        return self._error

    def result(self) -> list[Tensor]:
        return self._results

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        if self._future is None and self.in_turn:
            self._future = future_in_turn(self._outcome)
        if self._future is None:
            cuda = {each.device for each in self._results if each.device.type == "cuda"}
            devices: list[int | str | torch.device] = [*sorted(cuda, key=str)]
            over: torch.futures.Future[None] = torch.futures.Future(devices=devices)
            self._future = over.then(lambda _: self._outcome())
            self._follow(0, over)
        return self._future

    def _follow(self, number: int, over: torch.futures.Future[None]) -> None:
        """Complete the future when the calls from this index on have ended."""
        if number < len(self.pending):
            self.pending[number].on_done(lambda: self._follow(number + 1, over))
        else:
            threading.Thread(target=over.set_result, args=(None,), name="hcsim callbacks", daemon=True).start()

    def _outcome(self) -> list[Tensor]:
        self._look()
        if self._error is not None:
            raise self._error
        return self._results

    def _over(self) -> bool:
        return all(pending.done() for pending in self.pending)

    def _look(self) -> None:
        """Collect the outcomes of the calls, all of which have ended."""
        if self._error is None:
            with suppress(Exception):  # kept by wait
                self.wait()

    def _settle(self) -> None:
        with self._delivering:
            if self._deliver is not None:
                self._deliver()
                self._deliver = None
