"""Models of families that nobody had looked at when the kinds of kernels and the blocks were chosen.

They guard against kinds and blocks that suit the models of `models` alone: nothing may be changed because of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as ops

from experiments.compute.models import Step, adamw, classifies, sgd, step_of


class _Swin(nn.Module):
    """A layer of attention within windows, which are shifted in every other layer (Liu et al., 2021)."""

    def __init__(self, width: int, heads: int, window: int, shifted: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))
        self._heads, self._window, self._shift = heads, window, window // 2 if shifted else 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._mixed(self.norm1(x))
        return x + self.feed(self.norm2(x))  # type: ignore[no-any-return]

    def _mixed(self, x: Tensor) -> Tensor:
        samples, height, width, channels = x.shape
        side = self._window
        x = torch.roll(x, (-self._shift, -self._shift), (1, 2)) if self._shift else x
        x = x.view(samples, height // side, side, width // side, side, channels).transpose(2, 3)
        q, k, v = self.into(x.reshape(-1, side**2, channels)).unflatten(-1, (3, self._heads, -1)).unbind(2)
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5 + self.bias
        mixed = self.out((scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2))
        mixed = mixed.view(samples, height // side, width // side, side, side, channels).transpose(2, 3)
        mixed = mixed.reshape(samples, height, width, channels)
        return torch.roll(mixed, (self._shift, self._shift), (1, 2)) if self._shift else mixed


class _Merge(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.join = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
        return self.join(self.norm(torch.cat(parts, -1)))  # type: ignore[no-any-return]


class _Permuted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


class _Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((1, 2))


def swin(batch: int) -> Step:
    first = [_Swin(64, 2, 4, shifted) for shifted in (False, True)]
    second = [_Swin(128, 4, 4, shifted) for shifted in (False, True)]
    head = (nn.LayerNorm(128), _Pooled(), nn.Linear(128, 100))
    module = nn.Sequential(nn.Conv2d(3, 64, 4, 4), _Permuted(), *first, _Merge(64), *second, *head)
    return step_of(module, classifies(module, torch.randn(8 * batch, 3, 64, 64), 100), adamw(module.parameters()))


class _Squeezed(nn.Module):
    """EfficientNet's block: an inverted bottleneck, and a gate for each channel (Tan and Le, 2019)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        wide, narrow = 6 * inputs, max(4, inputs // 4)
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(),
            nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False),
            nn.BatchNorm2d(wide), nn.SiLU(),
        )  # fmt: skip
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, narrow, 1), nn.SiLU(), nn.Conv2d(narrow, wide, 1), nn.Sigmoid()
        )
        self.out = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self._adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        wide = self.body(x)
        found = self.out(wide * self.gate(wide))
        return x + found if self._adds else found  # type: ignore[no-any-return]


def efficientnet(batch: int) -> Step:
    shapes = [(16, 24, 3, 2), (24, 24, 3, 1), (24, 40, 5, 2), (40, 40, 5, 1), (40, 64, 3, 2), (64, 64, 5, 1)]
    stem = (nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU())
    head = (nn.Conv2d(64, 256, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100))
    module = nn.Sequential(*stem, *(_Squeezed(*shape) for shape in shapes), *head)
    optimizer = torch.optim.RMSprop(module.parameters(), lr=0.01, momentum=0.9)
    return step_of(module, classifies(module, torch.randn(8 * batch, 3, 64, 64), 100), optimizer)


