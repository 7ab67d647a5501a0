"""Tasks with a model of torch modules: handwritten digits, and text.

Digits: scikit-learn's 1,797 images of 8 × 8 pixels, and a small convolutional network. There is no batch
normalisation and no dropout: a worker's gradient depends on its own samples alone, so that several workers
compute what one would.

Text, character by character: a small transformer that learns the names of Unicode's characters. The text must
be the same bytes on every machine. Every Python carries the frozen database of Unicode 3.2
(`unicodedata.ucd_3_2_0`), and Unicode never changes a name: that is 350 kB of text such as "GREEK SMALL LETTER
ALPHA WITH TONOS", one name to a line. Ideographs and Hangul syllables, whose names are made by a rule, are left
out. Names come in the order of their digests, so that the held-out tail has names of every script.
"""

from __future__ import annotations

import gzip
import hashlib
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import torch
from msgspec.structs import replace
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hcsim.errors import ConfigError, UsageError
from hcsim.files import file_of
from hcsim.rng import generator
from hcsim.runtime.channel import Phantom
from hcsim.training.blockwise import tied_blocks
from hcsim.training.layout import Layout, initial
from hcsim.training.task import Activations, Block, Defaults, Flat, Score, Tie, recomputed
from hcsim.training.tasks.torch_blocks import BlockPlan, TorchBlocks
from hcsim.training.tasks.torch_replica import (
    Array,
    ReplicaMemory,
    TorchReplica,
    compute_alike,
    freeze,
    layout_of,
    memory_on,
    place,
    shapes_in,
)
from hcsim.training.tasks.torch_stage import TorchStage

SCORED_AT_ONCE = 512
"""Samples evaluated at once, so that memory is bounded."""


class Dataset(msgspec.Struct, frozen=True):
    """Samples and their labels."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def digest(self) -> bytes:
        return hashlib.sha256(self.inputs.numpy().tobytes() + self.targets.numpy().tobytes()).digest()


class NetworkSpec(msgspec.Struct, frozen=True):
    """A network's factory."""

    modules: Callable[[], Sequence[nn.Module]]
    """Returns one module for each block."""
    gain: float
    """The gain of fresh weights: √2 where a ReLU follows (He et al., https://arxiv.org/abs/1502.01852), else 1."""
    ties: tuple[Tie, ...] = ()
    """The parameters that a block computes with and that are another block's; they are named there
    ("0.tokens.weight")."""


