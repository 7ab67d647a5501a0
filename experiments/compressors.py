"""How fast compressors are in one thread, beside the plain expressions one would write, in one run.

    python -m experiments.compressors --json compressors.json

Figures are GB of input a second. The plain expressions are the quickest of numpy's and torch's that we know, with
ready memory where they allow it; they check nothing and write no header. Ours and the plain one take turns, each goes
first every other time, and a figure is a median over the turns, so that noise hits both alike; time is the thread's
own, which other programs do not lengthen. "Over plain" is the median of the turns' ratios. Ours refuse a NaN or an
infinity wherever it is, but for random-k, which looks only at what it sends of so large a tensor; "over checked" is for
a plain expression that refuses what ours does, by the quickest one for that.
`copy` is `np.copyto` of the same array, the most that memory allows. The last two columns are what
`hcsim/compressors/codec.py` holds: bytes that a copy would have moved, for each byte of input.
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
import scipy.fft
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
from hcsim.compressors.kernels import COMPILED
from hcsim.compressors.registry import make

Row = dict[str, str | float]
Step = Callable[[], object]
RATIO = 0.01
RANK = 4
BLOCK = 256
SPARSE_BLOCK, SIDE = 4096, 64
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
    flat, target = x.reshape(-1), torch.from_numpy(out.reshape(-1))
    magnitudes, mask = np.empty_like(flat), np.empty(flat.size, bool)

    def encode() -> tuple[Any, Array]:
        sample = np.abs(flat[::101])
        least = np.partition(sample, -math.ceil(RATIO * sample.size))[-math.ceil(RATIO * sample.size)]
        indices = np.flatnonzero(np.greater_equal(np.abs(flat, out=magnitudes), least, out=mask))
        return indices, flat[indices]

    indices, values = (torch.from_numpy(part) for part in encode())
    return Plain(encode, lambda: _scatter(target, indices, values))


def random_places(x: Array, out: Array) -> Plain:
    """With repetitions, which costs less than without. Both sides draw them: they are not sent."""
    flat, target = x.reshape(-1), torch.from_numpy(out.reshape(-1))
    draws, count = np.random.Generator(np.random.SFC64(0)), math.ceil(RATIO * x.size)

    taken = np.empty(count, np.float32)

    def places() -> Any:
        drawn = draws.integers(flat.size, size=count, dtype=np.int32)
        drawn.sort()
        return drawn

    def encode() -> Array:
        return flat.take(places(), out=taken, mode="clip")  # with "raise" it would not write to `out` itself

    values = torch.from_numpy(encode().copy())
    return Plain(encode, lambda: _scatter(target, torch.from_numpy(places()), values))


def _scatter(target: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    target.zero_()[indices] = values


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


def torch_int8_blocks(x: Array, out: Array) -> Plain:
    rows, back = torch.from_numpy(x.reshape(-1, BLOCK)), torch.from_numpy(out.reshape(-1, BLOCK))
    quotient, narrow = torch.empty_like(rows), torch.empty(rows.shape, dtype=torch.int8)

    def encode() -> torch.Tensor:
        scales = torch.abs(rows, out=quotient).amax(1, keepdim=True) / 127
        narrow.copy_(torch.mul(rows, 1 / scales, out=quotient).round_())
        return scales

    scales = encode()
    return Plain(encode, lambda: back.copy_(narrow).mul_(scales))


def numpy_int8_stochastic(x: Array, out: Array) -> Plain:
    draws = np.random.Generator(np.random.SFC64(0))
    quotient, drawn, multiples = np.empty_like(x), np.empty_like(x), np.empty(x.shape, np.int8)

    def encode() -> float:
        scale = max(float(x.max()), -float(x.min())) / 127
        np.multiply(x, np.float32(1 / scale), out=quotient)
        np.add(quotient, draws.random(out=drawn, dtype=np.float32), out=quotient)
        np.copyto(multiples, np.floor(quotient, out=quotient), casting="unsafe")
        return scale

    scale = np.float32(encode())
    return Plain(encode, lambda: np.multiply(multiples, scale, out=out))


def signs(x: Array, out: Array) -> Plain:
    wide, negative = torch.from_numpy(x), np.empty(x.size, bool)
    magnitudes = torch.empty_like(wide)
    of_bytes = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32)

    def encode() -> tuple[float, Any]:
        mean = float(torch.abs(wide, out=magnitudes).mean())
        return mean, np.packbits(np.less(x.reshape(-1), 0, out=negative))

    mean, packed = encode()
    return Plain(encode, lambda: np.take(of_bytes * np.float32(mean), packed, 0, out.reshape(-1, 8), "clip"))


def torch_int4_blocks(x: Array, out: Array) -> Plain:
    rows, back = torch.from_numpy(x.reshape(-1, BLOCK)), torch.from_numpy(out.reshape(-1, BLOCK))
    quotient, narrow = torch.empty_like(rows), torch.empty(rows.shape, dtype=torch.int8)
    packed = torch.empty((len(rows), BLOCK // 2), dtype=torch.int8)

    def encode() -> torch.Tensor:
        scales = torch.abs(rows, out=quotient).amax(1, keepdim=True) / 7
        narrow.copy_(torch.mul(rows, 1 / scales, out=quotient).round_())
        torch.bitwise_or(narrow[:, ::2] & 15, narrow[:, 1::2] << 4, out=packed)
        return scales

    def decode() -> None:
        narrow[:, ::2] = packed << 4 >> 4
        narrow[:, 1::2] = packed >> 4
        back.copy_(narrow).mul_(scales)

    scales = encode()
    return Plain(encode, decode)


def torch_int2_blocks(x: Array, out: Array) -> Plain:
    """With the border of normally distributed numbers, and the scale that is best for them."""
    rows, back = torch.from_numpy(x.reshape(-1, BLOCK)), torch.from_numpy(out.reshape(-1, BLOCK))
    magnitudes, codes = torch.empty_like(rows), torch.empty(rows.shape, dtype=torch.uint8)
    levels = torch.tensor([1.0, 3.0, -1.0, -3.0])

    def encode() -> tuple[torch.Tensor, torch.Tensor]:
        means = torch.abs(rows, out=magnitudes).mean(1, keepdim=True)
        codes.copy_(magnitudes > 1.25 * means).add_((rows < 0).to(torch.uint8), alpha=2)
        quarters = [codes[:, at::4] << 2 * at for at in range(4)]
        return means * 0.624, quarters[0] | quarters[1] | quarters[2] | quarters[3]

    def decode() -> None:
        for at in range(4):
            back[:, at::4] = levels[(packed >> 2 * at & 3).to(torch.int32)]
        back.mul_(scales)

    scales, packed = encode()
    return Plain(encode, decode)


def torch_top_of_blocks(x: Array, out: Array) -> Plain:
    rows, back = torch.from_numpy(x.reshape(-1, SPARSE_BLOCK)), torch.from_numpy(out.reshape(-1, SPARSE_BLOCK))

    def encode() -> tuple[torch.Tensor, torch.Tensor]:
        places = rows.abs().topk(math.ceil(RATIO * SPARSE_BLOCK), sorted=False).indices
        return places, rows.gather(1, places)

    places, values = encode()
    return Plain(encode, lambda: back.zero_().scatter_(1, places, values))


def torch_top_of_cosines(x: Array, out: Array) -> Plain:
    """Products with the matrix of cosines, by BLAS."""
    high, wide = x.shape[0] // SIDE, x.shape[1] // SIDE
    blocks, back = (torch.from_numpy(each).view(high, SIDE, wide, SIDE) for each in (x, out))
    basis = torch.from_numpy(scipy.fft.dct(np.eye(SIDE, dtype=np.float32), norm="ortho", axis=0))

    def encode() -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.einsum("ia,yaxb,jb->yxij", basis, blocks, basis).reshape(-1, SPARSE_BLOCK)
        places = rows.abs().topk(math.ceil(RATIO * SPARSE_BLOCK), sorted=False).indices
        return places, rows.gather(1, places)

    def decode() -> None:
        rows = torch.zeros(high * wide, SPARSE_BLOCK).scatter_(1, places, values).view(high, wide, SIDE, SIDE)
        back.copy_(torch.einsum("ia,yxij,jb->yaxb", basis, rows, basis))

    places, values = encode()
    return Plain(encode, decode)


def factors(x: Array, out: Array) -> Plain:
    """Transposed: BLAS is twice as quick with long rows."""
    start = np.random.default_rng(0).standard_normal((RANK, x.shape[1]), np.float32)

    def encode() -> tuple[Array, Array]:
        p = np.linalg.qr((start @ x.T).T)[0]
        return p, p.T @ x

    p, q = encode()
    return Plain(encode, lambda: np.matmul(p, q, out=out))


def split_zstd(x: Array, out: Array) -> Plain:
    planes, frame = np.empty((4, x.size), np.uint8), np.empty(x.nbytes + (1 << 20), np.uint8)
    by_element, joined = x.view(np.uint8).reshape(-1, 4), out.view(np.uint8).reshape(-1, 4)

    def encode() -> int:
        np.copyto(planes, by_element.T)
        with zstandard.ZstdCompressor(level=1).stream_reader(planes.reshape(-1).data, size=planes.size) as reader:
            return reader.readinto(frame.data)

    packed = frame[: encode()].copy()

    def decode() -> None:
        with zstandard.ZstdDecompressor().stream_reader(packed.data) as reader:
            reader.readinto(planes.reshape(-1).data)
        for place, plane in enumerate(planes):
            joined[:, place] = plane

    return Plain(encode, decode)


CASES: dict[str, Callable[[Array, Array], Plain]] = {
    "none": copies,
    f"topk:{RATIO}": sampled_threshold,
    f"randomk:{RATIO}": random_places,
    "fp16": partial(torch_cast, torch.float16),
    "bf16": partial(torch_cast, torch.bfloat16),
    "int8": torch_int8,
    f"int8:block={BLOCK}": torch_int8_blocks,
    "int8:stochastic": numpy_int8_stochastic,
    "int4": torch_int4_blocks,
    "int2": torch_int2_blocks,
    f"blocktopk:{RATIO}": torch_top_of_blocks,
    f"dcttopk:{RATIO}": torch_top_of_cosines,
    "onebit": signs,
    f"powersgd:{RANK}": factors,
    "zstd": split_zstd,
}


BLIND = ("none", f"topk:{RATIO}", f"blocktopk:{RATIO}", "fp16", "bf16", "zstd")
"""Whose plain expression would not meet a NaN on its way: it has to look for one."""


def is_finite(x: torch.Tensor) -> bool:
    """A sum is finite only if all is, and torch adds at the speed of memory; one that overflows says nothing."""
    return math.isfinite(float(x.sum())) or bool(x.isfinite().all())


def measure(spec: str, x: Array, turns: int) -> Row:
    """Copy, ours and the plain one in turn, several times."""
    sender, receiver = make(spec, seed=0, rank=0), make(spec, seed=0, rank=0)
    out, elsewhere = np.zeros_like(x), np.zeros_like(x)
    payload = sender.encode(x, OF).copy()
    sender.commit(OF.step)  # from here on it starts warm, as in the middle of a training
    plain, wide = CASES[spec](x, out), torch.from_numpy(x)
    steps: dict[str, Step] = {
        "copy": lambda: np.copyto(elsewhere, x),
        "encode": lambda: sender.encode(x, OF),
        "plain_encode": plain.encode,
        "decode": lambda: receiver.decode(payload, out, OF),
        "plain_decode": plain.decode,
        "check": lambda: is_finite(wide),
    }
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        for name, step in list(steps.items())[:: -1 if turn % 2 else 1]:
            start_s = thread_time()
            step()
            if turn:  # the first one warms up
                times_s[name].append(thread_time() - start_s)
    looks = times_s.pop("check")
    checked_s = [sum(each) for each in zip(times_s["plain_encode"], looks, strict=True)]
    median_s = {name: statistics.median(each) for name, each in times_s.items()}
    rates: Row = {f"{name}_GBps": x.nbytes / each_s / 1e9 for name, each_s in median_s.items()}
    return {
        "compressor": spec,
        "ratio": x.nbytes / payload.size,
        **rates,
        "encode_over_plain": _over(times_s["plain_encode"], times_s["encode"]),
        "encode_over_checked": _over(checked_s if spec in BLIND else times_s["plain_encode"], times_s["encode"]),
        "decode_over_plain": _over(times_s["plain_decode"], times_s["decode"]),
        "encode_factor": 2 * median_s["encode"] / median_s["copy"],
        "decode_factor": 2 * median_s["decode"] / median_s["copy"],
    }


def _over(plain_s: list[float], ours_s: list[float]) -> float:
    return statistics.median(plain / ours for plain, ours in zip(plain_s, ours_s, strict=True))


def rows(chosen: list[str], size: int, turns: int) -> Iterator[Row]:
    side = max(BLOCK, math.isqrt(size) // BLOCK * BLOCK)
    x = np.random.default_rng(0).standard_normal((side, max(SIDE, size // side // SIDE * SIDE)), np.float32)
    torch.set_num_threads(1)
    with threadpool_limits(1):
        for spec in chosen:
            yield measure(spec, x, turns)


def table(measured: list[Row]) -> Table:
    loops = "compiled" if COMPILED else "plain"
    result = Table(title=f"compressors in one thread, {loops} loops, GB of input a second", box=box.SIMPLE_HEAD)
    headings = ("", "ratio", "copy", "encode", "plain", "decode", "plain", "encode over plain", "over checked",
                "decode over plain", "encode factor", "decode factor")  # fmt: skip
    for heading in headings:
        result.add_column(heading, justify="right" if heading else "left")
    for row in measured:
        result.add_row(*(f"{value:.3g}" if isinstance(value, float) else value for value in row.values()))
    return result


def main(
    size: Annotated[int, typer.Option(min=1 << 16, help="Elements of the tensor, roughly.")] = 25_000_000,
    turns: Annotated[int, typer.Option(min=1, max=100, help="Turns of each, of which the median counts.")] = 7,
    only: Annotated[str, typer.Option(help="Compressors to measure.")] = ",".join(CASES),
    json_file: Annotated[str | None, typer.Option("--json", help="Write one row per compressor to this file.")] = None,
) -> None:
    """The compressors' speed in one thread, beside plain expressions in the same run."""
    names = asked.chosen(only, CASES)
    asked.check_json(json_file)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        measured = list(progress.track(rows(names, size, turns), total=len(names), description="measuring"))
    asked.hand_over(json_file, measured, lambda: Console(width=120).print(table(measured)))


if __name__ == "__main__":
    asked.run(main)
