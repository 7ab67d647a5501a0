"""A small transformer that learns to spell, character by character, from the names of Unicode that every Python has.

    hcsim run examples/language_model.py --scenario mixed-home -- --steps 30
    torchrun --nproc-per-node 2 examples/language_model.py --backend hcsim --sharded

With --sharded every rank keeps only its share of the parameters and of the optimizer's state.
"""

import argparse
import sys
import time
import unicodedata

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import hcsim.torch_backend  # noqa: F401  # for --backend hcsim
from hcsim.checkpoints.saver import Saver
from hcsim.training.modules.sharded import Sharded, clip_grad_norm

CONTEXT = 64


def text() -> Tensor:
    """The names as numbers below 128. Unicode 3.2 is frozen: they are the same everywhere."""
    names = (unicodedata.ucd_3_2_0.name(chr(code), "") for code in range(0x3000))
    return torch.tensor(list("\n".join(filter(None, names)).lower().encode()))


class Block(nn.Module):
    """Attention to what came before, then a small network for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.asked, self.answered = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.thought = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Adds to x."""
        batch, length, width = x.shape
        split = self.asked(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.answered(seen)
        return x + self.thought(self.between(x))


class Embedding(nn.Module):
    """What a character is, and where it stands."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)

    def forward(self, characters: Tensor) -> Tensor:
        """Their sum."""
        return self.character(characters) + self.place(torch.arange(characters.shape[1]))


def transformer(width: int = 128, blocks: int = 4, heads: int = 4) -> nn.Sequential:
    """0.8 million parameters."""
    inner = [Block(width, heads) for _ in range(blocks)]
    return nn.Sequential(Embedding(width), *inner, nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128)))


def samples(characters: Tensor, count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Stretches of the text, and the same one character further on."""
    starts = torch.randint(len(characters) - CONTEXT - 1, (count,), generator=draws)
    stretches = torch.stack([characters[start : start + CONTEXT + 1] for start in starts.tolist()])
    return stretches[:, :-1], stretches[:, 1:]


def main() -> None:
    """One rank of the program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--save", help="the folder of the checkpoints")
    asked = parser.parse_args()
    dist.init_process_group(asked.backend)
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = transformer()
    model = nn.Sequential(*map(Sharded, plain)) if asked.sharded else DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saver = Saver(asked.save, model, optimizer) if asked.save else None
    characters, draws = text(), torch.Generator().manual_seed(rank)
    began = time.perf_counter()
    for step in range(asked.steps):
        inputs, targets = samples(characters, asked.batch, draws)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        clip_grad_norm(model, 1.0)
        optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f} after {time.perf_counter() - began:.2f} s")
            sys.stdout.flush()
        if saver is not None and step % 20 == 19:
            saver.save(step + 1)
    if saver is not None:
        saver.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
