"""Compressors by their names."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sample_tensors import ALL

from hcsim.compressors.base import PayloadKind
from hcsim.compressors.registry import make, specs
from hcsim.errors import ConfigError


@pytest.mark.parametrize("spec", [spec + suffix for spec in ALL for suffix in ("", "+ef")])
def test_a_spec_is_read_as_it_is_written(spec):
    assert make(spec, seed=1, rank=0).spec == spec


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("none", PayloadKind.LINEAR),
        ("randomk:0.1", PayloadKind.LINEAR),
        ("powersgd:2", PayloadKind.LINEAR),
        ("topk:0.1", PayloadKind.SPARSE),
        ("fp16", PayloadKind.QUANTISED),
        ("bf16", PayloadKind.QUANTISED),
        ("int8", PayloadKind.QUANTISED),
        ("onebit", PayloadKind.QUANTISED),
        ("zstd", PayloadKind.QUANTISED),
    ],
)
def test_the_kind_says_how_payloads_are_combined(spec, kind):
    assert make(spec, seed=1, rank=0).kind is kind


@pytest.mark.parametrize(("spec", "message"), [
    ("int8+fe", r"no compressor \(did you mean int8\+ef\?\)"),
    ("top-k:0.1", r"no compressor \(did you mean topk\?\); known are none, topk:RATIO, .* each also with \+ef"),
    ("gzip", "no compressor; known are"),
    ("", "no compressor; known are"),
    ("topk", "expected a ratio above 0 and up to 1, such as 0.01; topk is written topk:RATIO"),
    ("topk:0", "expected a ratio"), ("topk:1.5", "expected a ratio"), ("topk:nan", "expected a ratio"),
    ("topk:-0.1", "expected a ratio"), ("randomk:1/2", "expected a ratio"), ("topk:", "nothing stands after the colon"),
    ("fp16:3", "takes no argument"), ("none:", "nothing stands after"),
    ("int8:block=7", "a block, a power of two, from 16 to 32768"), ("int8:block=48", "48 is not a power of two"),
    ("int8:blocks=64", "'blocks=64' is not a setting"), ("int8:stochastic,stochastic", "stands twice"),
    ("powersgd", "expected a rank from 1 to 1024"), ("powersgd:0", "expected a rank"),
    ("zstd:99", "a level from 1 to 19"),
    ("fp16+ef+ef", "takes no|no compressor"),
])  # fmt: skip
def test_what_is_not_known_is_refused_with_what_is(spec, message):
    with pytest.raises(ConfigError, match=message):
        make(spec, seed=1, rank=0)


def test_every_compressor_is_described():
    forms = [spec.form for spec in specs()]
    assert {spec.partition(":")[0] for spec in ALL} == {form.partition(":")[0].partition("[")[0] for form in forms[:-1]}
    assert forms[-1] == "…+ef"
    assert all(spec.description for spec in specs())


@pytest.mark.slow
def test_sizes_and_work_do_not_wait_for_torch():
    program = (
        "import sys; from hcsim.compressors.registry import make\n"
        f"for spec in {ALL}:\n"
        "    c = make(spec, seed=1, rank=0); c.size_bytes((300, 400)); c.encode_work((300, 400))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "False"
