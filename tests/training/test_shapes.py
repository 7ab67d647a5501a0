"""Models by their shapes: parameters beside published counts, FLOPs beside what torch counts of real modules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hcsim.config import Training
from hcsim.errors import ConfigError
from hcsim.launch.virtual import simulate_training
from hcsim.runtime.frame import HEADER_BYTES
from hcsim.training.task import Task, backward_work, forward_work
from hcsim.training.tasks import task

GIVEN = "layers=3,width=64,heads=4,vocabulary=500,tokens=32"


def trained(found: Task) -> int:
    return sum(block.length for block in found.blocks)


def forward_flops(found: Task) -> float:
    return sum(block.flops for block in found.blocks)


def backward_flops(found: Task) -> float:
    return sum(backward_work(block, 1).flops for block in found.blocks)


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        ("resnet18", 11_689_512), ("resnet101", 44_549_160), ("vit-b16", 86_567_656), ("vit-s16", 22_050_664),
        ("llama-8b", 8_030_261_248), ("gpt2:tokens=64", 124_439_808),
        ("transformer:layers=12,width=768,tokens=1024,vocabulary=50257", 124_439_808),
        ("transformer:layers=24,width=1024,tokens=1024,vocabulary=50257", 354_823_168),  # GPT-2 medium
    ],
)  # fmt: skip
def test_a_model_has_the_published_number_of_parameters(spec: str, parameters: int) -> None:
    assert trained(task(spec)) == parameters


def test_qwen_has_the_published_number_of_parameters_and_two_flops_for_each_and_token() -> None:
    """llama.cpp counts 8.95 billion without the vision tower. The embedding is looked up, not multiplied."""
    found = task("qwen3.5-9b:tokens=1")
    assert trained(found) == pytest.approx(8.95e9, rel=1e-3)
    multiplied = trained(found) - 248_320 * 4096
    assert forward_flops(found) == pytest.approx(2 * multiplied, rel=0.015)


def test_layers_below_the_lowest_adapter_have_no_backward_pass() -> None:
    whole, upper = task("qwen3.5-9b:lora=8"), task("qwen3.5-9b:lora=8,adapted=16")
    assert 2 * trained(upper) == trained(whole)
    assert [block.is_trained for block in upper.blocks] == [False] * 17 + [True] * 17
    assert backward_flops(upper) < 0.6 * backward_flops(whole)
    assert forward_flops(upper) < forward_flops(whole)


def test_there_are_no_more_adapted_layers_than_layers() -> None:
    with pytest.raises(ConfigError, match="adapted = 33: this model has 32 layers"):
        task("qwen3.5-9b:lora=8,adapted=33")


def test_adapters_have_the_parameters_that_peft_prints() -> None:
    """Of Llama 7B, with its usual matrices ("trainable params: 4,194,304 || all params: 6,742,609,920")."""
    adapted = task("llama-7b:lora=8")
    assert trained(adapted) == 4_194_304
    assert sum(block.frozen_length for block in adapted.blocks) == 6_742_609_920 - 4_194_304


@pytest.mark.parametrize(
    ("matrices", "sides"),
    [("query", 4096 + 4096), ("gate+down", 2 * (4096 + 11008)), ("all", 4 * 2 * 4096 + 3 * (4096 + 11008))],
)
def test_an_adapter_has_its_rank_times_the_sides_of_its_matrix(matrices: str, sides: int) -> None:
    assert trained(task(f"llama-7b:lora=16,matrices={matrices}")) == 32 * 16 * sides


@pytest.mark.parametrize("size", [1e6, 3e7, 1e9, 1e10])
@pytest.mark.parametrize("kind", ["", ",gated"])
def test_a_transformer_has_about_the_parameters_it_is_named_for(size: float, kind: str) -> None:
    found = task(f"transformer:{size:g}{kind}")
    assert trained(found) == pytest.approx(size, rel=0.03)
    # Two FLOPs for each parameter and token, and attention on top.
    assert forward_flops(found) >= 2 * 2048 * size * 0.97


def test_a_width_or_a_depth_that_is_given_stays() -> None:
    deep, wide = task("transformer:1e8,layers=20"), task("transformer:1e8,width=512")
    assert len(deep.blocks) == 20
    assert dict(wide.blocks[0].shapes)["layer0.query.weight"] == (512, 512)
    assert trained(deep) == pytest.approx(1e8, rel=0.02)
    assert trained(wide) == pytest.approx(1e8, rel=0.02)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("transformer", "give parameters .transformer:1e8., or layers and width"),
        ("transformer:1e8,layers=3,width=4", "leave those out"),
        ("transformer:layers=2,width=10,heads=4", "these do not divide"),
        ("transformer:1e8,kv_heads=2", "give layers and width instead of parameters"),
        ("gpt2:tokens=2000", "tokens = 2000: this model knows 1024 positions"),
        (
            "gpt2:lora=4,matrices=querry",
            'no matrix "querry" .did you mean query..; known: query, key, value, output, up',
        ),
        ("gpt2:lora=4,matrices=gate", 'there is no matrix "gate"'),
        ("resnet50:side=100", "give a multiple of 32"),
        ("vit-b16:side=100", "give a multiple of 16"),
        ("digits:4", '"digits" has nothing to set'),
        ("gpt2:words=4", '"gpt2" knows tokens=1024, lora=0, matrices=query.value'),
    ],
)
def test_a_mistake_in_a_spec_is_told_in_a_line(spec: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as told:
        task(spec)
    assert "\n" not in str(told.value)


class Adapted(nn.Module):
    """A frozen product with an adapter beside it."""

    def __init__(self, inputs: int, outputs: int, bias: bool, rank: int) -> None:
        super().__init__()
        self.whole = nn.Linear(inputs, outputs, bias=bias)
        self.rank = rank
        if rank:
            self.a, self.b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x) + self.b(self.a(x)) if self.rank else self.whole(x)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, gated: bool, kv_heads: int, ranks: dict[str, int]) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        kv_width = width * kv_heads // heads
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(width), norm(width)

        def product(name: str, inputs: int, outputs: int) -> Adapted:
            return Adapted(inputs, outputs, not gated, ranks.get(name, 0))

        self.query, self.key = product("query", width, width), product("key", width, kv_width)
        self.value, self.output = product("value", width, kv_width), product("output", width, width)
        self.gate = product("gate", width, hidden) if gated else None
        self.up, self.down = product("up", width, hidden), product("down", hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm1(x)
        q, k, v = (
            each.unflatten(-1, (heads, -1)).transpose(1, 2)
            for each, heads in (
                (self.query(n), self.heads), (self.key(n), self.kv_heads), (self.value(n), self.kv_heads),
            )
        )  # fmt: skip
        if any(each.requires_grad for each in (q, k, v)):
            for each in (q, k, v):  # a fused attention has all three gradients, or none
                each.requires_grad or each.requires_grad_()
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
        attended = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        n = self.norm2(x)
        if self.gate is not None:
            return x + self.down(nn.functional.silu(self.gate(n)) * self.up(n))
        return x + self.down(nn.functional.gelu(self.up(n)))


class Decoder(nn.Module):
    """The transformer of `GIVEN`."""

    def __init__(self, gated: bool, kv_heads: int, ranks: dict[str, int]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(500, 64)
        self.positions = None if gated else nn.Embedding(32, 64)
        hidden = 171 if gated else 256
        self.layers = nn.ModuleList(Layer(64, 4, hidden, gated, kv_heads, ranks) for _ in range(3))
        self.norm = (nn.RMSNorm if gated else nn.LayerNorm)(64)
        if ranks:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(".a." in name or ".b." in name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flowing = self.tokens(x)
        if self.positions is not None:
            flowing = flowing + self.positions.weight
        for layer in self.layers:
            flowing = layer(flowing)
        return self.norm(flowing) @ self.tokens.weight.T


def counted(module: nn.Module, sample: torch.Tensor) -> tuple[int, int]:
    """Return the FLOPs of both passes."""
    with FlopCounterMode(display=False) as counter:
        result = module(sample)
        forward = counter.get_total_flops()
        result.sum().backward()
    return forward, counter.get_total_flops() - forward


MATRICES: Sequence[tuple[str, ...]] = [
    ("query", "value"), ("key",), ("output",), ("up",), ("down",), ("query", "key", "value", "output", "up", "down"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["", ",gated", ",gated,kv_heads=2"])
@pytest.mark.parametrize("matrices", [(), *MATRICES])
def test_a_transformer_takes_the_flops_that_torch_counts_in_both_passes(kind: str, matrices: tuple[str, ...]) -> None:
    module = Decoder("gated" in kind, 2 if "kv" in kind else 4, dict.fromkeys(matrices, 8))
    forward, backward = counted(module, torch.zeros(1, 32, dtype=torch.int64))
    adapters = f",lora=8,matrices={'+'.join(matrices)}" if matrices else ""
    found = task(f"transformer:{GIVEN}{kind}{adapters}")
    assert trained(found) == sum(each.numel() for each in module.parameters() if each.requires_grad)
    assert sum(block.frozen_length for block in found.blocks) == (
        sum(each.numel() for each in module.parameters() if not each.requires_grad)
    )
    assert forward_work(found, 1).flops == forward
    assert backward_flops(found) == backward


def test_frozen_weights_take_half_of_the_backward_pass() -> None:
    whole, adapted = task("llama-7b"), task("llama-7b:lora=8")
    assert backward_flops(whole) == 2 * forward_flops(whole)
    # Attention has no weights.
    attention = 32 * 4.0 * 2048**2 * 4096
    assert backward_flops(adapted) == pytest.approx(forward_flops(whole) + attention, rel=0.01)


class Residual(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.main(x) + self.shortcut(x))


def torch_resnet18() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width in (64, 128, 256, 512):
        layers += [Residual(channels, width, 1 if width == channels else 2), Residual(width, width, 1)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def test_a_residual_network_of_basic_blocks_takes_the_flops_that_torch_counts() -> None:
    module, found = torch_resnet18(), task("resnet18:side=64")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.zeros(1, 3, 64, 64))
    assert trained(found) == sum(each.numel() for each in module.parameters())
    assert forward_flops(found) == counter.get_total_flops()


class VisionTransformer(nn.Module):
    """ViT-S/16."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 384, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, 384))
        self.positions = nn.Parameter(torch.zeros(1, (side // 16) ** 2 + 1, 384))
        self.layers = nn.Sequential(*(Layer(384, 6, 1536, False, 6, {}) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(384), nn.Linear(384, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first, x], 1) + self.positions
        return self.head(self.norm(self.layers(x))[:, 0])


def test_a_vision_transformer_takes_the_flops_that_torch_counts() -> None:
    module, found = VisionTransformer(48), task("vit-s16:side=48")
    assert trained(found) == sum(each.numel() for each in module.parameters())
    assert (forward_flops(found), backward_flops(found)) == counted(module, torch.zeros(1, 3, 48, 48))


def test_adapters_alone_are_on_the_wire() -> None:
    """A ring of four sends 2 · 3/4 of what is trained, in six messages for each bucket."""
    settings = Training(task="llama-7b:lora=16,tokens=64", algorithm="ring", steps=2)
    outcome = simulate_training("four-macs-1gbe", settings)
    size_bytes = 4 * 32 * 16 * 2 * (4096 + 4096)
    buckets = len(task(settings.task).replica(0).layout.buckets(settings.bucket_bytes))
    for report in outcome.values():
        each = [later.sent_bytes - earlier.sent_bytes for earlier, later in pairwise(report.points)]
        assert each == [2 * 3 * size_bytes // 4 + 6 * buckets * HEADER_BYTES]
