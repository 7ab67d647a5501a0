"""A pool of processes on this machine."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from multiprocessing.connection import wait

from hcsim.pool import Finished, TaskFunction
from hcsim.pool.process import TaskProcess, spawned_process
from hcsim.workers import starting


class LocalPool:
    """Processes of our own, which are started when there is work for them."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._workers: list[TaskProcess] = []

    @property
    def size(self) -> int:
        return self._jobs

    def run(self, function: TaskFunction, tasks: Iterator[bytes]) -> Generator[Finished]:
        try:
            self._employ(function, tasks)
            while busy := [worker for worker in self._workers if worker.task is not None]:
                ready = wait([worker.line for worker in busy])
                for worker in [worker for worker in busy if worker.line in ready]:
                    finished = worker.take()
                    if not worker.is_alive:
                        self._workers.remove(worker)
                        worker.end()
                    yield finished
                self._employ(function, tasks)
        finally:
            for worker in [worker for worker in self._workers if worker.task is not None]:
                self._workers.remove(worker)
                worker.end()

    def _employ(self, function: TaskFunction, tasks: Iterator[bytes]) -> None:
        """Give every free worker a task, and start workers as long as there are tasks."""
        free = [worker for worker in self._workers if worker.task is None]
        while free or len(self._workers) < self._jobs:
            task = next(tasks, None)
            if task is None:
                return
            if not free:
                with starting():  # an interrupt meanwhile is raised at its end, when it is in the list
                    self._workers.append(spawned_process())
                free.append(self._workers[-1])
            free.pop().give(function, task)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
