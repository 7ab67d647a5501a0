"""Compressed all-reduces: as a communication hook of DDP, and as an option of the group."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hcsim.compressors.base import Array, Ident
from hcsim.compressors.registry import make
from hcsim.errors import HcsimError
from hcsim.rng import generator
from hcsim.torch_backend import Options
from hcsim.torch_backend.work import CallFailed
from hcsim.training.tasks.torch_task import digits, digits_network
from tests.torch_backend.ranks import Meeting, Ranks

WITH_FEEDBACK = ["topk:0.1+ef", "randomk:0.1+ef", "int8+ef", "onebit+ef", "powersgd:2+ef"]
STEPS = 4
EPOCHS = 20


def _gradients(rank: int, step: int, model: nn.Module) -> dict[str, Tensor]:
    draws = generator(rank, "gradients", step)
    return {
        name: torch.from_numpy(draws.standard_normal(tuple(each.shape), np.float32))
        for name, each in model.named_parameters()
    }


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Linear(60, 50), nn.Linear(50, 8))


def _hooked(model: nn.Module, spec: str, name: str = "gradients") -> tuple[DistributedDataParallel, Any]:
    from hcsim.torch_backend.hooks import CompressionState, compression_hook

    # Buckets so small that there are several, and others after the first step.
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.008)
    state = CompressionState(model, spec, name=name)
    ddp.register_comm_hook(state, compression_hook)
    return ddp, state


def _step(ddp: DistributedDataParallel, wanted: dict[str, Tensor]) -> dict[str, Array]:
    """A backward pass that yields these gradients on this rank: the averages that DDP makes of them."""
    ddp.zero_grad()
    ddp(torch.zeros(1, 40))  # DDP prepares its backward pass in the forward pass
    loss = sum((wanted[name] * each).sum() for name, each in ddp.module.named_parameters())
    loss.backward()
    return {name: each.grad.numpy().copy() for name, each in ddp.module.named_parameters()}


def _some_steps(spec: str) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    model = _model()
    ddp, state = _hooked(model, spec)
    averages = [_step(ddp, _gradients(dist.get_rank(), step, model)) for step in range(STEPS)]
    return averages, _remembered(state.state_dict())


def _remembered(state: dict[str, Any]) -> dict[str, Array]:
    kind = tuple[str, dict[str, tuple[str, tuple[int, ...], bytes]]]
    _, arrays = msgspec.msgpack.decode(state["memory"].numpy().tobytes(), type=kind)
    return {name: np.frombuffer(raw, dtype).reshape(shape) for name, (dtype, shape, raw) in arrays.items()}


@pytest.fixture(scope="module", params=WITH_FEEDBACK)
def answers(ranks: Ranks, request: pytest.FixtureRequest) -> list[tuple[list[dict[str, Array]], dict[str, Array]]]:
    """Of three ranks, which take the same steps for each test."""
    return ranks.run(_some_steps, request.param, size=3)


@pytest.mark.quick_cases(1)
def test_what_was_not_delivered_is_still_owed(answers: list[Any]) -> None:
    size = len(answers)
    for name, _ in _model().named_parameters():
        sent = sum(
            _gradients(rank, step, _model())[name].double() / size for rank in range(size) for step in range(STEPS)
        )
        delivered = sum(average[name].astype(np.float64) for average in answers[0][0])
        owed = sum(residuals[f"own/residual/{name}"].astype(np.float64) for _, residuals in answers)
        np.testing.assert_allclose(delivered + owed, sent.numpy(), atol=1e-4)


@pytest.mark.quick_cases(1)
def test_all_ranks_get_the_same_bits(answers: list[Any]) -> None:
    for step in range(STEPS):
        for name, average in answers[0][0][step].items():
            for averages, _ in answers[1:]:
                assert np.array_equal(averages[step][name], average)


def test_top_k_sends_what_the_toolkits_compressor_does_with_feedback(ranks: Ranks) -> None:
    size, spec = 2, "topk:0.1+ef"
    answers = ranks.run(_some_steps, spec, size=size)
    compressors = [make(spec, seed=0, rank=rank) for rank in range(size)]
    for step in range(STEPS):
        for name, average in answers[0][0][step].items():
            expected = np.zeros_like(average)
            for rank, compressor in enumerate(compressors):
                ours = _gradients(rank, step, _model())[name].numpy() * np.float32(1 / size)
                compressor.add(compressor.encode(ours, Ident(name, step)), expected, Ident(name, step))
            assert np.array_equal(average, expected)
        for compressor in compressors:
            compressor.commit(step)


def _interrupted(spec: str) -> tuple[dict[str, Array], dict[str, Array]]:
    model, rank = _model(), dist.get_rank()
    ddp, state = _hooked(model, spec)
    for step in range(2):
        _step(ddp, _gradients(rank, step, model))
    saved = state.state_dict()
    other, other_state = _hooked(_model(), spec, name="another run")
    other_state.load_state_dict(saved)
    return _step(ddp, _gradients(rank, 2, model)), _step(other, _gradients(rank, 2, model))


@pytest.mark.parametrize("spec", ["topk:0.1+ef", "powersgd:2+ef", "randomk:0.1+ef"])
def test_a_saved_state_goes_on_as_if_nothing_had_happened(ranks: Ranks, spec: str) -> None:
    for uninterrupted, resumed in ranks.run(_interrupted, spec, size=2):
        for name, average in uninterrupted.items():
            assert np.array_equal(resumed[name], average)


def _half_precision() -> tuple[torch.dtype, Tensor]:
    model = nn.Linear(64, 32, bias=False).bfloat16()
    ddp, _ = _hooked(model, "topk:0.5+ef")
    with torch.no_grad():
        model.weight.zero_()
    ddp(torch.full((1, 64), dist.get_rank() + 1.0, dtype=torch.bfloat16)).sum().backward()
    return model.weight.grad.dtype, model.weight.grad.float()


def test_gradients_keep_their_dtype(ranks: Ranks) -> None:
    for dtype, gradient in ranks.run(_half_precision, size=2):
        assert dtype is torch.bfloat16
        assert set(gradient.unique().tolist()) <= {0.0, 0.5, 1.0, 1.5}


def _trained(spec: str) -> float:
    task = digits()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = nn.Sequential(*digits_network())
    ddp: nn.Module = _hooked(model, spec)[0] if spec else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, EPOCHS)
    for epoch in range(EPOCHS):
        order = generator(epoch, "order").permutation(len(task.training.targets))
        for batch in np.array_split(order, len(order) // 64):
            ours = torch.from_numpy(batch[rank::size])
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(task.training.inputs[ours]), task.training.targets[ours]).backward()
            optimizer.step()
        slower.step()
    with torch.no_grad():
        right = model(task.held_out.inputs).argmax(1) == task.held_out.targets
    return float(right.float().mean())


@pytest.mark.slow
def test_one_percent_with_feedback_learns_the_digits_as_well_as_all_of_it(ranks: Ranks) -> None:
    dense, compressed = (ranks.run(_trained, spec, size=2)[0] for spec in ("", "topk:0.01+ef"))
    assert dense > 0.95
    assert compressed > dense - 0.01


def _init(meeting: Meeting, **options: Any) -> None:
    dist.init_process_group(
        "hcsim", init_method=f"file://{meeting.file}", rank=meeting.rank, world_size=meeting.size,
        pg_options=Options(**options),
    )  # fmt: skip


def _reduced(meeting: Meeting, spec: str, op: str) -> tuple[Tensor, Tensor, Tensor]:
    _init(meeting, compression=spec, least_bytes=4000)
    large = [_values(meeting.rank, number) for number in range(3)]
    works = [dist.all_reduce(each, op=getattr(dist.ReduceOp, op), async_op=True) for each in large]
    small, whole = torch.full((9,), 1 / 3), torch.arange(5000) * (meeting.rank + 1)
    dist.all_reduce(small)
    dist.all_reduce(whole)
    for work in works:
        work.wait()
    return torch.stack(large), small, whole


def _values(rank: int, number: int) -> Tensor:
    return torch.from_numpy(generator(rank, "values", number).standard_normal(5000, np.float32))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("spec", "error"), [("int8", 0.08), ("bf16", 0.05), ("zstd", 1e-6)])
@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_a_group_may_compress_its_large_sums(ranks: Ranks, spec: str, error: float, op: str) -> None:
    size = 3
    answers = ranks.run(_reduced, spec, op, size=size, backend="")
    expected = torch.stack([torch.stack([_values(rank, number) for rank in range(size)]).sum(0) for number in range(3)])
    for large, small, whole in answers:
        assert torch.equal(large, answers[0][0])
        torch.testing.assert_close(large * (size if op == "AVG" else 1), expected, atol=size * error, rtol=0)
        torch.testing.assert_close(small, torch.full((9,), 1.0))
        assert torch.equal(whole, 6 * torch.arange(5000))
    assert torch.equal(answers[0][0], expected / (size if op == "AVG" else 1)) == (spec == "zstd" and op == "SUM")


@pytest.mark.parametrize(
    ("spec", "word"), [("topk:0.01+ef", "which one it is"), ("powersgd:4", "which one it is"), ("int9", "int8")]
)
def test_a_group_refuses_what_it_cannot_do(tmp_path: Path, spec: str, word: str) -> None:
    with pytest.raises(HcsimError, match=word):
        dist.init_process_group(
            "hcsim", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, pg_options=Options(compression=spec)
        )


def _with_a_nan(spec: str, spoiled: int) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Steps with other gradients each; in one, a rank's have an infinity, as when a scale is too high."""
    model = _model()
    ddp, state = _hooked(model, spec)
    averages = []
    for step in range(STEPS):
        gradients = _gradients(dist.get_rank(), step, model)
        if step == spoiled and dist.get_rank() == 1:
            gradients["1.weight"][3, 4] = float("inf")
        averages.append(_step(ddp, gradients))
    return averages, _remembered(state.state_dict())


