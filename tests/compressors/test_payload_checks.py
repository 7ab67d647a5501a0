"""What is refused: tensors that cannot be sent, payloads that no correct peer sends. Each by the tensor's name."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import zstandard
from sample_tensors import ALL

from hcsim.compressors.base import Array, ByteArray, Compressor, Ident
from hcsim.compressors.encoding import HEADER_BYTES, as_array
from hcsim.compressors.registry import make
from hcsim.errors import CompressionError, NotFinite, UsageError

OF = Ident("layer.weight", 3)
SHAPE = (12, 10)


def compressor(spec: str) -> Compressor:
    return make(spec, seed=1, rank=0)


def tensor() -> Array:
    return np.random.default_rng(8).standard_normal(SHAPE).astype(np.float32)


def payload_of(spec: str) -> ByteArray:
    return compressor(spec).encode(tensor(), OF).copy()


def refused(spec: str, payload: ByteArray, match: str = "") -> None:
    """By each way to decode."""
    for way in ("decode", "add", "subtract"):
        out = np.full(SHAPE, 5, np.float32)
        with pytest.raises(CompressionError, match=f"^layer.weight: .*{match}") as caught:
            getattr(compressor(spec), way)(payload, out, OF)
        assert caught.value.tensor == "layer.weight"
        assert np.isfinite(out).all() or spec in (
            "none",
            "zstd",
            "zstd:3",
            "fp16",
            "bf16",
        )  # checked as they are decoded


@pytest.mark.parametrize("spec", ALL)
def test_a_payload_cut_off_anywhere_is_refused(spec):
    whole = payload_of(spec)
    for length in range(whole.size):
        with pytest.raises(CompressionError, match=r"^layer\.weight: "):
            compressor(spec).decode(whole[:length], np.zeros(SHAPE, np.float32), OF)


@pytest.mark.parametrize("spec", ALL)
def test_a_payload_that_goes_on_is_refused(spec):
    for more in (1, 4, 1000):
        refused(spec, np.append(payload_of(spec), np.zeros(more, np.uint8)))


@pytest.mark.parametrize("spec", ALL)
def test_every_byte_of_the_header_counts(spec):
    for at in range(HEADER_BYTES):
        payload = payload_of(spec)
        payload[at] ^= 0x40
        refused(spec, payload)


FIELDS = [(0, "magic"), (2, "version"), (3, "codec"), (4, "dtype"), (6, "parameter"), (8, "number of elements")]


@pytest.mark.parametrize(("at", "field"), FIELDS)
def test_the_error_says_which_field_is_wrong(at, field):
    payload = payload_of("none")
    payload[at] += 1
    refused("none", payload, f"{field} is .* was expected")


@pytest.mark.parametrize("spec", ALL)
def test_another_compressors_payload_is_refused(spec):
    for other in ALL:
        if other.partition(":")[0] != spec.partition(":")[0]:
            refused(spec, payload_of(other), "codec|elements")


def test_the_same_codec_with_other_settings_is_refused():
    refused("int8", payload_of("int8:block=16"), "parameter")
    refused("powersgd:1", payload_of("powersgd:2"), "parameter")
    refused("topk:0.5", payload_of("topk:0.3"), "bytes")
    refused("randomk:0.3", make("randomk:0.3+ef", seed=1, rank=0).encode(tensor(), OF).copy(), "parameter")


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("elements", [7, 200_000])
def test_a_tensor_with_a_nan_or_an_infinity_is_refused(spec, value, elements):
    for at in (0, elements // 2, elements - 1):
        x = np.ones(elements, np.float32)
        x[at] = value
        with pytest.raises(CompressionError, match=f"^layer.weight: element {at} of the tensor is (nan|-?inf)"):
            compressor(spec).encode(x, OF)


@pytest.mark.parametrize("spec", ["randomk:0.3", "powersgd:2"])
def test_rounds_refuse_a_nan_too(spec):
    x = tensor()
    x[3, 4] = np.nan
    with pytest.raises(NotFinite, match=r"^layer.weight: element 34 of the tensor is nan"):
        next(compressor(spec).rounds(x, OF))


@pytest.mark.parametrize("spec", ["none", "randomk:0.3", "powersgd:2"])
def test_rounds_refuse_sums_with_a_nan(spec):
    """All ranks get the same sums, so all refuse them."""
    rounds = compressor(spec).rounds(tensor(), OF)
    factor = next(rounds)
    factor[-1] = np.nan
    with pytest.raises(NotFinite, match=r"^layer.weight: "):
        rounds.send(factor)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_payload_as_it_is_with_a_nan_or_an_infinity_is_refused(value):
    payload = payload_of("none")
    payload[-4:] = np.array([value], np.float32).view(np.uint8)
    refused("none", payload, "NaN or an infinity")


@pytest.mark.parametrize("spec", ["topk:0.3", "randomk:0.3", "powersgd:1"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_payload_with_a_nan_or_an_infinity_is_refused_and_nothing_is_changed(spec, value):
    payload = payload_of(spec)
    payload[-4:] = np.array([value], np.float32).view(np.uint8)
    out = np.full(SHAPE, 5, np.float32)
    with pytest.raises(CompressionError, match="NaN or an infinity"):
        compressor(spec).decode(payload, out, OF)
    assert (out == 5).all()
    refused(spec, payload)


@pytest.mark.parametrize(("spec", "bits"), [("fp16", 0x7C00), ("fp16", 0xFE00), ("bf16", 0xFF80), ("bf16", 0x7FC0)])
def test_a_half_that_is_no_number_is_refused(spec, bits):
    payload = payload_of(spec)
    payload[HEADER_BYTES:].view(np.uint16)[17] = bits
    refused(spec, payload, "NaN or an infinity")


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1, 3e38])
@pytest.mark.parametrize("spec", ["int8", "int8:block=16"])
def test_a_scale_that_would_overflow_is_refused(spec, scale):
    payload = payload_of(spec)
    payload[HEADER_BYTES : HEADER_BYTES + 4].view(np.float32)[0] = scale
    refused(spec, payload, "scale")


def test_a_multiple_that_would_overflow_is_refused():
    payload = compressor("int8").encode(np.full(SHAPE, np.finfo(np.float32).max), OF).copy()
    payload[-1] = 0x80
    refused("int8", payload, "infinity")


@pytest.mark.parametrize("magnitude", [np.nan, np.inf, -0.5])
def test_a_magnitude_that_is_none_is_refused(magnitude):
    payload = payload_of("onebit")
    payload[HEADER_BYTES : HEADER_BYTES + 4].view(np.float32)[0] = magnitude
    refused("onebit", payload, "magnitude")


def test_signs_beyond_the_tensor_are_refused():
    sender = compressor("onebit")
    payload = sender.encode(np.ones(9, np.float32), OF).copy()
    payload[-1] |= 0x80
    with pytest.raises(CompressionError, match="signs of more elements"):
        sender.decode(payload, np.zeros(9, np.float32), OF)


@pytest.mark.parametrize(("change", "match"), [
    (lambda indices: indices[-1:].__setitem__(0, 120), "beyond the tensor"),
    (lambda indices: indices[-1:].__setitem__(0, 2**32 - 1), "beyond the tensor"),
    (lambda indices: indices[1:2].__setitem__(0, indices[0]), "not ascending"),
    (lambda indices: indices.__setitem__(slice(None), indices[::-1].copy()), "not ascending"),
])  # fmt: skip
def test_indices_out_of_range_repeated_or_out_of_order_are_refused(change, match):
    payload = payload_of("topk:0.3")
    change(payload[HEADER_BYTES : HEADER_BYTES + 4 * 36].view(np.uint32))
    refused("topk:0.3", payload, match)


def zstd_payload(frame: bytes) -> ByteArray:
    head = payload_of("zstd")[:HEADER_BYTES].tobytes()
    return np.frombuffer(head + struct.pack("<I", len(frame)) + frame, np.uint8)


def test_a_decompression_bomb_is_refused_before_it_unpacks():
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))
    assert len(bomb) < 10_000
    refused("zstd", zstd_payload(bomb), f"unpacks to {64 << 20} bytes, but 480 were expected")


def test_a_frame_that_hides_its_size_is_refused():
    coder = zstandard.ZstdCompressor(write_content_size=False)
    refused("zstd", zstd_payload(coder.compress(tensor().tobytes())), "unpacks to")


def test_a_frame_that_lies_about_its_size_is_refused():
    frame = bytearray(zstandard.ZstdCompressor().compress(bytes(300)))
    true_size = frame.index(struct.pack("<H", 300 - 256))
    frame[true_size : true_size + 2] = struct.pack("<H", 480 - 256)
    refused("zstd", zstd_payload(bytes(frame)), "cannot be decompressed")


def test_garbage_is_not_a_frame():
    refused("zstd", zstd_payload(b"not a zstd frame at all"), "cannot be decompressed")
    refused("zstd", zstd_payload(zstandard.ZstdCompressor().compress(bytes(480)) + b"more"), "cannot be decompressed")


def test_a_packed_nan_is_refused():
    planes = np.full(SHAPE, np.nan, np.float32).reshape(-1).view(np.uint8).reshape(-1, 4).T
    refused("zstd", zstd_payload(zstandard.ZstdCompressor().compress(planes.tobytes())), "NaN or an infinity")


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32])
def test_only_float32_is_taken(spec, dtype):
    with pytest.raises(UsageError, match=rf"^layer.weight: expected float32, not {np.dtype(dtype)}"):
        compressor(spec).encode(np.ones(SHAPE, dtype), OF)


def test_only_contiguous_memory_is_taken():
    with pytest.raises(UsageError, match="contiguous"):
        compressor("none").encode(np.ones((4, 6), np.float32)[:, ::2], OF)
    with pytest.raises(UsageError, match="contiguous"):
        compressor("none").decode(payload_of("none"), np.ones((24, 10), np.float32)[::2], OF)
    with pytest.raises(UsageError, match="not list"):
        compressor("none").encode([1.0, 2.0], OF)


def test_a_payload_is_bytes():
    for wrong in (b"bytes", payload_of("none").view(np.float32), np.repeat(payload_of("none"), 2)[::2]):
        with pytest.raises(UsageError, match="array of uint8"):
            compressor("none").decode(wrong, np.ones(SHAPE, np.float32), OF)


def test_a_torch_tensor_is_read_where_it_is():
    x = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    view = as_array(x, "x")
    x[1, 2] = 77
    assert view.tolist() == [0, 1, 2, 3, 4, 77]
    out = torch.zeros(2, 3)
    sender = compressor("none")
    sender.decode(sender.encode(x, OF), out, OF)
    assert torch.equal(out, x)
    with pytest.raises(UsageError, match=r"^x: this tensor has no memory that can be read here"):
        as_array(x.requires_grad_(), "x")
    with pytest.raises(UsageError, match="expected float32, not float64"):
        as_array(x.detach().double(), "x")


def test_values_that_overflow_when_scaled_are_refused():
    with pytest.raises(CompressionError, match="too large for float32"):
        compressor("randomk:0.1").encode(np.full(SHAPE, 1e38, np.float32), OF)
    with pytest.raises(CompressionError, match="too large for float32"):
        compressor("powersgd:1").encode(np.full(SHAPE, 3e38, np.float32), OF)
