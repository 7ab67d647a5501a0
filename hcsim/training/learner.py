"""The local part of a training run: one rank's replica, its digests, its device, and its time accounting."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import Host, TaskPart, Work
from hcsim.training.device_pace import DevicePace
from hcsim.training.optimizer import Optimizer, clip, update_work
from hcsim.training.task import Flat, Indices, Replica, Task, backward_work, forward_work

T = TypeVar("T")
StateArray: TypeAlias = "npt.NDArray[np.generic] | Phantom"


class TimeAccounting:
    """Seconds by purpose, on this rank's clock."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._clock = host.clock
        self.seconds = dict.fromkeys(("compute", "encode", "exchange"), 0.0)
        self.pace = DevicePace(host.clock)

    @contextmanager
    def spent_on(self, what: str, detail: str = "", work: Work | None = None) -> Iterator[None]:
        """Account the time that passes in this block; `detail` names the work in a timeline."""
        start_s = self._clock.elapsed()
        try:
            working = self.pace.waiting() if what == "exchange" else self.pace.work()
            with self._host.interval(what, detail, None if work is None else work.figures), working:
                yield
        finally:
            self.seconds[what] += self._clock.elapsed() - start_s


def part_of(task: Task, part: str, block: int | None = None) -> str:
    """Return what a part of a task's step is called, where it was measured by itself."""
    return f"{task.name} {part}" if block is None else f"{task.name} {part} {block}"


class Learner:
    """Computes gradients and applies updates on this rank's device."""

    def __init__(
        self, host: Host, task: Task, optimizer: Optimizer, seed: int, make: Callable[..., Replica] | None = None
    ) -> None:
        """`make` is called with the task, the seed and the device in place of the task's own `replica`."""
        self.host = host
        self.task = task
        self.ledger = TimeAccounting(host)
        device = host.device.torch_name
        self.replica: Replica = task.replica(seed, device) if make is None else make(task, seed, device)
        self.layout = self.replica.layout
        self.stepper = optimizer.open(self.replica.parameters)
        update = part_of(task, f"update by {type(optimizer).__name__}")
        self._update_work = replace(optimizer.work(self.layout.length), steps=1, part=TaskPart(update, 1))

    async def gradients(self, batch: Indices, ready: Callable[[int], Awaitable[None]] | None = None) -> float:
        """Compute the gradients of the batch in place, and return the mean loss. `ready` is called with each block
        when its gradients are complete.

        An empty batch has no loss, and gradients of zero."""
        gradients = self.replica.gradients
        if not isinstance(gradients, Phantom):
            gradients.fill(0.0)
        loss = float("nan")
        if len(batch):
            part = TaskPart(part_of(self.task, "forward"), len(batch))
            work = replace(forward_work(self.task, len(batch)), part=part)
            loss = await self.run(work, partial(self.replica.forward, batch), "forward")
        for block in reversed(range(len(self.task.blocks))):
            if len(batch):
                part = TaskPart(part_of(self.task, "backward", block), len(batch))
                work = replace(backward_work(self.task.blocks[block], len(batch)), part=part)
                backward = partial(self.replica.backward, block)
                await self.run(work, backward, f"backward {block}", self.gradients_of(block))
            if ready is not None:
                await ready(block)
        return loss

    def predicted_s(self, samples: int) -> float | None:
        """Return how long a step with so many samples takes by the profile of this machine, if it is known."""
        times_s = map(self.host.device.predict_s, (*step_work(self.task, samples), self._update_work))
        total_s = 0.0
        for time_s in times_s:
            if time_s is None:
                return None
            total_s += time_s
        return total_s

    async def clip(self, max_norm: float | None) -> None:
        """Clip the gradients in place; do nothing if `max_norm` is None."""
        if max_norm is not None:
            gradients = self.replica.gradients
            work = update_work(3.0 * gradients.nbytes / 4, 3.0 * gradients.nbytes)
            await self.run(work, partial(clip, gradients, max_norm), "clip")

    async def update(self, lr: float) -> None:
        """Take one step of the optimizer with the gradients in place."""
        await self.run(self._update_work, partial(self.stepper.step, self.replica.gradients, lr), "update")

    async def run(self, work: Work, function: Callable[[], T], name: str = "", into: memoryview | None = None) -> T:
        """Run `function` on the device, and account its time."""
        with self.ledger.spent_on("compute", name, work):
            return await self.host.device.run(work, function, into)

    def gradients_of(self, block: int) -> memoryview | None:
        tensors, gradients = self.layout.blocks[block], self.replica.gradients
        if isinstance(gradients, Phantom) or not tensors:
            return None
        return gradients[tensors[0].offset : tensors[-1].span.stop].data