@pytest.mark.parametrize("spec", [*WITH_FEEDBACK, "zstd", "fp16"])
def test_all_ranks_get_a_gradient_that_is_not_finite_and_go_on(ranks: Ranks, spec: str) -> None:
    answers = ranks.run(_with_a_nan, spec, 1, size=2)
    for averages, _ in answers:
        assert np.isnan(averages[1]["1.weight"]).any()  # so that a gradient scaler skips the step on all of them
        assert all(np.isfinite(average).all() for step in (0, 2, 3) for average in averages[step].values())
    assert all(np.array_equal(answers[0][0][3][name], average) for name, average in answers[1][0][3].items())
    for _, remembered in answers:
        assert all(np.isfinite(array).all() for array in remembered.values())


def _scaled_steps(spec: str) -> tuple[float, list[bytes]]:
    """Steps with a gradient scaler whose scale is too high for one rank at first."""
    model = _model()
    ddp, _ = _hooked(model, spec)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.full((1, 40), 1.0 + 20 * dist.get_rank())
        scaler.scale(ddp(x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), [each.detach().numpy().tobytes() for each in model.parameters()]


def test_a_gradient_scaler_skips_the_same_steps_on_all_ranks(ranks: Ranks) -> None:
    (scale, ours), (other_scale, theirs) = ranks.run(_scaled_steps, "int8+ef", size=2)
    assert scale == other_scale < 2.0**126
    assert ours == theirs


def _one_after_the_other(before: str) -> tuple[dict[str, Array], str]:
    """A training after another one, which is over; and what becomes of that if it goes on all the same."""
    model, rank = _model(), dist.get_rank()
    old = None
    if before:
        old, _ = _hooked(_model(), before)
        _step(old, _gradients(rank, 7, model))
    ddp, _ = _hooked(model, "topk:0.1+ef")
    average = _step(ddp, _gradients(rank, 0, model))
    said = ""
    if old is not None:
        try:
            _step(old, _gradients(rank, 8, model))
        except (CallFailed, ValueError, RuntimeError) as error:
            said = str(error)
    return average, said


@pytest.mark.parametrize("before", ["topk:0.1+ef", "int8+ef"])
def test_a_new_state_owes_nothing_of_what_one_of_its_name_owed(ranks: Ranks, before: str) -> None:
    alone = ranks.run(_one_after_the_other, "", size=2)
    for (average, _), (after, said) in zip(alone, ranks.run(_one_after_the_other, before, size=2), strict=True):
        for name, expected in average.items():
            assert np.array_equal(after[name], expected)
        assert "unlike names" in said


def _seeded_by_rank(spec: str) -> str:
    from hcsim.torch_backend.hooks import CompressionState, compression_hook

    model = _model()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(CompressionState(model, spec, seed=dist.get_rank()), compression_hook)
    try:
        _step(ddp, _gradients(dist.get_rank(), 0, model))
    except (CallFailed, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_ranks_that_would_draw_unlike_numbers_are_told_so(ranks: Ranks) -> None:
    for said in ranks.run(_seeded_by_rank, "randomk:0.1+ef", size=3):
        assert "not the same on rank 0 and on 1, 2" in said


def _many_calls(meeting: Meeting) -> tuple[int, Tensor]:
    _init(meeting, compression="bf16")
    tensor = torch.ones(1 << 18)
    tracemalloc.start()
    for _ in range(40):
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    return tracemalloc.get_traced_memory()[0], tensor


@pytest.mark.slow
def test_calls_use_the_memory_of_those_before_them(ranks: Ranks) -> None:
    for held, tensor in ranks.run(_many_calls, size=2, backend=""):
        assert torch.equal(tensor, torch.ones_like(tensor))
        assert held < 16 * tensor.nbytes


def _wide(meeting: Meeting) -> Tensor:
    _init(meeting, compression="zstd")
    tensor = torch.full((1 << 14,), 1e300, dtype=torch.float64) / 3
    dist.all_reduce(tensor)
    return tensor


def test_double_precision_travels_as_it_is(ranks: Ranks) -> None:
    for tensor in ranks.run(_wide, size=2, backend=""):
        assert torch.equal(tensor, torch.full((1 << 14,), 1e300, dtype=torch.float64) / 3 * 2)


def _unevenly(meeting: Meeting) -> tuple[Tensor, Tensor]:
    """Rank 1 starts its second call when the first is long over on the others, or so it would be without it."""
    _init(meeting, compression="bf16")
    first, second = torch.ones(1 << 15), torch.full((1 << 15,), 2.0)
    works = [dist.all_reduce(first, async_op=True)]
    if meeting.rank == 1:
        time.sleep(0.3)
    works.append(dist.all_reduce(second, async_op=True))
    for work in works:
        work.wait()
    return first, second


def test_ranks_may_start_their_first_calls_at_unlike_times(ranks: Ranks) -> None:
    for first, second in ranks.run(_unevenly, size=2, backend=""):
        assert torch.equal(first, torch.full((1 << 15,), 2.0))
        assert torch.equal(second, torch.full((1 << 15,), 4.0))


def _read_again_by_one() -> dict[str, Array]:
    model, rank = _model(), dist.get_rank()
    ddp, state = _hooked(model, "topk:0.1+ef")
    _step(ddp, _gradients(rank, 0, model))
    if rank == 1:
        state.load_state_dict(state.state_dict())
    return _step(ddp, _gradients(rank, 1, model))


def test_a_rank_may_read_its_state_again_alone(ranks: Ranks) -> None:
    one, other = ranks.run(_read_again_by_one, size=2)
    for name, average in one.items():
        assert np.array_equal(other[name], average)


def _replaced_on_one() -> str:
    from hcsim.torch_backend.hooks import CompressionState

    model, rank = _model(), dist.get_rank()
    ddp, state = _hooked(model, "topk:0.1+ef")
    _step(ddp, _gradients(rank, 0, model))
    if rank == 1:
        CompressionState(model, "topk:0.1+ef").load_state_dict(state.state_dict())
    try:
        _step(ddp, _gradients(rank, 1, model))
    except (CallFailed, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_call_that_one_rank_refuses_is_no_riddle_to_the_others(ranks: Ranks) -> None:
    one, other = ranks.run(_replaced_on_one, size=2)
    assert "unlike names" in one
    assert "unlike names" in other
