"""What went wrong in other systems' parameter servers, and does not here: one test each.

A server, an honest worker where one is needed, and a peer that is not one of our workers but says what it likes.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from hcsim.compressors.base import Ident
from hcsim.compressors.registry import make
from hcsim.config import Pause
from hcsim.errors import CompressionError, HcsimError
from hcsim.real.host import RealHost, RealOptions
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.runtime.host import Host
from hcsim.training.learner import digest
from hcsim.training.parameter_server.gradients import GradientCodec
from hcsim.training.parameter_server.messages import (
    ANSWERS,
    QUESTIONS,
    Join,
    JoinReply,
    KeepAlive,
    LeaveRequest,
    MessageConnection,
    ModelReply,
    Pull,
    Push,
    PushAccepted,
    PushStale,
    RequestRefused,
    ServerReply,
    TrainingDone,
    WorkerRequest,
)
from hcsim.training.parameter_server.rounds import ServerPolicy
from hcsim.training.tasks import task
from tests.training.parameter_server.bench import (
    BATCHES,
    JOB,
    NAMES,
    OPTIMIZER,
    POLICY,
    SEED,
    SIZES,
    Bench,
    Job,
    alone,
    of_the_round,
    worker_on,
    world_with,
)

QUICK = replace(POLICY, deadline_s=0.4, grace_s=0.1, linger_s=0.5)
BOUNDED = ServerPolicy(mode="bounded", staleness=0, deadline_s=2.0, patience_s=20.0)
LAYOUT = task("convex").replica(0).layout
Body = Callable[[Host, Host, Host, str], Awaitable[Any]]


def in_the_virtual_world(body: Body) -> Any:
    world = world_with()
    return world.run(body(world.host("s"), world.host("a"), world.host("b"), "s:0"))


def in_the_real_world(body: Body) -> Any:
    async def main() -> Any:
        async with AsyncExitStack() as stack, asyncio.timeout(30):
            hosts = [await stack.enter_async_context(RealHost(RealOptions(name))) for name in "sab"]
            return await body(*hosts, "127.0.0.1:0")

    return asyncio.run(main())


@pytest.fixture(params=[in_the_virtual_world, in_the_real_world], ids=["virtual", "real"])
def run(request: pytest.FixtureRequest) -> Callable[[Body], Any]:
    return request.param


class Peer:
    """Somebody who speaks the protocol by hand."""

    def __init__(self, line: MessageConnection[WorkerRequest, ServerReply], host: Host) -> None:
        self.line = line
        self.host = host

    @classmethod
    async def call(cls, host: Host, address: str, name: str = "b") -> Peer:
        line = MessageConnection(await host.connect(address), host.clock, QUESTIONS, ANSWERS, silence_s=5.0)
        await line.send(Join(JOB, name, 1, task("convex").fingerprint))
        assert isinstance(await line.recv(5.0), JoinReply)
        return cls(line, host)

    async def __aenter__(self) -> Peer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.line.close()

    async def hears(self) -> ServerReply:
        while isinstance(heard := await self.line.recv(5.0), KeepAlive):
            pass
        return heard

    async def push(self, gradient: Any, sequence: int, version: int, **changes: Any) -> None:
        sizes, payload = changes.pop("packed", None) or dense(gradient)
        push = replace(Push(sequence, version, 8, "none", sizes), **changes)
        await self.line.send(push, np.ascontiguousarray(payload).data)

    async def pull(self, version: int) -> tuple[ModelReply, np.ndarray]:
        await self.line.send(Pull(version))
        model = await self.hears()
        assert isinstance(model, ModelReply)
        found = np.empty(model.size_bytes, np.uint8)
        await self.line.recv_payload(model.size_bytes, found.data)
        return model, found.view(np.float32)


def dense(gradient: Any) -> tuple[tuple[int, ...], np.ndarray]:
    """A gradient as it travels uncompressed, finite or not: each tensor behind the header of its compressor."""
    sizes, payload = GradientCodec(LAYOUT, make("none", seed=0, rank=0)).pack(np.zeros(LAYOUT.length, np.float32), 1, 0)
    at, lo = 0, 0
    for tensor, size in zip(LAYOUT.tensors, sizes, strict=True):
        body = slice(at + size - 4 * tensor.length, at + size)
        payload[body] = np.asarray(gradient[lo : lo + tensor.length], np.float32).view(np.uint8)
        at, lo = at + size, lo + tensor.length
    return sizes, payload


def ones(scale: float = 1.0) -> np.ndarray:
    return np.full(LAYOUT.length, scale, np.float32)


async def nan(peer: Peer) -> None:
    await peer.push(ones(float("nan")), 1, 0)
    await refused(peer, "finite|NaN")


async def infinity(peer: Peer) -> None:
    gradient = ones()
    gradient[-1] = np.inf
    await peer.push(gradient, 1, 0)
    await refused(peer, "finite|infinit")


async def wrong_shape(peer: Peer) -> None:
    sizes, payload = dense(ones())
    await peer.push(None, 1, 0, packed=((sizes[0] + 4, sizes[1] - 4, *sizes[2:]), payload))
    await refused(peer, "bytes for")


async def missing_name(peer: Peer) -> None:
    sizes, payload = dense(ones())
    await peer.push(None, 1, 0, packed=(sizes[:-1], payload[: sum(sizes[:-1])]))
    await refused(peer, "2 payloads for 3 tensors")


async def unknown_compressor(peer: Peer) -> None:
    await peer.push(ones(), 1, 0, compressor="pickle")
    await refused(peer, "'pickle'")


async def body_without_end(peer: Peer) -> None:
    """It announces more than any gradient has, and is hung up on."""
    await peer.line.send(Push(1, 0, 8, "none", (1 << 50,) * 3))
    with pytest.raises(HcsimError):
        await peer.hears()


async def body_that_stops(peer: Peer) -> None:
    """It announces a gradient and sends nothing; its connection stays open until the server closes it."""
    await peer.line.send(Push(1, 0, 8, "none", dense(ones())[0]))
    with pytest.raises(HcsimError):
        await until_hung_up(peer)


async def until_hung_up(peer: Peer) -> None:
    while True:
        assert await peer.hears() == TrainingDone(6)  # that the honest worker has got to the end


async def no_message(peer: Peer) -> None:
    """It sends bytes that are no message."""
    await peer.line.send(RequestRefused(1, "this is what a server says"))
    with pytest.raises(HcsimError):
        await peer.hears()


async def refused(peer: Peer, why: str) -> None:
    heard = await peer.hears()
    assert isinstance(heard, RequestRefused)
    assert any(reason in heard.reason for reason in why.split("|")), heard.reason


async def nothing(peer: Peer) -> None:
    """For comparison."""


POISONS = (nan, infinity, wrong_shape, missing_name, unknown_compressor, body_without_end, body_that_stops, no_message)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("poison", POISONS, ids=lambda poison: poison.__name__)
def test_poison_gradient(run, poison):
    """What is not a gradient is refused and never counted, and the honest worker trains to the end as if alone."""

    async def body(s: Host, a: Host, b: Host, address: str, act: Any) -> tuple[TrainingDone, int, str | None]:
        bench = Bench(s, 6, policy=QUICK, awaited="ab")
        listener = await bench.open(address)
        worker = worker_on(a, "a", policy=QUICK)
        async with await Peer.call(b, listener.address) as peer:
            working = a.spawn(worker.run(listener.address, of_the_round("a"), _nothing), name="work")
            await act(peer)
        done = await working
        await bench.serving
        return done, bench.rounds.members["b"].accepted, bench.digest

    found = run(partial(body, act=poison))
    assert found == run(partial(body, act=nothing))
    assert found[:2] == (TrainingDone(6), 0)


def test_poison_gradient_that_is_a_decompression_bomb():
    """64 MiB of zeros in a few KiB, in the place of a small tensor: refused by name, without room for them."""
    zstd = make("zstd", seed=0, rank=0)
    bomb = zstd.encode(np.zeros(1 << 24, np.float32), Ident("0.weight"))
    gradients = GradientCodec(LAYOUT, zstd)
    good, _ = gradients.pack(ones(), 1, 0)
    sizes = (bomb.nbytes, *good[1:])
    push = Push(1, 0, 8, "zstd", sizes)
    tracemalloc.start()
    try:
        if not gradients.objection(push):
            with pytest.raises(CompressionError):
                gradients.unpack(push, np.concatenate([bomb, np.zeros(sum(good[1:]), np.uint8)]))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_lost_response_resubmit(run):
    """The answer is lost with the connection, the push comes again, and counts once."""

    async def body(s: Host, a: Host, b: Host, address: str) -> tuple[list[ServerReply], np.ndarray]:
        bench = Bench(s, 2, awaited="b")
        listener = await bench.open(address)
        async with await Peer.call(b, listener.address) as first:
            await first.push(ones(8.0), 1, 0)  # the sum over its 8 samples
            while bench.rounds.version == 0:
                await b.clock.sleep(0.001)
        heard = []
        async with await Peer.call(b, listener.address) as again:
            for sequence, version in ((1, 0), (1, 0), (2, 1), (2, 1)):
                await again.push(ones(8.0), sequence, version)
                heard.append(await again.hears())
            await again.line.send(LeaveRequest())
            await bench.serving
        return heard, bench.learner.replica.parameters

    heard, parameters = run(body)
    assert heard == [PushAccepted(1, 1), PushAccepted(1, 1), PushAccepted(2, 2), TrainingDone(2)]
    momentum = OPTIMIZER.momentum
    expected = task("convex").replica(SEED).parameters - OPTIMIZER.lr * (1 + (1 + momentum))
    np.testing.assert_allclose(parameters, expected, rtol=1e-5, atol=1e-6)


def test_stale_409(run):
    """A gradient of an old version is refused with the new one's number; pulled and computed again, it counts."""

    async def body(s: Host, a: Host, b: Host, address: str) -> list[Any]:
        bench = Bench(s, 3, policy=BOUNDED, awaited="ab")
        listener = await bench.open(address)
        async with await Peer.call(a, listener.address, "a") as fast, await Peer.call(b, listener.address) as slow:
            heard: list[Any] = [(await slow.pull(-1))[0].version]
            await fast.push(ones(), 1, 0)
            heard.append(await fast.hears())
            await slow.push(ones(), 1, 0)
            heard.append(await slow.hears())
            heard.append((await slow.pull(0))[0].version)
            await slow.push(ones(), 2, 1)
            heard.append(await slow.hears())
        await bench.stop()
        return heard

    assert run(body) == [0, PushAccepted(1, 1), PushStale(1, 1), 1, PushAccepted(2, 2)]


