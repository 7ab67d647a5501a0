"""Predicted against measured memory of real training processes.

    python -m experiments.memory
    python -m experiments.memory --device cuda --only "gpt2:tokens=512 resnet50 vit-b16"

Two ranks train torch modules of the same shapes as a task's, with data parallelism, with zero3, or as two stages of a
pipeline, each in a process of its own. The last rank, which evaluates nothing, says what it has used at most from the
moment before it builds the model on: on a processor its resident memory (Linux tells the peak), on CUDA what torch has
allocated there. The prediction is `hcsim.training.memory`'s, from shapes alone; which blocks a stage has, and the kind
of the GPU, are those of the measurement. No time is measured, so that the machine may have other
things to do.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import torch
import typer
from msgspec.structs import replace
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as ops

from experiments import asked
from experiments.peers.memory import peak_bytes, reset_peak
from hcsim import real_group, train
from hcsim.collectives.select import Options
from hcsim.config import Training
from hcsim.config.training import read_spec
from hcsim.training.memory import FRAMEWORK_BYTES, Held, MemoryNeed, Place, cublas_bytes, device_bytes, memory_need
from hcsim.training.pipeline.strategy import Pipeline
from hcsim.training.precision import prepared
from hcsim.training.run import Point, Run
from hcsim.training.strategies import held_by, strategy
from hcsim.training.task import Defaults, Task, Tie
from hcsim.training.tasks import TASKS, task
from hcsim.training.tasks.torch_stage import TorchStage
from hcsim.training.tasks.torch_task import Dataset, NetworkSpec, TorchTask
from hcsim.training.tasks.transformer import Architecture, Gpt2, Transformer
from hcsim.training.tasks.vision import ResNet18, ResNet50, ViTBase, ViTSmall
from hcsim.units import PositiveSeconds

RANKS = 2
STEPS = 3
TEXT = "transformer:layers=6,width=512,heads=8,vocabulary=16000,tokens=128"
USUAL = (TEXT, "resnet18:side=96", "vit-s16:side=96")
RANK = "--as-rank"


class Layer(nn.Module):
    """A layer of GPT-2, or of a vision transformer."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        q, k, v = (
            each(n).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        attended = ops.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.down(ops.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """Of tokens and their positions."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(rows, of.width, _weight=torch.empty(rows, of.width)) for rows in (of.vocabulary, of.positions)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.positions.weight[: x.shape[1]]  # type: ignore[no-any-return]


class Head(nn.Module):
    """A norm, and the embedding's matrix."""

    def __init__(self, embedding: Embedding, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.shared = (embedding,)
        """In a tuple, since its parameters are the embedding's."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(self.norm(x), self.shared[0].tokens.weight)


def decoder(of: Architecture) -> Sequence[nn.Module]:
    embedding = Embedding(of)
    layers = (Layer(of.width, of.head_count, causal=True) for _ in range(of.depth))
    return [embedding, *layers, Head(embedding, of.width)]


class Patches(nn.Module):
    """Of an image, with a token for its class."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 16, 16)
        self.kind = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (side // 16) ** 2 + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(2).transpose(1, 2)
        return torch.cat([self.kind.expand(len(x), -1, -1), x], 1) + self.positions


class First(nn.Module):
    """The token of the class."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def vision_transformer(of: ViTBase | ViTSmall) -> Sequence[nn.Module]:
    layers = (Layer(of.width, of.heads, causal=False) for _ in range(12))
    head = nn.Sequential(nn.LayerNorm(of.width), First(), nn.Linear(of.width, 1000))
    return [Patches(of.width, of.side), *layers, head]


def norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels, track_running_stats=False)


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), norm(outputs)]


class Residual(nn.Module):
    """ResNet's basic block, or its bottleneck."""

    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            middle = [*conv(channels, width, 1), nn.ReLU(), *conv(width, width, 3, stride), nn.ReLU()]
            self.main = nn.Sequential(*middle, *conv(width, outputs, 1))
        else:
            self.main = nn.Sequential(*conv(channels, width, 3, stride), nn.ReLU(), *conv(width, width, 3))
        self.shortcut = nn.Sequential(*(conv(channels, outputs, 1, stride) if channels != outputs else ()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.main(x) + self.shortcut(x))


def residual_network(of: ResNet18 | ResNet50) -> Sequence[nn.Module]:
    blocks: list[nn.Module] = [nn.Sequential(*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))]
    channels = 64
    for stage, depth in enumerate(of.depths):
        for number in range(depth):
            width = 64 * 2**stage
            blocks.append(Residual(channels, width, 2 if stage and not number else 1, of.bottleneck))
            channels = (4 if of.bottleneck else 1) * width
    return [*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))]


def torch_task(spec: str, samples: int) -> TorchTask:
    """Return a task with data of the same shapes as the spec's."""
    figures = read_spec(spec, {spec.partition(":")[0]: TASKS[spec.partition(":")[0]]}, "task")  # type: ignore[dict-item]
    if isinstance(figures, Transformer | Gpt2):
        of = figures.architecture if isinstance(figures, Gpt2) else _architecture(figures)
        codes = torch.randint(0, of.vocabulary, (samples, figures.tokens + 1))
        data = Dataset(codes[:, :-1].contiguous(), codes[:, 1:].contiguous())
        return _task(spec, lambda: decoder(of), data, (Tie("0.tokens.weight", 0, of.depth + 1),))
    if not isinstance(figures, ViTBase | ViTSmall | ResNet18 | ResNet50):
        raise typer.BadParameter(f"{spec}: there are no torch modules of it here", param_hint="--only")
    images = Dataset(torch.rand(samples, 3, figures.side, figures.side), torch.randint(0, 1000, (samples,)))
    if isinstance(figures, ViTBase | ViTSmall):
        vision = figures
        return _task(spec, lambda: vision_transformer(vision), images)
    network = figures
    return _task(spec, lambda: residual_network(network), images)


def _architecture(of: Transformer) -> Architecture:
    assert of.layers is not None
    assert of.width is not None
    return Architecture(of.layers, of.width, of.vocabulary, of.heads or 0, positions=of.tokens)


def _task(spec: str, modules: Any, data: Dataset, ties: tuple[Tie, ...] = ()) -> TorchTask:
    held_out = Dataset(data.inputs[:1], data.targets[:1])
    return TorchTask(spec, NetworkSpec(modules, 1.0, ties), data, held_out, Defaults(0.01, 0.9, 1))


# A rank's process.


class Cell(msgspec.Struct, frozen=True):
    """What is measured."""

    spec: str
    batch: int
    device: str
    optimizer: str = "sgd"
    recompute: bool = False
    strategy: str = "ddp"
    ports: tuple[int, ...] = ()

    @property
    def settings(self) -> Training:
        return Training(
            task=self.spec, strategy=self.strategy, steps=STEPS,
            batch=self.batch, optimizer=self.optimizer, recompute=self.recompute,  # type: ignore[arg-type]
            lr=1e-4, momentum=0.9 if self.optimizer == "sgd" else None, timeout_s=PositiveSeconds(300),
        )  # fmt: skip


class Measured(msgspec.Struct, frozen=True):
    """What a rank has used, and the blocks that it has computed."""

    peak_bytes: int
    first: int
    end: int
    capability: tuple[int, int] = (0, 0)
    """Of a CUDA device."""


class _Blocks:
    """Notes which blocks the rank computes."""

    def __init__(self) -> None:
        self.span = 0, 0

    def point(self, rank: int, point: Point) -> None:
        """Called after each step."""

    def finished(self, run: Run) -> None:
        """Note them."""
        task = run.learner.task
        self.span = (task.first, task.end) if isinstance(task, TorchStage) else (0, len(task.blocks))


async def as_rank(cell: Cell, rank: int) -> Measured:
    torch.manual_seed(1)
    what = torch_task(cell.spec, RANKS * cell.batch)
    blocks = _Blocks()
    peers = [f"127.0.0.1:{port}" for port in cell.ports]
    async with real_group(rank, peers, device=cell.device, options=Options(timeout_s=300.0)) as group:
        await group.barrier()
        if cell.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            await train(group, cell.settings, 1, blocks, what)
            return Measured(torch.cuda.max_memory_allocated(), *blocks.span, torch.cuda.get_device_capability())
        reset_peak()
        before = peak_bytes() or 0
        await train(group, cell.settings, 1, blocks, what)
        return Measured((peak_bytes() or 0) - before, *blocks.span)


def measured(cell: Cell) -> Measured:
    """Return the peak of the last rank."""
    # Large arrays come from the system and go back to it, so that what is resident is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MALLOC_TRIM_THRESHOLD_": str(1 << 16)}
    command = [sys.executable, "-m", "experiments.memory", RANK, msgspec.json.encode(cell).decode()]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return msgspec.json.decode(said[-1], type=Measured)


def predicted(cell: Cell, found: Measured) -> tuple[int, MemoryNeed]:
    """Return what the last rank uses of the memory that is measured, and all that it needs."""
    settings = cell.settings
    own = prepared(task(cell.spec), settings)
    held = _held(cell, own, found)
    need = memory_need(own, settings, held, Place(RANKS, cell.batch, mirrored=cell.device != "cpu"))
    if cell.device == "cpu":
        return need.total - FRAMEWORK_BYTES, need
    return device_bytes(own, held, cell.batch) + cublas_bytes(found.capability), need


def _held(cell: Cell, own: Task, found: Measured) -> Held:
    chosen, last = strategy(cell.strategy), RANKS - 1
    if isinstance(chosen, Pipeline):
        return chosen.held_at(cell.settings, own, RANKS, (last, found.first, found.end))
    return held_by(chosen, last, RANKS)


CELLS: dict[str, tuple[dict[str, object], ...]] = {
    "ddp": ({}, {"optimizer": "adamw"}, {"recompute": True}),
    "zero3": ({"optimizer": "adamw"}, {"optimizer": "adamw", "recompute": True}),
    "pipeline": tuple({"strategy": f"pipeline:{schedule},microbatches=4"} for schedule in ("1f1b", "gpipe")),
}
"""What is measured of each strategy."""


def _cells(usual: Cell, strategies: Sequence[str]) -> list[Cell]:
    if unknown := [name for name in strategies if name not in CELLS]:
        raise typer.BadParameter(f"{unknown[0]}: known: {', '.join(CELLS)}", param_hint="--strategies")
    return [replace(usual, **{"strategy": name, **fields}) for name in strategies for fields in CELLS[name]]


def free_ports() -> tuple[int, ...]:
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    only: Annotated[str, typer.Option(help="Tasks by shape, joined by spaces.")] = " ".join(USUAL),
    batch: Annotated[int, typer.Option(help="Samples of each rank.", min=1)] = 8,
    strategies: Annotated[str, typer.Option(help="Joined by spaces.")] = "ddp zero3 pipeline",
    json: Annotated[str | None, typer.Option(help="A file for the figures.")] = None,
) -> None:
    """Compare predicted with measured memory."""
    asked.check_json(json)
    table = Table(box=box.SIMPLE)
    names = ("task", "strategy", "optimizer", "recompute")
    for heading in (*names, "predicted", "measured", "error"):
        table.add_column(heading, justify="left" if heading in names else "right")
    rows = []
    for spec in only.split():
        for cell in _cells(Cell(spec, batch, device), strategies.split()):
            found = measured(replace(cell, ports=free_ports()))
            expected, need = predicted(cell, found)
            error = expected / found.peak_bytes - 1
            rows.append(
                {**msgspec.to_builtins(cell), "predicted": expected, "measured": found.peak_bytes, "parts": need.parts}
            )
            sizes = (f"{each / (1 << 20):.1f} MiB" for each in (expected, found.peak_bytes))
            what = cell.strategy, cell.optimizer, str(cell.recompute).lower()
            table.add_row(spec, *what, *sizes, f"{100 * error:+.1f} %")
            print(spec, *what, f"{100 * error:+.1f} %", file=sys.stderr, flush=True)
    Console().print(table)
    if json is not None:
        with open(json, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(rows)))


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        outcome = asyncio.run(as_rank(msgspec.json.decode(sys.argv[2], type=Cell), int(sys.argv[3])))
        print(msgspec.json.encode(outcome).decode())
    else:
        asked.run(main)
