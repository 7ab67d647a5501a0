"""The parts of an event loop that have nothing to do with time: errors that nobody receives, and refusals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]

_log = logging.getLogger(__name__)


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError(
        "the virtual world has no sockets, threads, processes, signals or task factories, and runs only until "
        "something is complete: take channels and compute from the host"
    )


_ABSENT: Any = _refuse


class PlainLoop(asyncio.AbstractEventLoop):
    """Handles errors as asyncio's loops do, and refuses what the virtual world lacks."""

    def __init__(self) -> None:
        self._exception_handler: ExceptionHandler | None = None

    get_debug: Any = bool
    """Whether asyncio's debug mode is on. Every future asks when it is made, and a method takes five times as long."""

    def set_debug(self, enabled: bool) -> None:
        """Turn asyncio's debug mode on or off: futures then remember where they were made."""
        self.get_debug = partial(bool, enabled)

    # Errors that no task receives.

    def get_exception_handler(self) -> ExceptionHandler | None:
        """The handler that was set."""
        return self._exception_handler

    def set_exception_handler(self, handler: ExceptionHandler | None) -> None:
        """Handle such errors in another way than by logging them."""
        self._exception_handler = handler

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Log the error."""
        _log.error("%s", context.get("message", "an error that no task receives"), exc_info=context.get("exception"))

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Hand an error that no task receives to the handler, as asyncio does; an interrupt has its own way out."""
        if isinstance(context.get("exception"), KeyboardInterrupt | SystemExit):
            return
        if self._exception_handler is None:
            self.default_exception_handler(context)
            return
        try:
            self._exception_handler(self, context)
        except Exception as error:
            self.default_exception_handler({"message": "the exception handler failed", "exception": error})
            self.default_exception_handler(context)

    # What asyncio's interface has beyond this.

    create_connection = create_server = create_datagram_endpoint = start_tls = sendfile = _ABSENT
    sock_accept = sock_connect = sock_recv = sock_recv_into = sock_recvfrom = sock_recvfrom_into = _ABSENT
    sock_sendall = sock_sendto = sock_sendfile = getaddrinfo = getnameinfo = _ABSENT
    add_reader = remove_reader = add_writer = remove_writer = connect_read_pipe = connect_write_pipe = _ABSENT
    subprocess_exec = subprocess_shell = add_signal_handler = remove_signal_handler = _ABSENT
    call_soon_threadsafe = run_in_executor = set_default_executor = _ABSENT
    run_forever = stop = get_task_factory = set_task_factory = _ABSENT
