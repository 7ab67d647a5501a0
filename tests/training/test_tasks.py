"""The tasks: gradients beside torch's own, models beside their published sizes, an optimum beside a solver's."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hcsim.errors import ConfigError, UsageError
from hcsim.files import file_of
from hcsim.runtime.channel import Phantom
from hcsim.training.data import Batches
from hcsim.training.layout import Layout
from hcsim.training.optimizer import Sgd
from hcsim.training.task import Replica, Task, backward_work, forward_work
from hcsim.training.tasks import TASKS, convex, task, torch_task
from hcsim.training.tasks.torch_replica import MirroredMemory, ReplicaMemory, TorchReplica
from hcsim.training.tasks.torch_task import TorchTask, cross_entropy

REAL = ("digits", "text", "convex")
SHAPES = (
    "resnet18", "resnet50", "resnet101", "vit-s16", "vit-b16", "gpt2", "llama-1b", "llama-7b", "llama-8b",
    "qwen3.5-9b", "transformer:1e6",
)  # fmt: skip
NAMES = (*REAL, "slopes", *SHAPES)


def pass_over(replica: Replica, batch: Sequence[int]) -> float:
    loss = replica.forward(np.array(batch, np.int64))
    for block in reversed(range(len(replica.layout.blocks))):
        replica.backward(block)
    return loss


def text_modules() -> list[nn.Module]:
    layers = torch_task.Layer(), torch_task.Layer()
    return [torch_task.Embedding(39), *layers, nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 39))]


# The registry.


@pytest.mark.slow
def test_every_name_has_its_task() -> None:
    assert tuple(TASKS) == tuple(name.partition(":")[0] for name in NAMES)
    for name in NAMES:
        found: Task = task(name)
        assert found.name == name
        assert found.phantom == (name in SHAPES)
        assert found.samples > 0
        assert found.defaults.batch > 0


def test_an_unknown_task_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r'no task "digit" \(did you mean digits\?\); known: digits, text, '):
        task("digit")


@pytest.mark.parametrize("name", NAMES)
def test_a_replica_has_the_layout_of_its_tasks_blocks(name: str) -> None:
    replica = task(name).replica(0)
    assert replica.layout == Layout.of([block.shapes for block in task(name).blocks])
    assert replica.parameters.nbytes == replica.gradients.nbytes == replica.layout.size_bytes


def test_fingerprints_tell_tasks_apart_and_are_the_same_everywhere() -> None:
    prints = [task(name).fingerprint for name in NAMES]
    assert len(frozenset(prints)) == len(prints)
    # Data that is drawn, shipped with scikit-learn or with Python must not change unnoticed: digests hang on it.
    assert task("convex").fingerprint[:16] == "68126000dce2a53a"
    assert task("digits").fingerprint[:16] == "01a9bdb54c75de9d"
    assert task("text").fingerprint[:16] == "b7ef90e980bec742"


# Gradients.


@pytest.mark.parametrize(("name", "modules"), [("digits", torch_task.digits_network), ("text", text_modules)])
def test_gradients_are_those_of_one_undivided_model_bit_for_bit(name: str, modules: object) -> None:
    found = task(name)
    assert isinstance(found, TorchTask)
    replica = found.replica(seed=5)
    whole = nn.Sequential(*modules())  # type: ignore[operator]
    for parameter, tensor in zip(whole.parameters(), by_forward(replica.layout), strict=True):
        parameter.data = torch.from_numpy(replica.parameters[tensor.span].reshape(tensor.shape).copy())
    batch = torch.arange(3, 12)
    loss = cross_entropy(whole(found.training.inputs[batch]), found.training.targets[batch])
    loss.backward()

    assert pass_over(replica, batch.tolist()) == float(loss.detach())
    for parameter, tensor in zip(whole.parameters(), by_forward(replica.layout), strict=True):
        assert parameter.grad is not None
        assert np.array_equal(replica.gradients[tensor.span].reshape(tensor.shape), parameter.grad.numpy()), tensor.name


def by_forward(layout: Layout) -> list:  # type: ignore[type-arg]
    return [tensor for block in layout.blocks for tensor in block]


@pytest.mark.parametrize("name", REAL)
def test_the_backward_pass_adds_to_the_gradients_that_are_there(name: str) -> None:
    replica = task(name).replica(seed=1)
    pass_over(replica, range(8))
    once = np.array(replica.gradients)
    pass_over(replica, range(8))
    np.testing.assert_allclose(replica.gradients, 2 * once, rtol=1e-6)


@pytest.mark.parametrize("name", REAL)
def test_each_block_writes_its_own_gradients_alone(name: str) -> None:
    replica = task(name).replica(seed=1)
    replica.forward(np.arange(8))
    for block in reversed(range(len(replica.layout.blocks))):
        before = np.array(replica.gradients)
        replica.backward(block)
        changed = np.flatnonzero(before != replica.gradients)
        tensors = replica.layout.blocks[block]
        assert tensors[0].offset <= changed.min() <= changed.max() < tensors[-1].span.stop


@pytest.mark.parametrize("name", REAL)
def test_gradients_of_parts_weighted_by_their_samples_are_those_of_the_whole(name: str) -> None:
    found = task(name)
    batches = Batches(20, [5, 9, 2], seed=0)
    mean = np.zeros(found.replica(1).layout.length)
    for rank, count in enumerate(batches.counts(0)):
        replica = found.replica(1)
        pass_over(replica, batches.batch(0, rank).tolist())
        mean += np.asarray(replica.gradients) * (count / 16)
    whole = found.replica(1)
    pass_over(whole, Batches(20, [16], seed=0).batch(0, 0).tolist())
    np.testing.assert_allclose(whole.gradients, mean, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", REAL)
def test_an_empty_batch_has_no_loss_and_no_gradients(name: str) -> None:
    replica = task(name).replica(1)
    replica.forward(np.arange(4))
    assert pass_over(replica, []) == 0.0
    assert not np.any(replica.gradients)


def test_what_is_written_to_the_parameters_is_what_the_model_uses() -> None:
    replica = task("digits").replica(1)
    replica.parameters[:] = 0
    assert replica.forward(np.arange(8)) == pytest.approx(np.log(10))


def test_blocks_out_of_order_are_refused() -> None:
    replica = task("digits").replica(1)
    replica.forward(np.arange(2))
    with pytest.raises(UsageError, match="comes to block 3 next, not to block 1"):
        replica.backward(1)


class Deaf(nn.Linear):
    """Says the same whatever it is told."""

    def forward(self, told: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.ones_like(told))


def test_a_block_that_makes_no_use_of_the_one_before_is_refused() -> None:
    data = torch.ones(2, 3), torch.zeros(2, 3)
    replica = TorchReplica([nn.Linear(3, 3), Deaf(3, 3)], nn.functional.mse_loss, data, ReplicaMemory(24))
    replica.forward(np.arange(2))
    replica.backward(1)
    with pytest.raises(UsageError, match="block 1 makes no use of what block 0 gives it"):
        replica.backward(0)


def test_nothing_is_kept_after_the_backward_pass() -> None:
    flowing: list[weakref.ref[torch.Tensor]] = []

    class Watched(nn.Linear):
        def forward(self, told: torch.Tensor) -> torch.Tensor:
            said = super().forward(told)
            flowing.extend((weakref.ref(told), weakref.ref(said)))
            return said

    data = torch.ones(2, 3), torch.zeros(2, 3)
    replica = TorchReplica([Watched(3, 3), Watched(3, 3)], nn.functional.mse_loss, data, ReplicaMemory(24))
    replica.forward(np.arange(2))
    assert any(each() is not None for each in flowing)
    for block in (1, 0):
        replica.backward(block)
    assert [each() for each in flowing] == [None] * 4


def test_a_device_with_its_own_memory_computes_the_same() -> None:
    found = task("digits")
    assert isinstance(found, TorchTask)
    near = found.replica(seed=2)
    far = found.replica_in(MirroredMemory(near.layout.length, torch.device("cpu")))
    far.initialise(seed=2, gain=found.model.gain)
    for batch in (range(8), range(8, 20)):
        assert pass_over(near, batch) == pass_over(far, batch)
        assert np.array_equal(near.gradients, far.gradients)
        near.parameters[:] -= np.float32(0.1) * near.gradients
        far.parameters[:] -= np.float32(0.1) * far.gradients


NO_OPERATION = """The operator 'aten::frobnicate.out' is not currently implemented for the MPS device. If you want
this op to be considered for addition please comment on an issue. As a temporary fix, you can set the environment
variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a fallback for this op."""
NO_DOUBLES = "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Use float32."


@pytest.mark.parametrize(
    ("raised", "complaint"),
    [
        (NotImplementedError(NO_OPERATION), "torch has no aten::frobnicate.out on MPS: --set device=cpu, or PYTORCH_"),
        (TypeError(NO_DOUBLES), "this model cannot be trained on MPS: Cannot convert a MPS Tensor to float64"),
        (TypeError("forward() takes 2 arguments"), None),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_what_torch_cannot_do_on_mps_is_told_in_a_line(
    raised: Exception, complaint: str | None, backward: bool
) -> None:
    class Demanding(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not backward:
                raise raised
            return Refused.apply(super().forward(x))

    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *_: torch.Tensor) -> torch.Tensor:
            raise raised

    data = torch.ones(2, 3), torch.zeros(2, 3)
    replica = TorchReplica([Demanding(3, 3)], nn.functional.mse_loss, data, ReplicaMemory(12))
    with pytest.raises(ConfigError if complaint else type(raised)) as told:
        pass_over(replica, range(2))
    assert str(told.value).startswith(complaint or str(raised))
    assert "\n" not in str(told.value)


def test_flat_arrays_are_the_models_own_memory() -> None:
    memory = ReplicaMemory(10)
    memory.device_parameters.fill_(3)
    memory.device_gradients.fill_(4)
    assert memory.parameters.tolist() == [3] * 10
    assert memory.gradients.tolist() == [4] * 10


# Determinism.

DIGEST = """
import hashlib
import numpy as np, torch
from hcsim.training.tasks import task
torch.set_num_threads(3)
for name in ("digits", "text", "convex"):
    replica = task(name).replica(7)
    for step in range(2):
        loss = replica.forward(np.arange(32 * step, 32 * step + 32))
        for block in reversed(range(len(replica.layout.blocks))):
            replica.backward(block)
    print(name, loss.hex(), hashlib.sha256(replica.parameters.tobytes() + replica.gradients.tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_a_seed_gives_the_same_bits_in_every_process_whatever_its_threads() -> None:
    elsewhere = subprocess.run(
        [sys.executable, "-c", DIGEST],
        capture_output=True, text=True, timeout=170, check=True, env={"PYTHONHASHSEED": "5"},
    )  # fmt: skip
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(DIGEST.replace("set_num_threads(3)", "set_num_threads(1)"), {})
    assert len(here.getvalue().splitlines()) == len(REAL)
    assert here.getvalue() == elsewhere.stdout


def test_seeds_differ() -> None:
    one, same, other = (task("digits").replica(seed).parameters for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


# What is learned.


def train(found: Task, steps: int, workers: int, seed: int = 0) -> Replica:
    """One process with the batch of all workers."""
    replica = found.replica(seed)
    batches = Batches.of(found, [workers * found.defaults.batch], seed)
    stepper = Sgd(found.defaults.lr, found.defaults.momentum).open(replica.parameters)
    for step in range(steps):
        replica.gradients[:] = 0
        pass_over(replica, batches.batch(step, 0).tolist())
        stepper.step(replica.gradients)
    return replica


@pytest.mark.slow
def test_digits_are_learned_in_two_hundred_steps_of_eight_workers() -> None:
    score = task("digits").score(train(task("digits"), 200, workers=8).parameters)
    assert score is not None
    assert score.accuracy is not None
    assert score.accuracy >= 0.97


def test_digits_held_out_are_not_trained_on() -> None:
    found = task("digits")
    assert isinstance(found, TorchTask)
    assert found.samples + len(found.held_out.inputs) == 1797
    labels = np.bincount(found.held_out.targets.numpy(), minlength=10)
    assert labels.min() >= 25  # every digit is asked for


@pytest.mark.slow
def test_text_is_learned() -> None:
    found = task("text")
    before, after = (found.score(train(found, steps, workers=1).parameters) for steps in (0, 30))
    assert before is not None
    assert after is not None
    assert after.loss < 3.0 < before.loss


@pytest.mark.slow
def test_the_text_is_the_same_bytes_everywhere() -> None:
    assert (
        hashlib.sha256(torch_task.unicode_names().encode()).hexdigest()
        == "a46a07e65d3b74a1034ebd3e7f8e0823c012b8404fde93510ec064dc2ab35109"
    )
    assert "GREEK SMALL LETTER ALPHA WITH TONOS\n" in torch_task.unicode_names()


def test_a_transformer_sees_no_later_character() -> None:
    replica = task("text").replica(1)
    assert isinstance(replica, TorchReplica)
    inputs = torch.arange(64)[None] % 39
    changed = inputs.clone()
    changed[0, 40:] = 0
    there, here = replica.outputs(inputs), replica.outputs(changed)
    assert torch.equal(there[0, :40], here[0, :40])
    assert not torch.equal(there[0, 40:], here[0, 40:])


def test_the_score_of_digits_is_that_of_a_plain_evaluation() -> None:
    found = task("digits")
    assert isinstance(found, TorchTask)
    replica = found.replica(3)
    outputs = replica.outputs(found.held_out.inputs)
    score = found.score(replica.parameters)
    assert score.loss == pytest.approx(float(cross_entropy(outputs, found.held_out.targets)))
    assert score.accuracy == pytest.approx(float((outputs.argmax(1) == found.held_out.targets).float().mean()))


# The convex problem.


def all_of(found: convex.Convex, parameters: np.ndarray) -> float:  # type: ignore[type-arg]
    replica = found.replica(0)
    replica.parameters[:] = parameters
    return replica.forward(np.arange(found.samples))


def flat_optimum(found: convex.Convex) -> np.ndarray:  # type: ignore[type-arg]
    """Last block first."""
    ends = np.cumsum(convex.FEATURES)[:-1]
    return np.concatenate([block.reshape(-1) for block in reversed(np.split(found.optimum, ends))])


def test_at_the_optimum_the_gradient_is_nothing_and_so_is_the_gap() -> None:
    found = convex.Convex()
    replica = found.replica(0)
    replica.parameters[:] = flat_optimum(found)
    assert pass_over(replica, range(found.samples)) == pytest.approx(found.least_loss, rel=1e-5)
    assert np.abs(replica.gradients).max() < 1e-5
    score = found.score(replica.parameters)
    assert score.gap is not None
    assert 0 <= score.gap < 1e-9


@given(st.integers(0, 1000))
@settings(max_examples=20)
def test_everywhere_else_the_gap_is_what_the_loss_exceeds_the_optimum_by(seed: int) -> None:
    found = task("convex")
    assert isinstance(found, convex.Convex)
    parameters = found.replica(seed).parameters
    score = found.score(parameters)
    assert score.gap is not None
    assert score.gap > 0
    assert score.loss == pytest.approx(found.least_loss + score.gap)
    assert all_of(found, parameters) == pytest.approx(score.loss, rel=1e-5)


def test_slopes_are_those_that_torch_finds() -> None:
    found = convex.Convex()
    replica = found.replica(4)
    batch = np.arange(10, 30)
    weights = [torch.tensor(replica.parameters[t.span].reshape(t.shape), requires_grad=True)
               for t in by_forward(replica.layout)]  # fmt: skip
    predicted = torch.from_numpy(found.x[batch]) @ torch.cat(weights)
    ridge = sum((weight**2).sum() for weight in weights)
    loss = 0.5 * ((predicted - torch.from_numpy(found.y[batch])) ** 2).sum() / 20 + 0.5 * convex.RIDGE * ridge
    loss.backward()
    assert pass_over(replica, batch.tolist()) == pytest.approx(float(loss.detach()), rel=1e-5)
    for weight, tensor in zip(weights, by_forward(replica.layout), strict=True):
        assert weight.grad is not None
        np.testing.assert_allclose(
            replica.gradients[tensor.span].reshape(tensor.shape), weight.grad, rtol=1e-4, atol=1e-5
        )


def test_full_gradient_descent_closes_the_gap_as_fast_as_theory_says() -> None:
    found = convex.Convex()
    eigenvalues = np.linalg.eigvalsh(found.curvature)
    least, most = eigenvalues[0], eigenvalues[-1]
    replica = found.replica(0)
    first = found.score(replica.parameters).gap
    stepper = Sgd(float(2 / (least + most))).open(replica.parameters)
    for _ in range(60):
        replica.gradients[:] = 0
        pass_over(replica, range(found.samples))
        stepper.step(replica.gradients)
    last = found.score(replica.parameters).gap
    assert first is not None
    assert last is not None
    assert last <= first * ((most - least) / (most + least)) ** 120 * 1.01 + 1e-9


# Shapes.


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet50", 25_557_032), ("gpt2", 124_439_808), ("llama-1b", 1_235_814_400), ("llama-7b", 6_738_415_616)],
)
def test_a_model_has_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert sum(prod(shape) for block in task(name).blocks for _, shape in block.shapes) == parameters
    assert task(name).replica(0).layout.length == parameters


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.main(x) + self.shortcut(x))


def torch_resnet50() -> list[nn.Module]:
    modules: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    ]
    channels = 64
    for repeats, width, stride in [(3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)]:
        for repeat in range(repeats):
            modules.append(Bottleneck(channels, width, stride if repeat == 0 else 1))
            channels = 4 * width
    modules.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)))
    return modules


