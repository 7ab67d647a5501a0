from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._ops import OpOverload

from hcsim.torch_kernels import Kernel, KernelMode, KernelTally, Operation, kernel_of, signature_of, size_bytes


class _Seen(KernelMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.signatures: list[str] = []

    def launch(self, func: OpOverload, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.signatures.append(signature_of(func, args, kwargs))
        result = func(*args, **kwargs)
        flops = operation.flops(args, kwargs, result)
        self.kernels.append(kernel_of(operation, flops, size_bytes(args) + size_bytes(result), args, result))
        return result


def seen(function: Callable[[], object]) -> _Seen:
    with _Seen() as mode:
        function()
    return mode


def kinds(function: Callable[[], object]) -> list[str]:
    return [kernel.kind for kernel in seen(function).kernels]


def test_a_product_has_the_flops_and_bytes_of_its_matrices():
    a, b = torch.ones(30, 20), torch.ones(20, 10)
    assert seen(lambda: a @ b).kernels == [Kernel("matmul", 2.0 * 30 * 20 * 10, 4 * (600 + 200 + 300), "float32")]


def test_a_gather_moves_the_rows_that_it_takes():
    table, rows = torch.ones(1000, 8), torch.zeros(5, dtype=torch.int64)
    assert seen(lambda: table[rows]).kernels == [Kernel("gather", 0.0, 2 * 4 * 5 * 8, "float32", 5)]


def test_a_kernel_moves_the_bytes_that_it_reads_or_writes():
    scores, words = torch.ones(100, 50).log_softmax(1), torch.zeros(100, dtype=torch.int64)
    (loss,) = seen(lambda: nn.functional.nll_loss(scores, words)).kernels
    assert (loss.kind, loss.moved_bytes) == ("gather", 2 * 8 * 100)
    (filled,) = seen(lambda: scores.new_zeros(7, 3)).kernels
    assert (filled.kind, filled.moved_bytes) == ("fill", 4 * 21)
    (row,) = seen(lambda: scores.index_select(0, words[:9])).kernels
    assert (row.kind, row.moved_bytes) == ("lookup", 2 * 4 * 9 * 50)


@pytest.mark.parametrize(("window", "prefix"), [(3, ""), (5, "wide_")])
def test_convolutions_of_single_channels_with_wide_windows_are_of_another_kind(window: int, prefix: str):
    layer, images = nn.Conv2d(8, 8, window, groups=8), torch.ones(2, 8, 8, 8)
    found = kinds(lambda: layer(images).sum().backward())
    assert f"{prefix}grouped_convolution" in found
    assert f"{prefix}grouped_convolution_backward" in found


def test_a_convolution_of_each_channel_does_the_flops_of_its_groups_in_both_directions():
    layer, images = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), torch.ones(2, 16, 8, 8, requires_grad=True)
    forward, *_, backward = (
        kernel for kernel in seen(lambda: layer(images).sum().backward()).kernels if "convolution" in kernel.kind
    )
    assert (forward.kind, backward.kind) == ("grouped_convolution", "grouped_convolution_backward")
    assert forward.flops == 2.0 * 2 * 16 * 8 * 8 * 9
    assert backward.flops == 2 * forward.flops


def test_causal_attention_does_half_of_the_products():
    q = torch.ones(2, 4, 64, 16)
    attend = nn.functional.scaled_dot_product_attention

    def flops(causal: bool) -> float:
        kernels = seen(lambda: attend(q, q, q, is_causal=causal)).kernels
        return sum(kernel.flops for kernel in kernels if kernel.kind == "attention")

    assert flops(False) == 4.0 * 2 * 4 * 64 * 64 * 16
    assert flops(True) == flops(False) / 2


def test_an_lstm_does_two_flops_for_each_weight_and_sample():
    lstm, words = nn.LSTM(8, 16), torch.ones(5, 3, 8)
    weights = 4 * 16 * (8 + 16)
    recurrent = [kernel for kernel in seen(lambda: lstm(words)).kernels if kernel.kind == "recurrent"]
    if not recurrent:
        pytest.skip("torch computes an LSTM of single products here")
    assert sum(kernel.flops for kernel in recurrent) == 2.0 * 5 * 3 * weights


def test_views_are_free_and_changes_in_place_are_updates():
    x = torch.ones(4, 6)
    assert kinds(lambda: x.t().reshape(6, 4)[:2].unsqueeze(0)) == []
    assert kinds(lambda: x.add_(1)) == ["update"]
    assert kinds(lambda: x + 1) == ["elementwise"]
    assert kinds(lambda: x.t().contiguous()) == ["copy"]
    assert kinds(lambda: x.softmax(-1)) == ["softmax"]
    assert kinds(lambda: nn.functional.gelu(x)) == ["gelu"]
    assert kinds(lambda: torch.rand(3)) == ["random"]


def test_a_tally_joins_kernels_of_like_sizes_and_keeps_their_sums():
    tally = KernelTally()
    for size in (1000.0, 1010.0, 5000.0):
        tally.add(Kernel("copy", 0.0, size, "float32"))
    tally.add(Kernel("copy", 0.0, 1000.0, "float64"))
    groups = tally.take()
    assert [(group.moved_bytes, group.count, group.dtype) for group in groups] == [
        (1005.0, 2, "float32"),
        (5000.0, 1, "float32"),
        (1000.0, 1, "float64"),
    ]
    assert tally.take() == ()


def test_a_signature_tells_shapes_strides_and_settings_apart():
    x = torch.ones(4, 6)
    names = seen(lambda: (x.sum(0), x.sum(1), x.t().clone(), x.clone())).signatures
    assert len(dict.fromkeys(names)) == 4
    assert seen(lambda: x.sum(0)).signatures == names[:1]


def test_a_tally_knows_which_kernels_of_a_step_were_the_first_of_their_kind():
    tally = KernelTally()
    for _ in range(2):
        for kind in ("copy", "copy", "fill", "copy", "copy"):
            tally.add(Kernel(kind, 0.0, 1000.0, "float32"))
        tally.step_ended()
    copies = 2 * (1 + 2**-0.5 + 3**-0.5 + 4**-0.5)
    assert {group.kind: group.colds for group in tally.take()} == pytest.approx({"copy": copies, "fill": 2.0})


@pytest.mark.parametrize(("inputs", "window", "prefix"), [(16, 1, "pointwise_"), (3, 3, "thin_"), (16, 3, "")])
def test_convolutions_of_single_pixels_and_of_few_channels_are_of_kinds_of_their_own(
    inputs: int, window: int, prefix: str
):
    layer, images = nn.Conv2d(inputs, 16, window), torch.ones(1, inputs, 8, 8)
    found = [kind for kind in kinds(lambda: layer(images).sum().backward()) if "convolution" in kind]
    assert found == [f"{prefix}convolution", f"{prefix}convolution_backward"]


def test_what_is_reduced_or_copied_as_one_is_a_row():
    x, codes = torch.ones(2, 6, 4, 5, requires_grad=True), torch.tensor([[1, 0, 1]])

    def rows(function: Callable[[], object]) -> set[tuple[str, float]]:
        return {(kernel.kind, kernel.rows) for kernel in seen(function).kernels if kernel.rows}

    assert rows(lambda: x.sum((0, 2))) == {("reduction", 6 * 5)}
    assert rows(lambda: x.softmax(1)) == {("softmax", 2 * 4 * 5)}
    norms = ((nn.BatchNorm2d(6), "batch_norm", 6), (nn.LayerNorm(5), "norm", 48), (nn.GroupNorm(3, 6), "norm", 6))
    for layer, kind, count in norms:
        found = rows(partial(lambda layer: layer(x).backward(torch.ones_like(x)), layer))
        assert {(kind, count), (f"{kind}_backward", count)} <= found
    table = nn.Embedding(4, 8)
    found = rows(lambda: table(codes).backward(torch.ones(1, 3, 8)))
    assert found == {("lookup", 3), ("lookup_backward", 3)}
