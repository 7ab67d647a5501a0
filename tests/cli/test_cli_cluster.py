"""`hcsim cluster`: from one machine to the next, as two people would type it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.table import Table
from typer.testing import CliRunner, Result

from hcsim.cli.app import app
from hcsim.cli.screen import show
from hcsim.real.keys import load_node_key, load_secret, new_secret


def run(home: Path, *arguments: str, typed: str | None = None) -> Result:
    result = CliRunner().invoke(app, ["cluster", *arguments], env={"HCSIM_HOME": str(home)}, input=typed)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def homes(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "mini", tmp_path / "studio"


def test_the_phrase_that_create_prints_joins_the_next_machine_and_stands_on_no_command_line(
    homes: tuple[Path, Path],
) -> None:
    mini, studio = homes
    created = run(mini, "create")
    assert created.exit_code == 0
    [phrase] = created.stdout.splitlines()
    assert "hcsim cluster join" in created.stderr
    assert phrase not in created.stderr
    joined = run(studio, "join", typed=phrase + "\n")
    assert joined.exit_code == 0
    assert load_secret(mini, "home") == load_secret(studio, "home")
    assert load_node_key(studio).node_id in joined.stdout
    assert load_node_key(studio).node_id != load_node_key(mini).node_id
    assert [line.split()[0] for line in run(studio, "members").stdout.splitlines()] == [load_node_key(studio).node_id]


@pytest.mark.parametrize("way", ["typed", "argument", "standard input"])
def test_the_phrase_can_be_shown_again_and_given_in_any_form(homes: tuple[Path, Path], way: str) -> None:
    mini, studio = homes
    run(mini, "create", "--name", "lab")
    [phrase] = run(mini, "phrase", "--name", "lab").stdout.splitlines()
    text = phrase.lower().replace("-", " ")
    given = {"typed": (), "argument": text.split(), "standard input": ("-",)}[way]
    joined = run(studio, "join", "--name", "lab", *given, typed=text + "\n")
    assert joined.exit_code == 0
    assert load_secret(mini, "lab") == load_secret(studio, "lab")


def test_a_rotation_replaces_the_phrase_and_keeps_the_namespace(homes: tuple[Path, Path]) -> None:
    mini, studio = homes
    [before] = run(mini, "create").stdout.splitlines()
    namespace = load_secret(mini, "home").namespace
    rotated = run(mini, "rotate", "--look", "10 ms")
    assert rotated.exit_code == 0, rotated.stderr
    assert "admits nobody any more" in rotated.stderr
    assert load_secret(mini, "home").namespace == namespace
    [after] = run(mini, "phrase").stdout.splitlines()
    assert after.startswith(before)
    assert len(after) == 2 * len(before) + 1
    joined = run(studio, "join", typed=after + "\n")
    assert joined.exit_code == 0
    assert (studio / "clusters" / "home.trust").stat().st_mode & 0o777 == 0o600


def test_who_cannot_be_expelled_is_told_with_those_who_can(homes: tuple[Path, Path]) -> None:
    mini, _ = homes
    run(mini, "create")
    unknown = run(mini, "expel", "nobody", "--look", "10 ms")
    assert unknown.exit_code == 2
    assert "no member is called 'nobody'" in unknown.stderr
    us = load_node_key(mini).node_id
    ourselves = run(mini, "expel", us[:8], "--look", "10 ms")
    assert ourselves.exit_code == 2
    assert "is this machine" in ourselves.stderr
    assert us in run(mini, "members").stdout


@pytest.mark.slow
def test_an_invitation_that_nobody_waits_with_is_told_in_a_line_and_leaves_no_cluster(homes: tuple[Path, Path]) -> None:
    _, studio = homes
    text = new_secret().invitation()
    for arguments in (("--look", "10 ms"), ("--peer", "127.0.0.1:9", "--look", "10 ms")):
        result = run(studio, "join", *arguments, typed=text + "\n")
        assert result.exit_code == 1
        assert "hcsim cluster invite" in result.stderr
        assert "Traceback" not in result.stderr
    assert "hcsim cluster create" in run(studio, "members").stderr


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"hcsim record 1\n0000\x80"])
def test_a_damaged_trust_list_is_told_in_a_line(homes: tuple[Path, Path], damage: bytes) -> None:
    mini, _ = homes
    run(mini, "create")
    (mini / "clusters" / "home.trust").write_bytes(damage)
    for command in (("members",), ("rotate",), ("phrase",), ("invite",)):
        result = run(mini, *command)
        assert result.exit_code == 2
        assert "home.trust: cannot be read" in result.stderr
    (mini / "clusters" / "home.trust").unlink()
    assert load_node_key(mini).node_id in run(mini, "members").stdout


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
