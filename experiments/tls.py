"""What TLS costs on a stream: hcsim's channels over TCP in plaintext and with TLS, in turns in one run.

    python -m experiments.tls --json tls.json
    sudo python -m experiments.tls --mbit 2500

Two processes, one sends frames of 4 MiB, the other receives them into one buffer. `bound` is what the cipher alone
makes of the plaintext: to the CPU time that each end spends on a byte in plaintext it adds the time that OpenSSL, as
Python has it, takes to encrypt or decrypt that byte in memory. `over bound` is TLS's CPU time over that.

With `--mbit` both ends are in network namespaces on a switch, behind cables of that rate (Linux, root): what counts
there is the rate. CPU times are the processes' own, so noise of other processes hardly changes them. Medians over the
rounds.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from experiments import asked
from experiments.ddp.shaped import BURST
from experiments.peers.crew import CONTROL, Crew, TeamFailed, free_ports, module, working
from experiments.peers.peer import Command
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.tls import ClusterTls, Tls
from hcsim.runtime.channel import Channel, Listener
from hcsim.runtime.frame import Header
from tests.real.namespaces import lan, obstacle

FRAME_BYTES = 4 << 20
RECORD_BYTES = 16 << 10
SECRET = ClusterSecret(hashlib.sha256(b"experiments.tls").digest()[:16])
WAYS = ("plaintext", "TLS")


class Turn(msgspec.Struct, frozen=True):
    """Send so many frames over this way."""

    way: str
    frames: int


class Spent(msgspec.Struct, frozen=True):
    """What an end spent on a turn."""

    wall_s: float
    cpu_s: float
    encrypt_s: float = 0.0
    """OpenSSL's time to encrypt as many bytes in memory, and to decrypt them."""
    decrypt_s: float = 0.0


def _credentials(number: int) -> ClusterTls:
    return ClusterTls(NodeKey(hashlib.sha256(bytes([number])).digest()), SECRET)