def step_work(task: Task, samples: int) -> list[Work]:
    """Return the work of a step with so many samples, but for the update."""
    return [forward_work(task, samples), *(backward_work(block, samples) for block in task.blocks)]


_TIMED_STEPS = 3


async def seconds_per_step(host: Host, task: Task, optimizer: Optimizer, samples: int) -> float:
    """Return how long a step with a batch of so many samples takes on the host's device, by the fastest of a few."""
    learner = Learner(host, task, optimizer, seed=0)
    batch = np.arange(samples, dtype=np.int64) % task.samples
    lasted_s = []
    for _ in range(1 + _TIMED_STEPS):
        began_s = host.clock.elapsed()
        await learner.gradients(batch)
        await learner.update(0.0)
        lasted_s.append(host.clock.elapsed() - began_s)
    return min(lasted_s[1:])  # for the first step the device is woken up, and its programs are loaded


def digest(parameters: Flat) -> str | None:
    """Return the SHA-256 of the parameters' bits, or None for a phantom."""
    return None if isinstance(parameters, Phantom) else hashlib.sha256(parameters.data).hexdigest()


_COLUMNS = 64
_CHUNK_WORDS = 1 << 16
"""A chunk of this size stays in the cache while it is summed."""
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = (2 * np.arange(_COLUMNS, dtype=np.uint64) + np.uint64(1)) * _ODD


def fingerprint(array: StateArray) -> int:
    """Return a 63-bit fingerprint of a replica, cheap enough for every step; 0 for a phantom.

    The array's 64-bit words are summed by column, sixty-four columns at a time, and the sums are mixed with odd
    multipliers, all modulo 2⁶⁴. One flipped bit, or any change within one word, always changes the fingerprint.
    Diverged replicas almost surely have different ones. It does not detect rows of 512 bytes that change places
    within a chunk, nor an even number of flipped signs of 64-bit words. A CRC would, in twice the time. It is no
    protection against deliberate collisions."""
    if isinstance(array, Phantom):
        return 0
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    even = data.size - data.size % (8 * _COLUMNS)
    words = data[:even].view(np.uint64)
    rest = np.zeros(_COLUMNS, np.uint64)
    rest.view(np.uint8)[: data.size - even] = data[even:]
    total = data.size
    for at in range(0, words.size, _CHUNK_WORDS):
        total = _joined(total, words[at : at + _CHUNK_WORDS].reshape(-1, _COLUMNS).sum(axis=0))
    return _joined(total, rest) >> 1


def fingerprint_of_all(arrays: Mapping[str, Flat | npt.NDArray[np.generic]]) -> int:
    """Return one fingerprint of many named arrays."""
    total = 0
    for name in sorted(arrays):
        word = np.frombuffer(name.encode() + fingerprint(arrays[name]).to_bytes(8, "little"), np.uint8)
        total = (total * int(_ODD) + fingerprint(word)) % 2**63
    return total


def _joined(total: int, sums: npt.NDArray[np.uint64]) -> int:
    # An odd multiplier loses no bit; the sums' low bits must reach the high ones that the last shift leaves.
    return (total * int(_ODD) + int((sums * _MIX).sum(dtype=np.uint64))) % 2**64
