"""How fast compressors are in one thread, beside the plain expressions one would write, in one run.

    python -m experiments.compressors --json compressors.json

Figures are GB of input a second. The plain expressions are numpy's or torch's, into memory that is ready where they
allow it; they check nothing and write no header. Ours and the plain one take turns and each figure is a median
over the turns, so that noise hits both alike; time is the thread's own, which other programs do not lengthen.
`copy` is `np.copyto` of the same array, the most that memory allows. The last two columns are what
`hcsim/compressors/work.py` holds: bytes that a copy would have moved, for each byte of input.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from time import thread_time
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import typer
import zstandard
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from threadpoolctl import threadpool_limits

from experiments import asked
from hcsim.compressors.base import Array, Ident
from hcsim.compressors.registry import make

Row = dict[str, str | float]
Step = Callable[[], object]
RATIO = 0.01
RANK = 4
BLOCK = 256
OF = Ident("tensor")


class Plain(msgspec.Struct, frozen=True):
    """What one would write without us."""

    encode: Step
    decode: Step


def copies(x: Array, out: Array) -> Plain:
    kept = x.copy()
    return Plain(lambda: np.copyto(kept, x), lambda: np.copyto(out, kept))


def sampled_threshold(x: Array, out: Array) -> Plain:
    """Roughly as many as asked for: the exact number costs more."""
    flat, target = x.reshape(-1), out.reshape(-1)

    def encode() -> tuple[Any, Array]:
        sample = np.abs(flat[::101])
        least = np.partition(sample, -math.ceil(RATIO * sample.size))[-math.ceil(RATIO * sample.size)]
        indices = np.flatnonzero(np.abs(flat) >= least)
        return indices, flat[indices]

    return Plain(encode, partial(_scatter, target, *encode()))


def random_places(x: Array, out: Array) -> Plain:
    """With repetitions, which costs less than without. Both sides draw them: they are not sent."""
    flat, target, draws = x.reshape(-1), out.reshape(-1), np.random.default_rng(0)

    def places() -> Any:
        return np.sort(draws.integers(flat.size, size=math.ceil(RATIO * flat.size)))

    values = flat[places()]
    return Plain(lambda: flat[places()], lambda: _scatter(target, places(), values))


def _scatter(target: Array, indices: Any, values: Array) -> None:
    target.fill(0)
    target[indices] = values


def torch_cast(dtype: torch.dtype, x: Array, out: Array) -> Plain:
    wide, back = torch.from_numpy(x), torch.from_numpy(out)
    narrow = wide.to(dtype)
    return Plain(lambda: narrow.copy_(wide), lambda: back.copy_(narrow))


def torch_int8(x: Array, out: Array) -> Plain:
    wide, back = torch.from_numpy(x), torch.from_numpy(out)
    quotient, narrow = torch.empty_like(wide), torch.empty(wide.shape, dtype=torch.int8)

    def encode() -> float:
        least, most = wide.aminmax()
        scale = max(-float(least), float(most)) / 127
        narrow.copy_(torch.mul(wide, 1 / scale, out=quotient).round_())
        return scale

    scale = encode()
    return Plain(encode, lambda: back.copy_(narrow).mul_(scale))


def numpy_int8_blocks(x: Array, out: Array) -> Plain:
    rows, back = x.reshape(-1, BLOCK), out.reshape(-1, BLOCK)

    def encode() -> tuple[Any, Any]:
        scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        return scales, np.rint(rows / scales).astype(np.int8)

    scales, multiples = encode()
    return Plain(encode, lambda: np.multiply(multiples, scales, out=back))


def numpy_int8_stochastic(x: Array, out: Array) -> Plain:
    draws = np.random.Generator(np.random.SFC64(0))

    def encode() -> tuple[Any, Any]:
        scale = np.abs(x).max() / np.float32(127)
        return scale, np.floor(x / scale + draws.random(x.shape, np.float32)).astype(np.int8)

    scale, multiples = encode()
    return Plain(encode, lambda: np.multiply(multiples, scale, out=out))


def numpy_signs(x: Array, out: Array) -> Plain:
    def encode() -> tuple[Any, Any]:
        return np.abs(x).mean(), np.packbits(x < 0)

    mean, packed = encode()
    flat = out.reshape(-1)
    return Plain(encode, lambda: np.copyto(flat, np.where(np.unpackbits(packed, count=flat.size), -mean, mean)))


def factors(x: Array, out: Array) -> Plain:
    start = np.random.default_rng(0).standard_normal((x.shape[1], RANK), np.float32)

    def encode() -> tuple[Array, Array]:
        p = np.linalg.qr(x @ start)[0]
        return p, x.T @ p

    p, q = encode()
    return Plain(encode, lambda: np.matmul(p, q.T, out=out))


def split_zstd(x: Array, out: Array) -> Plain:
    def encode() -> bytes:
        planes = np.ascontiguousarray(x.reshape(-1).view(np.uint8).reshape(-1, 4).T)
        return zstandard.ZstdCompressor(level=1).compress(planes.data)

    packed = encode()

    def decode() -> None:
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed), np.uint8).reshape(4, -1)
        np.copyto(out.reshape(-1).view(np.uint8).reshape(-1, 4), planes.T)

    return Plain(encode, decode)


CASES: dict[str, Callable[[Array, Array], Plain]] = {
    "none": copies,
    f"topk:{RATIO}": sampled_threshold,
    f"randomk:{RATIO}": random_places,
    "fp16": partial(torch_cast, torch.float16),
    "bf16": partial(torch_cast, torch.bfloat16),
    "int8": torch_int8,
    f"int8:block={BLOCK}": numpy_int8_blocks,
    "int8:stochastic": numpy_int8_stochastic,
    "onebit": numpy_signs,
    f"powersgd:{RANK}": factors,
    "zstd": split_zstd,
}


def measure(spec: str, x: Array, turns: int) -> Row:
    """Copy, ours and the plain one in turn, several times."""
    sender, receiver = make(spec, seed=0, rank=0), make(spec, seed=0, rank=0)
    out, elsewhere = np.zeros_like(x), np.zeros_like(x)
    payload = sender.encode(x, OF).copy()
    plain = CASES[spec](x, out)
    steps: dict[str, Step] = {
        "copy": lambda: np.copyto(elsewhere, x),
        "encode": lambda: sender.encode(x, OF),
        "plain_encode": plain.encode,
        "decode": lambda: receiver.decode(payload, out, OF),
        "plain_decode": plain.decode,
    }
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        for name, step in steps.items():
            start_s = thread_time()
            step()
            if turn:  # the first one warms up
                times_s[name].append(thread_time() - start_s)
    median_s = {name: statistics.median(each) for name, each in times_s.items()}
    rates: Row = {f"{name}_GBps": x.nbytes / each_s / 1e9 for name, each_s in median_s.items()}
    return {
        "compressor": spec,
        "ratio": x.nbytes / payload.size,
        **rates,
        "encode_factor": 2 * median_s["encode"] / median_s["copy"],
        "decode_factor": 2 * median_s["decode"] / median_s["copy"],
    }


def rows(chosen: list[str], size: int, turns: int) -> Iterator[Row]:
    side = max(BLOCK, math.isqrt(size) // BLOCK * BLOCK)
    x = np.random.default_rng(0).standard_normal((side, max(1, size // side)), np.float32)
    torch.set_num_threads(1)
    with threadpool_limits(1):
        for spec in chosen:
            yield measure(spec, x, turns)


def table(measured: list[Row]) -> Table:
    result = Table(title="compressors in one thread, GB of input a second", box=box.SIMPLE_HEAD)
    headings = ("", "ratio", "copy", "encode", "plain", "decode", "plain", "encode factor", "decode factor")
    for heading in headings:
        result.add_column(heading, justify="right" if heading else "left")
    for row in measured:
        result.add_row(*(f"{value:.3g}" if isinstance(value, float) else value for value in row.values()))
    return result


def main(
    size: Annotated[int, typer.Option(min=1 << 16, help="Elements of the tensor, roughly.")] = 25_000_000,
    turns: Annotated[int, typer.Option(min=1, max=100, help="Turns of each, of which the median counts.")] = 5,
    only: Annotated[str, typer.Option(help="Compressors to measure.")] = ",".join(CASES),
    json_file: Annotated[str | None, typer.Option("--json", help="Write one row per compressor to this file.")] = None,
) -> None:
    """The compressors' speed in one thread, beside plain expressions in the same run."""
    names = asked.chosen(only, CASES)
    asked.check_json(json_file)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        measured = list(progress.track(rows(names, size, turns), total=len(names), description="measuring"))
    Console(width=120).print(table(measured))
    asked.write_json(json_file, measured)


if __name__ == "__main__":
    typer.run(main)
