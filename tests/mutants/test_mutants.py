"""The planted bugs of this folder fit the tree, are complete, and are found by the search."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from experiments.mutants.__main__ import main
from experiments.mutants.hunt import Outcome
from experiments.mutants.patches import KINDS, apply, load_all, parse
from experiments.mutants.tree import command, copied, environment, root
from hcsim.config import load_scenario
from hcsim.errors import ConfigError
from hcsim.fuzz.trial import run_trial

FOLDER = Path(__file__).parent
PATCHES = load_all(FOLDER)
MOST_CONTEXT = 3


def copies(name: str, to: Path) -> Path:
    """The files that a patch changes, in a folder of their own."""
    for path in PATCHES[name].files:
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root() / path, to / path)
    return to


def test_there_are_twenty_of_all_kinds():
    assert len(PATCHES) == 20
    assert {patch.breaks for patch in PATCHES.values()} == set(KINDS)


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_still_fits_and_changes_every_file_that_it_names(name: str, tmp_path: Path):
    tree = copies(name, tmp_path)
    apply(PATCHES[name], tree)
    for path in PATCHES[name].files:
        changed = (tree / path).read_text()
        assert changed != (root() / path).read_text()
        compile(changed, path, "exec")


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git here")
@pytest.mark.parametrize("name", PATCHES)
def test_git_makes_the_same_of_a_patch(name: str, tmp_path: Path):
    ours, theirs = (copies(name, tmp_path / which) for which in ("ours", "theirs"))
    apply(PATCHES[name], ours)
    subprocess.run(["git", "apply", str(FOLDER / f"{name}.patch")], cwd=theirs, check=True)
    for path in PATCHES[name].files:
        assert (ours / path).read_text() == (theirs / path).read_text()


HEAD = "What: a\nSeen: b\n  and c\nBreaks: safety\n"
DIFF = "--- a/x.py\n+++ b/x.py\n@@ -2,2 +2,2 @@\n a\n-b\n+c\n"


def test_a_hunk_goes_to_the_place_nearest_to_its_line(tmp_path: Path):
    (tmp_path / "x.py").write_text("a\nb\n\na\nb\n\na\nb\n")
    apply(parse(HEAD + DIFF.replace("-2,2", "-5,2"), "x"), tmp_path)
    assert (tmp_path / "x.py").read_text() == "a\nb\n\na\nc\n\na\nb\n"


def test_a_patch_that_does_not_fit_changes_nothing(tmp_path: Path):
    (tmp_path / "x.py").write_text("a\nb\n")
    (tmp_path / "y.py").write_text("a\nB\n")
    with pytest.raises(ConfigError, match=r"lines that it changes near y\.py:2 are not there"):
        apply(parse(HEAD + DIFF + DIFF.replace("x.py", "y.py"), "x"), tmp_path)
    assert (tmp_path / "x.py").read_text() == "a\nb\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD.replace("Seen: b\n  and c\n", "") + DIFF, "Seen: is missing"),
        (HEAD.replace("safety", "everything") + DIFF, "Breaks: everything is none of safety"),
        (HEAD, "no diff in it"),
        (HEAD + DIFF + "what?\n", "'what\\?' is no part"),
    ],
)
def test_a_patch_that_is_not_complete_is_refused(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        parse(text, "x")


def hunt(tmp_path: Path, name: str, *options: str) -> tuple[int, dict[str, object]]:
    """What the command says of one mutant."""
    app = typer.Typer()
    app.command()(main)
    rows = tmp_path / "rows.json"
    known = ["--record", str(tmp_path / "record"), "--json", str(rows), "--workers", "1"]
    result = CliRunner().invoke(app, ["--only", name, *known, *options])
    (row,) = json.loads(rows.read_text())
    return result.exit_code, row


SOON = {"adopted-view-is-not-saved": "epochs_never_go_back", "suspicion-stays": "the_core_comes_to_the_end"}
"""Mutants that the first seeds show, and what they break."""


@pytest.mark.soak
@pytest.mark.parametrize("name", SOON)
def test_the_search_finds_a_mutant_and_shrinks_what_shows_it(name: str, tmp_path: Path):
    code, row = hunt(tmp_path, name, "--seeds", "20", "--shrink", "40")
    assert (code, row["invariant"]) == (0, SOON[name])
    assert isinstance(row["faults"], int)
    assert row["also_unpatched"] == []


def replayed(name: str, tree: Path) -> Outcome:
    """What a tree makes of the scenario in which a bug matters."""
    arguments = command("experiments.mutants.hunt", "replay", str(FOLDER / f"{name}.toml"))
    text = subprocess.run(arguments, cwd=tree, env=environment(tree), capture_output=True, check=True, text=True).stdout
    outcome = msgspec.json.decode(text.splitlines()[-1], type=Outcome)
    assert Path(outcome.package) == tree / "hcsim"
    return outcome


QUICK = ("adopted-view-is-not-saved", "objection-needs-a-majority")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in PATCHES]
)
def test_a_small_scenario_shows_a_mutant_and_nothing_else(name: str, tmp_path: Path):
    scenario = load_scenario(FOLDER / f"{name}.toml")
    assert len(scenario.faults) <= 3
    assert len(scenario.nodes) <= 3
    (found,) = replayed(name, copied(tmp_path / "patched", PATCHES[name]).resolve()).broken
    assert found.invariants
    assert not run_trial(scenario).breaches
