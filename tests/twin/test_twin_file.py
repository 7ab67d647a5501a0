"""What is measured comes into a file, and nothing that was there is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from hcsim.config import Basis, Machine, load_scenario
from hcsim.config.machine import CodecCurve, KernelCurve, MessageCosts
from hcsim.config.scenario import Attachment
from hcsim.errors import ConfigError
from hcsim.launch.virtual import simulate
from hcsim.runtime.host import Interface, Medium
from hcsim.twin.file import TwinFile
from hcsim.units import ByteRate, FlopRate, Seconds

BASIS = Basis("measured", "hcsim 0.1.0 on cpu", "2026-11-19", 0.03)
MINI = Machine(
    "mini",
    FlopRate(3.2e12),
    ByteRate(101e9),
    basis=BASIS,
    kernels=(
        KernelCurve("matmul", tuple((2.0 * n**3, 1e-6 + n**3 / 1e12) for n in (32, 64, 128, 256, 512)), basis=BASIS),
        KernelCurve("copy", ((4096.0, 1e-6), (2.0**26, 1.3e-3)), "float16", BASIS),
    ),
    codecs=(CodecCurve("topk:0.01", ((16384.0, 1e-5), (2.0**26, 0.014)), ((16384.0, 2e-6),), BASIS),),
    messages=MessageCosts(Seconds(61e-6), Seconds(80e-6), basis=BASIS),
    step_s=Seconds(2.1e-3),
)
STUDIO = replace(MINI, name="studio", peak_flops=FlopRate(13e12))
WIRED = Interface("en0", Medium.ETHERNET, 2.5e9, ("10.0.0.2",))
SLOW = Interface("en0", Medium.ETHERNET, 1e9, ("10.0.0.3",))
AIR = Interface("en1", Medium.WIFI, None, ("10.0.0.4",))

HOME = """\
# My home.
name = "home" # where I live

[[medium]]
kind = "ethernet"
name = "lan"
rate = "1 Gb/s" # a cheap switch

# The small one.
[[node]]
name = "mini"
machine = "M4" # until it is measured
links = ["lan"]

[[node]] # the big one
name = "studio"
machine = "M2 Max"
links = ["lan"]

[job]
size = "3 MiB" # enough
"""


def test_a_new_twin_has_all_that_was_measured_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "our home.toml"
    twin = TwinFile(path)
    twin.put_machine(MINI, [WIRED])
    twin.put_machine(STUDIO, [SLOW])
    twin.put_machine(replace(MINI, name="air"), [AIR])
    scenario = load_scenario(path)
    assert scenario == TwinFile(path).scenario == twin.scenario
    assert scenario.twin == 1
    assert [node.machine for node in scenario.nodes] == [MINI, STUDIO, replace(MINI, name="air")]
    assert [node.links for node in scenario.nodes] == [
        (Attachment("switch"),), (Attachment("switch", 1e9),), (Attachment("air"),),
    ]  # fmt: skip
    assert [medium.basis.kind for medium in scenario.media if medium.basis] == ["estimated", "estimated"]
    text = path.read_text()
    assert max(map(len, text.splitlines())) <= 120
    assert text.count("[[machine.kernel]]") == 6

    async def ranks(group):
        await group.barrier()
        return group.rank

    assert simulate(path, ranks).results == [0, 1, 2]


def test_measuring_again_replaces_one_machine(tmp_path: Path) -> None:
    path = tmp_path / "twin.toml"
    for machine in (MINI, STUDIO):
        TwinFile(path).put_machine(machine)
    faster = replace(STUDIO, peak_flops=FlopRate(14e12), kernels=STUDIO.kernels[:1])
    TwinFile(path).put_machine(faster)
    assert load_scenario(path).machines == (MINI, faster)
    assert TwinFile(path).machine("studio") == faster
    assert TwinFile(path).machine("nobody") is None


def test_what_a_person_wrote_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "home.toml"
    path.write_text(HOME)
    TwinFile(path).put_machine(MINI, [WIRED])
    text = path.read_text()
    for line in HOME.splitlines():
        assert line in text or "M4" in line or "small" in line or line == 'links = ["lan"]', line
    scenario = load_scenario(path)
    assert scenario.nodes[0].machine == MINI
    assert scenario.nodes[1].machine == "M2 Max"
    assert scenario.job == load_scenario_of(tmp_path, HOME).job
    before = path.read_text()
    TwinFile(path).put_machine(MINI, [WIRED])
    assert path.read_text() == before


def load_scenario_of(folder: Path, text: str):
    path = folder / "other.toml"
    path.write_text(text)
    return load_scenario(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('name = "x"\nnode = [{ name = "mini", machine = "M4" }]', "give each medium, machine and node in it a"),
        (HOME.replace('"studio"', '"mini-2"').replace('name = "mini"', 'name = "mini"\ncount = 1'), None),
        ('name = "x"\ntwin = 2', "a newer hcsim wrote this file"),
        ('name = "x"\n[[machine]]\nname = 3', r"machine\[0\].name = 3"),
        ("nonsense", "this is not TOML"),
    ],
)
def test_a_file_that_cannot_be_updated_is_left_as_it_is(tmp_path: Path, text: str, told: str | None) -> None:
    path = tmp_path / "twin.toml"
    path.write_text(text)
    if told is None:
        TwinFile(path).put_machine(MINI)
        return
    with pytest.raises(ConfigError, match=told):
        TwinFile(path).put_machine(MINI)
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_a_text_that_looks_like_a_table_is_none(tmp_path: Path) -> None:
    path = tmp_path / "twin.toml"
    path.write_text(HOME.replace('name = "home"', 'name = "home"\ndescription = """\n[[node]]\nname = "mini"\n"""'))
    description = load_scenario(path).description
    TwinFile(path).put_machine(MINI)
    assert load_scenario(path).description == description
    assert load_scenario(path).machines == (MINI,)


def test_a_folder_that_is_not_there_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        TwinFile(tmp_path / "no" / "twin.toml")
