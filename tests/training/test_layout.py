"""Where tensors lie in the flat array, and how it is cut into buckets."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from hcsim.training.layout import FLOAT_BYTES, Layout

SHAPES = st.lists(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3), min_size=1, max_size=6
)


def laid_out(blocks: list[list[tuple[int, ...]]]) -> Layout:
    return Layout.of([[(f"{b}.{i}", shape) for i, shape in enumerate(block)] for b, block in enumerate(blocks)])


@given(SHAPES)
def test_tensors_cover_the_array_without_gaps_and_the_last_block_comes_first(
    blocks: list[list[tuple[int, ...]]],
) -> None:
    layout = laid_out(blocks)
    end = 0
    for tensor in layout.tensors:
        assert tensor.offset == end
        end += prod(tensor.shape)
    assert layout.length == end == sum(prod(shape) for block in blocks for shape in block)
    assert layout.size_bytes == FLOAT_BYTES * end
    assert [tensor.name.partition(".")[0] for tensor in layout.tensors] == sorted(
        (tensor.name.partition(".")[0] for tensor in layout.tensors), key=int, reverse=True
    )


@given(SHAPES, st.integers(1, 500))
def test_buckets_are_contiguous_and_close_as_soon_as_they_are_full(
    blocks: list[list[tuple[int, ...]]], most_bytes: int
) -> None:
    layout = laid_out(blocks)
    buckets = layout.buckets(most_bytes)
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    assert [block for bucket in buckets for block in bucket.blocks] == list(reversed(range(len(blocks))))
    assert [bucket.lo for bucket in buckets] == [0, *(bucket.hi for bucket in buckets[:-1])]
    assert buckets[-1].hi == layout.length
    for bucket in buckets:
        assert sum(tensor.length for tensor in bucket.tensors) == bucket.hi - bucket.lo
        before_the_last = bucket.size_bytes - FLOAT_BYTES * sum(map(prod, blocks[bucket.blocks[-1]]))
        assert before_the_last < most_bytes
    assert all(bucket.size_bytes >= most_bytes for bucket in buckets[:-1])