@pytest.mark.slow
def test_every_block_of_resnet50_costs_what_torch_counts() -> None:
    with torch.device("meta"):
        modules, flowing = torch_resnet50(), torch.zeros(1, 3, 224, 224)
    for block, module in zip(task("resnet50").blocks, modules, strict=True):
        with FlopCounterMode(display=False) as counter:
            flowing = module(flowing)
        assert block.flops == counter.get_total_flops(), block.name
        assert block.length == sum(parameter.numel() for parameter in module.parameters()), block.name
    assert sum(block.flops for block in task("resnet50").blocks) == pytest.approx(2 * 4.089e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "layers", "width", "context", "vocabulary"),
    [("gpt2", 12, 768, 1024, 50257), ("llama-1b", 16, 2048, 2048, 128256), ("llama-7b", 32, 4096, 2048, 32000)],
)
def test_a_transformer_costs_two_flops_for_each_weight_and_token_and_its_attention(
    name: str, layers: int, width: int, context: int, vocabulary: int
) -> None:
    """A rule of thumb (https://arxiv.org/abs/2001.08361): an embedding looks up and does not multiply."""
    blocks = task(name).blocks
    weights = sum(block.length for block in blocks)
    tied = name != "llama-7b"
    multiplied = weights if tied else weights - vocabulary * width
    expected = 2 * multiplied * context + 4 * layers * context**2 * width
    assert sum(block.flops for block in blocks) == pytest.approx(expected, rel=0.01)


