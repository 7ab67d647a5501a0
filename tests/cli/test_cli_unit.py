"""`hcsim cluster unit`: files that launchd and systemd take as they are."""

from __future__ import annotations

import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from hcsim.cli.app import app
from hcsim.cli.unit import ServiceUnit, launchd, systemd

AWKWARD = ("/a path/python", "-m", "hcsim", "run", "--real", 'job "1" of 100 %n.toml', "--set", "name=$HOME\\mini's")


def unit(*words: str, folder: str = "/home/ann/my job %h") -> ServiceUnit:
    return ServiceUnit("home", words or AWKWARD, Path(folder), "ann", Path("/Users/ann"), {"HCSIM_HOME": "/a b/100%"})


def printed(*words: str) -> Result:
    return CliRunner().invoke(app, ["cluster", "unit", *words], env={"HCSIM_HOME": "/keys of mine"})


def command_of(text: str) -> list[str]:
    """The command of a systemd unit, without what stands for specifiers and variables."""
    (line,) = (line for line in text.splitlines() if line.startswith("ExecStart="))
    return shlex.split(line.removeprefix("ExecStart=").replace("%%", "%").replace("$$", "$"))


def test_launchd_starts_the_command_at_boot_as_its_user_and_again_when_it_fails() -> None:
    told = plistlib.loads(launchd(unit()).encode())
    assert tuple(told["ProgramArguments"]) == AWKWARD
    assert told["WorkingDirectory"] == "/home/ann/my job %h"
    assert told["EnvironmentVariables"] == {"HOME": "/Users/ann", "HCSIM_HOME": "/a b/100%"}
    assert (told["Label"], told["UserName"], told["RunAtLoad"]) == ("hcsim.home", "ann", True)
    assert told["KeepAlive"] == {"SuccessfulExit": False}
    assert told["StandardErrorPath"] == "/Users/ann/Library/Logs/hcsim-home.log"


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"))), min_size=1))
def test_systemd_gets_every_word_as_it_was_given(words: list[str]) -> None:
    assert command_of(systemd(unit("/bin/true", *words))) == ["/bin/true", *words]


def test_systemd_finds_a_program_whose_path_has_a_dollar_sign() -> None:
    (line,) = (line for line in systemd(unit("/my $HOME 5%/python", "$x")).splitlines() if "ExecStart" in line)
    assert line == 'ExecStart="@/my $HOME 5%%/python" "/my $$HOME 5%%/python" "$$x"'


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["bin", "a $b ${c} %n 100%"])
def test_systemd_finds_nothing_wrong_with_its_file(name: str, tmp_path: Path) -> None:
    file, folder, program = tmp_path / "hcsim-home.service", tmp_path / "my job 100%", tmp_path / name / "python"
    folder.mkdir()
    program.parent.mkdir()
    program.symlink_to(sys.executable)
    file.write_text(systemd(unit(str(program), *AWKWARD[1:], folder=str(folder))), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_file_is_all_that_is_printed_and_its_installation_is_told_beside() -> None:
    done = printed("--launchd", "--name", "attic", "--", "run", "--real", "job.toml")
    told = plistlib.loads(done.stdout.encode())
    assert told["ProgramArguments"] == [sys.executable, "-m", "hcsim", "run", "--real", "job.toml"]
    assert told["WorkingDirectory"] == str(Path.cwd())
    assert told["EnvironmentVariables"]["HCSIM_HOME"] == "/keys of mine"
    assert "sudo launchctl bootstrap system /Library/LaunchDaemons/hcsim.attic.plist" in done.stderr
    done = printed("--systemd", "--", "coordinator", "--workers", "4")
    assert command_of(done.stdout)[1:] == ["-m", "hcsim", "coordinator", "--workers", "4"]
    assert "systemctl --user enable --now hcsim-home" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "say what the machine does, after --"),
        (("--", "run", "four-macs-churn"), "say what the machine does, after --"),
        (("--", "doctor"), "say what the machine does, after --"),
        (("--", "run", "--real", "-"), "a service has none: give a file"),
        (("--", "run", "--real", "a\nb"), "one line of printable characters"),
        (("--name", "../up", "--", "run", "--real", "job.toml"), "cannot be the name of a cluster"),
    ],
)
def test_what_cannot_be_a_service_is_refused(words: tuple[str, ...], says: str) -> None:
    done = printed(*words)
    assert done.exit_code == 2
    assert says in " ".join(done.stderr.split())
    assert not done.stdout


def test_a_folder_whose_name_would_begin_a_line_of_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a\nExecStartPre=b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for kind in ("--systemd", "--launchd"):
        done = printed(kind, "--", "run", "--real", "job.toml")
        assert (done.exit_code, done.stdout) == (2, "")
        assert "rename the folder" in " ".join(done.stderr.split())
