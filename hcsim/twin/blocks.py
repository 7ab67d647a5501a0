"""Small blocks of the layers that models are made of, with shapes that are drawn, log-uniformly and always the same,
from the ranges that models use."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SCALES = {"cuda": 64, "mps": 8}
"""How much larger batches and layers are on devices that need much work at once to reach their speed."""


class _Draw:
    """Draws shapes, for batches and layers that are `scale` times as large as those of a processor."""

    def __init__(self, seed: int, scale: int) -> None:
        self._random = random.Random(seed)
        self._scale = scale
        self.most_flops = 1.5e9 * scale
        """Of one layer's forward pass."""
        self.most_elements = scale << 22
        """Of one activation."""

    def batch(self, low: int, high: int) -> int:
        """Return a number of samples or rows."""
        return self.size(low, high * self._scale)

    def size(self, low: int, high: int, multiple: int = 1) -> int:
        """Return a number, log-uniformly between the two."""
        value = float(low * (high / low) ** self._random.random())
        return max(multiple, round(value / multiple) * multiple)

    def width(self, low: int, high: int) -> int:
        """Return a number of channels or features: a power of two, one and a half of it, or, less often, another
        multiple of 8."""
        if self._random.random() < 0.25:
            return self.size(low, high, 8)
        widths = [base * 2**power for base in (8, 12) for power in range(12) if low <= base * 2**power <= high]
        return self.one_of(*widths)  # type: ignore[no-any-return]

    def one_of(self, *choices: Any) -> Any:
        return self._random.choice(choices)


class Block(NamedTuple):
    """Some layers, and what goes into them."""

    module: nn.Module
    inputs: Tensor
    clips: bool = False
    """Whether the norm of the gradients is limited."""


