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
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hcsim.errors import ConfigError, UsageError
from hcsim.files import file_of
from hcsim.rng import generator
from hcsim.runtime.channel import Phantom
from hcsim.training.layout import Layout
from hcsim.training.task import Block, Defaults, Flat, Score
from hcsim.training.tasks.torch_replica import ReplicaMemory, TorchReplica, compute_alike, layout_of, memory_on, place

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


class TorchTask:
    """Classification of inputs: one class for each sample, or one for each position in it."""

    phantom = False

    def __init__(self, name: str, model: NetworkSpec, training: Dataset, held_out: Dataset, defaults: Defaults) -> None:
        self.name = name
        self.defaults = defaults
        self.model = model
        self.training = training
        self.held_out = held_out
        self.blocks: Sequence[Block] = counted(self._on_meta(), training.inputs[:1])

    @property
    def samples(self) -> int:
        """The number of training samples."""
        return len(self.training.inputs)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr((self.name, [block.shapes for block in self.blocks])).encode())
        digest.update(self.training.digest() + self.held_out.digest())
        return digest.hexdigest()

    def replica(self, seed: int, device: str = "cpu") -> TorchReplica:
        replica = self.replica_in(memory_on(device, Layout.of([block.shapes for block in self.blocks]).length))
        replica.initialise(seed, self.model.gain)
        return replica

    def replica_in(self, memory: ReplicaMemory) -> TorchReplica:
        """Return a model over these arrays, with their present values."""
        data = (self.training.inputs, self.training.targets)
        return TorchReplica(self._on_meta(), cross_entropy, data, memory)

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


def counted(modules: Sequence[nn.Module], sample: torch.Tensor) -> tuple[Block, ...]:
    """Return the cost of each block for one sample.

    Does not use torch's `FlopCounterMode` and meta device: they import its compiler, which takes as long as torch
    itself."""
    compute_alike()
    layout = layout_of(modules)
    memory = memory_on("cpu", layout.length)
    flowing, blocks = sample, []
    for number, (module, tensors) in enumerate(zip(modules, layout.blocks, strict=True)):
        place(module, tensors, memory)
        with _Apart(), _Counter() as count, torch.no_grad():
            flowing = module(flowing)
        shapes = tuple((tensor.name, tensor.shape) for tensor in tensors)
        # What is written is read again once.
        blocks.append(Block(f"{number}", shapes, float(count.flops), 2.0 * count.nbytes, count.kernels))
    return tuple(blocks)


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


def text() -> TorchTask:
    """Return the text task: samples are sections of the text, and the labels are its next characters."""
    written = unicode_names()
    alphabet = sorted(frozenset(written))
    codes = np.searchsorted(np.array(alphabet), np.array(list(written))).astype(np.int64)
    stretches = (len(codes) - 1) // CONTEXT
    inputs = codes[: stretches * CONTEXT].reshape(stretches, CONTEXT)
    targets = codes[1 : stretches * CONTEXT + 1].reshape(stretches, CONTEXT)
    cut = stretches - int(stretches * HELD_OUT_SHARE)

    def modules() -> Sequence[nn.Module]:
        head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(alphabet)))
        return [Embedding(len(alphabet)), *(Layer() for _ in range(LAYERS)), head]

    training = Dataset(as_tensor(inputs[:cut]), as_tensor(targets[:cut]))
    held_out = Dataset(as_tensor(inputs[cut:]), as_tensor(targets[cut:]))
    return TorchTask("text", NetworkSpec(modules, 1.0), training, held_out, Defaults(lr=0.1, momentum=0.9, batch=8))
