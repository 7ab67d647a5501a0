"""`hcsim plan`, and the jobs that it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.config import CATALOGUE, load_scenario, write_scenario
from hcsim.real.keys import new_secret, save_secret
from tests.conftest import free_addresses
from tests.test_report import asks_for_nothing

HOME = "M4, M3 Pro on 1gbe"
FEW = ("--strategy", "local_sgd:8", "--workers", "1")


def planned(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_plan_says_what_to_do_how_much_faster_it_is_and_why() -> None:
    told = " ".join(planned(HOME, "resnet50", *FEW).replace("│", "").split())
    assert "Train with local_sgd:8, on m4 and m3-pro. Of the samples of a step, " in told
    assert "× as fast as m3-pro alone to the same loss (p10–p90 " in told
    assert "What limits it is computing" in told
    assert "1gbe at half its rate" in told


def test_a_plan_as_json_has_all_of_it(tmp_path: Path) -> None:
    told = msgspec.json.decode(planned(HOME, "--params", "10M", "--tokens", "256", *FEW, "--json", "--buy", "M4 mini"))
    assert told["task"] == "transformer:1e+07,tokens=256"
    assert told["speedup"]["p10"] <= told["speedup"]["value"] <= told["speedup"]["p90"]
    assert [each["words"] for each in told["purchases"]] == ["M4 mini"]
    assert {"best", "alone", "limits", "alternatives", "changes", "excluded"} <= set(told)


def test_a_plan_as_json_is_whole_however_long_it_is() -> None:
    told = planned("M4, M3 Pro on wifi6", "convex", "--json", "--workers", "1")
    assert len(told) > 12_000
    assert msgspec.json.decode(told)["candidates"] > 50


def test_the_page_of_a_plan_stands_by_itself_and_has_all_of_it(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    told = planned(HOME, "resnet50", *FEW, "--buy", "M4 mini", "--set", "batch=32", "--report", str(page))
    found = asks_for_nothing(page.read_text(encoding="utf-8"))
    advice = "Train with local_sgd:8, on m4 and m3-pro. Of the samples of a step, "
    assert advice in found.words
    assert advice in " ".join(told.replace("│", "").split())
    titles = ("What else there is", "The machines", "What limits it", "If you bought", "Memory", "Do it")
    assert all(title in found.words for title in titles)
    command = f"hcsim plan '{HOME}' resnet50 --strategy local_sgd:8 --buy 'M4 mini' --set batch=32 -o job.toml"
    assert command in found.words
    assert "[training]" in found.words  # the file of the job


def test_a_home_with_hostile_names_is_text_on_the_page(tmp_path: Path) -> None:
    home = load_scenario("two-macs-wifi")
    first, *others = home.nodes
    machine = msgspec.structs.replace(CATALOGUE["M4"], name="<script>alert(1)</script>")
    file, page = tmp_path / "home.toml", tmp_path / "plan.html"
    named = msgspec.structs.replace(home, nodes=(msgspec.structs.replace(first, machine=machine), *others))
    file.write_text(write_scenario(named), encoding="utf-8")
    planned(str(file), "convex", "--strategy", "ddp", "--workers", "1", "--report", str(page))
    assert "<script>alert(1)</script>" in asks_for_nothing(page.read_text(encoding="utf-8")).words


def test_the_job_of_a_plan_is_simulated_as_fast_as_the_plan_says(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    told = msgspec.json.decode(planned(HOME, "resnet50", *FEW, "--json", "-o", str(job)))
    assert told["best"]["machines"] == [node.name for node in load_scenario(job).nodes]
    result = CliRunner().invoke(app, ["run", str(job), "--steps", "24"], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    [rate] = [
        word.split(" samples a second")[0].split()[-1] for word in result.stdout.splitlines() if "a second" in word
    ]
    assert float(rate) == pytest.approx(told["best"]["samples_per_s"], rel=0.1)


def test_the_job_of_a_plan_runs_for_real(tmp_path: Path) -> None:
    """On this machine, the only one of the home."""
    job = tmp_path / "job.toml"
    planned("M4", "convex", "--workers", "1", "--set", "steps=5", "-o", str(job))
    save_secret(tmp_path, "home", new_secret())
    control, data = (address.rpartition(":")[2] for address in free_addresses(2))
    alone = ("discover=false", f"discovery_port={control}", f"gradient_port={data}", "device=cpu", "at=127.0.0.1")
    command = ["run", "--real", str(job), *(word for each in alone for word in ("--set", each))]
    result = CliRunner().invoke(app, command, env={"HCSIM_HOME": str(tmp_path)})
    assert result.exit_code == 0, result.output
    assert "5 steps in " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("M4",), "say what is trained"),
        (("M4, M3", "resnet50"), "m4 is on no network"),
        (("M4", "resnet50", "--params", "1M"), "resnet50, --params: give one of them"),
        (("M4", "--params", "much"), "--params much: give a number"),
        (("M4", "resnet50", "--tokens", "5"), "only with --params"),
        (("M4", "train.py"), "give --params"),
        (("M4", "resnet51"), "did you mean resnet"),
        (("M4", "resnet50", "--strategy", "ddq"), "did you mean ddp"),
        (("M4", "resnet50", "--set", "batch=1,2"), "give one number for all"),
        (("M4", "resnet50", "--buy", "toaster"), "neither a network nor a machine"),
        (("M4", "resnet50", "-o", "/nowhere/job.toml"), "there is no folder"),
        (("M4", "resnet50", "--report", "/nowhere/plan.html"), "give a file in a folder that there is"),
        (("M4", "resnet50", "--dask", "tcp://127.0.0.1:1"), "--workers: only without --dask"),
        (("M1 8GB", "llama-7b"), "what would do: "),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["plan", *arguments, "--workers", "1"])
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_torch_is_not_imported_for_a_task_of_shapes() -> None:
    program = (
        "import sys; from hcsim.cli.app import app; "
        "app(['plan', 'M4', 'resnet50', '--workers', '1'], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
