"""`hcsim cluster`: from one machine to the next, as two people would type it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table
from typer.testing import CliRunner, Result

from hcsim.cli.app import app
from hcsim.cli.screen import show
from hcsim.real.keys import load_node_key, load_secret


def run(home: Path, *arguments: str, typed: str | None = None) -> Result:
    result = CliRunner().invoke(app, ["cluster", *arguments], env={"HCSIM_HOME": str(home)}, input=typed)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "mini", tmp_path / "studio"


def test_the_line_that_create_prints_joins_the_next_machine(homes: tuple[Path, Path]) -> None:
    mini, studio = homes
    created = run(mini, "create")
    assert created.exit_code == 0
    command = next(line for line in created.stdout.splitlines() if line.startswith("hcsim cluster join"))
    joined = run(studio, *command.split()[2:])
    assert joined.exit_code == 0
    assert load_secret(mini, "home") == load_secret(studio, "home")
    assert load_node_key(studio).node_id in joined.stdout
    assert load_node_key(studio).node_id != load_node_key(mini).node_id


def test_the_phrase_can_be_shown_again_and_typed_at_a_prompt_in_any_form(homes: tuple[Path, Path]) -> None:
    mini, studio = homes
    run(mini, "create", "--name", "lab")
    line = run(mini, "phrase", "--name", "lab").stdout.splitlines()[0]
    assert line.endswith("--name lab")
    phrase = line.split()[3]
    joined = run(studio, "join", "--name", "lab", typed=phrase.lower().replace("-", " ") + "\n")
    assert joined.exit_code == 0
    assert load_secret(mini, "lab") == load_secret(studio, "lab")


def test_creating_again_overwrites_nothing_and_says_so(homes: tuple[Path, Path]) -> None:
    mini, _ = homes
    run(mini, "create")
    before = load_secret(mini, "home")
    again = run(mini, "create")
    assert again.exit_code == 2
    assert "hcsim cluster phrase --name home" in again.stderr
    assert load_secret(mini, "home") == before
    assert run(mini, "create", "--name", "second").exit_code == 0


def test_joining_twice_is_harmless_and_joining_another_is_refused(homes: tuple[Path, Path]) -> None:
    mini, studio = homes
    run(mini, "create")
    run(studio, "create")
    ours, theirs = (load_secret(home, "home").phrase() for home in homes)
    assert "already" in run(mini, "join", ours).stdout
    refused = run(mini, "join", theirs)
    assert refused.exit_code == 2
    assert load_secret(mini, "home").phrase() == ours


def test_a_cluster_that_was_not_joined_is_told_with_those_that_were(homes: tuple[Path, Path]) -> None:
    mini, _ = homes
    assert "hcsim cluster create" in run(mini, "status").stderr
    run(mini, "create", "--name", "lab")
    result = run(mini, "status")
    assert result.exit_code == 2
    assert "'home'" in result.stderr
    assert "only lab" in result.stderr


def test_a_table_shows_addresses_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    address = "[fd00::2]:52415 [2001:db8:a:b::1]:52415 [/b]"
    table = Table("at")
    table.add_row(address)
    show(table)
    assert address in capsys.readouterr().out


@pytest.mark.parametrize("phrase", ["WSE38", "AAAAA-AAAAA-AAAAA-AAAAA-AAAAA-AAAAA", "it's a secret!"])
def test_a_typo_is_told_in_a_line_and_leaves_no_trace(homes: tuple[Path, Path], phrase: str) -> None:
    mini, _ = homes
    result = run(mini, "join", phrase)
    assert result.exit_code == 2
    assert "join phrase" in result.stderr
    assert "Traceback" not in result.stderr
    assert not mini.exists()


def test_a_key_that_others_can_read_is_told_in_a_line(homes: tuple[Path, Path]) -> None:
    mini, _ = homes
    load_node_key(mini)
    (mini / "node_key").chmod(0o644)
    result = run(mini, "create")
    assert result.exit_code == 2
    assert "chmod 600" in result.stderr
