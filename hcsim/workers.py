"""The environment of worker processes: one thread for arithmetic, and Ctrl-C ignored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)


@contextmanager
def starting() -> Iterator[None]:
    """Start worker processes inside this context. They run single-threaded, as the caller provides the
    parallelism, and only the caller handles an interrupt, even while they import."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    resource_tracker.ensure_running()  # not with the first process: it unblocks what we block
    held: list[int] = []
    # The mask is for those who are born here; an interrupt of ours may still come in through another thread.
    handler = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if held and callable(handler):
            handler(signal.SIGINT, None)