def cipher(turn_bytes: int) -> tuple[float, float]:
    """CPU seconds that the `ssl` module takes to encrypt so many bytes in memory, and to decrypt them."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = Tls(_credentials(0)).context(server_side=False).wrap_bio(to_client, to_server)
    server = Tls(_credentials(1)).context(server_side=True).wrap_bio(to_server, to_client, server_side=True)
    pending = [client, server]
    while pending:
        for end in tuple(pending):
            try:
                end.do_handshake()
                pending.remove(end)
            except ssl.SSLWantReadError:
                continue
    data, into = bytes(RECORD_BYTES), bytearray(RECORD_BYTES)
    encrypt_s = decrypt_s = 0.0
    for _ in range(turn_bytes // RECORD_BYTES):
        start_s = time.process_time()
        client.write(data)
        encrypted_s = time.process_time()
        server.read(RECORD_BYTES, into)
        encrypt_s += encrypted_s - start_s
        decrypt_s += time.process_time() - encrypted_s
    return encrypt_s, decrypt_s


async def _end(folder: str, address: str, ports: list[int], sends: bool) -> None:
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(str(Path(folder, CONTROL)))
        lines = control.makefile("rwb")
        async with (
            RealHost(RealOptions("plain", insecure=True, shared_memory=False)) as plain,
            RealHost(RealOptions("tls", tls=_credentials(int(sends)), shared_memory=False)) as secure,
        ):
            channels: dict[str, Channel] = {}
            for way, host, port in zip(WAYS, (plain, secure), ports, strict=True):
                where = f"{address}:{port}"
                listener: Listener | None = None if sends else await host.listen(where)
                channels[way] = await host.connect(where) if listener is None else await listener.accept()
                channels[way].limit(FRAME_BYTES)
            buffer = memoryview(bytearray(FRAME_BYTES))
            while line := await asyncio.to_thread(lines.readline):
                spent = await _take(msgspec.json.decode(line, type=Turn), channels, buffer, sends)
                lines.write(msgspec.json.encode(spent) + b"\n")
                lines.flush()


async def _take(turn: Turn, channels: dict[str, Channel], buffer: memoryview, sends: bool) -> Spent:
    channel = channels[turn.way]
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(turn.frames):
        if sends:
            await channel.send(Header(FRAME_BYTES), buffer)
        else:
            await channel.recv(lambda _: buffer)
    if sends:
        await channel.recv(lambda _: None)
    else:
        await channel.send(Header(0))
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return Spent(wall_s, cpu_s, *cipher(turn.frames * FRAME_BYTES) if turn.way == "TLS" else ())


def measure(mbit: int | None, rounds: int, frames: int) -> list[dict[str, Any]]:
    """A row for each way."""
    with ExitStack() as stack:
        prefixes: list[list[str]] = [[], []]
        address, ports = "127.0.0.1", free_ports(2)
        if mbit is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hcsim-")))
            machines = list(stack.enter_context(lan(folder, ["sender", "receiver"])))
            prefixes, address = [machine.prefix for machine in machines], machines[1].ip
            shape = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{mbit}mbit", "burst", BURST]
            for prefix in prefixes:
                subprocess.run([*prefix, *shape, "latency", "1s"], check=True)

        def commands(folder: Path) -> list[Command]:
            ends = [json.dumps([str(folder), address, ports, sends]) for sends in (True, False)]
            return [[*prefix, *module("experiments.tls", end)] for prefix, end in zip(prefixes, ends, strict=True)]

        crew = stack.enter_context(working(2, commands))
        _turns(crew, 1, 2)
        return _rows(_turns(crew, rounds, frames), frames * FRAME_BYTES, mbit)


def _turns(crew: Crew, rounds: int, frames: int) -> dict[str, list[list[Spent]]]:
    spent: dict[str, list[list[Spent]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, before in spent.items():
            before.append(crew.take(Turn(way, frames), Spent))
    return spent


def _rows(spent: dict[str, list[list[Spent]]], turn_bytes: int, mbit: int | None) -> list[dict[str, Any]]:
    rows = []
    ciphers = [end.encrypt_s + end.decrypt_s for turn in spent["TLS"] for end in turn]
    cpu_s = {way: statistics.median(sum(end.cpu_s for end in turn) for turn in turns) for way, turns in spent.items()}
    bounds = {"plaintext": cpu_s["plaintext"], "TLS": cpu_s["plaintext"] + statistics.median(ciphers)}
    for way, turns in spent.items():
        wall_s = statistics.median(max(end.wall_s for end in turn) for turn in turns)
        rows.append(
            {
                "way": way,
                "mbit": mbit,
                "gigabytes_per_s": turn_bytes / wall_s / 1e9,
                "cpu_ns_per_byte": cpu_s[way] / turn_bytes * 1e9,
                "bound_ns_per_byte": bounds[way] / turn_bytes * 1e9,
                "over_plaintext": cpu_s[way] / cpu_s["plaintext"],
                "over_bound": cpu_s[way] / bounds[way],
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """For a person."""
    link = "loopback" if rows[0]["mbit"] is None else f"a link of {rows[0]['mbit']:,} Mbit/s"
    result = Table(title=f"A stream over {link}; CPU time of both ends", box=box.SIMPLE_HEAD)
    for heading in ("way", "GB/s", "CPU ns/byte", "bound", "over plaintext", "over bound"):
        result.add_column(heading, justify="left" if heading == "way" else "right")
    for row in rows:
        numbers = [row[key] for key in ("gigabytes_per_s", "cpu_ns_per_byte", "bound_ns_per_byte")]
        ratios = [row["over_plaintext"], row["over_bound"]]
        result.add_row(row["way"], *(f"{number:.3f}" for number in numbers), *(f"{ratio:.2f}" for ratio in ratios))
    return result


def main(
    mbit: Annotated[int | None, typer.Option(min=1, help="Over a link of this rate, not loopback.")] = None,
    rounds: Annotated[int, typer.Option("--repeat", min=1, max=1000, help="Rounds in which both take a turn.")] = 9,
    frames: Annotated[int, typer.Option(min=1, help="Frames of 4 MiB in a turn.")] = 64,
    json_file: Annotated[str | None, typer.Option("--json", help="Write one row per way to this file.")] = None,
) -> None:
    """What TLS costs on a stream between two processes, beside the cipher's own time."""
    asked.check_json(json_file)
    if mbit is not None and (why_not := obstacle()):
        raise typer.BadParameter(f"left out: {why_not}", param_hint="--mbit")
    # Namespaces and processes are removed on the way out, also when somebody ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        rows = measure(mbit, rounds, frames)
    except TeamFailed as failure:
        raise typer.BadParameter(str(failure)) from None
    asked.write_json(json_file, rows)
    Console().print(table(rows))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        asyncio.run(_end(*json.loads(sys.argv[1])))
    else:
        asked.run(main)