class TorchTask:
    """Classification of inputs: one class for each sample, or one for each position in it."""

    phantom = False
    recompute = False

    def __init__(
        self,
        name: str,
        model: NetworkSpec,
        training: Dataset,
        held_out: Dataset,
        defaults: Defaults,
        base: Path | None = None,
    ) -> None:
        """`base` is a saved model with the values of frozen parameters. Without it, they are drawn."""
        self.name = name
        self.defaults = defaults
        self.model = model
        self.training = training
        self.held_out = held_out
        self.blocks: Sequence[Block]
        self._entering: tuple[tuple[int, ...], ...]
        self.blocks, self._entering = zip(*walked(self._on_meta(), training.inputs[:1]), strict=True)
        self.frozen_layout = Layout.of([block.frozen for block in self.blocks])
        self.frozen = frozen_values(self.frozen_layout, model.gain, base)

    @property
    def samples(self) -> int:
        """The number of training samples."""
        return len(self.training.inputs)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr((self.name, [block.shapes for block in self.blocks])).encode())
        digest.update(self.training.digest() + self.held_out.digest() + self.frozen.tobytes())
        return digest.hexdigest()

    def replica(self, seed: int, device: str = "cpu") -> TorchReplica:
        replica = self.replica_in(memory_on(device, Layout.of([block.shapes for block in self.blocks]).length))
        replica.initialise(seed, self.model.gain)
        return replica

    def recomputing(self) -> TorchTask:
        """Return the task with replicas that keep only the inputs of blocks."""
        twin = copy(self)
        twin.blocks = recomputed(self.blocks)
        twin.recompute = True
        return twin

    def replica_in(self, memory: ReplicaMemory) -> TorchReplica:
        """Return a model over these arrays, with their present values."""
        data, modules = (self.training.inputs, self.training.targets), self.modules_on(memory.device)
        return TorchReplica(modules, self.loss, data, memory, recompute=self.recompute)

    @property
    def entering(self) -> tuple[int, ...]:
        """See `Sequential.entering`."""
        return tuple(prod(shape) for shape in self._entering)

    @property
    def ties(self) -> tuple[Tie, ...]:
        """See `Sequential.ties`."""
        return self.model.ties

    def stage(self, first: int, end: int) -> TorchStage:
        """See `Sequential.stage`."""
        return TorchStage(self, first, end)

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        return cross_entropy(outputs, targets)

    def entering_shape(self, block: int) -> tuple[int, ...]:
        """Return the shape of what enters the block, for one sample."""
        return self._entering[block]

    def blockwise(self, seed: int, device: str = "cpu", *, whole: bool) -> TorchBlocks:
        """Return a fresh model that is given its blocks one by one; `whole`: with all its parameters."""
        data, modules = (self.training.inputs, self.training.targets), self.modules_on(torch.device(device))
        draw = partial(initial, seed, gain=self.model.gain)
        replica = TorchBlocks(modules, self.loss, data, draw, BlockPlan(device, self.recompute, tied_blocks(self)))
        if whole:
            replica.parameters = np.concatenate([replica.fresh(block) for block in reversed(range(len(modules)))])
        return replica

    def modules_on(self, device: torch.device) -> Sequence[nn.Module]:
        """Return modules whose frozen parameters have their values, and whose trained ones have no memory."""
        modules = self._on_meta()
        if self.frozen_layout.length:
            values = torch.from_numpy(self.frozen).to(device)
            for module, tensors in zip(modules, self.frozen_layout.blocks, strict=True):
                freeze(module, tensors, values)
        return modules

    def score(self, parameters: Flat) -> Score:
        if isinstance(parameters, Phantom):
            raise UsageError(f"{self.name} is scored with its parameters, not with their phantom")
        self._judge.parameters[:] = parameters
        loss = right = 0.0
        for at in range(0, len(self.held_out.inputs), SCORED_AT_ONCE):
            some = self.held_out.inputs[at : at + SCORED_AT_ONCE]
            answers = self.held_out.targets[at : at + SCORED_AT_ONCE]
            outputs = self._judge.outputs(some)
            loss += float(cross_entropy(outputs, answers)) * answers.numel()
            right += int((outputs.argmax(-1) == answers).sum())
        answered = self.held_out.targets.numel()
        return Score(loss / answered, right / answered)

    @cached_property
    def _judge(self) -> TorchReplica:
        return self.replica_in(memory_on("cpu", Layout.of([block.shapes for block in self.blocks]).length))

    def _on_meta(self) -> Sequence[nn.Module]:
        """Return modules without memory, for which torch draws no random numbers."""
        with torch.device("meta"):
            return self.model.modules()


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over samples, and over the positions in each; classes are the last dimension of the outputs."""
    return nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1))


def frozen_values(layout: Layout, gain: float, base: Path | None) -> Array:
    """Return the values of frozen parameters: those of a saved model, or values that are the same everywhere."""
    values: Array = np.zeros(layout.length, np.float32)
    if base is None:
        for tensor in layout.tensors:
            tensor.view(values)[...] = initial(SPLIT_SEED, tensor, gain)
        return values
    try:
        saved = safetensors.numpy.load_file(base)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"base = {base}: this is no model that can be read ({error})") from None
    for tensor in layout.tensors:
        found = saved.get(tensor.name)
        if found is None or found.shape != tensor.shape or found.dtype != np.float32:
            there = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise ConfigError(f"base = {base}: {tensor.name} is {there}, but is to be float32 {list(tensor.shape)}")
        tensor.view(values)[...] = found
    return values


def counted(modules: Sequence[nn.Module], sample: torch.Tensor) -> tuple[Block, ...]:
    """Return the cost of each block for one sample."""
    return tuple(block for block, _ in walked(modules, sample))


def walked(modules: Sequence[nn.Module], sample: torch.Tensor) -> Iterator[tuple[Block, tuple[int, ...]]]:
    """Yield the cost of each block for one sample, and the shape of what enters it.

    Does not use torch's `FlopCounterMode` and meta device: they import its compiler, which takes as long as torch
    itself."""
    compute_alike()
    frozen = [shapes_in(number, module, trained=False) for number, module in enumerate(modules)]
    layouts = layout_of(modules), Layout.of(frozen)
    memory = memory_on("cpu", layouts[0].length)
    values = torch.zeros(layouts[1].length)
    flowing = sample
    trained = False
    for number, module in enumerate(modules):
        place(module, layouts[0].blocks[number], memory)
        freeze(module, layouts[1].blocks[number], values)
        with _Apart(), _Counter() as count, torch.no_grad():
            leaving = module(flowing)
        shapes = tuple((tensor.name, tensor.shape) for tensor in layouts[0].blocks[number])
        backward_flops = _backward_flops(module, flowing, trained=trained) if values.numel() else None
        # What is written is read again once.
        block = Block(f"{number}", shapes, float(count.flops), 2.0 * count.nbytes, count.kernels)
        kept = Activations(float(flowing.nbytes), float(count.nbytes))
        block = replace(block, frozen=frozen[number], backward_flops=backward_flops, activations=kept)
        yield block, tuple(flowing.shape[1:])
        flowing, trained = leaving, trained or bool(shapes)


def _backward_flops(module: nn.Module, entering: torch.Tensor, *, trained: bool) -> float:
    """Count the FLOPs of a backward pass; `trained` says whether there is one through the block before."""
    with _Apart():
        leaving = module(entering.detach().requires_grad_(trained))
    if not leaving.requires_grad:
        return 0.0
    with _Counter() as count:
        leaving.sum().backward()
    return float(count.flops)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs by torch's own table, and the results that are not views, and their bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.nbytes = 0
        self.kernels = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what keeps the compiler out of a mode is a part of it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        results = result if isinstance(result, tuple | list) else (result,)
        for declared, value in zip(func._schema.returns, results, strict=False):
            if isinstance(value, torch.Tensor) and declared.alias_info is None:
                self.nbytes += value.nbytes
                self.kernels += 1
        return result


class _Apart(TorchFunctionMode):
    """Makes attention use matrix products, also where torch has a fused kernel: so every machine counts alike."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            return torch._scaled_dot_product_attention_math(*args, **(kwargs or {}))[0]
        return func(*args, **(kwargs or {}))


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a copy that torch may keep."""
    return torch.from_numpy(np.array(array))


IMAGES = 1797
HELD_OUT = 397
"""Held-out samples, which leaves 1,400 to train on."""
SPLIT_SEED = 0
"""The split is the same in every run, whatever its seed."""


def digits_network() -> Sequence[nn.Module]:
    return [
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU()),
        nn.Sequential(nn.Linear(64, 10)),
    ]


def digits_table() -> npt.NDArray[Any]:
    """Return a row for each image: its 64 pixels, and its digit.

    The data come from scikit-learn's own file, if it is where it is today: importing scikit-learn takes a second."""
    if (file := file_of("sklearn", "datasets", "data", "digits.csv.gz")) is not None:
        try:
            with gzip.open(file, "rt", encoding="ascii") as lines:
                return np.array([line.split(",") for line in lines], np.float64).reshape(IMAGES, 65)
        except (OSError, EOFError, ValueError) as error:
            raise ConfigError(f"{file} is damaged ({error}): install scikit-learn again") from error
    from sklearn.datasets import load_digits

    found = load_digits()
    return np.column_stack([found.data, found.target])


