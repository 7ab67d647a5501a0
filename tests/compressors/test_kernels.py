"""The compiled loops do what the plain ones do: the same bits, the same refusals, and nothing beyond their arrays."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_tensors import ALL, COMPILED_LOOPS, quick, tensors

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, Ident
from hcsim.compressors.kernels import plain
from hcsim.compressors.registry import make
from hcsim.errors import CompressionError

CPU = Path("/proc/cpuinfo")
ROOM = np.zeros(100, np.uint32)
each_compiled = pytest.mark.parametrize("compiled", COMPILED_LOOPS)  # none, where the install found no compiler


@pytest.fixture
def use(monkeypatch):
    """A switch to other loops."""

    def switch(loops: ModuleType) -> None:
        for name in plain.__all__:
            monkeypatch.setattr(kernels, name, getattr(loops, name))

    return switch


def payloads(spec: str, tensor: Array) -> tuple[bytes, bytes]:
    """What is sent, and what comes out."""
    compressor, out, of = make(spec, seed=1, rank=0), np.empty_like(tensor), Ident("w", 3)
    payload = compressor.encode(tensor, of)
    compressor.decode(payload, out, of)
    return payload.tobytes(), out.tobytes()


@each_compiled
def test_all_have_the_same_functions(compiled):
    assert [name for name in dir(compiled) if not name.startswith("_")] == sorted(plain.__all__)


def test_the_best_that_this_processor_can_run_are_in_use():
    assert bool(COMPILED_LOOPS) == kernels.COMPILED
    assert kernels.copy is [plain, *COMPILED_LOOPS][-1].copy


@pytest.mark.skipif(not CPU.exists() or not kernels.COMPILED, reason="Linux says what a processor can, if compiled")
def test_a_processor_with_avx2_uses_it():
    can = {word for line in CPU.read_text().splitlines() if line.startswith("flags") for word in line.split()}
    assert (COMPILED_LOOPS[-1].__name__ == "hcsim.compressors.kernels.avx2") == (
        {"avx2", "f16c", "bmi1", "bmi2"} <= can
    )


@pytest.mark.quick_cases(16)
@each_compiled
@pytest.mark.parametrize("spec", [*ALL, "randomk:0.7", "int8:block=32768"])
@pytest.mark.parametrize("elements", [1, 63, 65, 1000, 300_001])
def test_a_payload_has_the_same_bytes_with_either(compiled, spec, elements, use):
    source = np.random.default_rng(elements)
    x = (source.standard_normal(elements) * np.exp(4 * source.standard_normal(elements))).astype(np.float32)
    use(compiled)
    by_compiled = payloads(spec, x)
    use(plain)
    assert payloads(spec, x) == by_compiled


@each_compiled
@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_both_refuse_with_the_same_words(compiled, spec, value, use):
    x = np.ones((20, 30), np.float32)
    x[7, 3] = value
    use(compiled)
    with pytest.raises(CompressionError) as by_compiled:
        payloads(spec, x)
    use(plain)
    with pytest.raises(CompressionError) as by_plain:
        payloads(spec, x)
    assert str(by_plain.value) == str(by_compiled.value)


@each_compiled
@given(tensor=tensors(), bad=st.sampled_from([None, np.nan, np.inf, -np.inf]), offset=st.integers(0, 3))
@quick
def test_every_conversion_of_floats_is_the_same_at_any_address(compiled, tensor, bad, offset):
    x = np.concatenate((np.zeros(offset, np.uint8), tensor.reshape(-1).view(np.uint8)))[offset:].view(np.float32)
    if bad is not None and x.size:
        x[x.size // 2] = bad
    for name, out in (
        ("copy", np.zeros(x.size, np.float32)),
        ("to_bf16", np.zeros(x.size, np.uint16)),
        ("to_fp16", np.zeros(x.size, np.uint16)),
        ("split", np.zeros(4 * x.size, np.uint8)),
    ):
        other = out.copy()
        finite = getattr(compiled, name)(x, out)
        assert finite == getattr(plain, name)(x, other)
        assert not finite or out.tobytes() == other.tobytes()


@each_compiled
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("offset", [0, 1, 4, 16, 36, 63])
def test_a_copy_is_whole_and_finds_what_is_not_finite_at_every_place(compiled, value, offset):
    """Some elements are copied one by one, most by lines of the cache: that depends on where they are copied to."""
    x = np.full(200, np.finfo(np.float32).max)
    room = np.zeros(4 * x.size + 192, np.uint8)
    start = -room.ctypes.data % 64 + 64 + offset
    out = room[start : start + x.nbytes].view(np.float32)
    for at in range(x.size):
        x[at] = value
        assert not compiled.copy(x, out)
        assert not compiled.copy(x[at:], out[at:])
        x[at] = -at
        assert compiled.copy(x, out)
        assert out.tobytes() == x.tobytes()
    assert not room[:start].any()
    assert not room[start + x.nbytes :].any()


@pytest.mark.quick_cases(1)
@each_compiled
@pytest.mark.parametrize("offset", [0, 2, 4, 7, 36])
def test_so_much_that_it_goes_past_the_caches_is_converted_like_little(compiled, offset):
    x = np.random.default_rng(offset).standard_normal(2_200_037).astype(np.float32)
    for name, values, dtype in (
        ("copy", x, np.float32),
        ("to_bf16", x, np.uint16),
        ("to_fp16", x, np.uint16),
        ("from_bf16", x.view(np.uint16)[1::2].copy(), np.float32),
        ("from_fp16", x.astype(np.float16).view(np.uint16), np.float32),
    ):
        itemsize = np.dtype(dtype).itemsize
        room = np.zeros(itemsize * x.size + 192, np.uint8)
        start = -room.ctypes.data % 64 + 64 + offset
        out, other = room[start : start + itemsize * x.size].view(dtype), np.zeros(x.size, dtype)
        assert getattr(compiled, name)(values, out)
        assert getattr(plain, name)(values, other)
        assert out.tobytes() == other.tobytes(), name
        assert not room[:start].any()
        assert not room[start + out.nbytes :].any()


@each_compiled
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_half_is_widened_alike_and_no_infinity_passes(compiled, name):
    halves = np.arange(1 << 16, dtype=np.uint16)
    narrowed, wide, other = np.zeros_like(halves), np.zeros(halves.size, np.float32), np.zeros(halves.size, np.float32)
    assert not getattr(compiled, f"from_{name}")(halves, wide)
    assert not getattr(plain, f"from_{name}")(halves, other)
    finite = np.isfinite(other)
    assert wide[finite].tobytes() == other[finite].tobytes()
    assert getattr(compiled, f"to_{name}")(wide[finite], narrowed[finite])
    for at in np.flatnonzero(~finite)[::97]:
        assert not getattr(compiled, f"from_{name}")(halves[at : at + 1], wide[:1])


@each_compiled
@given(st.integers(0, 400), st.sampled_from([1, 16, 64, 1000]))
@quick
def test_blocks_are_scaled_alike(compiled, elements, block):
    source = np.random.default_rng(elements)
    x = source.standard_normal(elements).astype(np.float32)
    blocks = -(-elements // block)
    scales = [np.zeros(blocks, np.float32) for _ in range(2)]
    multiples = [np.zeros(elements, np.int8) for _ in range(4)]
    wide = [np.zeros(elements, np.float32) for _ in range(2)]
    drawn = source.integers(1 << 16, size=elements, dtype=np.uint16)
    for kernel, scale, nearest, at_random, out in zip(
        (compiled, plain), scales, multiples[:2], multiples[2:], wide, strict=True
    ):
        kernel.largest(x, scale, block)
        kernel.quantise(x, 127 / scale, nearest, block)
        kernel.quantise_at_random(x, scale / 127, drawn, at_random, block)
        kernel.dequantise(nearest, scale, out, block)
    for one, other in (scales, multiples[:2], multiples[2:], wide):
        assert one.tobytes() == other.tobytes()


@each_compiled
@pytest.mark.parametrize("elements", [0, 5, 8, 128, 1003, 1 << 17])
def test_signs_and_their_sum_are_numpys(compiled, elements):
    x = np.random.default_rng(elements).standard_normal(elements).astype(np.float32)
    x[::7] = -0.0
    packed = np.zeros(-(-elements // 8), np.uint8)
    assert compiled.pack_signs(x, packed) == float(np.abs(x).sum())
    assert packed.tobytes() == np.packbits(x < 0, bitorder="little").tobytes()


@each_compiled
@given(st.integers(0, 2000), st.integers(0, 300))
@quick
def test_large_elements_are_found_as_far_as_there_is_room(compiled, elements, room):
    x = np.random.default_rng(elements).standard_normal(elements).astype(np.float32)
    least = int(np.float32(1).view(np.uint32))
    places = np.flatnonzero(np.abs(x) >= 1)
    indices, bits = np.zeros(room, np.uint32), np.zeros(room, np.uint32)
    assert compiled.reaching(x, least, indices, bits) == places.size
    assert indices[: places.size].tolist() == places[:room].tolist()
    assert bits.view(np.float32)[: places.size].tolist() == x[places[:room]].tolist()


@each_compiled
@pytest.mark.parametrize("call", [
    lambda loops, x, out: loops.copy(x, out[:-1]),
    lambda loops, x, out: loops.to_bf16(x, out),
    lambda loops, x, out: loops.split(x, out.view(np.uint8)[1:]),
    lambda loops, x, out: loops.largest(x, out[:2], 7),
    lambda loops, x, out: loops.largest(x, out[:2], 0),
    lambda loops, x, out: loops.dequantise(x.view(np.int8), x[:1], out, 9),
    lambda loops, x, out: loops.pack_signs(x, out.view(np.uint8)),
    lambda loops, x, out: loops.scatter(np.array([-1]), x[:1], out),
    lambda loops, x, out: loops.scatter(np.array([20]), x[:1], out),
    lambda loops, x, out: loops.choose(np.zeros(4, np.uint64), 3, 65, np.zeros(1, np.uint64), ROOM),
    lambda loops, x, out: loops.choose(np.zeros(4, np.uint64), 3, 0, np.zeros(0, np.uint64), ROOM),
    lambda loops, x, out: loops.choose(np.zeros(4, np.uint64), 66, 65, np.zeros(2, np.uint64), ROOM),
    lambda loops, x, out: loops.choose(np.zeros(4, np.uint64), -1, 65, np.zeros(2, np.uint64), ROOM),
    lambda loops, x, out: loops.choose(np.zeros(3, np.uint64), 3, 65, np.zeros(2, np.uint64), ROOM),
    lambda loops, x, out: loops.marked(np.ones(1, np.uint64), np.zeros(2, np.int64)),
    lambda loops, x, out: loops.take_marked(x, np.zeros(2, np.uint64), 1, out),
    lambda loops, x, out: loops.choose_few(np.zeros(3, np.uint64), 3, 65, ROOM),
    lambda loops, x, out: loops.choose_few(np.zeros(4, np.uint64), 66, 65, np.zeros(66, np.uint32)),
    lambda loops, x, out: loops.choose_few(np.zeros(4, np.uint64), -1, 65, ROOM),
    lambda loops, x, out: loops.choose_few(np.zeros(4, np.uint64), 3, 65, np.zeros(2, np.uint32)),
    lambda loops, x, out: loops.choose_few(np.zeros(4, np.uint64), 3, (1 << 26) + 1, ROOM),
    lambda loops, x, out: loops.take_listed(x, np.zeros(2, np.uint32), 1, out),
    lambda loops, x, out: loops.take_listed(x, np.array([20], np.uint32), 1, out[:1]),
    lambda loops, x, out: loops.take_listed(x, np.array([2**32 - 1], np.uint32), 1, out[:1]),
])  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(compiled, call):
    with pytest.raises(ValueError, match="sizes do not fit"):
        call(compiled, np.ones(20, np.float32), np.zeros(20, np.float32))


@each_compiled
def test_memory_that_is_not_to_be_written_stays_as_it_is(compiled):
    out = np.zeros(20, np.float32)
    out.flags.writeable = False
    with pytest.raises((TypeError, BufferError, ValueError)):
        compiled.copy(np.ones(20, np.float32), out)
    assert not out.any()
