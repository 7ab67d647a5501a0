"""A pool on a Dask cluster (https://www.dask.org): one that runs already, or one that is started through ssh.

A Dask worker hands each task to a process of its own (`process.py`), one for each of its threads: so tasks run side by
side, each with a main thread, and what they do to their process is as on one machine. Dask gives the tasks of a worker
that is lost to others. A worker of other software is refused: its answers would not be those of this machine.

Dask's messages are pickles: whoever can reach the scheduler, or answers as one, can run code here. So the scheduler has
to be in a network where everybody is trusted, or behind TLS (tls://, with the certificates of Dask's configuration).
Through ssh nothing listens but on the loopback addresses, and all travels in ssh's own connections.
"""

from __future__ import annotations

import gc
import logging
import shlex
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from queue import Empty, Queue
from typing import Any
from urllib.parse import urlsplit

from hcsim.errors import ConfigError
from hcsim.pool import Finished, TaskFunction
from hcsim.pool.identity import identity, unlike
from hcsim.pool.process import TaskProcess, executed_process
from hcsim.real.ssh import SSH
from hcsim.registry import loaded_plugins

_SSH = "ssh:"
_CONNECT_S = 10.0
_WORKERS_S = 60.0
_LOOK_S = 5.0
_LOOPBACK = "127.0.0.1"
_AHEAD = 2
"""Tasks in flight for each thread of a worker, so that none waits for the next."""
_INSTALL = "pip install -c constraints.txt 'hcsim[dask]'"


class DaskPool:
    """The workers of a Dask cluster."""

    def __init__(self, where: str) -> None:
        distributed = _library()
        self._where = where
        self._plugins = tuple(loaded_plugins())
        self._identity = identity(self._plugins)
        self._closing = ExitStack()
        try:
            self._client = self._connected(distributed, where)
            self._check_workers()
        except BaseException:
            self._closing.close()
            raise

    def _connected(self, distributed: Any, where: str) -> Any:
        address, hosts = where, []
        if where.startswith(_SSH):
            hosts = [host.strip() for host in where.removeprefix(_SSH).split(",")]
            address = self._closing.enter_context(_SshCluster(distributed, hosts)).address
        _check_reachable(where, address)
        try:
            client = _client(distributed, address)
        except OSError as error:
            why = str(error).splitlines()[0]
            raise ConfigError(f"--dask {where}: there is no scheduler that answers ({why})") from None
        self._closing.callback(_quietly, client.close)
        try:
            client.wait_for_workers(max(1, len(hosts)), timeout=_WORKERS_S)
        except TimeoutError:
            there = len(client.nthreads())
            raise ConfigError(f"--dask {where}: {there} workers came within {_WORKERS_S:g} s") from None
        return client

    def _check_workers(self) -> None:
        """Refuse workers whose software is unlike ours."""
        found = self._client.run(identity, self._plugins, on_error="return")
        for worker, theirs in sorted(found.items()):
            if isinstance(theirs, BaseException):
                raise ConfigError(f"the worker {worker} cannot work for us: {type(theirs).__name__}: {theirs}")
            if differences := unlike(self._identity, theirs):
                raise ConfigError(f"the worker {worker} has other software: {differences}")

    @property
    def size(self) -> int:
        return max(1, self._threads())

    def run(self, function: TaskFunction, tasks: Iterator[bytes]) -> Generator[Finished]:
        flying: dict[Any, bytes] = {}
        completed: Queue[Any] = Queue()
        try:
            while True:
                for task in tasks:
                    future = self._client.submit(
                        answer_task, function, task, self._plugins, self._identity, pure=False, key=None
                    )
                    flying[future] = task
                    future.add_done_callback(completed.put)
                    if len(flying) >= _AHEAD * self.size:
                        break
                if not flying:
                    return
                future = self._next(completed)
                yield self._finished(future, flying.pop(future))
        finally:
            with suppress(Exception):  # the scheduler may be gone
                self._client.cancel(list(flying))

    def _next(self, completed: Queue[Any]) -> Any:
        """Return a future that is over; give up if all workers or the scheduler are lost."""
        alone_s = 0.0
        while alone_s < _WORKERS_S:
            with suppress(Empty):
                return completed.get(timeout=_LOOK_S)
            alone_s = 0.0 if self._threads() else alone_s + _LOOK_S
        raise ConfigError(f"--dask {self._where}: no worker is left; the same command goes on once there are some")

    def _threads(self) -> int:
        try:
            threads: dict[str, int] = self._client.nthreads()
        except Exception as error:  # any of those of Dask, tornado and the sockets below
            raise ConfigError(f"--dask {self._where}: the scheduler is lost ({type(error).__name__})") from None
        return sum(threads.values())

    def _finished(self, future: Any, task: bytes) -> Finished:
        from distributed import KilledWorker

        try:
            found = future.result()
        except KilledWorker as error:
            return Finished(
                task, None, f"each of the workers that ran this cell died ({error.last_worker.address})", 0.0
            )
        except (CancelledError, OSError) as error:
            raise ConfigError(f"--dask {self._where}: the scheduler is lost ({type(error).__name__})") from None
        if isinstance(found, str):
            raise ConfigError(found)
        assert isinstance(found, Finished)
        return found

    def close(self) -> None:
        self._closing.close()


