"""Plugins outside the package are full citizens: in commands, scenarios and sweeps, and under the checks of ours."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from hcsim.collectives.algorithms import PLANNERS
from hcsim.compressors.registry import make
from hcsim.config import load_scenario
from hcsim.errors import ConfigError
from hcsim.registry import Registry, function_in, load_plugin
from hcsim.testing import check_algorithm, check_compressor, check_strategy, check_task
from hcsim.training.tasks import task

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "plugins"


def run(*command: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """In a process of its own: what a plugin registers stays."""
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def python(code: str, *words: str) -> None:
    ended = run(sys.executable, "-c", code, *words)
    assert ended.returncode == 0, ended.stderr


def hcsim(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "hcsim", *words, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["int8:block=64", "topk:0.1", "powersgd:2", "zstd"])
def test_our_own_compressors_pass_what_is_asked_of_a_plugins(spec: str) -> None:
    check_compressor(spec)


@pytest.mark.parametrize(
    ("operation", "name"), [(operation, name) for operation in PLANNERS for name in PLANNERS[operation]]
)
def test_our_own_algorithms_pass_what_is_asked_of_a_plugins(operation: str, name: str) -> None:
    if name != "hierarchical":  # which is told of homes
        check_algorithm(operation, name, range(1, 6))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["ddp", "diloco:2", "parameter_server"])
def test_our_own_strategies_pass_what_is_asked_of_a_plugins(spec: str) -> None:
    check_strategy(spec)


@pytest.mark.parametrize("name", ["digits", "convex", "text", "gpt2"])
def test_our_own_tasks_pass_what_is_asked_of_a_plugins(name: str) -> None:
    check_task(task(name))


@pytest.mark.slow
def test_the_examples_pass_the_checks() -> None:
    python(
        """
import sys
from pathlib import Path
from hcsim.config import load_scenario
from hcsim.plugins import load_plugin
from hcsim.testing import check_algorithm, check_compressor, check_fault, check_strategy
from hcsim.units import PositiveSeconds, Seconds
for name in ("ternary", "gossip", "chain", "microwave"):
    module = load_plugin(f"{sys.argv[1]}/{name}.py")
check_compressor("ternary")
check_algorithm("all_reduce", "chain")
check_strategy("gossip:0.3")
air = load_scenario("two-macs-wifi")
oven = module.Microwave(at_s=Seconds(0.01), medium=air.media[0].name, duration_s=PositiveSeconds(1.0))
check_fault(air, oven)
""",
        str(EXAMPLES),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ("body_bytes = lambda self, elements: elements", "where body_bytes says"),
        ("unpack = lambda self, body, elements: np.zeros(elements + 1)", "unpack made"),
        ("unpack = lambda self, body, elements: np.zeros(elements)", "what is lost is less than the tensor"),
        ("subtract = lambda self, payload, out, of: None", "`add` and `subtract`"),
        ("encode_work = lambda self, shape: 1 / 0", "ZeroDivisionError"),
    ],
)
def test_the_checks_find_a_compressor_that_is_wrong(mistake: str, found: str, tmp_path: Path) -> None:
    wrong = f"class Wrong(Ternary):\n    name = 'wrong'\n    {mistake}\n\n\nregister_compressor('wrong', '', Wrong)\n"
    (tmp_path / "wrong.py").write_text(f"{(EXAMPLES / 'ternary.py').read_text()}\n\n{wrong}")
    code = """
import sys
from hcsim.plugins import load_plugin
from hcsim.testing import check_compressor
load_plugin(sys.argv[1])
check_compressor('wrong')
"""
    ended = run(sys.executable, "-c", code, str(tmp_path / "wrong.py"))
    assert ended.returncode != 0
    assert found in ended.stderr


HOME = """
name = "street"
plugins = ["neighbourhood.py", "microwave.py", "ternary.py"]
processes = ["neighbourhood.py:evening_backup"]

[[medium]]
kind = "powerline"
name = "wall"

[[medium]]
kind = "wifi"
name = "air"

[[node]]
name = "mini"
machine = "Old Mini"
count = 2
links = ["wall"]

[[node]]
name = "laptop"
machine = "M3 Air"
links = ["air"]

