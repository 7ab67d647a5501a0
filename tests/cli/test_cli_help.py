"""What `--help` shows: few options, on one screen; and where those are that a command does not have."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.cli.errors import BAD_INPUT

ROOT = Path(__file__).parents[2]
MOST_OPTIONS = 16
COMMANDS = (
    "run", "bench", "replay", "rank", "list", "sweep", "doctor", "probe", "twin", "plan", "selftest", "dashboard",
    "topology", "show",
    "fuzz", "evaluate", "coordinator",
    "cluster",
)  # fmt: skip
OF_A_CLUSTER = ("create", "join", "invite", "members", "expel", "rotate", "phrase", "status", "forget", "unit")


def shown(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], terminal_width=80)
    assert result.exit_code == 0
    return result.output


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize(
    "command", [(), *((name,) for name in COMMANDS), *(("cluster", name) for name in OF_A_CLUSTER)]
)
def test_every_command_has_few_options_and_fits_on_a_screen(command: tuple[str, ...]) -> None:
    lines = shown(*command).splitlines()
    assert len(re.findall(r"^  --(?!help\b)", "\n".join(lines), re.MULTILINE)) <= MOST_OPTIONS
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_the_commands_are_those_that_are_tested_here() -> None:
    assert re.findall(r"^  ([a-z]+)  ", shown().partition("Commands:")[2], re.MULTILINE) == [*COMMANDS]
    assert re.findall(r"^  ([a-z]+)  ", shown("cluster").partition("Commands:")[2], re.MULTILINE) == [*OF_A_CLUSTER]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run two-macs-wifi --batch 32", "--batch is a setting: --set batch=32"),
        ("run two-macs-wifi --lr=0.1", "--lr is a setting: --set lr=0.1"),
        ("run --real --task digits --device cpu", "--device is a setting: --set device=cpu"),
        ("run --real --task digits --metrics-port 9400", "--metrics-port is a setting: --set metrics=9400"),
        ("run --real --remote-hcsim /opt/hcsim", "--remote-hcsim is a setting: --set remote_hcsim=/opt/hcsim"),
        ("run --real --hosts a --name --at", "--name is a setting: --set name=…"),
        ("run two-macs-wifi --metrics out", "--metrics is a setting: --set metrics=out"),
        ("run two-macs-wifi --timeout 5s", "--timeout is a setting: --set timeout=5s"),
        ("run --real --cluster lab", "--cluster is a setting: --set cluster=lab"),
        (
            "run two-macs-wifi --size 1MiB",
            "--size is an option of `hcsim bench`, and a setting here: --set size=1MiB",
        ),
        (
            "run two-macs-wifi --operation broadcast",
            "--operation is an option of `hcsim bench` and `hcsim rank`, and a setting here: --set operation=broadcast",
        ),
        (
            "run --real --peers a,b --rank 0",
            "--peers is an option of `hcsim rank`, and a setting here: --set peers=a,b",
        ),
        ("run --real --rank 0", "--rank is an option of `hcsim rank`"),
        ("run --real --insecure", "--insecure is an option of `hcsim rank`"),
        ("run --real --tls-cert me.pem", "--tls-cert is an option of `hcsim rank`"),
        ("bench two-macs-wifi --stripes 4", "--stripes is a setting: --set stripes=4"),
        ("bench two-macs-wifi --wait 1s", "--wait is an option of `hcsim rank`"),
        ("bench --real", "--real is an option of `hcsim run`"),
        ("rank --peers a,b --steps 3", "--steps is an option of `hcsim run`, and a setting here: --set steps=3"),
        ("rank --real --peers a,b", "--real is what `hcsim rank` always is: leave it out"),
        ("scenarios", "`hcsim scenarios` is now `hcsim list scenarios`"),
    ],
)
def test_an_option_that_stands_elsewhere_is_refused_with_its_place(words: str, told: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert (result.exit_code, result.stdout, result.stderr) == (BAD_INPUT, "", f"error: {told}\n")


def test_what_a_setting_was_given_is_quoted_for_a_shell() -> None:
    result = CliRunner().invoke(app, ["run", "two-macs-wifi", "--timeout", "5 min"])
    assert result.stderr == "error: --timeout is a setting: --set 'timeout=5 min'\n"


@pytest.mark.parametrize("words", ["run --stepss 3", "fuzz --batch 3", "benhc", "list --kind x"])
def test_what_is_nowhere_is_refused_as_usual(words: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == BAD_INPUT
    assert "No such" in result.stderr
    assert "Traceback" not in result.output


def completed(words: str) -> list[str]:
    """What bash would be offered after these words."""
    asked = {"_HCSIM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = CliRunner().invoke(app, [], prog_name="hcsim", env=asked)
    assert "Traceback" not in done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("hcsim be", "bench"),
        ("hcsim run four-macs-ch", "four-macs-churn"),
        ("hcsim run --task conv", "convex"),
        ("hcsim run --strategy dil", "diloco"),
        ("hcsim run --compressor tok", ""),
        ("hcsim run --set momen", "momentum="),
        ("hcsim bench --operation all_g", "all_gather"),
        ("hcsim bench --algorithm chu", "chunked_ring"),
        ("hcsim list comp", "compressors"),
    ],
)
def test_a_shell_completes_names(words: str, offered: str) -> None:
    assert completed(words) == offered.split()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("scenarios", "two-macs-wifi +Two MacBooks on one Wi-Fi 6 access point"),
        ("machines", r"M3 Air +.* TFLOPS, 100 GB/s, fanless"),
        ("media", "thunderbolt +A network of cables"),
        ("strategies", "diloco +Local steps"),
        ("compressors", "topk:RATIO +the largest elements"),
        ("algorithms", "broadcast +auto, ring, tree, centralized"),
        ("tasks", "gpt2 +GPT-2 of 124 million"),
        ("faults", "crash +The node stops"),
        ("settings", r"training\.bucket +25 MiB +Gradients are exchanged in buckets"),
    ],
)
def test_each_kind_of_name_is_listed_with_what_it_is(kind: str, words: str) -> None:
    result = CliRunner().invoke(app, ["list", kind], env={"COLUMNS": "150"})
    assert result.exit_code == 0
    assert re.search(rf"^ ?{words}", result.stdout, re.MULTILINE), result.stdout


def test_without_a_kind_all_names_are_listed_a_line_of_names_for_each() -> None:
    result = CliRunner().invoke(app, ["list"], env={"COLUMNS": "2000"})
    kinds = [line.split(None, 1) for line in result.stdout.splitlines()]
    assert [kind for kind, _ in kinds][:2] == ["scenarios", "machines"]
    assert all("two-macs-wifi" in names for kind, names in kinds if kind == "scenarios")
    assert all(len(names) > 10 for _, names in kinds)
    assert all(one[0] != other[0] for one, other in pairwise(kinds))


def test_what_a_plugin_brings_is_listed() -> None:
    """In a process of its own, since plugins are registered for good."""
    command = [sys.executable, "-m", "hcsim", "list", "compressors", "--plugin", "examples/plugins/ternary.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    assert "ternary" in listed.stdout