def test_stale_409_in_a_whole_job():
    """With no staleness allowed, workers that keep pace refuse each other's pushes all the time, and get to the end."""
    job = Job(world_with(), total=60, policy=BOUNDED)
    assert job.run() == dict.fromkeys(("s", *NAMES), TrainingDone(60))
    assert sorted(version for _, version in job.counted) == list(range(1, 61))
    computed = sum(len(worker.gradients.packed) for worker in job.workers.values())
    assert computed > 60
    assert all(version - 1 in job.workers[name].gradients.packed for name, version in job.counted)


def test_unequal_batches():
    """Batches of 16, 8 and 4 count by their samples: the result is that of one process with all 28."""
    job = Job(world_with(), total=20)
    assert job.run()["s"] == TrainingDone(20)
    found = job.bench.learner.replica.parameters
    np.testing.assert_allclose(found, alone(20), rtol=2e-5, atol=2e-6)
    assert np.abs(found - _equally_weighted(20)).max() > 0.01


def _equally_weighted(steps: int) -> np.ndarray:
    replica = task("convex").replica(SEED)
    stepper = OPTIMIZER.open(replica.parameters)
    for step in range(steps):
        total = np.zeros_like(replica.parameters)
        for rank in range(len(SIZES)):
            replica.gradients[:] = 0
            replica.forward(BATCHES.batch(step, rank))
            for block in reversed(range(len(replica.layout.blocks))):
                replica.backward(block)
            total += replica.gradients / len(SIZES)
        stepper.step(total)
    return replica.parameters