[[fault]]
kind = "microwave"
at = "2 s"
medium = "air"
duration = "1 s"

[training]
steps = 6
compressor = "ternary+ef"
"""


def street(folder: Path, text: str = HOME) -> Path:
    for example in EXAMPLES.glob("*.py"):
        (folder / example.name).write_bytes(example.read_bytes())
    (folder / "street.toml").write_text(text)
    return folder / "street.toml"


@pytest.mark.slow
def test_a_scenario_brings_machines_media_faults_compressors_and_processes(tmp_path: Path) -> None:
    ended = hcsim("run", str(street(tmp_path)), "--trace", str(tmp_path / "trace"))
    assert ended.returncode == 0, ended.stderr
    assert "ternary+ef" in ended.stdout
    again = hcsim("run", str(tmp_path / "street.toml"))
    assert [line for line in again.stdout.splitlines() if "sha256" in line] == [
        line for line in ended.stdout.splitlines() if "sha256" in line
    ]
    quiet = street(tmp_path, HOME.replace('processes = ["neighbourhood.py:evening_backup"]', ""))
    assert hcsim("run", str(quiet)).stdout != ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"ternary.py"]', '"int5.py"]', "street.toml: plugin int5.py: there is no file"),
        ('"ternary.py"]', '"no.such.module"]', "street.toml: plugin no.such.module: No module named 'no'"),
        ('"ternary.py"]', "4]", "plugins[2] = 4: expected text"),
        ("evening_backup", "morning_backup", "there is no function morning_backup in neighbourhood.py"),
        (":evening_backup", "", '"neighbourhood.py": expected module:function'),
        ('"ternary.py"]', '"ternary.py", "broken.py"]', "broken.py, line 3)"),
        ('kind = "microwave"', 'kind = "kettle"', "fault[0].kind"),
        ('compressor = "ternary+ef"', 'compressor = "ternary:7"', "it takes no argument; ternary is written ternary"),
        ('compressor = "ternary+ef"', 'compressor = "ternaryy"', "(did you mean ternary?"),
    ],
)
def test_a_mistake_in_a_plugins_name_is_told_in_a_line(old: str, new: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text('"""No."""\n\n1 / 0\n')
    ended = hcsim("run", str(street(tmp_path, HOME.replace(old, new))))
    assert ended.returncode == 2
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_process_that_is_no_generator_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("def walk(world):\n    return 3\n")
    ended = hcsim("run", str(street(tmp_path, HOME.replace("neighbourhood.py:evening_backup", "plain.py:walk"))))
    assert "a SimPy process is a generator, and this is int" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_plugin_of_a_command_is_known_in_it() -> None:
    plugins = ["--plugin", str(EXAMPLES / "gossip.py"), "--plugin", str(EXAMPLES / "ternary.py")]
    words = ["run", "two-macs-wifi", *plugins, "--task", "digits", "--strategy", "gossip:0.3", "--steps", "4"]
    ended = hcsim(*words, "--compressor", "ternary")
    assert ended.returncode == 0, ended.stderr
    assert "digits by gossip:0.3, compressor ternary" in ended.stdout
    without = hcsim("run", "two-macs-wifi", "--task", "digits", "--compressor", "ternary")
    assert without.returncode == 2
    assert "'ternary' is no compressor" in without.stderr


EVERYONE = """
import msgspec
from hcsim.plugins import Replicated, one_level, register_strategy

class Everyone(msgspec.Struct, frozen=True):
    def open(self, settings, learner):
        return Replicated(learner, one_level)

register_strategy("everyone", Everyone)
"""


@pytest.mark.slow
def test_a_strategy_of_a_plugin_trains_a_cluster_whose_members_come_and_go(tmp_path: Path) -> None:
    (tmp_path / "everyone.py").write_text(EVERYONE)
    plugin = ["--plugin", str(tmp_path / "everyone.py")]
    ours, own = (hcsim("run", "four-macs-churn", *plugin, "--strategy", name) for name in ("everyone", "ddp"))
    assert ours.returncode == own.returncode == 0, ours.stderr
    assert "mini-2 was lost" in ours.stderr
    assert ours.stdout == own.stdout.replace(" by ddp", " by everyone")


def test_a_strategy_without_open_is_refused_by_a_cluster() -> None:
    ended = hcsim("run", "four-macs-churn", "--plugin", str(EXAMPLES / "gossip.py"), "--strategy", "gossip:0.3")
    assert ended.returncode == 2
    assert "fixed ranks only" in ended.stderr
    assert "Traceback" not in ended.stderr


SWEEP = """
plugins = ["ternary.py"]