class _Chain(nn.Module):
    """Layers one after the other, each of which may be a module or a function."""

    def __init__(self, *layers: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._modules.update(
            {f"{number}": layer for number, layer in enumerate(layers) if isinstance(layer, nn.Module)}
        )
        self._layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self._layers:
            x = layer(x)
        return x


def _perceptron(draw: _Draw) -> Block:
    """Linear layers between two widths, on vectors or on sequences of them."""
    while True:
        rows, width, hidden = draw.batch(4, 4096), draw.width(8, 2048), draw.width(8, 2048)
        if 2.0 * rows * width * hidden < draw.most_flops and rows * max(width, hidden) < draw.most_elements:
            break
    activation = draw.one_of(nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU)
    shape = (rows, width) if draw.one_of(True, False) else (max(1, rows // 32), min(rows, 32), width)
    layers = [layer for _ in range(2) for layer in (nn.Linear(width, hidden), activation(), nn.Linear(hidden, width))]
    return Block(_Chain(nn.Linear(width, width), *layers), torch.randn(shape))


def _convolutions(draw: _Draw) -> Block:
    """Convolutions with a normalisation and an activation."""
    while True:
        samples, channels, outputs = draw.batch(1, 64), draw.width(8, 512), draw.width(8, 512)
        kernel, stride, side = draw.one_of(1, 1, 3, 3, 3, 5), draw.one_of(1, 1, 2), draw.size(4, 64, 2)
        few = draw.one_of(True, False, False, False, False)
        channels = draw.one_of(1, 2, 3, 4) if few else channels
        depthwise = kernel > 1 and not few and draw.one_of(True, False, False)
        outputs = channels if depthwise else outputs
        pixels = samples * side * side
        flops = 2.0 * pixels * kernel**2 * channels * (1 if depthwise else outputs) / stride**2
        if 1e5 < flops < draw.most_flops and pixels * max(channels, outputs) < draw.most_elements:
            break
    groups = channels if depthwise else 1
    norm = draw.one_of(nn.BatchNorm2d, nn.BatchNorm2d, lambda width: nn.GroupNorm(1 if width % 4 else 4, width))
    activation = draw.one_of(nn.ReLU, nn.ReLU, nn.SiLU)
    bias = draw.one_of(True, False)
    convolve = nn.Conv2d(channels, outputs, kernel, stride, kernel // 2, groups=groups, bias=bias)
    back = nn.Conv2d(outputs, channels, kernel, 1, kernel // 2, groups=groups, bias=bias)
    again = nn.Conv2d(channels, outputs, kernel, 1, kernel // 2, groups=groups, bias=bias)
    layers = (convolve, norm(outputs), activation(), back, norm(channels), activation(), again)
    return Block(_Chain(*layers), torch.randn(samples, channels, side, side))


def _depthwise(draw: _Draw) -> Block:
    """Convolutions of each channel by itself, between a normalisation and an activation."""
    while True:
        samples, channels, side = draw.batch(1, 64), draw.width(8, 512), draw.size(4, 64, 2)
        kernel, stride = draw.one_of(3, 3, 5, 7), draw.one_of(1, 1, 2)
        flops = 2.0 * samples * side * side * kernel**2 * channels / stride**2
        if 1e5 < flops < _SHARE_OF_SLOW * draw.most_flops and samples * side * side * channels < draw.most_elements:
            break
    each = nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=draw.one_of(True, False))
    again = nn.Conv2d(channels, channels, kernel, 1, kernel // 2, groups=channels)
    layers = (each, nn.BatchNorm2d(channels), nn.ReLU(), again)
    return Block(_Chain(*layers), torch.randn(samples, channels, side, side))


_SHARE_OF_SLOW = 0.02
"""Of the most FLOPs, for layers that do many times fewer in a second."""


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, fused: bool) -> None:
        super().__init__()
        self.into, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)
        self._heads, self._causal, self._fused = heads, causal, fused

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = self.into(self.norm(x)).view(samples, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        if self._fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self._causal)
        else:
            mixed = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))  # type: ignore[no-any-return]


def _attention(draw: _Draw) -> Block:
    """Self-attention: fused, and of its products."""
    while True:
        samples, length, heads, depth = draw.batch(1, 32), draw.size(8, 512), draw.size(1, 12), draw.one_of(16, 32, 64)
        width, tokens = heads * depth, samples * length
        products = 2.0 * tokens * width * 3 * width + 4.0 * tokens * length * width
        if (
            products < draw.most_flops
            and samples * heads * length**2 < draw.most_elements
            and 3 * tokens * width < draw.most_elements
        ):
            break
    causal, fused = draw.one_of(True, False), draw.one_of(True, True, False)
    layers = (_Attention(width, heads, causal, fused) for _ in range(2))
    return Block(_Chain(*layers), torch.randn(samples, length, width))


def _pointwise(draw: _Draw) -> Block:
    """Activations, dropout, norms, sums and products of tensors of one shape, and a residual sum."""
    width = draw.width(16, 1024)
    rows = draw.size(8, max(8, draw.most_elements // width))
    kinds = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Sigmoid, lambda: nn.LayerNorm(width), lambda: nn.Softmax(-1),
             lambda: _Scaled(), lambda: nn.LayerNorm(width))  # fmt: skip
    layers = [nn.Dropout(0.1), *(draw.one_of(*kinds)() for _ in range(5))]
    return Block(_Residual(*layers), torch.randn(rows, width))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + x


class _Residual(_Chain):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def _recurrent(draw: _Draw) -> Block:
    """LSTMs and GRUs, of one layer or two, in one direction or both."""
    while True:
        samples, length, width, hidden = draw.batch(4, 64), draw.size(8, 128), draw.width(32, 512), draw.width(32, 512)
        kind, layers = draw.one_of(nn.LSTM, nn.LSTM, nn.GRU), draw.one_of(1, 1, 2)
        both = draw.one_of(False, False, True)
        many = layers * (1 + both)
        if 8.0 * many * samples * length * hidden * (width + hidden) < draw.most_flops and many * length < 128:
            break
    layer = kind(width, hidden, layers, batch_first=draw.one_of(True, False), bidirectional=both)
    return Block(_Chain(layer, lambda found: found[0]), torch.randn(samples, length, width))


class _Cell(nn.Module):
    """A gated state, which is computed step by step of products and activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(2 * width, width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        state, found = torch.zeros_like(x[:, 0]), []
        for time in range(x.shape[1]):
            both = torch.cat([x[:, time], state], -1)
            gate = self.gate(both).sigmoid()
            state = gate * state + (1 - gate) * self.value(both).tanh()
            found.append(state)
        return torch.stack(found, 1)


def _cells(draw: _Draw) -> Block:
    """Recurrent layers that a program takes apart."""
    samples, length, width = draw.batch(1, 16), draw.size(4, 32), draw.width(16, 128)
    return Block(_Cell(width), torch.randn(samples, length, width), draw.one_of(True, False))


def _sequences(draw: _Draw) -> Block:
    """Convolutions of sequences."""
    while True:
        samples, channels, outputs = draw.batch(1, 32), draw.width(16, 256), draw.width(16, 256)
        channels = draw.one_of(1, 3, channels, channels, channels, channels)
        kernel, dilation, length = draw.one_of(1, 2, 3, 5), draw.one_of(1, 1, 2, 8), draw.size(32, 2048, 8)
        flops = 2.0 * samples * length * channels * outputs * kernel
        if 1e5 < flops < draw.most_flops and samples * length * max(channels, outputs) < draw.most_elements:
            break
    convolve = nn.Conv1d(channels, outputs, kernel, dilation=dilation, padding=dilation * (kernel - 1) // 2)
    back = nn.Conv1d(outputs, channels, kernel, dilation=dilation, padding=dilation * (kernel - 1) // 2)
    return Block(_Chain(convolve, nn.ReLU(), back), torch.randn(samples, channels, length))


def _resampling(draw: _Draw) -> Block:
    """Pooling and upsampling, of what is scaled before each."""
    while True:
        samples, channels, side = draw.batch(1, 64), draw.width(8, 256), draw.size(8, 64, 4)
        if samples * channels * side**2 < draw.most_elements:
            break
    down = draw.one_of(lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2), lambda: nn.MaxPool2d(3, 2, 1))
    mode = draw.one_of("nearest", "nearest", "bilinear")
    layers = (_Scaled(), down(), _Scaled(), nn.Upsample(scale_factor=2, mode=mode), down(), nn.AdaptiveAvgPool2d(1))
    return Block(_Chain(*layers), torch.randn(samples, channels, side, side))


def _embedding(draw: _Draw) -> Block:
    """An embedding, and the cross-entropy over its words."""
    while True:
        words, width, samples = draw.size(64, 16384), draw.width(16, 512), draw.batch(16, 2048)
        if 2.0 * words * width * samples < draw.most_flops and words * max(width, samples) < draw.most_elements:
            break
    codes = torch.randint(0, words, (max(1, samples // 32), min(samples, 32)))

    layers = (nn.Embedding(words, width), nn.LayerNorm(width), nn.Linear(width, words), _against(codes))
    return Block(_Chain(*layers), codes)


class _Joined(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return torch.cat([high * low, low], -1).transpose(-1, -2).contiguous().transpose(-1, -2) + x


def _rearranging(draw: _Draw) -> Block:
    """Parts of tensors, joined and transposed."""
    while True:
        samples, rows, width = draw.batch(1, 64), draw.size(8, 512), draw.width(16, 512)
        if samples * rows * width < draw.most_elements:
            break
    return Block(_Chain(_Scaled(), _Joined(), _Joined()), torch.randn(samples, rows, width))


class _Messages(nn.Module):
    """Sums of rows over the edges of a graph."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.edges = nn.Buffer(edges)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.zeros_like(x).index_add(0, self.edges[1], x[self.edges[0]])


def _neighbours(draw: _Draw) -> Block:
    """Rows that are gathered, and added up elsewhere."""
    while True:
        rows, width, edges = draw.batch(64, 16384), draw.width(8, 256), draw.batch(256, 65536)
        if max(rows, edges) * width < draw.most_elements:
            break
    return Block(_Chain(*(_Messages(torch.randint(0, rows, (2, edges))) for _ in range(2))), torch.randn(rows, width))


class _Gated(nn.Module):
    """What follows on a gate of each channel, from the mean of its pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        narrow = max(4, width // 8)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, narrow, 1), nn.SiLU(),
                                  nn.Conv2d(narrow, width, 1), nn.Sigmoid())  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x)  # type: ignore[no-any-return]


def _image_layer(draw: _Draw, width: int) -> Callable[[], nn.Module]:
    """Return what makes one of the layers of a network for images."""
    activation, window, gated = draw.one_of(nn.ReLU, nn.SiLU), draw.one_of(3, 3, 5, 7), draw.one_of(True, False)
    bias = draw.one_of(True, False)

    def conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Module:
        return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=bias)

    def plain() -> nn.Module:
        return _Residual(conv(width, width, 3), nn.BatchNorm2d(width), activation(),
                         conv(width, width, 3), nn.BatchNorm2d(width))  # fmt: skip

    def inverted() -> nn.Module:
        wide = 4 * width
        gate = [_Gated(wide)] if gated else []
        return _Residual(conv(width, wide, 1), nn.BatchNorm2d(wide), activation(),
                         conv(wide, wide, window, wide), nn.BatchNorm2d(wide), activation(), *gate,
                         conv(wide, width, 1), nn.BatchNorm2d(width))  # fmt: skip

    def grouped() -> nn.Module:
        return _Residual(nn.GroupNorm(4, width), activation(), conv(width, width, 3),
                         nn.GroupNorm(4, width), activation(), conv(width, width, 3))  # fmt: skip

    return draw.one_of(plain, inverted, grouped)  # type: ignore[no-any-return]


def _images(draw: _Draw) -> Block:
    """Networks for images, of many small layers: what a launch costs depends on how many there were of its kind."""
    samples, width, side, depth = draw.batch(1, 8), draw.width(16, 64), draw.size(4, 16, 4), draw.size(2, 12)
    layer, classes = _image_layer(draw, width), torch.randint(0, 10, (samples,))
    layers = (layer() for _ in range(depth))
    first, last = nn.Conv2d(3, width, 3, padding=1), nn.Linear(width, 10)
    network = _Chain(first, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last, _against(classes))
    return Block(network, torch.randn(samples, 3, side, side), draw.one_of(True, False))


def _against(codes: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the cross-entropy over the words."""
    return lambda x: nn.functional.cross_entropy(x.flatten(0, -2), codes.to(x.device).flatten())


class _Decoder(nn.Module):
    """A layer of a transformer, as different models write it."""

    def __init__(self, width: int, heads: int, norm: Callable[[int], nn.Module], gated: bool, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=not gated) for _ in range(4))
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.gate = nn.Linear(width, 3 * width) if gated else None
        self.dropout = nn.Dropout(0.0 if gated else 0.1)
        self._heads, self._fused = heads, fused

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm1(x)
        q, k, v = (self._split(of(given)) for of in (self.query, self.key, self.value))
        if self._fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = self.dropout((q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)) @ v
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        given = self.norm2(x)
        wide = nn.functional.gelu(self.up(given))
        if self.gate is not None:
            wide = nn.functional.silu(self.gate(given)) * self.up(given)
        return x + self.dropout(self.down(wide))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self._heads, -1).transpose(1, 2)


def _transformer(draw: _Draw) -> Block:
    """Networks for sequences, of many small layers."""
    samples, length, heads, depth = draw.batch(1, 4), draw.size(8, 48, 8), draw.size(1, 4), draw.size(2, 10)
    width, words = heads * draw.one_of(16, 32), draw.size(64, 1024)
    norm = draw.one_of(nn.LayerNorm, nn.LayerNorm, nn.RMSNorm)
    gated, fused = draw.one_of(True, False), draw.one_of(True, False)
    layers = (_Decoder(width, heads, norm, gated, fused) for _ in range(depth))
    codes = torch.randint(0, words, (samples, length))
    network = _Chain(nn.Embedding(words, width), *layers, norm(width), nn.Linear(width, words), _against(codes))
    return Block(network, codes, draw.one_of(True, False))


def _small(draw: _Draw) -> Block:
    """Layers so small that what a step costs beside its kernels is a large part of it."""
    layers = (layer for _ in range(draw.size(1, 16)) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()))
    return Block(_Chain(*layers), torch.randn(4, 8))


_FAMILIES: tuple[tuple[Callable[[_Draw], Block], int], ...] = (
    (_convolutions, 44), (_perceptron, 24), (_attention, 20), (_pointwise, 16), (_recurrent, 24), (_resampling, 14),
    (_sequences, 10), (_embedding, 12), (_rearranging, 8), (_neighbours, 10), (_small, 8), (_depthwise, 20),
    (_images, 14), (_transformer, 12), (_cells, 5),
)  # fmt: skip
"""Kinds of blocks, and how many of each are drawn."""


def blocks(device: str = "cpu", every: int = 1) -> Iterator[tuple[int, Block]]:
    """Yield all blocks with their numbers, or one in `every`, on the device, those of one family far from each
    other."""
    turns = sorted((turn / count, number, turn) for number, (_, count) in enumerate(_FAMILIES) for turn in range(count))
    for number, (_, family, turn) in list(enumerate(turns))[::every]:
        draw = _Draw(1000 * family + turn, SCALES.get(device, 1))
        with torch.device(device):
            block = _FAMILIES[family][0](draw)
        yield number, block
