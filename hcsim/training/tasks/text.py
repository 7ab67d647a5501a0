"""Text, character by character: a small transformer that learns the names of Unicode's characters.

The text must be the same bytes wherever the task is run. Every Python carries the frozen database of Unicode 3.2
(`unicodedata.ucd_3_2_0`), and Unicode never changes a name: that is 350 kB of text such as "GREEK SMALL LETTER
ALPHA WITH TONOS", one name to a line, the same in every version on every machine. Ideographs and Hangul
syllables, whose names are made by a rule, are left out. Names come in the order of their digests, so
that the held-out tail has names of every script.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from hcsim.training.task import Defaults
from hcsim.training.tasks.torch_task import Data, Model, TorchTask, as_tensor

CONTEXT = 64
WIDTH = 64
HEADS = 2
LAYERS = 2
HELD_OUT_SHARE = 0.1
BY_RULE = ("CJK UNIFIED IDEOGRAPH", "CJK COMPATIBILITY IDEOGRAPH", "HANGUL SYLLABLE")
LAST_NAMED = 0xE01EF
"""Planes beyond have private characters alone."""


def corpus() -> str:
    """The text."""
    found = (unicodedata.ucd_3_2_0.name(chr(code), "") for code in range(LAST_NAMED + 1))
    names = [name for name in found if name and not name.startswith(BY_RULE)]
    return "\n".join(sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())) + "\n"


class Embedding(nn.Module):
    """Characters and their places, as vectors."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.characters = _embedding(vocabulary)
        self.places = _embedding(CONTEXT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, places) to (samples, places, width)."""
        return self.characters(x) + self.places.weight  # type: ignore[no-any-return]


def _embedding(words: int) -> nn.Embedding:
    """With no values: those that torch would draw nobody needs, and on the meta device they take its compiler."""
    return nn.Embedding(words, WIDTH, _weight=torch.empty(words, WIDTH))


class Layer(nn.Module):
    """Causal attention and a feed-forward network, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape in and out."""
        x = x + self.joined(self._attend(self.norm1(x)))
        return x + self.down(nn.functional.relu(self.up(self.norm2(x))))  # type: ignore[no-any-return]

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        samples, places, _ = x.shape
        q, k, v = self.heads(x).view(samples, places, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).reshape(samples, places, WIDTH)


def text() -> TorchTask:
    """The task: samples are stretches of the text, and the answers its characters one further on."""
    written = corpus()
    alphabet = sorted(frozenset(written))
    codes = np.searchsorted(np.array(alphabet), np.array(list(written))).astype(np.int64)
    stretches = (len(codes) - 1) // CONTEXT
    inputs = codes[: stretches * CONTEXT].reshape(stretches, CONTEXT)
    targets = codes[1 : stretches * CONTEXT + 1].reshape(stretches, CONTEXT)
    cut = stretches - int(stretches * HELD_OUT_SHARE)

    def modules() -> Sequence[nn.Module]:
        head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(alphabet)))
        return [Embedding(len(alphabet)), *(Layer() for _ in range(LAYERS)), head]

    training = Data(as_tensor(inputs[:cut]), as_tensor(targets[:cut]))
    held_out = Data(as_tensor(inputs[cut:]), as_tensor(targets[cut:]))
    return TorchTask("text", Model(modules, 1.0), training, held_out, Defaults(lr=0.1, momentum=0.9, batch=8))
