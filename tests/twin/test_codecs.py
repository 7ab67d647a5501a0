"""The measured curves of compressors."""

from __future__ import annotations

import pytest

from hcsim.compressors.registry import make, specs
from hcsim.config import Basis
from hcsim.twin.codecs import measure_codec, usual_specs


def basis(spread: float) -> Basis:
    return Basis("measured", "here", "2026-11-19", spread)


def test_every_registered_compressor_is_measured() -> None:
    names = {each.form.partition(":")[0].partition("[")[0] for each in specs()} - {"…+ef"}
    assert {spec.partition(":")[0] for spec in usual_specs()} == names
    assert [make(spec, seed=0, rank=0).spec for spec in usual_specs()]


@pytest.mark.parametrize("spec", ["topk:0.01", "powersgd:4", "zstd"])
def test_a_curve_has_a_time_for_each_size(spec: str) -> None:
    curve = measure_codec(spec, basis, sizes=(4096, 65536, 2**20))
    for points in (curve.encode, curve.decode):
        assert [size for size, _ in points] == [4096, 65536, 2**20]
        assert all(0 < seconds < 10 for _, seconds in points)
    assert curve.compressor == spec
    assert curve.basis.spread >= 0
