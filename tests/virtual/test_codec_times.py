"""How long compressors take on machines on which they were measured."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hcsim.compressors.registry import make
from hcsim.config import CodecCurve, Machine
from hcsim.runtime.host import Work, joined_work
from hcsim.runtime.work_time import seconds
from hcsim.units import ByteRate, FlopRate, PositiveShare, Seconds

SHAPE = (1024, 256)
CURVE = CodecCurve("topk:0.01", ((4096, 1e-3), (2**20, 5e-3)), ((4096, 1e-4), (2**20, 2e-4)))
PLAIN = Machine("plain", FlopRate(1e12), ByteRate(1e9), efficiency_memory=PositiveShare(1), overhead_s=Seconds(0))
MEASURED = replace(PLAIN, codecs=(CURVE,))


def test_a_compressor_takes_the_time_that_was_measured_of_it() -> None:
    compressor = make("topk:0.01", seed=0, rank=0)
    assert seconds(MEASURED, compressor.encode_work(SHAPE)) == pytest.approx(5e-3)
    assert seconds(MEASURED, compressor.decode_work(SHAPE)) == pytest.approx(2e-4)
    assert seconds(MEASURED, compressor.encode_work((1024,))) == pytest.approx(1e-3)


def test_error_feedback_decodes_and_compensates_beside_that() -> None:
    compressor = make("topk:0.01+ef", seed=0, rank=0)
    compensated_bytes = 3 * 2**20
    assert seconds(MEASURED, compressor.encode_work(SHAPE)) == pytest.approx(5e-3 + 2e-4 + compensated_bytes / 1e9)


def test_several_tensors_take_the_sum_of_their_times() -> None:
    compressor = make("topk:0.01", seed=0, rank=0)
    work = joined_work([compressor.encode_work(SHAPE), compressor.encode_work((1024,)), Work(moved_bytes=1e6)], 0.5)
    assert seconds(MEASURED, work) == pytest.approx(0.5 * (5e-3 + 1e-3 + 1e-3))


@pytest.mark.parametrize("spec", ["int8", "topk:0.05"])
def test_a_compressor_that_was_not_measured_takes_the_time_of_its_estimated_traffic(spec: str) -> None:
    work = make(spec, seed=0, rank=0).encode_work(SHAPE)
    assert seconds(MEASURED, work) == seconds(PLAIN, work) == pytest.approx(work.moved_bytes / 1e9)