def test_a_layer_of_gpt2_costs_what_torch_counts() -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, dropout=0.0)
        flowing = torch.zeros(1, 1024, 768)
    with FlopCounterMode(display=False) as counter:
        layer(flowing)
    block = task("gpt2").blocks[1]
    assert block.flops == counter.get_total_flops()
    assert block.length == sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_of_shapes_learns_nothing_and_moves_nothing(name: str) -> None:
    found = task(name)
    replica = found.replica(0)
    assert np.isnan(pass_over(replica, range(4)))
    assert replica.parameters == replica.gradients == Phantom(replica.layout.size_bytes, 4)
    assert found.score(replica.parameters) is None


@pytest.mark.slow
def test_torch_is_not_imported_for_what_does_without() -> None:
    program = f"""
import sys
from hcsim.training.data import Batches
from hcsim.training.optimizer import Sgd
from hcsim.training.tasks import task
for name in {(*SHAPES, "convex")}:
    found = task(name)
    Sgd(0.1).open(found.replica(0).parameters)
    Batches.of(found, [1, 2], 0).batch(0, 1)
print([name for name in ("torch", "sklearn") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_no_more_is_imported_for_training_than_torch_itself() -> None:
    """torch's compiler, sympy, or all of scikit-learn, would take as long again before the first step."""
    program = """
import sys
import numpy as np
from hcsim.training.tasks import task
for name in ("digits", "text"):
    found = task(name)
    replica = found.replica(0)
    replica.forward(np.arange(2))
    for block in reversed(range(len(found.blocks))):
        replica.backward(block)
    found.score(replica.parameters)
import torch
print([name for name in ("torch._dynamo", "torch._inductor", "sympy", "sklearn") if name in sys.modules])
print(torch.get_deterministic_debug_mode(), torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.splitlines() == ["[]", "1 1"], "and yet results are a function of the input alone"


@pytest.mark.slow
@pytest.mark.parametrize("is_file", [True, False])
def test_digits_are_scikit_learns_wherever_it_keeps_them(monkeypatch: pytest.MonkeyPatch, is_file: bool) -> None:
    from sklearn.datasets import load_digits  # a second, which every worker would spend at its beginning

    if not is_file:
        monkeypatch.setattr(torch_task, "file_of", lambda *_: None)
    expected = load_digits()
    found = torch_task.digits_table()
    assert np.array_equal(found[:, :-1].reshape(-1, 8, 8), expected.images)
    assert np.array_equal(found[:, -1], expected.target)


# Costs of the real ones.


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:999], lambda _: b"", lambda _: b"1,2\n", lambda _: gzip.compress(b"1,2\n")]
)
def test_damaged_digits_are_a_message_for_people(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    found, file = file_of("sklearn", "datasets", "data", "digits.csv.gz"), tmp_path / "digits.csv.gz"
    assert found is not None
    file.write_bytes(damage(found.read_bytes()))
    monkeypatch.setattr(torch_task, "file_of", lambda *_: file)
    with pytest.raises(ConfigError, match=r"digits\.csv\.gz is damaged .*: install scikit-learn again"):
        torch_task.digits_table()


def test_kernels_and_bytes_are_those_of_all_results() -> None:
    """Pinned: they decide how long a step takes in virtual time, in all that was ever published."""
    costs = [(block.moved_bytes, block.kernels) for name in ("digits", "text") for block in task(name).blocks]
    layer = (1067024, 28)
    assert costs == [(22528, 4), (8192, 2), (1024, 2), (80, 1), (65536, 2), layer, layer, (53760, 4)]


@pytest.mark.parametrize(("name", "modules"), [("digits", torch_task.digits_network), ("text", text_modules)])
def test_every_block_costs_what_torch_counts_without_data(
    name: str, modules: Callable[[], Sequence[nn.Module]]
) -> None:
    with torch.device("meta"):
        made, flowing = modules(), task(name).training.inputs[:1].to("meta")  # type: ignore[attr-defined]
    for block, module in zip(task(name).blocks, made, strict=True):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            flowing = module(flowing)
        assert block.flops == counter.get_total_flops(), block.name


def test_flops_of_digits_are_those_of_its_convolutions_and_products() -> None:
    assert [block.flops for block in task("digits").blocks] == [
        2 * 16 * 9 * 64, 2 * 16 * 32 * 9 * 16, 2 * 512 * 64, 2 * 64 * 10,
    ]  # fmt: skip


def test_flops_of_text_are_those_of_its_products_and_attention() -> None:
    layer = 2 * 64 * 12 * 64 * 64 + 4 * 64 * 64 * 64
    assert [block.flops for block in task("text").blocks] == [0, layer, layer, 2 * 64 * 64 * 39]


def test_bytes_are_those_of_all_results_written_and_read() -> None:
    conv, activated, pooled, indices = 16 * 64 * 4, 16 * 64 * 4, 16 * 16 * 4, 16 * 16 * 8
    assert task("digits").blocks[0].moved_bytes == 2 * (conv + activated + pooled + indices)
    assert task("digits").blocks[3].moved_bytes == 2 * 10 * 4


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("vit")])
def test_the_backward_pass_is_twice_the_forward_pass(name: str) -> None:
    found = task(name)
    forward = forward_work(found, 3)
    backward = [backward_work(block, 3) for block in found.blocks]
    assert sum(work.flops for work in backward) == pytest.approx(2 * forward.flops)
    assert sum(work.moved_bytes for work in backward) == pytest.approx(2 * forward.moved_bytes)
    assert forward_work(found, 0).flops == 0
