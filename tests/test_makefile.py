"""`make` on a machine whose python3 is too old: it says what is needed, and leaves nothing in the way of the next."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the Makefile and what it looks at."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    for name in ("pyproject.toml", "constraints.txt", "setup.py"):
        (folder / name).touch()
    return folder


def python(folder: Path, version: tuple[int, int], *, has_venv: bool = True) -> Path:
    """Stands for a Python of that version: it knows its version, makes a .venv of itself, and pip refuses old ones."""
    path = folder / f"python{version[0]}.{version[1]}"
    path.write_text(
        f"""#!/bin/sh
        case "$1 $2" in
        "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit {int(not has_venv)};;
        "-m pip") exit {int(version < (3, 11))};;
        -c*) exec "{sys.executable}" -c "import sys; sys.version_info = {(*version, 0)}; $2";;
        esac
        """,
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def make(checkout: Path, interpreter: Path) -> subprocess.CompletedProcess[str]:
    ours = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # of the make that runs the tests
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = ["make", f"PYTHON={interpreter}", "install"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)


def version_in(venv: Path) -> str:
    ask = "print(*sys.version_info[:2], sep='.')"
    return subprocess.run([venv / "bin/python", "-c", f"import sys; {ask}"], capture_output=True, text=True).stdout


def test_a_python_that_is_too_old_is_named_in_a_line_and_leaves_nothing_behind(checkout: Path, tmp_path: Path) -> None:
    old = python(tmp_path, (3, 10))
    done = make(checkout, old)
    assert done.returncode != 0
    said, *by_make = done.stderr.splitlines()
    assert "Python >= 3.11" in said
    assert str(old) in said
    assert "make PYTHON=python3.12 test" in said
    assert all(line.startswith("make: ***") for line in by_make)
    assert not (checkout / ".venv").exists()


def test_a_python_that_is_not_there_is_told_in_the_same_way(checkout: Path, tmp_path: Path) -> None:
    done = make(checkout, tmp_path / "python3.99")
    assert "Python >= 3.11" in done.stderr.splitlines()[0]
    assert not (checkout / ".venv").exists()


def test_an_environment_of_a_python_that_is_too_old_is_made_anew(checkout: Path, tmp_path: Path) -> None:
    old, new = python(tmp_path, (3, 9)), python(tmp_path, (3, 12))
    subprocess.run([old, "-m", "venv", checkout / ".venv"], check=True)
    (checkout / ".venv" / "old").touch()
    done = make(checkout, new)
    assert done.returncode == 0, done.stderr
    assert version_in(checkout / ".venv") == "3.12\n"
    assert not (checkout / ".venv" / "old").exists()


def test_an_environment_that_will_do_is_kept_whatever_python3_is(checkout: Path, tmp_path: Path) -> None:
    assert make(checkout, python(tmp_path, (3, 11))).returncode == 0
    (checkout / ".venv" / ".ready").unlink()
    assert make(checkout, python(tmp_path, (3, 9))).returncode == 0
    assert version_in(checkout / ".venv") == "3.11\n"


def test_an_environment_that_could_not_be_made_whole_is_not_left_for_the_next_time(
    checkout: Path, tmp_path: Path
) -> None:
    """As on Debian, where venv without ensurepip fails when half of it is there."""
    assert make(checkout, python(tmp_path, (3, 12), has_venv=False)).returncode != 0
    assert not (checkout / ".venv").exists()


def test_the_makefile_and_the_package_ask_for_the_same_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = re.findall(r"version_info < \((\d+), (\d+)\)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert [f">={major}.{minor}" for major, minor in asked] == [project["requires-python"]]
