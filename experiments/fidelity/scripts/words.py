"""A small transformer that predicts the next word, by AdamW with a schedule and clipped gradients."""

import torch
from loop import begin, repeat, shared
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

WORDS, WIDTH, HEADS, LENGTH = 1000, 128, 4, 64


class Layer(nn.Module):
    """A layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.into(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class Words(nn.Module):
    """The decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers, self.head = nn.Sequential(Layer(), Layer()), nn.Linear(WIDTH, WORDS)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(codes) + self.places.weight[: codes.shape[1]]))


steps = begin()
model = shared(Words())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
text = torch.randint(0, WORDS, (100_000,))


def step() -> torch.Tensor:
    starts = torch.randint(0, len(text) - LENGTH - 1, (8,))
    codes = torch.stack([text[start : start + LENGTH + 1] for start in starts])
    loss = cross_entropy(model(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return loss


repeat(step, steps)