def digits() -> TorchTask:
    """Return the task of handwritten digits."""
    found = digits_table()
    order = generator(SPLIT_SEED, "digits").permutation(len(found))
    images = (found[order, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    labels = found[order, -1].astype(np.int64)
    held_out = Dataset(as_tensor(images[:HELD_OUT]), as_tensor(labels[:HELD_OUT]))
    training = Dataset(as_tensor(images[HELD_OUT:]), as_tensor(labels[HELD_OUT:]))
    return TorchTask(
        "digits", NetworkSpec(digits_network, 2**0.5), training, held_out, Defaults(lr=0.05, momentum=0.9, batch=16)
    )


CONTEXT = 64
WIDTH = 64
HEADS = 2
LAYERS = 2
HELD_OUT_SHARE = 0.1
BY_RULE = ("CJK UNIFIED IDEOGRAPH", "CJK COMPATIBILITY IDEOGRAPH", "HANGUL SYLLABLE")
LAST_NAMED = 0xE01EF
"""Later planes have private characters alone."""


def unicode_names() -> str:
    """Return the names of Unicode's characters, one to a line."""
    found = (unicodedata.ucd_3_2_0.name(chr(code), "") for code in range(LAST_NAMED + 1))
    names = [name for name in found if name and not name.startswith(BY_RULE)]
    return "\n".join(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())) + "\n"


class Embedding(nn.Module):
    """The sum of character and position embeddings."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = _embedding(vocabulary)
        self.places = _embedding(CONTEXT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, places) to (samples, places, width)."""
        return self.characters(x) + self.places.weight  # type: ignore[no-any-return]


def _embedding(words: int) -> nn.Embedding:
    """Return an embedding without values: torch's initial values are not needed, and on the meta device they import
    its compiler."""
    return nn.Embedding(words, WIDTH, _weight=torch.empty(words, WIDTH))


class Layer(nn.Module):
    """Causal attention and a feed-forward network, each with a norm before it and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.joined(self._attend(self.norm1(x)))
        return x + self.down(nn.functional.relu(self.up(self.norm2(x))))  # type: ignore[no-any-return]

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        samples, places, _ = x.shape
        q, k, v = self.heads(x).view(samples, places, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(samples, places, WIDTH)


class AdaptedLinear(nn.Linear):
    """A product with a low-rank adapter beside it (Hu et al., https://arxiv.org/abs/2106.09685)."""

    def __init__(self, whole: nn.Linear, rank: int) -> None:
        super().__init__(whole.in_features, whole.out_features)
        self.lora_a = nn.Parameter(torch.empty(rank, whole.in_features))
        self.lora_b = nn.Parameter(torch.empty(whole.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thin = nn.functional.linear(x, self.lora_a)
        return super().forward(x) + nn.functional.linear(thin, self.lora_b)


def adapted(modules: Sequence[nn.Module], rank: int, products: Sequence[str]) -> Sequence[nn.Module]:
    """Give adapters to these products of each layer, and freeze everything else."""
    for layer in modules:
        for name in products if isinstance(layer, Layer) else ():
            setattr(layer, name, AdaptedLinear(getattr(layer, name), rank))
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("lora_" in name)
    return modules


PRODUCTS = ("heads", "joined", "up", "down")
"""Of a layer; "heads" are queries, keys and values together."""


def text(name: str, rank: int, matrices: str, base: Path | None) -> TorchTask:
    """Return the text task: samples are sections of the text, and the labels are its next characters.

    With a rank, adapters of these matrices are trained."""
    products = PRODUCTS if matrices == "all" else tuple(matrices.split("+"))
    for each in products:
        if each not in PRODUCTS:
            raise ConfigError(f'task "{name}": there is no matrix "{each}"; known: {", ".join(PRODUCTS)}, or all')
    if base is not None and not rank:
        raise ConfigError(f'task "{name}": a base is for adapters: give lora, their rank')
    written = unicode_names()
    alphabet = sorted(frozenset(written))
    codes = np.searchsorted(np.array(alphabet), np.array(list(written))).astype(np.int64)
    stretches = (len(codes) - 1) // CONTEXT
    inputs = codes[: stretches * CONTEXT].reshape(stretches, CONTEXT)
    targets = codes[1 : stretches * CONTEXT + 1].reshape(stretches, CONTEXT)
    cut = stretches - int(stretches * HELD_OUT_SHARE)

    def modules() -> Sequence[nn.Module]:
        head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(alphabet)))
        whole = [Embedding(len(alphabet)), *(Layer() for _ in range(LAYERS)), head]
        return adapted(whole, rank, products) if rank else whole

    training = Dataset(as_tensor(inputs[:cut]), as_tensor(targets[:cut]))
    held_out = Dataset(as_tensor(inputs[cut:]), as_tensor(targets[cut:]))
    return TorchTask(name, NetworkSpec(modules, 1.0), training, held_out, Defaults(lr=0.1, momentum=0.9, batch=8), base)