class _Biased(nn.Module):
    """T5's attention: biases for relative positions, of its own or of another sequence (Raffel et al., 2019)."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.biases = nn.Embedding(32, heads)
        self._heads, self._causal = heads, causal

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        q, k, v = (
            of(given).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            for of, given in ((self.query, x), (self.key, other), (self.value, other))
        )
        ahead = torch.arange(x.shape[1], device=x.device)[:, None] - torch.arange(other.shape[1], device=x.device)
        scores = q @ k.transpose(-1, -2) + self.biases(ahead.clamp(-16, 15) + 16).permute(2, 0, 1)
        if self._causal:
            scores = scores.masked_fill(ahead < 0, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _T5Layer(nn.Module):
    def __init__(self, width: int, heads: int, decodes: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.own = _Biased(width, heads, decodes)
        self.other = _Biased(width, heads, False) if decodes else None
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False),
            nn.Linear(2 * width, width, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        given = self.norms[0](x)
        x = x + self.own(given, given)
        if self.other is not None:
            x = x + self.other(self.norms[1](x), encoded)
        given = self.norms[2](x)
        return x + self.down(ops.gelu(self.gate(given), approximate="tanh") * self.up(given))  # type: ignore[no-any-return]


class _T5(nn.Module):
    def __init__(self, words: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.encoder = nn.ModuleList(_T5Layer(width, heads, False) for _ in range(depth))
        self.decoder = nn.ModuleList(_T5Layer(width, heads, True) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, codes: Tensor, before: Tensor) -> Tensor:
        encoded, x = self.words(codes), self.words(before)
        for layer in self.encoder:
            encoded = layer(encoded, encoded)
        for layer in self.decoder:
            x = layer(x, encoded)
        return self.head(x)  # type: ignore[no-any-return]


def t5(batch: int) -> Step:
    module, samples = _T5(2500, 160, 5, 3), 6 * batch
    codes, targets = torch.randint(0, 2500, (samples, 80)), torch.randint(0, 2500, (samples, 49))
    loss = lambda: ops.cross_entropy(module(codes, targets[:, :-1]).flatten(0, 1), targets[:, 1:].flatten())  # noqa: E731
    return step_of(module, loss, torch.optim.Adafactor(module.parameters(), lr=1e-3))


class _Nerf(nn.Module):
    """Densities and colours along rays (Mildenhall et al., 2020)."""

    def __init__(self, width: int, depth: int, octaves: int) -> None:
        super().__init__()
        self.octaves = nn.Buffer(2.0 ** torch.arange(octaves))
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.body = nn.Sequential(nn.Linear(6 * octaves, width), nn.ReLU(), *layers)
        self.density, self.colour = nn.Linear(width, 1), nn.Sequential(nn.Linear(width, 3), nn.Sigmoid())

    def forward(self, places: Tensor) -> Tensor:
        angles = (places[..., None] * self.octaves).flatten(-2)
        found = self.body(torch.cat([angles.sin(), angles.cos()], -1))
        opaque = 1 - (-ops.softplus(self.density(found))).exp()
        clear = torch.cumprod(1 - opaque + 1e-6, 1)
        return (opaque * clear * self.colour(found)).sum(1)  # type: ignore[no-any-return]


def nerf(batch: int) -> Step:
    module, rays = _Nerf(128, 4, 8), 128 * batch
    places, colours = torch.randn(rays, 48, 3), torch.rand(rays, 3)
    return step_of(module, lambda: ops.mse_loss(module(places), colours), adamw(module.parameters()))


class _Vae(nn.Module):
    """Codes drawn from a distribution for each image (Kingma and Welling, 2013)."""

    def __init__(self, width: int, codes: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(1, width, 5, 2, 2), nn.ELU(), nn.Conv2d(width, 2 * width, 5, 2, 2), nn.ELU(), nn.Flatten(),
            nn.Linear(2 * width * 64, 2 * codes),
        )  # fmt: skip
        self.decode = nn.Sequential(
            nn.Linear(codes, 2 * width * 64), nn.ELU(), nn.Unflatten(1, (2 * width, 8, 8)),
            nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 3, padding=1), nn.ELU(),
            nn.Upsample(scale_factor=2), nn.Conv2d(width, 1, 3, padding=1),
        )  # fmt: skip

    def loss(self, images: Tensor) -> Tensor:
        mean, log_variance = self.encode(images).chunk(2, 1)
        found = self.decode(mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
        apart = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return ops.binary_cross_entropy_with_logits(found, images) + 1e-3 * apart


def vae(batch: int) -> Step:
    module, images = _Vae(24, 32), torch.rand(32 * batch, 1, 32, 32)
    return step_of(module, lambda: module.loss(images), torch.optim.Adam(module.parameters(), lr=1e-3))


class _Attentive(nn.Module):
    """Graph attention: a softmax over each node's neighbours (Velickovic et al., 2017)."""

    def __init__(self, inputs: int, width: int, heads: int, edges: Tensor) -> None:
        super().__init__()
        self.into = nn.Linear(inputs, heads * width, bias=False)
        self.near, self.far = (nn.Parameter(torch.randn(heads, width) * 0.1) for _ in range(2))
        self._from, self._to = edges
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        sent = self.into(x).unflatten(-1, (self._heads, -1))
        scores = (sent * self.near).sum(-1)[self._to] + (sent * self.far).sum(-1)[self._from]
        weights = ops.leaky_relu(scores, 0.2).clamp(max=20).exp()
        total = torch.zeros(len(x), self._heads, device=x.device).index_add(0, self._to, weights)
        shares = weights / total[self._to]
        mixed = torch.zeros_like(sent).index_add(0, self._to, sent[self._from] * shares[..., None])
        return ops.elu(mixed.flatten(1))


