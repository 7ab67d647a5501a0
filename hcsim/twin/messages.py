"""What messages cost this machine's processor, measured with two processes that talk over its loopback interface.

Figures are processor time, not elapsed time: of the whole process, in the program and in the system, so that other
programs disturb them little. Each is the median of several rounds, in which all kinds of turns alternate.

An all-reduce of two ranks through a centre is one message each way, by a ring it is two. So, for a rank,

    c₁ = operation + send + receive        c₂ = operation + 2 · (send + receive)

give the cost of a pair of messages and that of an operation. In a stream from one rank to the other, the times of the
two processes divide a pair between its sender and its receiver. Streams of unlike sizes give the cost per byte, and
the same over TLS what encryption adds to it.

The loopback interface costs no less than a network card that cuts segments itself, and the sender's time contains
what the receiver's system does with the packets.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date

import msgspec
import numpy as np

from hcsim.collectives.group import Group
from hcsim.config.machine import Basis, MessageCosts
from hcsim.errors import HcsimError
from hcsim.identity.keys import SEED_BYTES, ClusterSecret, NodeKey
from hcsim.launch.real import real_group
from hcsim.real.hardware import installed_versions, system_name
from hcsim.real.keys import new_secret
from hcsim.real.sockets import free_ports
from hcsim.real.tls import ClusterTls
from hcsim.twin.timing import rounded, summary
from hcsim.units import ByteRate, Seconds
from hcsim.workers import ONE_THREAD

SIZES = (64, 4096, 65536, 2**20, 4 * 2**20, 16 * 2**20)
ROUNDS = 10
_SMALL, _BULK_FROM = SIZES[0], 2**18
_TURN_BYTES = 16 * 2**20
_MOST_REPEATS, _FEWEST_REPEATS = 40, 2
TIMEOUT_S = 60.0


class Turn(msgspec.Struct, frozen=True):
    """What both ranks do a few times, before they look at the clock again."""

    kind: str
    """"stream", or the algorithm of an all-reduce."""
    size_bytes: int

    @property
    def repeats(self) -> int:
        return max(_FEWEST_REPEATS, min(_MOST_REPEATS, _TURN_BYTES // self.size_bytes))


TURNS = (Turn("centralized", _SMALL), Turn("ring", _SMALL), *(Turn("stream", size) for size in SIZES))


class Part(msgspec.Struct, frozen=True):
    """What one of the two processes has to know."""

    rank: int
    peers: tuple[str, ...]
    secret: bytes | None
    """Of the TLS between the two; None for plain connections."""
    rounds: int


class Times(msgspec.Struct, frozen=True):
    """The processor time of one repeat in each round, of each turn, in one process or in both."""

    of: tuple[tuple[float, ...], ...]

    def median(self, turn: Turn) -> float:
        return statistics.median(self.of[TURNS.index(turn)])


class Place(msgspec.Struct, frozen=True):
    """Where one of the two processes runs: its address, and what its command begins with."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


HERE = (Place(), Place())


def measure_messages(
    basis: Callable[[float], Basis] | None = None, rounds: int = ROUNDS, places: Sequence[Place] = HERE
) -> MessageCosts:
    """Measure for about five seconds. `basis` makes the provenance from the spread.

    The two places may be network namespaces of this machine, whose network costs more than the loopback interface."""
    plain = _measured(None, rounds, places)
    tls = _measured(new_secret().data, rounds, places)
    return costs_of(plain, tls, basis or _measured_now)


def _measured_now(spread: float) -> Basis:
    version = installed_versions()["hcsim"]
    return Basis("measured", f"hcsim {version}, {system_name()}, loopback", date.today().isoformat(), spread)


def costs_of(plain: Sequence[Times], tls: Sequence[Times], basis: Callable[[float], Basis]) -> MessageCosts:
    """Return the costs that follow from the times of the two ranks, of which the first sends the streams."""
    once, twice = (statistics.fmean(side.median(turn) for side in plain) for turn in TURNS[:2])
    pair_s = max(twice - once, 0.0)
    sender, receiver = (side.median(Turn("stream", _SMALL)) for side in plain)
    share = sender / (sender + receiver)
    rates = [_rate_Bps(side) for side in plain]
    spreads = [summary(list(side.of[number])).spread for side in plain for number in (0, len(TURNS) - 1)]
    return MessageCosts(
        send_s=Seconds(rounded(pair_s * share)),
        receive_s=Seconds(rounded(pair_s * (1 - share))),
        operation_s=Seconds(rounded(max(once - pair_s, 0.0))),
        send_rate_Bps=ByteRate(rounded(rates[0])),
        receive_rate_Bps=ByteRate(rounded(rates[1])),
        tls_send_rate_Bps=ByteRate(rounded(_added(rates[0], _rate_Bps(tls[0])))),
        tls_receive_rate_Bps=ByteRate(rounded(_added(rates[1], _rate_Bps(tls[1])))),
        basis=basis(max(spreads)),
    )


