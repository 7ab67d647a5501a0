"""Models as people train them, small enough for a processor, each with a batch, a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as ops

Step: TypeAlias = Callable[[], None]
"""Takes a training step: forward, backward, and the optimizer."""


def step_of(module: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, clip: float = 0.0) -> Step:
    module.train()

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()  # type: ignore[no-untyped-call]
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()

    return step


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def classifies(module: nn.Module, inputs: Tensor, classes: int) -> Callable[[], Tensor]:
    targets = torch.randint(0, classes, (len(inputs),))
    return lambda: ops.cross_entropy(module(inputs), targets)


def predicts_words(module: nn.Module, words: int, samples: int, length: int) -> Callable[[], Tensor]:
    codes = torch.randint(0, words, (samples, length + 1))
    return lambda: ops.cross_entropy(module(codes[:, :-1]).flatten(0, 1), codes[:, 1:].flatten())


class _Residual(nn.Module):
    """ResNet's basic block, or its bottleneck (He et al., 2015)."""

    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            shapes = [(channels, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        else:
            shapes = [(channels, width, 3, stride), (width, width, 3, 1)]
        layers: list[nn.Module] = []
        for inputs, width, kernel, step in shapes:
            layers += [
                nn.Conv2d(inputs, width, kernel, step, kernel // 2, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(True),
            ]
        self.body = nn.Sequential(*layers[:-1])
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet(depths: tuple[int, ...], bottleneck: bool, width: int, side: int, samples: int) -> Step:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)]
    channels = width
    for stage, depth in enumerate(depths):
        for number in range(depth):
            block = _Residual(channels, width * 2**stage, 2 if stage and not number else 1, bottleneck)
            layers.append(block)
            channels = block.outputs
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))
    return step_of(module, classifies(module, torch.randn(samples, 3, side, side), 100), sgd(module))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, dropout: float, fused: bool = True) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)
        self._heads, self._causal, self._fused = heads, causal, fused

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(of(x)) for of in (self.query, self.key, self.value))
        if self._fused:
            mixed = ops.scaled_dot_product_attention(q, k, v, is_causal=self._causal)
        else:
            mixed = self.dropout((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)) @ v
        return self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self._heads, -1)).transpose(1, 2)


class _Layer(nn.Module):
    """A transformer's layer, with the norms before or after."""

    def __init__(self, width: int, attention: _Attention, dropout: float, norm_first: bool = True) -> None:
        super().__init__()
        self.attention = attention
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self._norm_first = norm_first

    def forward(self, x: Tensor) -> Tensor:
        if self._norm_first:
            x = x + self.attention(self.norm1(x))
            return x + self.feed(self.norm2(x))  # type: ignore[no-any-return]
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed(x))  # type: ignore[no-any-return]


class _Vit(nn.Module):
    """Dosovitskiy et al., 2020."""

    def __init__(self, width: int, depth: int, heads: int, patch: int, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(*(_Layer(width, _Attention(width, heads, False, 0.0), 0.0) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 100))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.layers(x)[:, 0])  # type: ignore[no-any-return]


def vit(batch: int) -> Step:
    module = _Vit(width=192, depth=6, heads=3, patch=4, side=32)
    return step_of(module, classifies(module, torch.randn(16 * batch, 3, 32, 32), 100), adamw(module.parameters()))


class _Gpt(nn.Module):
    """GPT-2's decoder, and its output matrix tied to the embedding."""

    def __init__(self, words: int, width: int, depth: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layers = (_Layer(width, _Attention(width, heads, True, dropout), dropout) for _ in range(depth))
        self.layers, self.norm = nn.Sequential(nn.Dropout(dropout), *layers), nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.words(codes) + self.places(torch.arange(codes.shape[1], device=codes.device))
        return self.norm(self.layers(x)) @ self.words.weight.T  # type: ignore[no-any-return]


def gpt(batch: int) -> Step:
    module = _Gpt(words=4096, width=256, depth=4, heads=8, length=128, dropout=0.0)
    return step_of(module, predicts_words(module, 4096, 4 * batch, 128), adamw(module.parameters()), clip=1.0)


class _Bert(nn.Module):
    """An encoder with norms after each part, dropout, and attention of plain products."""

    def __init__(self, words: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (
            nn.Embedding(words, width),
            nn.Embedding(length, width),
            nn.Embedding(2, width),
        )
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        layers = (_Layer(width, _Attention(width, heads, False, 0.1, fused=False), 0.1, False) for _ in range(depth))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, words))

    def forward(self, codes: Tensor) -> Tensor:
        x = (
            self.words(codes)
            + self.places(torch.arange(codes.shape[1], device=codes.device))
            + self.kinds(torch.zeros_like(codes))
        )
        return self.head(self.layers(self.dropout(self.norm(x))))  # type: ignore[no-any-return]


def bert(batch: int) -> Step:
    module = _Bert(words=3000, width=192, depth=4, heads=6, length=96)
    return step_of(module, predicts_words(module, 3000, 6 * batch, 96), adamw(module.parameters()), clip=1.0)


class _Lstm(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(words, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(codes))[0])  # type: ignore[no-any-return]


