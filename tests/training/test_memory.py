"""How much memory training needs: beside what autograd keeps, beside published formulas, and what fits where."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from experiments.memory import decoder, residual_network, vision_transformer
from hcsim.config import Training, parse_scenario
from hcsim.config.machine import GIB, usable_bytes
from hcsim.training.fitting import Room, alternatives, fits_of, smallest_mac_gib
from hcsim.training.memory import Held, MemoryNeed, Place, activation_bytes, memory_need
from hcsim.training.precision import prepared
from hcsim.training.strategies import STRATEGIES, held_by, strategy
from hcsim.training.tasks import task
from hcsim.training.tasks.transformer import Architecture
from hcsim.training.tasks.vision import ResNet18, ResNet50, ViTSmall

GPT2 = Training(task="gpt2", momentum=0.9)
PARAMETERS = 124_439_808


def need(settings: Training, held: Held | None = None, place: Place | None = None) -> MemoryNeed:
    return memory_need(prepared(task(settings.task), settings), settings, held or Held(), place or Place(4, 8))


# Activations.


def kept_by_autograd(modules: Sequence[nn.Module], flowing: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the bytes of all tensors that autograd keeps, each once, without parameters; and the result."""
    own = [each.untyped_storage().data_ptr() for module in modules for each in module.parameters()]
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for number, module in enumerate(modules):
            flowing = module(flowing.detach().requires_grad_(number > 0))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), flowing


def modules_of(spec: str) -> tuple[list[nn.Module], torch.Tensor]:
    if spec.startswith("transformer"):
        return list(decoder(Architecture(2, 64, 300, 4, positions=32))), torch.zeros(1, 32, dtype=torch.int64)
    kind = {"resnet18": ResNet18, "resnet50": ResNet50, "vit-s16": ViTSmall}[spec.partition(":")[0]](side=64)
    modules = vision_transformer(kind) if isinstance(kind, ViTSmall) else residual_network(kind)
    return list(modules), torch.zeros(1, 3, 64, 64)


@pytest.mark.parametrize(
    "spec",
    [
        "transformer:layers=2,width=64,heads=4,vocabulary=300,tokens=32", "resnet18:side=64",
        pytest.param("resnet50:side=64", marks=pytest.mark.slow), "vit-s16:side=64",
    ],
)  # fmt: skip
def test_blocks_keep_what_autograd_keeps_of_their_modules(spec: str) -> None:
    modules, flowing = modules_of(spec)
    kept_bytes, result = kept_by_autograd(modules, flowing)
    kept_bytes += 4 * result.numel()  # the loss keeps the logarithms of its probabilities
    # The mean and the deviation of each channel do not grow with the batch.
    norms = [each for module in modules for each in module.modules() if isinstance(each, nn.BatchNorm2d)]
    kept_bytes -= sum(2 * 4 * each.num_features for each in norms)
    ours = sum(block.activations.kept_bytes for block in task(spec).blocks if block.activations is not None)
    assert ours == pytest.approx(kept_bytes, rel=0.005)


def test_a_layer_keeps_what_the_formula_of_megatron_says() -> None:
    """34 bytes for each token and each unit of width in 16 bits, two of them for masks of dropouts, which are not
    here (https://arxiv.org/abs/2205.05198, without the scores of attention). Statistics of norms come on top."""
    layer = prepared(task("gpt2"), replace(GPT2, precision="bf16")).blocks[1]
    assert layer.activations is not None
    assert layer.activations.kept_bytes == pytest.approx(1024 * 768 * 32, rel=0.005)


def test_blocks_that_are_computed_again_keep_their_inputs_and_one_of_them_all_it_has() -> None:
    blocks, again = (prepared(task("llama-1b"), each).blocks for each in (GPT2, replace(GPT2, recompute=True)))
    inputs_bytes = 16 * 4 * 2048 * 2048
    head, layer = blocks[-1].activations, blocks[1].activations
    assert head is not None
    assert layer is not None
    assert activation_bytes(again, 1) == inputs_bytes + head.kept_bytes + head.working_bytes
    assert activation_bytes(blocks, 1) == 16 * layer.kept_bytes + head.kept_bytes + head.working_bytes


def test_activations_grow_with_the_batch_and_nothing_else_does() -> None:
    one, eight = need(GPT2, place=Place(4, 1)), need(GPT2, place=Place(4, 8))
    assert eight.activations == pytest.approx(8 * one.activations, rel=1e-6)
    assert replace(one, activations=0) == replace(eight, activations=0)


def test_adapters_need_no_inputs_of_frozen_products_and_no_gradients_of_their_weights() -> None:
    whole, adapted = need(replace(GPT2, task="llama-7b")), need(replace(GPT2, task="llama-7b:lora=8"))
    assert adapted.gradients == adapted.optimizer == 4 * 4_194_304
    assert adapted.weights == whole.weights + 4 * 4_194_304
    assert adapted.activations < 0.85 * whole.activations


# States.


@pytest.mark.parametrize(
    ("precision", "optimizer", "each_bytes"),
    # With 16 bits and Adam 16 bytes, of which 12 are the optimizer's (ZeRO, https://arxiv.org/abs/1910.02054).
    [
        ("fp32", "sgd", (4, 4, 4)),
        ("fp32", "adamw", (4, 4, 8)),
        ("bf16", "sgd", (2, 2, 8)),
        ("bf16", "adamw", (2, 2, 12)),
    ],
)
def test_each_parameter_takes_its_bytes(precision: str, optimizer: str, each_bytes: tuple[int, ...]) -> None:
    chosen = msgspec.convert({"task": "gpt2", "precision": precision, "optimizer": optimizer}, Training)
    found = need(chosen)
    assert (found.weights, found.gradients, found.optimizer) == tuple(PARAMETERS * each for each in each_bytes)