def _rate_Bps(times: Times) -> float:
    """Return the bytes per second of streams: the median of the slopes between a small message and each large one."""
    small = Turn("stream", _SMALL)
    slopes = [
        (times.median(turn) - times.median(small)) / (turn.size_bytes - _SMALL)
        for turn in TURNS
        if turn.kind == "stream" and turn.size_bytes >= _BULK_FROM
    ]
    return 1.0 / max(statistics.median(slopes), 1e-15)


def _added(plain_Bps: float, tls_Bps: float) -> float:
    """Return the rate of what TLS does beside the rest."""
    more_s = 1.0 / tls_Bps - 1.0 / plain_Bps
    return 1.0 / more_s if more_s > 1e-15 else float("inf")


def _measured(secret: bytes | None, rounds: int, places: Sequence[Place]) -> list[Times]:
    """Start both processes; return the times of each."""
    peers = tuple(f"{place.address}:{port}" for place, port in zip(places, free_ports(2), strict=True))
    parts = [msgspec.json.encode(Part(rank, peers, secret, rounds)) for rank in range(2)]
    with _started(places) as processes:
        for process, part in zip(processes, parts, strict=True):
            assert process.stdin is not None
            process.stdin.write(part)
            process.stdin.close()
            process.stdin = None  # `communicate` would flush it
        try:
            said = [process.communicate(timeout=TIMEOUT_S) for process in processes]
        except subprocess.TimeoutExpired:
            raise HcsimError(f"two processes of this machine did not measure messages within {TIMEOUT_S:g} s") from None
        for process, (_, errors) in zip(processes, said, strict=True):
            if process.returncode:
                last = errors.decode(errors="replace").strip().rpartition("\n")[2]
                raise HcsimError(f"a process that measures messages failed: {last or process.returncode}")
    return [msgspec.json.decode(output, type=Times) for output, _ in said]


@contextmanager
def _started(places: Sequence[Place]) -> Iterator[list[subprocess.Popen[bytes]]]:
    environment = {**os.environ, **ONE_THREAD}
    commands = [[*place.prefix, sys.executable, "-m", __spec__.name] for place in places]
    pipe = subprocess.PIPE
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.extend(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) for command in commands
        )
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


async def take_part(part: Part) -> Times:
    """Be one of the two ranks."""
    tls = None
    if part.secret is not None:
        tls = ClusterTls(NodeKey(os.urandom(SEED_BYTES)), ClusterSecret(part.secret))
    async with real_group(part.rank, part.peers, tls=tls, insecure=tls is None, shared_memory=False) as group:
        values: Mapping[Turn, np.ndarray] = {turn: np.zeros(turn.size_bytes // 4, np.float32) for turn in TURNS}
        times: list[list[float]] = [[] for _ in TURNS]
        for number in range(part.rounds + 1):
            for turn, samples in zip(TURNS, times, strict=True):
                await group.barrier()
                began_s = time.process_time()
                for _ in range(turn.repeats):
                    await _once(group, turn, values[turn])
                if number:  # the first round opens connections and windows
                    samples.append((time.process_time() - began_s) / turn.repeats)
        await group.barrier()
    return Times(tuple(map(tuple, times)))


async def _once(group: Group, turn: Turn, values: np.ndarray) -> None:
    if turn.kind != "stream":
        await group.all_reduce(values, algorithm=turn.kind)
    elif group.rank == 0:
        await group.send(values, 1)
    else:
        await group.recv(values, 0)


if __name__ == "__main__":
    done = asyncio.run(take_part(msgspec.json.decode(sys.stdin.buffer.read(), type=Part)))
    sys.stdout.buffer.write(msgspec.json.encode(done))