def lstm(batch: int) -> Step:
    module = _Lstm(words=2000, width=256)
    return step_of(module, predicts_words(module, 2000, 16 * batch, 48), sgd(module), clip=0.25)


class _UNet(nn.Module):
    """Ronneberger et al., 2015, with batch normalisation."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(_twice(before, after) for before, after in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * after, after, 2, 2) for after in reversed(widths[:-1]))
        self.merge = nn.ModuleList(_twice(2 * after, after) for after in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, down in enumerate(self.down):
            x = down(ops.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for up, merge, beside in zip(self.up, self.merge, reversed(kept[:-1]), strict=True):
            x = merge(torch.cat([beside, up(x)], 1))
        return self.head(x)  # type: ignore[no-any-return]


def _twice(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(True),
    )  # fmt: skip


def unet(batch: int) -> Step:
    module, images = _UNet(16, 4), torch.randn(4 * batch, 3, 64, 64)
    targets = torch.randint(0, 4, (4 * batch, 64, 64))
    return step_of(module, lambda: ops.cross_entropy(module(images), targets), adamw(module.parameters()))


class _Mixer(nn.Module):
    """A layer of an MLP-Mixer (Tolstikhin et al., 2021)."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.within = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))  # type: ignore[no-any-return]


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class _Patches(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.patches(x).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


def mixer(batch: int) -> Step:
    layers = (_Mixer(64, 192) for _ in range(6))
    module = nn.Sequential(_Patches(192, 4), *layers, nn.LayerNorm(192), _Mean(), nn.Linear(192, 100))
    return step_of(module, classifies(module, torch.randn(16 * batch, 3, 32, 32), 100), adamw(module.parameters()))


class _Lora(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it (Hu et al., 2021)."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, frozen.in_features) * 0.01)
        self.up = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + (x @ self.down.T @ self.up.T) * 2.0  # type: ignore[no-any-return]


def lora(batch: int) -> Step:
    module = _Gpt(words=4096, width=320, depth=4, heads=5, length=96, dropout=0.0).requires_grad_(False)
    for attention in [layer for layer in module.modules() if isinstance(layer, _Attention)]:
        attention.query, attention.value = _Lora(attention.query, 8), _Lora(attention.value, 8)  # type: ignore[assignment]
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return step_of(module, predicts_words(module, 4096, 4 * batch, 96), adamw(trained))


class _Inverted(nn.Module):
    """MobileNetV2's block: wide, each channel for itself, narrow (Sandler et al., 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(True),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(True),
            nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self._adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self._adds else self.body(x)


def mobilenet(batch: int) -> Step:
    shapes = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 40, 1), (40, 80, 2), (80, 80, 1)]
    blocks = (_Inverted(*shape) for shape in shapes)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(80, 100)
    )
    return step_of(module, classifies(module, torch.randn(8 * batch, 3, 48, 48), 100), sgd(module))


class _Dense(nn.Module):
    """DenseNet's layer: what it finds is appended to what it was given (Huang et al., 2016)."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet(batch: int) -> Step:
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1)]
    channels = 24
    for stage in range(3):
        for _ in range(6):
            layers.append(_Dense(channels, 12))
            channels += 12
        if stage < 2:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))
    return step_of(module, classifies(module, torch.randn(8 * batch, 3, 32, 32), 100), sgd(module))


