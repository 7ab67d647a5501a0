"""What hosts and channels promise, in both worlds and over every carrier.

Each contract takes an arena and two of its hosts, and raises `ContractBroken` for what does not hold.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hcsim.errors import AdmissionRefused, ChannelBroken, ChannelError, HcsimError
from hcsim.identity.handshake import Credentials
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.identity.trust_list import RefusalReason
from hcsim.rng import stream
from hcsim.runtime.channel import Channel, Fold, Listener
from hcsim.runtime.frame import Header, Kind
from hcsim.runtime.host import Host
from hcsim.selftest.arena import Arena
from hcsim.telemetry.metrics import HostMetrics
from hcsim.transport.admission import AdmissionOutcome, AdmittedHost

KIB, MIB = 2**10, 2**20
BEYOND_BUFFERS = 33 * MIB
SIZES = (0, 1, 55, 56, 57, 4 * KIB, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, MIB)
OURS, THEIRS = ClusterSecret(bytes(range(16))), ClusterSecret(bytes(range(1, 17)))
_machines = itertools.count()


class ContractBroken(HcsimError):
    """Something that must hold does not."""


class NotHere(Exception):
    """This machine lacks what a check is for, and need not have it."""


class Contract(Protocol):
    """Checks one promise on two hosts."""

    __name__: str

    async def __call__(self, arena: Arena, left: Host, right: Host) -> None: ...


def require(holds: object, what: str) -> None:
    """Raise `ContractBroken` unless that holds."""
    if not holds:
        raise ContractBroken(what)


@contextmanager
def required_error(kind: type[BaseException], what: str) -> Iterator[None]:
    """Require that the body raises an error of this kind."""
    try:
        yield
    except kind:
        return
    raise ContractBroken(f"{what}: there is no {kind.__name__}")


@lru_cache(maxsize=8)
def pattern(size_bytes: int, salt: int = 0) -> memoryview:
    """Return bytes that tell a shifted or mixed-up payload from the right one."""
    period = bytes((salt + 7 * i) % 251 for i in range(251))
    return memoryview((period * (size_bytes // 251 + 1))[:size_bytes])


def allocate(header: Header) -> None:
    """Have the channel allocate the payload."""


async def send_numbered(channel: Channel, count: int, size_bytes: int, *, sender: int = 0) -> None:
    """Send frames that are numbered by their step."""
    for step in range(count):
        await channel.send(Header(size_bytes, sender=sender, step=step), pattern(size_bytes, sender + step))


# Channels.


async def both_ends_say_what_they_go_by(arena: Arena, left: Host, right: Host) -> None:
    for channel in await arena.channels(left, right):
        require(channel.carrier == arena.carrier, f"a channel goes by {arena.carrier}, and not by {channel.carrier}")


async def frames_arrive_in_order(arena: Arena, left: Host, right: Host) -> None:
    client, server = await arena.channels(left, right)
    sending = left.spawn(send_numbered(client, 300, 100), name="sender")
    steps = [(await server.recv(allocate))[0].step for _ in range(300)]
    await sending
    require(steps == list(range(300)), f"300 frames arrive in the order in which they were sent, not as {steps}")


async def every_size_arrives_whole(
    arena: Arena, left: Host, right: Host, sizes: tuple[int, ...] = (*SIZES, BEYOND_BUFFERS)
) -> None:
    client, server = await arena.channels(left, right)
    for size_bytes in sizes:
        count = 3 if size_bytes <= MIB else 1
        sending = left.spawn(send_numbered(client, count, size_bytes), name="sender")
        for step in range(count):
            header, payload = await server.recv(allocate)
            require(header.length == size_bytes, f"a frame of {size_bytes} bytes says that it has {header.length}")
            right_one = np.array_equal(_bytes(payload), pattern(size_bytes, step))
            require(right_one, f"a frame of {size_bytes} bytes arrives as it was sent")
        await sending


async def senders_wait_for_readers(arena: Arena, left: Host, right: Host) -> None:
    """Two that both send more than buffers hold before either receives wait for each other."""
    ends = await arena.channels(left, right)
    payload = pattern(BEYOND_BUFFERS)
    sending = [left.spawn(end.send(Header(len(payload)), payload), name="sender") for end in ends]
    await left.clock.sleep(0.5)
    waits = not any(task.done() for task in sending)
    require(waits, f"a sender of {BEYOND_BUFFERS // MIB} MiB waits for its reader (back-pressure)")
    came = await asyncio.gather(*(end.recv(allocate) for end in ends))
    whole = all(np.array_equal(_bytes(arrived), payload) for _, arrived in came)
    require(whole, f"{BEYOND_BUFFERS // MIB} MiB arrive in both directions at once")
    await asyncio.gather(*sending)


async def senders_take_turns(
    arena: Arena, left: Host, right: Host, count: int = 20, size_bytes: int = 200 * KIB
) -> None:
    senders = 5
    client, server = await arena.channels(left, right)
    for sender in range(senders):
        left.spawn(send_numbered(client, count, size_bytes, sender=sender), name=f"sender {sender}")
    next_step = [0] * senders
    for _ in range(senders * count):
        header, payload = await server.recv(allocate)
        require(header.step == next_step[header.sender], "the frames of one of five senders arrive in its order")
        expected = pattern(size_bytes, header.sender + header.step)
        require(np.array_equal(_bytes(payload), expected), "frames of five senders do not mix")
        next_step[header.sender] += 1


async def floats_are_added_on_the_way(
    arena: Arena, left: Host, right: Host, dtype: npt.DTypeLike = np.float32, floats: int = 32 * KIB + 1
) -> None:
    """Several frames in a row: what comes behind one is no part of it. A channel may leave the sum to its caller."""
    client, server = await arena.channels(left, right)
    kind = np.dtype(dtype)
    sent = [np.random.default_rng(step).standard_normal(floats).astype(kind) for step in range(3)]
    ours = np.random.default_rng(9).standard_normal(floats).astype(kind)
    expected = ours.copy()

    async def send_all() -> None:
        for step, values in enumerate(sent):
            await client.send(Header(values.nbytes, step=step), values.view(np.uint8).data)

    sending = left.spawn(send_all(), name="sender")
    into, room = ours.view(np.uint8).data, memoryview(bytearray(ours.nbytes))
    fold = Fold(into, room, kind.char)
    for values in sent:
        before = ours.copy()
        # As a place, a fold serves like a buffer.
        _, payload = await server.recv(lambda _: fold)
        if payload is not into:
            require(payload is room, "what is not added on the way lies in the room beside it")
            require(np.array_equal(ours, before), "what is not added on the way leaves the numbers as they were")
            ours += np.frombuffer(room, kind)
        expected += values
        require(
            np.array_equal(ours, expected), f"{floats} {kind} that are added as they arrive are the sum, bit by bit"
        )
    await sending


async def what_was_sent_before_a_close_arrives(arena: Arena, left: Host, right: Host) -> None:
    client, server = await arena.channels(left, right)
    await send_numbered(client, 20, 10_000)
    await client.close()
    for step in range(20):
        header, payload = await server.recv(allocate)
        right_one = header.step == step and payload == pattern(10_000, step)
        require(right_one, "all that was sent before a close arrives")
    for _ in range(2):
        with required_error(ChannelBroken, "after the last frame of a closed channel"):
            await server.recv(allocate)


async def a_close_in_the_middle_ends_both(arena: Arena, left: Host, right: Host) -> None:
    client, server = await arena.channels(left, right)
    sending = left.spawn(client.send(Header(BEYOND_BUFFERS), pattern(BEYOND_BUFFERS)), name="sender")
    await left.clock.sleep(0.2)  # nobody reads
    receiving = right.spawn(server.recv(allocate), name="receiver")
    await client.close()
    for task, who in ((sending, "sender"), (receiving, "receiver")):
        with required_error(ChannelError, f"the {who} of a frame whose channel is closed half-way"):
            await task


async def a_cancelled_wait_loses_nothing(arena: Arena, left: Host, right: Host) -> None:
    client, server = await arena.channels(left, right)
    for step in range(5):
        with required_error(TimeoutError, "waiting for a frame that does not come"):
            async with right.clock.timeout(0.01):
                await server.recv(allocate)
        await client.send(Header(1000, step=step), pattern(1000, step))
        header, payload = await server.recv(allocate)
        whole = header.step == step and payload == pattern(1000, step)
        require(whole, "a frame arrives whole after a wait for it was cancelled")


CHANNELS: tuple[Contract, ...] = (
    both_ends_say_what_they_go_by,
    frames_arrive_in_order,
    every_size_arrives_whole,
    senders_wait_for_readers,
    senders_take_turns,
    floats_are_added_on_the_way,
    what_was_sent_before_a_close_arrives,
    a_close_in_the_middle_ends_both,
    a_cancelled_wait_loses_nothing,
)

# Admission.


def member(name: str, secret: ClusterSecret = OURS, boot: int = 1) -> Credentials:
    """Return the credentials of a member of that name, whose key is always the same."""
    draws = stream(1, "fresh", next(_machines)).randbytes  # two with one name are two machines with one key
    return Credentials(NodeKey(hashlib.sha256(name.encode()).digest()), secret, boot, draws)


async def listening(
    arena: Arena, host: Host, credentials: Credentials, verdicts: list[AdmissionOutcome] | None = None
) -> Listener:
    """Listen for members alone."""
    observer = None if verdicts is None else verdicts.append
    return await AdmittedHost(host, credentials, observer).listen(arena.address(host))


async def members_are_admitted(arena: Arena, left: Host, right: Host) -> None:
    seen: list[AdmissionOutcome] = []
    listener = await listening(arena, right, member("right", boot=5), seen)
    client = await AdmittedHost(left, member("left", boot=9), seen.append).connect(listener.address)
    server = await listener.accept()
    known = (client.identity, server.identity) == (member("right").key.node_id, member("left").key.node_id)
    require(known, "two members know each other by their keys")
    boots = {verdict.node: verdict.boot for verdict in seen}
    require(boots == {client.identity: 5, server.identity: 9}, "and when the other was started")
    for sender, receiver in ((client, server), (server, client)):
        await sender.send(Header(4, step=3), memoryview(b"data"))
        header, payload = await receiver.recv(allocate)
        require((header.step, bytes(_bytes(payload))) == (3, b"data"), "members talk to each other")
    await client.close()
    with required_error(ChannelBroken, "after the other member has closed"):
        await server.recv(allocate)
    await server.close()
    await listener.close()


async def another_secret_is_refused(arena: Arena, left: Host, right: Host) -> None:
    await refused(arena, left, right, member("left", THEIRS), RefusalReason.OTHER_CLUSTER, "another cluster")


async def a_copied_key_is_refused(arena: Arena, left: Host, right: Host) -> None:
    await refused(arena, left, right, member("right", boot=77), RefusalReason.COPIED_IDENTITY, "node_key was copied")


async def refused(
    arena: Arena, left: Host, right: Host, caller: Credentials, reason: RefusalReason, words: str
) -> None:
    """The caller is refused for this reason, both sides say why, and an honest one is admitted after it."""
    seen: list[AdmissionOutcome] = []
    listener = await listening(arena, right, member("right"), seen)
    accepting = asyncio.ensure_future(listener.accept())
    try:
        await AdmittedHost(left, caller, seen.append).connect(listener.address)
    except AdmissionRefused as error:
        told = error.reason == reason.name and "refused us: " in str(error) and words in str(error)
        require(told, f"who is refused hears why ({words}), and not: {error}")
    else:
        raise ContractBroken(f"{reason.name.lower()}: a stranger was admitted")
    async with left.clock.timeout(5):  # who refuses writes it down after saying it
        while len(seen) < 2:
            await left.clock.sleep(0.001)
    require([verdict.reason for verdict in seen] == [reason, reason], "both sides have the same reason")
    noted = any(verdict.text.startswith("we refused") and words in verdict.text for verdict in seen)
    require(noted, f"who refuses says why ({words})")
    name = "hcsim_admission_refusals_total"
    metrics = [host.metrics for host in (left, right) if isinstance(host.metrics, HostMetrics)]
    counted = [each.value(name, reason=reason.name.lower()) for each in metrics]
    require(counted == [0, 1], "a refusal is counted, once, where it was made")
    honest = await AdmittedHost(left, member("honest")).connect(listener.address)
    came = await accepting
    require(came.identity == member("honest").key.node_id, "nobody came in before the honest member")
    await honest.close()
    await came.close()
    await listener.close()


async def nothing_passes_without_a_handshake(arena: Arena, left: Host, right: Host) -> None:
    seen: list[AdmissionOutcome] = []
    listener = await listening(arena, right, member("right"), seen)
    for kind, data in ((Kind.DATA, b"tensor"), (Kind.HELLO, b"hello"), (Kind.CONTROL, bytes(107)), (Kind.BYE, b"")):
        stranger = await left.connect(listener.address)
        await stranger.send(Header(len(data), kind), memoryview(data))
        header, payload = await stranger.recv(allocate)
        answer = header.kind, bytes(_bytes(payload))
        require(answer == (Kind.HELLO, bytes([3, RefusalReason.MALFORMED])), f"{kind.name} instead of a handshake")
        with required_error(ChannelBroken, f"{kind.name} instead of a handshake"):
            await stranger.recv(allocate)
        await stranger.close()
    require([verdict.reason for verdict in seen] == [RefusalReason.MALFORMED] * 4, "each of them is refused")
    await listener.close()


ADMISSION: tuple[Contract, ...] = (
    members_are_admitted,
    another_secret_is_refused,
    a_copied_key_is_refused,
    nothing_passes_without_a_handshake,
)

# Clocks and tasks.


async def timeouts_end_in_order(arena: Arena, left: Host, right: Host, standstill_s: float = 0.0) -> None:
    """`standstill_s`: how long nothing of this process runs meanwhile, as on a machine that is too busy."""
    ended: list[float] = []

    async def limited(seconds: float) -> None:
        with required_error(TimeoutError, f"a limit of {seconds} s"):
            async with left.clock.timeout(seconds):
                await left.clock.sleep(1000)
        ended.append(seconds)

    async with asyncio.TaskGroup() as group:
        for seconds in (0.06, 0.02, 0.04, 1000):
            task = group.create_task(limited(seconds))
        async with left.clock.timeout(0.001):  # the earliest, and over before it is due
            await left.clock.sleep(0)
        time.sleep(standstill_s)  # noqa: ASYNC251
        await left.clock.sleep(0.1)
        task.cancel()
    require(ended == [0.02, 0.04, 0.06], f"limits of 0.02, 0.04 and 0.06 s end in this order, and not as {ended}")


async def limits_are_postponed(arena: Arena, left: Host, right: Host) -> None:
    clock, began_s = left.clock, left.clock.elapsed()
    with required_error(TimeoutError, "a limit that was postponed"):
        async with (limit := clock.timeout(0.05)):
            clock.postpone(limit, 0.2)
            clock.postpone(limit, 0.1)  # no earlier than that, and that is later already
            await clock.sleep(1000)
    took_s = clock.elapsed() - began_s
    require(took_s >= 0.2 - 1e-6, f"a limit that was postponed to 0.2 s ended after {took_s} s")
    clock.postpone(limit, 1.0)  # without consequences: it is over
    require(limit.expired(), "a limit that has ended stays so")


async def clocks_move(arena: Arena, left: Host, right: Host) -> None:
    before_s = left.clock.now()
    await left.clock.sleep(0.02)
    took_s = left.clock.now() - before_s
    require(took_s >= 0.02 - 1e-6, f"a clock moves by {took_s} s while one sleeps for 0.02 s")


async def ends_of_tasks_are_told(arena: Arena, left: Host, right: Host, *, begun: bool = True) -> None:
    ended: list[asyncio.Task[Any]] = []

    async def forever() -> None:
        await left.clock.sleep(1000)

    async def fail() -> None:
        raise ZeroDivisionError

    cancelled = left.spawn(forever(), name="forever", over=ended.append)
    failed = left.spawn(fail(), name="fail", over=ended.append)
    if begun:
        await left.clock.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, failed, return_exceptions=True)
    require({*ended} == {cancelled, failed}, "the end of a task is told when it was cancelled, and when it failed")


CLOCKS: tuple[Contract, ...] = (timeouts_end_in_order, limits_are_postponed, clocks_move, ends_of_tasks_are_told)

CONTRACTS: Mapping[str, tuple[Contract, ...]] = {"channels": CHANNELS, "admission": ADMISSION, "clocks": CLOCKS}


def check_contracts(arena: Arena, contracts: tuple[Contract, ...]) -> int:
    """Run the contracts, one after the other; return how many. An error says which one broke."""
    for contract in contracts:
        name = contract.__name__.replace("_", " ")

        async def body(left: Host, right: Host, contract: Contract = contract) -> None:
            await contract(arena, left, right)

        try:
            arena.run(body)
        except ContractBroken as error:
            raise ContractBroken(f"{name}: does not hold: {error}") from error
        except TimeoutError:
            raise ContractBroken(f"{name}: it did not end in time") from None
        except HcsimError as error:
            raise ContractBroken(f"{name}: {error}") from error
    return len(contracts)


def _bytes(payload: Any) -> memoryview:
    require(isinstance(payload, memoryview), "a payload of data arrives as data")
    return memoryview(payload)