[[grid]]
kind = "training"
study = "mine"
tasks = ["digits", "gpt2"]
strategies = ["ddp"]
compressors = ["int8", "ternary+ef"]
links = ["1gbe"]
worlds = [2]
steps = 2
"""


@pytest.mark.slow
def test_a_sweep_has_plugins_in_all_its_processes_and_runs_cells_again_when_they_change(tmp_path: Path) -> None:
    street(tmp_path)
    (tmp_path / "mine.toml").write_text(SWEEP)

    def sweep() -> list[dict[str, str]]:
        words = [str(tmp_path / "mine.toml"), "--out", str(tmp_path / "out"), "--jobs", "2"]
        ended = run(sys.executable, "-m", "experiments.sweep", *words)
        assert ended.returncode == 0, ended.stderr
        with (tmp_path / "out" / "cells.csv").open() as table:
            rows = list(csv.DictReader(table))
        return [*rows, {"said": ended.stderr}]

    *rows, _ = sweep()
    assert [(row["task"], row["compressor"]) for row in rows if not row["error"]] == [
        ("digits", "int8"), ("digits", "ternary+ef"), ("gpt2", "int8"), ("gpt2", "ternary+ef")
    ]  # fmt: skip
    share = {row["compressor"]: float(row["payload_share"]) for row in rows if row["task"] == "gpt2"}
    assert share["ternary+ef"] == pytest.approx(share["int8"] / 5, rel=0.01)
    assert "4 of 4 cells are finished already" in sweep()[-1]["said"]
    (tmp_path / "ternary.py").write_text((tmp_path / "ternary.py").read_text() + "\n# another version\n")
    assert "finished already" not in sweep()[-1]["said"]


def test_an_installed_plugin_is_found_by_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "kitchen_ternary.py").write_bytes((EXAMPLES / "ternary.py").read_bytes())
    info = tmp_path / "kitchen-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kitchen\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hcsim.plugins]\nkitchen = kitchen_ternary\n")
    python(
        """
import sys
sys.path.insert(0, sys.argv[1])
from hcsim.compressors.registry import make
make("int8", seed=0, rank=0)
assert "kitchen_ternary" not in sys.modules
assert make("ternary+ef", seed=0, rank=0).spec == "ternary+ef"
""",
        str(tmp_path),
    )


def test_a_name_is_given_once_and_can_be_written() -> None:
    shelf = Registry("jar", {"jam": 1})
    shelf.add("honey", 2)
    assert list(shelf) == ["jam", "honey"]
    for name in ("jam", "", "-x", "a:b", "+ef"):
        with pytest.raises(ValueError, match=r"there is a jar 'jam' already|cannot be the name of a jar"):
            shelf.add(name, 3)
    with pytest.raises(ConfigError, match=r'there is no jar "jan" \(did you mean jam\?\); known: jam, honey'):
        shelf.named("jan")


def test_a_plugin_is_imported_once_whatever_it_is_called_by(tmp_path: Path) -> None:
    (tmp_path / "counts.py").write_text("calls = []\n\n\ndef count():\n    calls.append(1)\n    return len(calls)\n")
    here = load_plugin("counts.py", tmp_path)
    assert load_plugin(str(tmp_path / "counts.py")) is here
    assert function_in("counts.py:count", tmp_path)() == 1
    assert function_in(f"{tmp_path}/counts.py:count")() == 2


def test_without_plugins_the_tree_is_as_ever() -> None:
    assert type(load_scenario("four-macs-1gbe")).__module__ == "hcsim.config.scenario"
    with pytest.raises(ConfigError, match="is no compressor"):
        make("ternary", seed=0, rank=0)