# On a worker.

_own = threading.local()


def answer_task(
    function: TaskFunction, task: bytes, plugins: tuple[str, ...], wanted: dict[str, str]
) -> Finished | str:
    """On a worker: have a task done by this thread's process. A worker of other software says so instead."""
    if differences := unlike(wanted, identity(plugins)):
        return f"the worker on {socket.gethostname()} has other software: {differences}"
    process: TaskProcess | None = getattr(_own, "process", None)
    if process is None or getattr(_own, "plugins", None) != plugins:
        if process is not None:
            process.end()
        process = _own.process = executed_process(plugins)
        _own.plugins = plugins
    process.give(function, task)
    finished = process.take()
    if not process.is_alive:
        process.end()
        _own.process = None
    return finished


# Started through ssh.


class _SshCluster:
    """A scheduler here and a worker on each host, connected by the tunnels of ssh."""

    def __init__(self, distributed: Any, hosts: list[str]) -> None:
        for host in hosts:
            if not host or host.startswith("-"):
                raise ConfigError(f"--dask {_SSH}{','.join(hosts)}: {host!r} is not the name of a host")
        self._distributed = distributed
        self._hosts = hosts
        self._stack = ExitStack()
        self.address = ""

    def __enter__(self) -> _SshCluster:
        cluster = self._distributed.LocalCluster(
            n_workers=0, host=_LOOPBACK, dashboard_address=f"{_LOOPBACK}:0", silence_logs=logging.CRITICAL
        )
        self._stack.callback(_quietly, cluster.close)
        self.address = cluster.scheduler_address
        for host in self._hosts:
            self._start(host, int(self.address.rpartition(":")[2]))
        return self

    def _start(self, given: str, port: int) -> None:
        host, _, program = given.partition("=")
        own = _free_port()
        tunnels = [
            "-o",
            "ExitOnForwardFailure=yes",
            "-R",
            f"{port}:{_LOOPBACK}:{port}",
            "-L",
            f"{own}:{_LOOPBACK}:{own}",
        ]
        command = shlex.join([program or "hcsim", "dask-worker", str(port), str(own)])
        try:
            process = subprocess.Popen([*SSH, *tunnels, host, command], stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise ConfigError(f"ssh cannot be started: {error.strerror}") from None
        self._stack.callback(_ended, process)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def serve(port: int, own: int) -> None:
    """Be the worker that another machine has started here through ssh, until that goes away."""
    import asyncio
    import os
    import tempfile

    distributed = _library()

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os._exit(0)

    async def work() -> None:
        with tempfile.TemporaryDirectory(prefix="hcsim-dask-") as folder:
            worker = distributed.Worker(
                f"tcp://{_LOOPBACK}:{port}", host=_LOOPBACK, port=own, nthreads=os.cpu_count() or 1, dashboard=False,
                dashboard_address=f"{_LOOPBACK}:0",
                memory_limit=0, local_directory=folder, death_timeout=_WORKERS_S,
            )  # fmt: skip
            await worker
            await worker.finished()

    threading.Thread(target=watch, daemon=True).start()
    asyncio.run(work())


def _check_reachable(where: str, address: str) -> None:
    """Refuse at once an address where nobody listens, or something that is no scheduler, which would speak first: Dask
    would try again and again, or wait for ever."""
    host, port = urlsplit(address).hostname, _port(address)
    if host is None or port is None or address.partition("://")[0] not in ("tcp", "tls"):
        raise ConfigError(f"--dask {where}: give tcp://host:8786, tls://host:8786, or ssh:host,host to start workers")
    try:
        with socket.create_connection((host, port), _CONNECT_S) as line:
            if address.startswith("tcp") and not line.recv(1):
                raise OSError("what listens there is none")
    except OSError as error:
        raise ConfigError(f"--dask {where}: there is no scheduler that answers ({error.strerror or error})") from None


def _port(address: str) -> int | None:
    try:
        return urlsplit(address).port
    except ValueError:
        return None


def _client(distributed: Any, address: str) -> Any:
    """Return a client. One that could not be made complains of that when it is collected, which nobody needs."""
    told, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        return distributed.Client(address, timeout=_CONNECT_S, set_as_default=False)
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from None
    finally:
        gc.collect()
        sys.unraisablehook = told


def _library() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import distributed
    except ImportError as error:
        raise ConfigError(f"--dask needs Dask's distributed ({error}): {_INSTALL}") from None
    for name in ("distributed", "tornado.application", "asyncio", *logging.root.manager.loggerDict):
        if name.partition(".")[0] in ("distributed", "tornado", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    warnings.filterwarnings("ignore", category=distributed.versions.VersionMismatchWarning)  # we say more
    return distributed


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_LOOPBACK, 0))
        return int(free.getsockname()[1])


def _ended(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_CONNECT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _quietly(close: Any) -> None:
    with suppress(Exception):  # of what is gone already
        close()