def test_shard_exhausted(run):
    """A worker that runs out of data says so: the other goes on alone, and both get the final model."""

    async def body(s: Host, a: Host, b: Host, address: str) -> Any:
        bench = Bench(s, 12, awaited="ab")
        listener = await bench.open(address)
        workers = {host: worker_on(host, name) for host, name in ((a, "a"), (b, "b"))}
        ends = {a: 99, b: 4}
        tasks = []
        for host, worker in workers.items():
            batch = of_the_round(worker.name)
            tasks.append(host.spawn(
                worker.run(listener.address, lambda v, n, h=host, f=batch: f(v, n) if n < ends[h] else None, _nothing),
                name="work",
            ))  # fmt: skip
        done = [await task for task in tasks]
        await bench.serving
        same = [digest(worker.learner.replica.parameters) == bench.digest for worker in workers.values()]
        return done, [worker.accepted for worker in workers.values()], same

    assert run(body) == ([TrainingDone(12)] * 2, [12, 4], [True] * 2)


def test_end_race():
    """A worker that is still busy when training ends is told so, and gets the final model, instead of a dead line."""
    policy = replace(POLICY, deadline_s=0.1)
    job = Job(world_with(Pause(at_s=0.1, node="c", duration_s=1.0)), total=40, policy=policy)
    assert job.run() == dict.fromkeys(("s", *NAMES), TrainingDone(40))
    assert ("c", 40) not in job.counted
    assert job.digests == dict.fromkeys(NAMES, job.bench.digest)


