"""Runs a page of the documentation in the current folder, from top to bottom, as its reader would.

    python -m tests.page docs/tutorial.md

- A block whose first line is `# NAME.py` or `# NAME.toml` is a file of that name; with `, continued`, its next part.
- Other `python` blocks are run, each by itself.
- In `sh` blocks, `hcsim` commands are run. `make` and `python -m` are looked up, and nothing else may stand there.
- A `text` block right behind an `sh` block is printed by it: its lines, in this order, perhaps with others in between.
- In `console` blocks, and where `hcsim …` stands in the text, a command is only parsed.

What is wrong is named with the page and the line.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.main import get_command
from typer.testing import CliRunner

from hcsim.cli.app import app

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"# ([\w-]+\.(?:py|toml))(, continued)?\n")
UsageError: Any = typer.BadParameter.__mro__[1]
"""Of the click that typer uses, which may be its own."""
MENTIONED = re.compile(r"(?<!`)`(hcsim(?: [^`]*)?)`(?!`)")


class Wrong(Exception):
    """The page shows what is not so."""


class Block(NamedTuple):
    """A piece of code, and where it begins."""

    language: str
    text: str
    line: int
    begin: int
    end: int


def blocks(page: str) -> Iterator[Block]:
    """All of a page's."""
    for match in BLOCK.finditer(page):
        indent, language, text = match.groups()
        text = "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
        yield Block(language, text, page.count("\n", 0, match.start()) + 1, match.start(), match.end())


def file_of(block: Block) -> tuple[str, bool] | None:
    """The name of the file that a block is, and whether it goes on with it."""
    named = NAMED.match(block.text)
    return (named[1], bool(named[2])) if named and block.language in ("python", "py", "toml") else None


def commands(block: Block) -> Iterator[str]:
    """What is typed: each line of `sh`, and of `console` what stands behind a prompt."""
    for line in block.text.splitlines():
        if block.language == "console":
            _, prompt, typed = line.partition("$ ")
            parts = re.findall(r"(?:\"[^\"]*\"|[^;\"]|;(?! ))+", typed) if prompt else []  # not within quotes
        else:
            parts = [line]
        for part in parts:
            command = part.partition(" #")[0].strip()
            while re.match(r"[A-Z_]+=", command):  # the environment
                command = command.partition(" ")[2]
            if command:
                yield command


def parse(command: str, *, mentioned: bool = False) -> None:
    """There are such a command and such options; one that is only mentioned need not be complete."""
    words = shlex.split(command)[1:]
    known: Any = get_command(app)
    if words and words[0].startswith("-"):  # options like --install-completion act while they are parsed
        if not any(words[0] in option.opts for option in known.params):
            raise UsageError(f"no such option: {words[0]}")
        return
    for option, setting in pairwise(words):
        if option == "--set" and setting.partition("=")[0] not in settings():
            raise UsageError(f"no such setting: {setting}")
    context = None
    try:
        while True:
            context = known.make_context(known.name, list(words), parent=context)
            rest = [*context._protected_args, *context.args]
            if not hasattr(known, "resolve_command") or not rest:
                return
            _, known, words = known.resolve_command(context, rest)
    except UsageError as error:
        if not mentioned or type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
            raise


@cache
def settings() -> frozenset[str]:
    """The keys that `--set` takes, short and in full."""
    full = re.findall(r"^ *(\w+\.\w+)\b", invoke(["list", "settings"]), re.MULTILINE)
    return frozenset(full) | {key.partition(".")[2] for key in full}


def invoke(words: list[str]) -> str:
    """Run a command of hcsim's in this process, and give what it prints."""
    result = CliRunner().invoke(app, words)
    if result.exit_code:
        raise Wrong(f"hcsim {shlex.join(words)} ends with {result.exit_code}:\n{result.output}") from result.exception
    return result.output


def run_command(command: str) -> str:
    """A line of an `sh` block."""
    words = shlex.split(command)
    if words[0] == "hcsim":
        return invoke(words[1:])
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        found = set(words[1:]) <= set(targets)
    else:
        found = words[:2] == ["python", "-m"] and find_spec(words[2]) is not None
    if not found:
        raise Wrong(f"{command}: expected a command of hcsim, a target of make, or python -m and a module")
    return ""


def compare(shown: str, printed: str) -> None:
    """Each line that is shown was printed, in this order; `…` stands for anything."""
    lines = iter(" ".join(line.split()) for line in printed.splitlines())
    for line in shown.splitlines():
        wanted = " ".join(line.split())
        pattern = ".*".join(map(re.escape, wanted.split("…")))
        if wanted and not any(re.fullmatch(pattern, each) for each in lines):
            raise Wrong(f"not printed, or not in this order: {line}\nin\n{printed}")


def run_page(page: str, run: Callable[[str], str] = run_command) -> None:
    """All of it; the first thing that is wrong ends it."""
    printed, end = "", -1
    for block in blocks(page):
        try:
            file = file_of(block)
            if file is not None:
                with Path(file[0]).open("a" if file[1] else "w", encoding="utf-8") as written:
                    written.write(block.text.partition("\n")[2])
                text = Path(file[0]).read_text(encoding="utf-8")
                tomllib.loads(text) if file[0].endswith("toml") else ast.parse(text)
            elif block.language == "python":
                exec(compile(block.text, f"line {block.line}", "exec"), {"__name__": "__main__"})
            elif block.language == "py":
                ast.parse(block.text)
            elif block.language == "toml":
                tomllib.loads(block.text)
            elif block.language == "sh":
                printed, end = "".join(map(run, commands(block))), block.end
            elif block.language == "text" and end >= 0 and not page[end : block.begin].strip():
                compare(block.text, printed)
        except Exception as error:
            raise Wrong(f"line {block.line}: {error}") from error


def parse_page(page: str) -> None:
    """All commands of hcsim that are shown and not run."""
    found = list(blocks(page))
    for block in found:
        for command in commands(block) if block.language == "console" else ():
            if command.startswith("hcsim"):
                _parse_at(block.line, command, mentioned=False)
    inside = [(block.begin, block.end) for block in found]
    for match in MENTIONED.finditer(page):
        if not any(begin <= match.start() < end for begin, end in inside):
            _parse_at(page.count("\n", 0, match.start()) + 1, " ".join(match[1].split()), mentioned=True)


def _parse_at(line: int, command: str, *, mentioned: bool) -> None:
    try:
        parse(command, mentioned=mentioned)
    except UsageError as error:
        raise Wrong(f"line {line}: {command}: {error.format_message()}") from error


def is_run(page: str) -> bool:
    """Whether there is anything to run."""
    return any(block.language in ("sh", "python") for block in blocks(page))


if __name__ == "__main__":
    sys.path.insert(0, "")
    run_page((ROOT / sys.argv[1]).read_text(encoding="utf-8"))
