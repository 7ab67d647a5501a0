"""A small transformer in MLX that learns to spell, character by character, from the names of Unicode.

    python examples/train_mlx.py
    hcsim run examples/train_mlx.py --scenario two-macs-wifi -- --steps 20 --compressor int8+ef
    mlx.launch -n 2 --backend ring examples/train_mlx.py --every 10

The first trains alone, the second on a virtual cluster, the third on two processes of this machine; with --every the
ranks average their changes every so many steps (DiLoCo) instead of their gradients in each.
"""

import argparse
import time
import unicodedata

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import AdamW

import hcsim.mlx as dist

CONTEXT = 32


def text() -> np.ndarray:
    """The names as numbers below 128. Unicode 3.2 is frozen: they are the same everywhere."""
    names = (unicodedata.ucd_3_2_0.name(chr(code), "") for code in range(0x3000))
    return np.frombuffer("\n".join(filter(None, names)).lower().encode(), np.uint8)


class Transformer(nn.Module):
    """0.1 million parameters."""

    def __init__(self, width: int = 64, blocks: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.TransformerEncoder(blocks, width, heads, norm_first=True)
        self.out = nn.Linear(width, 128)

    def __call__(self, characters: mx.array) -> mx.array:
        """Scores of each character to come."""
        length = characters.shape[1]
        mask = nn.MultiHeadAttention.create_additive_causal_mask(length)
        return self.out(self.blocks(self.character(characters) + self.place(mx.arange(length)), mask))


def samples(characters: np.ndarray, count: int, draws: np.random.Generator) -> tuple[mx.array, mx.array]:
    """Stretches of the text, and the same one character further on."""
    starts = draws.integers(len(characters) - CONTEXT - 1, size=count)
    stretches = mx.array(np.stack([characters[start : start + CONTEXT + 1] for start in starts]).astype(np.int32))
    return stretches[:, :-1], stretches[:, 1:]


def main() -> None:
    """One rank of the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    parser.add_argument("--compressor", default="none", help='of what ranks exchange: "int8+ef", "topk:0.01+ef"')
    parser.add_argument("--every", type=int, default=0, help="DiLoCo: how many steps lie between exchanges")
    asked = parser.parse_args()
    group = dist.init()
    mx.random.seed(0)
    model, optimizer = Transformer(), AdamW(1e-3)
    outer = dist.DiLoCo(model, every=asked.every, compressor=asked.compressor) if asked.every else None
    plain = asked.compressor == "none" or outer is not None
    compressor = "none" if plain else dist.GradientCompression(asked.compressor)

    def loss_of(inputs: mx.array, targets: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(inputs), targets, reduction="mean")

    loss_and_gradients = nn.value_and_grad(model, loss_of)
    characters, draws = text(), np.random.default_rng(group.rank())
    began = time.perf_counter()
    for step in range(asked.steps):
        loss, gradients = loss_and_gradients(*samples(characters, asked.batch, draws))
        if outer is None:
            gradients = dist.average_gradients(gradients, compressor=compressor)
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        if outer is not None:
            outer.step(asked.batch)
        if group.rank() == 0 and step % 10 == 9:
            took_s = time.perf_counter() - began
            print(f"step {step + 1}: loss {loss.item():.3f} after {took_s:.2f} s", flush=True)


if __name__ == "__main__":
    main()
