"""The README and the documents behind it show nothing that does not run."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

from docs.tools.architecture import FILE, drawing
from experiments.study.grid import load_sweep
from hcsim.config import FAULTS, Training, parse_scenario
from hcsim.selftest.checks import CHECKS
from tests.page import Wrong, blocks, compare, file_of, is_run, parse_page, run_page
from tests.torch_backend.ranks import Ranks

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
LIMIT_S = 120


def files(page: str) -> dict[str, str]:
    """The files that a page shows, by name."""
    found: dict[str, str] = {}
    for block in blocks(TEXTS[page]):
        if (file := file_of(block)) is not None:
            found[file[0]] = found.get(file[0], "") + block.text
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if is_run(text)])
def test_a_page_can_be_followed_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    """In a process of its own, since plugins are registered for good."""
    for folder in ("examples", "results"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.page", page]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{page}: {done.stderr}"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("page", TEXTS)
def test_commands_that_a_page_only_shows_can_be_parsed(page: str) -> None:
    parse_page(TEXTS[page])


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        ("```python\n1 / 0\n```", "line 1: division by zero"),
        ("# A\n\n```sh\nhcsim run no-such-home\n```", "line 3: hcsim run no-such-home ends with"),
        ("```sh\nmake nonsense\n```", "make nonsense: expected"),
        ("```sh\npython -m experiments.nonsense\n```", "nonsense: expected"),
        ("```sh\nhcsim --version\n```\n\n```text\nhcsim 0.0.0\n```", "not printed, or not in this order: hcsim 0.0.0"),
        ("```toml\n# a.toml\nname = \n```", "line 1: Invalid value"),
    ],
)
def test_what_is_wrong_on_a_page_is_found(
    page: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Wrong, match=re.escape(complaint)):
        run_page(page)


@pytest.mark.parametrize(
    "page",
    [
        "Try `hcsim nonsense`.",
        "Try `hcsim fuzz --nonsense 3`.",
        "`hcsim run --set nonsense=1`",
        "```console\nmini$ hcsim evaluate\n```",
    ],
)
def test_a_command_that_there_is_not_is_found(page: str) -> None:
    with pytest.raises(Wrong, match="line 1: hcsim"):
        parse_page(page)


def test_lines_are_compared_in_their_order() -> None:
    compare("one …\nthree", "one  1\ntwo\n three \n")
    with pytest.raises(Wrong):
        compare("three\none …", "one  1\ntwo\nthree\n")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "mean.py"
    file.write_text(files("docs/howto/program.md")["mean.py"], encoding="utf-8")
    return file


@pytest.mark.slow
def test_the_program_runs_in_the_virtual_world(program: Path) -> None:
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    *ranks, end = done.stdout.splitlines()
    assert ranks == [f"rank {rank} of 4 has 1.5" for rank in range(4)]
    assert re.fullmatch(r"[0-9.]+ ms, trace [0-9a-f]{12}", end)


@pytest.mark.slow
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
    section = TEXTS["docs/reference/torch.md"].partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return "\n".join(block.text for block in blocks(section) if block.language == "py")


def execute(code: str) -> None:
    exec(code, {})


@pytest.mark.slow
def test_the_module_runs_on_two_ranks(ranks: Ranks) -> None:
    ranks.run(execute, shown_under("Modules"), size=2)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.slow
def test_the_checkpoint_is_saved_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(shown_under("Checkpoints"))
    assert capsys.readouterr().out == "100 0.25 torch.Size([2, 8])\n"


def test_the_sweep_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(files("docs/howto/sweep.md")["mine.toml"], encoding="utf-8")
    assert len(load_sweep(str(file), quick=False)) == 2 * 2 * 2 * 2 * 2


def test_the_job_of_a_real_cluster_is_valid() -> None:
    job = parse_scenario(files("docs/howto/cluster.md")["job.toml"], "job.toml")
    assert job.cluster is not None
    assert job.cluster.nodes == 3


def test_the_keys_of_training_are_all_explained() -> None:
    table = TEXTS["docs/reference/scenarios.md"].partition("With `[training]` instead of")[2].partition("Media are")[0]
    known = [field.encode_name for field in msgspec.structs.fields(Training)]
    assert [key for key in known if f"`{key}`" not in table] == []


def test_every_fault_is_explained_with_all_its_keys() -> None:
    table = TEXTS["docs/reference/scenarios.md"].partition("Every fault is a `[[fault]]`")[2].partition("## ")[0]
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", table, re.MULTILINE)}
    assert list(rows) == list(FAULTS)
    for kind, (keys, _) in rows.items():
        needed, _, optional = keys.partition("[")
        fields = [field for field in msgspec.structs.fields(FAULTS[kind]) if field.name != "at_s"]
        assert re.findall(r"`(\w+)`", needed) == [field.encode_name for field in fields if field.required], kind
        assert re.findall(r"`(\w+)`", optional) == [field.encode_name for field in fields if not field.required], kind


@pytest.mark.parametrize(
    ("page", "module"),
    [("hcsim", "hcsim"), ("plugins", "hcsim.plugins"), ("testing", "hcsim.testing"), ("runtime", "hcsim.runtime")],
)
def test_the_reference_has_every_public_name(page: str, module: str) -> None:
    listed = re.findall(rf"^::: {module}\.(\w+)$", TEXTS[f"docs/reference/api/{page}.md"], re.MULTILINE)
    found = import_module(module)
    if module == "hcsim.testing":
        public = {name for name in vars(found) if name.startswith("check_")}
    elif module == "hcsim.runtime":
        public = {"host", "clock", "channel", "frame"}
    else:
        public = set(found.__all__)
    assert set(listed) == public
    assert len(listed) == len(public)


def test_the_diagram_is_what_its_program_draws_and_names_packages_that_there_are() -> None:
    shown = drawing()
    assert FILE.read_text(encoding="utf-8") == shown
    for names in re.findall(r'class="name"[^>]*>([a-z_, ]+)<', shown):
        for name in names.split(", "):
            places = [ROOT / "hcsim" / folder / name for folder in (".", "virtual", "real")]
            assert any(place.is_dir() or place.with_suffix(".py").exists() for place in places), name


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
    pages = [page.removeprefix("docs/") for page in TEXTS if page.startswith("docs/")]
    assert sorted({*listed} & {*pages}) == sorted(pages)
    assert sorted({*listed} - {*pages}) == ["CHANGELOG.md", "CONTRIBUTING.md", "results/README.md"]


@pytest.mark.parametrize(
    "file", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "results/README.md"], ids=lambda f: f.stem
)
def test_what_a_document_points_to_is_there(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    paths = re.findall(r"`((?:hcsim|experiments|tests|docs)/[\w./]*)`", text)
    assert [path for path in targets if not (file.parent / path).exists()] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


COUNTING = """
from hcsim.collectives.algorithms import algorithms
from hcsim.compressors.registry import specs
from hcsim.config.faults import OWN_FAULTS
from hcsim.training.strategies import STRATEGIES
codecs = [spec for spec in specs() if not spec.form.startswith(("none", "…"))]
print(len(STRATEGIES) - 1, len(codecs), len(algorithms("all_reduce")), len(OWN_FAULTS))
"""
"""A single machine is no strategy of a cluster, and "none" compresses nothing. In a process without plugins."""


def test_the_readme_counts_what_there_is() -> None:
    counted = subprocess.run([sys.executable, "-c", COUNTING], capture_output=True, text=True, check=True, timeout=60)
    words = {8: "eight", 9: "nine", 12: "twelve", 34: "thirty-four"}
    strategies, codecs, algorithms, faults = (words[int(number)] for number in counted.stdout.split())
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{strategies.capitalize()} strategies, " in text
    assert f"{codecs} compressors with error feedback, and {algorithms} algorithms of all-reduce" in text
    assert f"under {faults} kinds of faults" in text


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 150


def test_the_checks_that_the_page_on_macos_names_are_there() -> None:
    text = TEXTS["docs/reference/macos.md"]
    named = re.findall(r"`(tests/[^`:]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 30
    for file, test in named:
        defined = re.findall(r"^(?:async )?def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
        assert defined, file
        assert not test or test in defined, f"{file}::{test}"
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    assert all(re.search(r"`tests/|`make mac`|on a Mac|checked by", row[-1]) for row in rows)
    for check in re.findall(r"selftest's `([\w:]+)`", text):
        assert any(name.split(":")[0] == check.split(":")[0] for name in CHECKS), check
    findings = (ROOT / "hcsim" / "doctor.py").read_text(encoding="utf-8")
    for check in re.findall(r"doctor's `([\w ]+)`", text):
        assert f'"{check}"' in findings, check
