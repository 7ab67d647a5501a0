"""A call that torch waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work

from hcsim.torch_backend.engine import Pending
from hcsim.torch_backend.failures import translated


class PendingWork(Work):
    """One or several calls that were started together."""

    def __init__(self, pending: Sequence[Pending], results: list[Tensor], deliver: Callable[[], None]) -> None:
        """`results` are the tensors that hold what the calls come to, once `deliver` has put it there."""
        super().__init__()
        self._pending = pending
        self._results = results
        self._deliver: Callable[[], None] | None = deliver
        self._delivering = threading.Lock()
        self._source = -1
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    @classmethod
    def of_all(cls, works: Sequence[PendingWork]) -> PendingWork:
        """Over when all of them are."""

        def deliver() -> None:
            for work in works:
                work.wait()

        pending = [pending for work in works for pending in work._pending]
        return cls(pending, [tensor for work in works for tensor in work._results], deliver)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are there; raises what went wrong."""
        limit_s = timeout.total_seconds() if timeout else 0.0
        try:
            for pending in self._pending:
                self._source = pending.wait(limit_s if limit_s > 0 else None)
            self._settle()
        except Exception as error:
            if self._error is None:
                self._error = translated(error)
            raise self._error from error
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the calls are over, well or not."""
        if not all(pending.done() for pending in self._pending):
            return False
        self._look()
        return True

    def is_success(self) -> bool:
        """Whether they are over, and well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if it has."""
        self.is_completed()
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that hold the results."""
        return self._results

    def source_rank(self) -> int:
        """Who sent what was received."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the results."""
        if self._future is None:
            self._future = torch.futures.Future()
            self._pending[-1].on_done(self._fulfil)
        return self._future

    def _fulfil(self) -> None:
        assert self._future is not None
        self._look()
        if self._error is None:
            self._future.set_result(self._results)
        else:
            self._future.set_exception(self._error)  # type: ignore[arg-type]

    def _look(self) -> None:
        """See how the calls ended, which they have, all or at least the last one."""
        if self._error is None:
            try:
                self.wait()
            except Exception as error:
                self._error = error

    def _settle(self) -> None:
        with self._delivering:
            if self._deliver is not None:
                self._deliver()
                self._deliver = None