def gat(batch: int) -> Step:
    rows = 2000 * batch
    edges = torch.randint(0, rows, (2, 4 * rows))
    module = nn.Sequential(_Attentive(64, 16, 4, edges), _Attentive(64, 16, 4, edges), nn.Linear(64, 12))
    nodes, targets = torch.randn(rows, 64), torch.randint(0, 12, (rows,))
    return step_of(module, lambda: ops.cross_entropy(module(nodes), targets), torch.optim.Adam(module.parameters()))


class _Scan(nn.Module):
    """Mamba's layer: a state for each channel, whose decay depends on the input (Gu and Dao, 2023), step by step."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mix = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.select, self.pace = nn.Linear(width, 2 * states), nn.Linear(width, width)
        self.decay = nn.Parameter(torch.zeros(width, states))

    def forward(self, x: Tensor) -> Tensor:
        given, gate = self.into(self.norm(x)).chunk(2, -1)
        given = ops.silu(self.mix(given.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        paces = ops.softplus(self.pace(given))[..., None]
        enters, leaves = self.select(given)[:, :, None].chunk(2, -1)
        kept, added = (-paces * self.decay.exp()).exp(), paces * enters * given[..., None]
        state, found = torch.zeros_like(added[:, 0]), []
        for time in range(x.shape[1]):
            state = kept[:, time] * state + added[:, time]
            found.append((state * leaves[:, time]).sum(-1))
        return x + self.out(torch.stack(found, 1) * ops.silu(gate))  # type: ignore[no-any-return]


def mamba(batch: int) -> Step:
    module = nn.Sequential(nn.Embedding(500, 64), _Scan(64, 8), _Scan(64, 8), nn.LayerNorm(64), nn.Linear(64, 500))
    codes = torch.randint(0, 500, (8 * batch, 65))
    loss = lambda: ops.cross_entropy(module(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())  # noqa: E731
    return step_of(module, loss, adamw(module.parameters()), clip=1.0)


class _Points(nn.Module):
    """A perceptron for each point of a cloud, and the largest of each feature (Qi et al., 2016)."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.each = nn.Sequential(
            *(layer for pair in pairwise(widths) for layer in (nn.Conv1d(*pair, 1), nn.BatchNorm1d(pair[1]), nn.ReLU()))
        )
        self.head = nn.Sequential(nn.Linear(widths[-1], 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.3),
                                  nn.Linear(128, 40))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.each(x).max(2).values)  # type: ignore[no-any-return]


def pointnet(batch: int) -> Step:
    module = _Points(3, 64, 64, 128, 512)
    return step_of(module, classifies(module, torch.randn(8 * batch, 3, 512), 40), sgd(module))


class _Denoised(nn.Module):
    """A residual block that is told how much noise there is, as in diffusion models (Ho et al., 2020)."""

    def __init__(self, inputs: int, outputs: int, told: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.told = nn.Linear(told, outputs)
        self.beside = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        found = self.first(ops.silu(self.norm1(x))) + self.told(ops.silu(noise))[..., None, None]
        return self.second(ops.silu(self.norm2(found))) + self.beside(x)  # type: ignore[no-any-return]


class _Diffusion(nn.Module):
    def __init__(self, width: int, told: int) -> None:
        super().__init__()
        self.noise = nn.Sequential(nn.Linear(1, told), nn.SiLU(), nn.Linear(told, told))
        self.into, self.out = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.below = _Denoised(width, width, told), _Denoised(width, 2 * width, told)
        self.norm, self.attend = nn.GroupNorm(8, 2 * width), nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.up = _Denoised(3 * width, width, told)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        told = self.noise(noise)
        kept = self.down(self.into(x), told)
        x = self.below(ops.avg_pool2d(kept, 2), told)
        rows = self.norm(x).flatten(2).transpose(1, 2)
        x = x + self.attend(rows, rows, rows, need_weights=False)[0].transpose(1, 2).reshape(x.shape)
        return self.out(self.up(torch.cat([ops.interpolate(x, scale_factor=2.0), kept], 1), told))  # type: ignore[no-any-return]


def diffusion(batch: int) -> Step:
    module = _Diffusion(32, 64)
    images, noise = torch.randn(4 * batch, 3, 32, 32), torch.rand(4 * batch, 1)
    loss = lambda: ops.mse_loss(module(images, noise), images)  # noqa: E731
    return step_of(module, loss, adamw(module.parameters()), clip=1.0)


UNSEEN: dict[str, Callable[[int], Step]] = {
    "Swin": swin,
    "EfficientNet": efficientnet,
    "T5": t5,
    "NeRF": nerf,
    "VAE": vae,
    "GAT": gat,
    "Mamba": mamba,
    "PointNet": pointnet,
    "Diffusion": diffusion,
}
