"""LoRA on a real task: gradients beside torch's own, ranks beside one process, and a saved model as the base."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hcsim.errors import ConfigError
from hcsim.testing import check_task
from hcsim.training.layout import Layout
from hcsim.training.model_file import load_model, save_model
from hcsim.training.task import backward_work
from hcsim.training.tasks import task
from hcsim.training.tasks.torch_replica import Array, MirroredMemory, freeze
from hcsim.training.tasks.torch_task import TorchTask, cross_entropy

SPEC = "text:lora=4,matrices=heads+down"


def found(spec: str = SPEC) -> TorchTask:
    real = task(spec)
    assert isinstance(real, TorchTask)
    return real


def undivided(parameters: Array, layout: Layout) -> nn.Module:
    """The task's modules in one, with these adapters."""
    modules = found().model.modules()
    for module, trained, frozen in zip(modules, layout.blocks, found().frozen_layout.blocks, strict=True):
        freeze(module, frozen, torch.from_numpy(found().frozen))
        values = [torch.from_numpy(tensor.view(parameters).copy()) for tensor in trained]
        for parameter, value in zip([p for p in module.parameters() if p.requires_grad], values, strict=True):
            parameter.data = value
    return nn.Sequential(*modules)


def test_an_adapted_task_passes_the_checks_of_all_tasks() -> None:
    check_task(found())


def test_what_is_frozen_is_the_same_on_all_replicas_and_no_part_of_what_is_exchanged() -> None:
    one, other = found().replica(1), found().replica(2)
    assert one.layout.length == 2 * 4 * (64 + 3 * 64 + 4 * 64 + 64)
    assert sum(block.frozen_length for block in found().blocks) == sum(block.length for block in task("text").blocks)
    # The outer matrices of fresh adapters are zero, so that the model is the frozen one whatever the seed.
    batch = np.arange(8)
    assert one.forward(batch) == other.forward(batch)


def test_gradients_are_those_of_one_undivided_model_with_frozen_weights() -> None:
    replica = found().replica(seed=5)
    replica.parameters[:] = np.random.default_rng(0).normal(0, 0.1, replica.layout.length)
    batch = np.arange(3, 12)
    loss = replica.forward(batch)
    whole = undivided(replica.parameters, replica.layout)
    trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
    expected = cross_entropy(whole(found().training.inputs[batch]), found().training.targets[batch])
    gradients = torch.autograd.grad(expected, trained)
    assert loss == float(expected.detach())
    for block in reversed(range(len(replica.layout.blocks))):
        replica.backward(block)
    tensors = [tensor for block in replica.layout.blocks for tensor in block]
    for tensor, gradient in zip(tensors, gradients, strict=True):
        assert np.array_equal(tensor.view(replica.gradients), gradient.numpy()), tensor.name


def test_the_backward_pass_takes_the_flops_that_torch_counts() -> None:
    replica = found().replica(1)
    whole = undivided(replica.parameters, replica.layout)
    with FlopCounterMode(display=False) as counter:
        outputs = whole(found().training.inputs[:1])
        forward = counter.get_total_flops()
        outputs.sum().backward()
    blocks = found().blocks
    # torch counts no attention of a processor's fused kernel; both passes of it are products of q, k and v.
    attention = 2 * (2 * 2 * 64 * 64 * 64)
    assert sum(block.flops for block in blocks) == forward + attention
    backward = counter.get_total_flops() - forward
    assert sum(backward_work(block, 1).flops for block in blocks) == backward + 2 * attention


def test_a_device_with_its_own_memory_computes_the_same() -> None:
    near = found().replica(seed=2)
    far = found().replica_in(MirroredMemory(near.layout.length, torch.device("cpu")))
    far.initialise(seed=2, gain=found().model.gain)
    for replica in (near, far):
        replica.forward(np.arange(8))
        for block in reversed(range(len(near.layout.blocks))):
            replica.backward(block)
    assert np.array_equal(near.gradients, far.gradients)
    assert near.gradients.any()


def test_a_saved_model_is_the_base_of_adapters(tmp_path: Path) -> None:
    whole = found("text")
    parameters = whole.replica(3).parameters
    file = tmp_path / "base.safetensors"
    save_model(file, whole, parameters, {})
    adapted = found(f"text:lora=2,base={file}")
    assert adapted.score(adapted.replica(0).parameters) == whole.score(parameters)
    assert adapted.fingerprint != found("text:lora=2").fingerprint
    adapters = tmp_path / "adapters.safetensors"
    save_model(adapters, adapted, adapted.replica(0).parameters, {})
    assert load_model(adapters).task.name == adapted.name
    with pytest.raises(ConfigError, match=r"weight is missing, but is to be float32 \["):
        task(f"text:lora=4,base={adapters}")


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("text:lora=4,matrices=query", 'no matrix "query"; known: heads, joined, up, down, or all'),
        ("text:base=x.safetensors", "a base is for adapters: give lora, their rank"),
        ("text:lora=4,base=none.safetensors", "this is no model that can be read"),
        ("text:lora=1000", "lora: expected a whole number, at most 64"),
    ],
)
def test_a_mistake_in_the_spec_is_told_in_a_line(spec: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        task(spec)
