"""The README and the documents behind it show nothing that does not run."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from experiments.study.grid import load_sweep
from hcsim.cli.app import app
from hcsim.config import FAULTS, Training, parse_scenario
from tests.torch_backend.ranks import Ranks

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {file.stem: file.read_text(encoding="utf-8") for file in FILES}
LIMIT_S = 60


def blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


ALL = "\n".join(TEXTS.values())
COMMANDS = [
    line
    for block in blocks("sh", ALL)
    for line in block.splitlines()
    if line.startswith("hcsim") and "--real" not in line
]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    [code] = blocks("python", TEXTS["README"])
    file = tmp_path / "mean.py"
    file.write_text(code, encoding="utf-8")
    return file


def test_the_program_runs_in_the_virtual_world(program: Path) -> None:
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    *ranks, end = done.stdout.splitlines()
    assert ranks == [f"rank {rank} of 4 has 1.5" for rank in range(4)]
    assert re.fullmatch(r"[0-9.]+ ms, trace [0-9a-f]{12}", end)


def test_the_program_runs_in_the_real_world(program: Path) -> None:
    with socket.socket() as one, socket.socket() as other:
        for sock in (one, other):
            sock.bind(("127.0.0.1", 0))
        peers = ",".join(f"127.0.0.1:{sock.getsockname()[1]}" for sock in (one, other))
    commands = [[sys.executable, str(program), str(rank), peers] for rank in range(2)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert outputs == [f"rank {rank} of 2 has 0.5\n" for rank in range(2)]


def shown_under(title: str) -> str:
    """The one piece of code in a section about torch."""
    [code] = blocks("py", TEXTS["torch"].partition(f"\n## {title}\n")[2].partition("\n## ")[0])
    return code


def execute(code: str) -> None:
    exec(code, {})


def test_the_module_runs_on_two_ranks(ranks: Ranks) -> None:
    ranks.run(execute, shown_under("Modules"), size=2)


def test_the_checkpoint_is_saved_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(shown_under("Checkpoints"))
    assert capsys.readouterr().out == "100 0.25 torch.Size([2, 8])\n"


def test_the_commands_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, f"{command}\n{result.output}"


def test_the_table_is_the_one_that_is_printed() -> None:
    shown = next(block for block in blocks("text", ALL) if "exact" in block)
    printed = CliRunner().invoke(app, ["run", "four-macs-1gbe"]).stdout
    expected, actual = ([line.split() for line in text.splitlines() if "─" not in line] for text in (shown, printed))
    assert actual[: len(expected)] == expected


@pytest.mark.parametrize(("document", "name"), [("README", "pair"), ("scenarios", "kitchen")])
def test_the_scenario_runs(tmp_path: Path, document: str, name: str) -> None:
    [text] = [block for block in blocks("toml", TEXTS[document]) if "[[medium]]" in block]
    assert parse_scenario(text, document).name == name
    file = tmp_path / "home.toml"
    file.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, ["run", str(file)])
    assert result.exit_code == 0, result.output


def test_the_sweep_is_valid(tmp_path: Path) -> None:
    [text] = [block for block in blocks("toml", ALL) if "grid" in block]
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    assert len(load_sweep(str(file), quick=False)) == 2 * 2 * 2 * 2 * 2


def test_the_keys_of_training_are_all_explained() -> None:
    table = TEXTS["scenarios"].partition("With `[training]` instead of")[2].partition("Media are")[0]
    known = [field.encode_name for field in msgspec.structs.fields(Training)]
    assert [key for key in known if f"`{key}`" not in table] == []


def test_every_fault_is_explained_with_all_its_keys() -> None:
    table = TEXTS["scenarios"].partition("Every fault is a `[[fault]]`")[2].partition("## ")[0]
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", table, re.MULTILINE)}
    assert list(rows) == list(FAULTS)
    for kind, (keys, _) in rows.items():
        needed, _, optional = keys.partition("[")
        fields = [field for field in msgspec.structs.fields(FAULTS[kind]) if field.name != "at_s"]
        assert re.findall(r"`(\w+)`", needed) == [field.encode_name for field in fields if field.required], kind
        assert re.findall(r"`(\w+)`", optional) == [field.encode_name for field in fields if not field.required], kind


@pytest.mark.parametrize(
    "file", [*FILES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "results/README.md"], ids=lambda f: f.stem
)
def test_what_a_document_points_to_is_there(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    paths = re.findall(r"`((?:hcsim|experiments|tests)/[\w./]*)`", text)
    assert [path for path in targets if not (file.parent / path).exists()] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_command_that_can_be_run_is_run() -> None:
    assert len(COMMANDS) >= 3