class _Gated(nn.Module):
    """WaveNet's layer: dilated, gated convolutions of a sequence (van den Oord et al., 2016)."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.both = nn.Conv1d(width, 2 * width, 2, dilation=dilation, padding=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        signal, gate = self.both(x)[..., : x.shape[-1]].chunk(2, 1)
        return x + self.out(signal.tanh() * gate.sigmoid())  # type: ignore[no-any-return]


def wavenet(batch: int) -> Step:
    layers = (_Gated(48, 2 ** (number % 6)) for number in range(12))
    module = nn.Sequential(nn.Conv1d(1, 48, 1), *layers, nn.ReLU(), nn.Conv1d(48, 64, 1))
    waves, targets = torch.randn(4 * batch, 1, 1024), torch.randint(0, 64, (4 * batch, 1024))
    return step_of(module, lambda: ops.cross_entropy(module(waves), targets), adamw(module.parameters()))


class _Recommender(nn.Module):
    """Tables of embeddings, their products, and perceptrons, as DLRM (Naumov et al., 2019)."""

    def __init__(self, tables: int, words: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(words, width) for _ in range(tables))
        self.below = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.above = nn.Sequential(
            nn.Linear(width + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        self._low, self._high = torch.tril_indices(tables + 1, tables + 1, -1)

    def forward(self, dense: Tensor, codes: Tensor) -> Tensor:
        below = self.below(dense)
        found = torch.stack([below, *(table(code) for table, code in zip(self.tables, codes, strict=True))], 1)
        products = (found @ found.transpose(1, 2))[:, self._low, self._high]
        return self.above(torch.cat([below, products], 1)).squeeze(-1)  # type: ignore[no-any-return]


def recommender(batch: int) -> Step:
    module = _Recommender(tables=12, words=5000, width=32)
    samples = 1024 * batch
    dense, codes, clicks = torch.randn(samples, 13), torch.randint(0, 5000, (12, samples)), torch.rand(samples).round()
    loss = lambda: ops.binary_cross_entropy_with_logits(module(dense, codes), clicks)  # noqa: E731
    with torch.device("cpu"):  # where it keeps the number of steps, which it reads each time
        optimizer = torch.optim.Adagrad(module.parameters(), lr=0.01)
    return step_of(module, loss, optimizer)


class _Graph(nn.Module):
    """Layers of a graph network: sums of the neighbours' messages (Kipf and Welling, 2016)."""

    def __init__(self, width: int, depth: int, edges: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self._from, self._to = edges

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            messages = layer(x)[self._from]
            x = ops.relu(x + torch.zeros_like(x).index_add(0, self._to, messages))
        return x


def graph(batch: int) -> Step:
    rows = 3000 * batch
    module = _Graph(96, 4, torch.randint(0, rows, (2, 5 * rows)))
    nodes, targets = torch.randn(rows, 96), torch.randint(0, 96, (rows,))
    return step_of(module, lambda: ops.cross_entropy(module(nodes), targets), adamw(module.parameters()))


class _Llama(nn.Module):
    """A layer with RMS norms, rotary positions, shared heads for keys and values, and a gated feed-forward."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        depth = width // heads
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.both = nn.Linear(width, 2 * depth * (heads // 2), bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, depth, 2) / depth)).repeat(1, 2)
        self.cos, self.sin = nn.Buffer(angles.cos()), nn.Buffer(angles.sin())
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm1(x)
        q = self._rotated(self.query(given).unflatten(-1, (self._heads, -1)).transpose(1, 2))
        k, v = self.both(given).unflatten(-1, (2, self._heads // 2, -1)).unbind(2)
        k, v = self._rotated(k.transpose(1, 2)).repeat_interleave(2, 1), v.transpose(1, 2).repeat_interleave(2, 1)
        mixed = ops.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        given = self.norm2(x)
        return x + self.down(ops.silu(self.gate(given)) * self.up(given))  # type: ignore[no-any-return]

    def _rotated(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * self.cos + torch.cat([-high, low], -1) * self.sin


def llama(batch: int) -> Step:
    layers = (_Llama(192, 6, 128) for _ in range(4))
    module = nn.Sequential(nn.Embedding(3000, 192), *layers, nn.RMSNorm(192), nn.Linear(192, 3000, bias=False))
    return step_of(module, predicts_words(module, 3000, 4 * batch, 128), adamw(module.parameters()), clip=1.0)


class _ConvNext(nn.Module):
    """ConvNeXt's block: each channel for itself over 7 × 7, then a perceptron (Liu et al., 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.each, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.norm(self.each(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


def convnext(batch: int) -> Step:
    layers = [*(_ConvNext(40) for _ in range(2)), nn.Conv2d(40, 80, 2, 2), *(_ConvNext(80) for _ in range(4))]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(80), nn.Linear(80, 100))
    module = nn.Sequential(nn.Conv2d(3, 40, 4, 4), *layers, *head)
    return step_of(module, classifies(module, torch.randn(8 * batch, 3, 64, 64), 100), adamw(module.parameters()))


def autoencoder(batch: int) -> Step:
    module = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.InstanceNorm2d(64, affine=True),
        nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128 * 64, 64),
        nn.Linear(64, 128 * 64), nn.Unflatten(1, (128, 8, 8)), nn.ConvTranspose2d(128, 64, 4, 2, 1),
        nn.InstanceNorm2d(64, affine=True), nn.ReLU(), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid(),
    )  # fmt: skip
    images = torch.rand(8 * batch, 3, 64, 64)
    return step_of(module, lambda: ops.mse_loss(module(images), images), adamw(module.parameters()))


class _Gru(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(40, width, 2, batch_first=True, bidirectional=True), nn.Linear(2 * width, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0])  # type: ignore[no-any-return]


def gru(batch: int) -> Step:
    module, sounds, targets = _Gru(96), torch.randn(16 * batch, 60, 40), torch.randint(0, 48, (16 * batch, 60))
    loss = lambda: ops.cross_entropy(module(sounds).transpose(1, 2), targets)  # noqa: E731
    return step_of(module, loss, adamw(module.parameters()), clip=1.0)


MODELS: dict[str, Callable[[int], Step]] = {
    "ResNet-18": lambda batch: resnet((2, 2, 2, 2), False, 32, 32, 8 * batch),
    "ResNet-50": lambda batch: resnet((3, 4, 6, 3), True, 16, 32, 8 * batch),
    "ViT": vit,
    "GPT": gpt,
    "BERT": bert,
    "LSTM": lstm,
    "U-Net": unet,
    "MLP-Mixer": mixer,
    "LoRA": lora,
    "MobileNet": mobilenet,
    "DenseNet": densenet,
    "WaveNet": wavenet,
    "DLRM": recommender,
    "GCN": graph,
    "Llama": llama,
    "ConvNeXt": convnext,
    "Autoencoder": autoencoder,
    "GRU": gru,
}