def test_json_model_pull(run):
    """A pull is four bytes a parameter and two small frames; a model that the worker has is not sent again."""

    async def body(s: Host, a: Host, b: Host, address: str) -> tuple[int, bool]:
        bench = Bench(s, 1, awaited="b")
        listener = await bench.open(address)
        async with await Peer.call(b, listener.address) as peer:
            _, parameters = await peer.pull(-1)
            _, nothing_new = await peer.pull(0)
        await bench.stop()
        assert len(nothing_new) == 0
        return bench.server.reception.sent_bytes(), np.array_equal(parameters, bench.learner.replica.parameters)

    sent_bytes, equal = run(body)
    small_frames = 4  # a welcome, two answers and the model's header
    assert LAYOUT.size_bytes < sent_bytes < LAYOUT.size_bytes + small_frames * (HEADER_BYTES + 40)
    assert equal


def test_decode_failure_kept_local(run):
    """A payload that cannot be decoded is refused by the tensor's name; nothing is put in its place."""

    async def body(s: Host, a: Host, b: Host, address: str) -> tuple[list[ServerReply], bool]:
        bench = Bench(s, 1, awaited="b", compressor="topk:0.1")
        listener = await bench.open(address)
        sizes, good = GradientCodec(LAYOUT, make("topk:0.1", seed=SEED, rank=0)).pack(ones(), 1, 0)
        bad = good.copy()
        bad[: sizes[0]] = 0xFF
        before = bench.digest
        async with await Peer.call(b, listener.address) as peer:
            await peer.push(None, 1, 0, packed=(sizes, bad), compressor="topk:0.1")
            heard = [await peer.hears()]
            unchanged = bench.digest == before
            await peer.push(None, 2, 0, packed=(sizes, good), compressor="topk:0.1")
            heard.append(await peer.hears())
            await peer.line.send(LeaveRequest())
            await bench.serving
        return heard, unchanged

    (refusal, accepted), unchanged = run(body)
    assert isinstance(refusal, RequestRefused)
    assert LAYOUT.tensors[0].name in refusal.reason
    assert accepted == PushAccepted(2, 1)
    assert unchanged


async def _nothing(version: int, loss: float) -> None:
    """Nobody wants to know."""