def test_sgd_without_momentum_has_no_state() -> None:
    assert need(replace(GPT2, momentum=0.0)).optimizer == 0


@pytest.mark.parametrize(("spec", "copies"), [("ddp", 0), ("local_sgd:8", 2), ("diloco:16", 3)])
def test_a_strategy_of_periods_holds_an_anchor_a_change_and_its_momentum(spec: str, copies: int) -> None:
    assert need(GPT2, held_by(strategy(spec), 1, 4)).strategy == copies * 4 * PARAMETERS


def test_a_server_holds_the_pushes_of_all_workers_in_a_round_and_of_one_without_rounds() -> None:
    sync, free = (need(GPT2, held_by(strategy(f"parameter_server:{mode}"), 0, 8)).total for mode in ("sync", "async"))
    worker = need(GPT2, held_by(strategy("parameter_server"), 3, 8)).total
    assert sync - free == pytest.approx(7 * 2 * 4 * PARAMETERS, rel=0.001)
    assert worker < free


def test_one_machine_alone_computes_with_the_batches_of_all() -> None:
    rooms = [Room(name, "M4 Max", None, None) for name in "abcd"]
    alone, *others = (fit.need for fit in fits_of(replace(GPT2, strategy="single", batch=2), rooms))
    assert alone.activations == need(GPT2, place=Place(4, 8)).activations
    assert {other.activations for other in others} == {0}


def test_a_strategy_that_shards_says_which_share_of_each_kind_it_holds() -> None:
    class Shards(msgspec.Struct, frozen=True):
        def held(self, rank: int, ranks: int) -> Held:
            return Held(weights=1 / ranks, gradients=1 / ranks, optimizer=1 / ranks)

        async def train(self, run: object) -> None: ...

    whole, shard = need(GPT2), need(GPT2, held_by(Shards(), 0, 4))
    assert (shard.weights, shard.gradients, shard.optimizer) == (PARAMETERS,) * 3
    assert shard.activations == whole.activations


@pytest.mark.parametrize("spec", STRATEGIES)
@pytest.mark.parametrize("compressor", ["none", "topk:0.01+ef", "int8+ef", "powersgd:4+ef", "onebit"])
def test_compression_needs_memory_too(spec: str, compressor: str) -> None:
    held = held_by(strategy(spec), 0, 2)
    plain, found = need(GPT2, held), need(replace(GPT2, compressor=compressor), held)
    residual_bytes = 2 * 4 * PARAMETERS if compressor.endswith("+ef") else 0
    assert found.compression >= residual_bytes
    assert plain.compression == 0


def test_a_device_with_memory_of_its_own_has_a_second_copy_of_weights_and_gradients() -> None:
    plain, mirrored = need(GPT2), need(GPT2, place=Place(4, 8, mirrored=True))
    assert mirrored.total - plain.total == 2 * 4 * PARAMETERS


# Machines.

HOME = """
name = "home"
[[medium]]
kind = "ethernet"
name = "switch"
rate = "1 Gb/s"
[[machine]]
name = "tower"
peak = "10 TFLOPS"
memory = "100 GB/s"
ram = "10 GB"
[[node]]
name = "mini"
machine = "M4"
links = ["switch"]
[[node]]
name = "studio"
machine = "M2 Max"
memory = "96 GiB"
links = ["switch"]
[[node]]
name = "tower"
machine = "tower"
links = ["switch"]
[[node]]
name = "thought"
machine = "ideal"
links = ["switch"]
"""


def test_a_machine_has_the_memory_of_its_name_or_what_the_home_says() -> None:
    rooms = [Room.of(node) for node in parse_scenario(HOME, "home").nodes]
    assert [room.installed_bytes for room in rooms] == [16 * GIB, 96 * GIB, 10_000_000_000, None]
    assert [room.usable_bytes for room in rooms] == [16 * GIB * 2 // 3, 72 * GIB, 9_000_000_000, None]


def test_macos_leaves_the_gpu_two_thirds_of_little_memory_and_three_quarters_of_much() -> None:
    """10.67 GiB of a Mac mini with an M4 and 16 GiB, as was measured, and 48 of 64."""
    assert usable_bytes("M4", 16 * GIB) == pytest.approx(10.67 * GIB, rel=1e-3)
    assert usable_bytes("Apple M1 Max", 64 * GIB) == 48 * GIB
    assert smallest_mac_gib(20 * GIB) == 32
    assert smallest_mac_gib(1000 * GIB) is None


def test_what_is_offered_instead_fits() -> None:
    rooms = [Room.of(node) for node in parse_scenario(HOME, "home").nodes]
    settings = Training(task="gpt2", strategy="diloco:16", optimizer="adamw")
    assert not all(fit.fits for fit in fits_of(settings, rooms))
    offered = alternatives(settings, rooms)
    assert "--set batch=1" in [each.words for each in offered]
    least = min(room.usable_bytes for room in rooms if room.usable_bytes is not None)
    assert all(each.most_bytes <= least for each in offered)
    assert all(fit.fits for fit in fits_of(replace(settings, batch=1), rooms))
