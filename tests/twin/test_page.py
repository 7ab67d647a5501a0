"""The page that shows a twin."""

from __future__ import annotations

import re

from msgspec.structs import replace

from hcsim.config import CATALOGUE, Basis, Machine, load_scenario
from hcsim.config.machine import CodecCurve, KernelCurve, MessageCosts
from hcsim.twin.page import catalogued, page
from hcsim.units import ByteRate, FlopRate, Seconds

MEASURED = Machine(
    "anna<b>",
    FlopRate(2e12),
    ByteRate(90e9),
    basis=Basis("measured", "hcsim 0.1.0 on mps, Apple M4 Pro, macOS 15.1", "2026-11-19", 0.02),
    kernels=(KernelCurve("matmul", ((1e6, 1e-4), (1e9, 1e-3))), KernelCurve("copy", ((4096.0, 1e-5), (1e8, 2e-3)))),
    codecs=(CodecCurve("topk:0.01", ((16384.0, 1e-5),), ((16384.0, 0.0),)),),
    messages=MessageCosts(Seconds(60e-6), Seconds(80e-6)),
)


def test_the_page_has_each_curve_and_each_link_and_loads_nothing() -> None:
    home = load_scenario("mixed-home")
    twin = replace(home, nodes=(replace(home.nodes[0], machine=MEASURED), *home.nodes[1:]))
    text = page(twin)
    assert text.count("<polyline") == 4  # two kinds with the catalogue's
    assert text.count("<circle") == 1  # encode was measured at one size; decoding took no time
    for words in ("anna&lt;b&gt;", "topk:0.01", "60 µs", "16.4 Gb/s / 5.3 Gb/s", "M4 Pro", "laptop", "± 2%"):
        assert words in text, words
    assert "<b>" not in text
    assert set(re.findall(r"(?:src|href|url)\s*[=(].{0,6}", text)) == {'href="data:'}


def test_the_catalogues_machine_is_that_of_the_chip() -> None:
    assert catalogued(MEASURED) == CATALOGUE["M4 Pro"]
    assert catalogued(replace(MEASURED, basis=Basis("measured", "hcsim on cpu, Neoverse-N1, Linux"))) is None
