"""Programs that never import hcsim: torch finds the backend by itself, and torchrun starts and restarts them."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from tests.torch_backend.models import alone, compare
from tests.torch_backend.resumed import DIES_IN

ROOT = Path(__file__).parents[2]
LIMIT_S = 180


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment in which Python finds the entry point of our pyproject.toml, as after an install."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    about = tmp_path / "path" / "hcsim_as_installed-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hcsim-as-installed\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"{name} = {value}" for name, value in points["torch.backends"].items()]
    (about / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines, ""]), encoding="utf-8")
    path = os.pathsep.join([str(about.parent), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


@pytest.mark.slow
def test_torch_knows_the_backend_and_has_loaded_nothing_of_it(installed: dict[str, str]) -> None:
    program = """
import sys
import torch.distributed as dist
assert not {"hcsim.torch_backend.process_group", "hcsim.collectives"} & {*sys.modules}
dist.init_process_group("hcsim", store=dist.HashStore(), rank=0, world_size=1)
import torch
ones = torch.ones(3)
dist.all_reduce(ones)
print(dist.get_backend(), ones.sum().item())
dist.destroy_process_group()
"""
    done = run("-c", program, environment=installed)
    assert done.stdout.split() == ["hcsim", "3.0"], done.stderr


@pytest.mark.slow
def test_the_backend_may_be_imported_before_torch(installed: dict[str, str]) -> None:
    """torch then looks for it in the middle of its own import."""
    program = "import hcsim.torch_backend, torch.distributed as dist; print('HCSIM' in dist.Backend._plugins)"
    done = run("-c", program, environment=installed)
    assert done.stdout.split() == ["True"], done.stderr


@pytest.mark.slow
def test_torchrun_starts_it_again_and_it_goes_on_from_its_checkpoint(installed: dict[str, str], tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = run(*torchrun, "-m", "tests.torch_backend.resumed", str(tmp_path), environment=installed)
    assert done.returncode == 0, done.stderr
    assert "rank 1" in done.stderr  # rank 0, of its peer
    for rank in range(2):
        first, weights = torch.load(tmp_path / f"rank-{rank}.pt")
        assert first == DIES_IN
        compare([weights], [alone(2)[-1]], exact=True)
