"""The all-reduce benchmark: what it accepts, what it writes, and that it notices a wrong sum."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from experiments import allreduce
from experiments.peers.peer import EXACT
from experiments.peers.rank import Teeth, Turn
from experiments.peers.roster import PEERS
from experiments.peers.team import TeamFailed, running
from hcsim.collectives.arithmetic import dtype_named

NAMES = ("hcsim", "hcsim_tcp", "hcsim_tls", "hcsim_tls_tcp", "gloo", "mlx", "hcsim_mlx", "mpi", "bare")
COLUMNS = {
    "ranks",
    "size_bytes",
    "dtype",
    *(f"ratio_{name}" for name in NAMES if name != "hcsim"),
    *(f"tcp_ratio_{name}" for name in NAMES if name not in ("hcsim", "hcsim_tcp")),
    *(f"{name}_{what}" for name in NAMES for what in ("s", "peak_bytes", "idle_bytes", "iterations")),
}


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(allreduce.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("text", "sizes_bytes"),
    [
        ("4KB", [4096]),
        ("4096", [4096]),
        ("64 kb, 1MB", [65536, 1 << 20]),
        ("1GB,8B,8B", [8, 1 << 30]),
    ],
)
def test_sizes_are_read_and_sorted(text: str, sizes_bytes: list[int]) -> None:
    assert allreduce.parse_sizes(text) == sizes_bytes


@pytest.mark.parametrize("size_bytes", [4, 4096, 5000, 1 << 24, 3 << 30])
def test_a_size_reads_as_it_is_printed(size_bytes: int) -> None:
    assert allreduce.parse_sizes(allreduce.size_label(size_bytes)) == [size_bytes]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--sizes", "4XB"),
        ("--sizes", ""),
        ("--sizes", "0"),
        ("--sizes", "-4KB"),
        ("--sizes", "6"),
        ("--sizes", "5GB"),
        ("--ranks", "1"),
        ("--ranks", "two"),
        ("--ranks", "2,,4"),
        ("--peers", "nccl"),
        ("--algorithm", "fastest"),
        ("--algorithm", "hierarchical"),
        ("--dtype", "int32"),
        ("--repeat", "0"),
        ("--json", "/nowhere/to/be/found.json"),
        ("--json", "."),
    ],
)
def test_bad_input_is_refused_by_name_and_without_a_traceback(option: str, value: str) -> None:
    result = run(option, value)
    assert result.exit_code == 2
    assert option in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_a_small_run_writes_one_complete_row_per_cell(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    result = run("--ranks", "2", "--sizes", "4KB,64KB", "--peers", "gloo", "--repeat", "2", "--json", str(output))
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())
    assert [(row["ranks"], row["size_bytes"]) for row in rows] == [(2, 4096), (2, 65536)]
    for row in rows:
        assert set(row) == COLUMNS
        assert row["gloo_s"] > 0
        assert 2 <= row["gloo_iterations"] <= 2 * allreduce.MAX_ITERATIONS
        assert all(row[name] is None for name in ("hcsim_s", "mlx_s", "mpi_s", "ratio_gloo"))
    assert "4 KB" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hcsim_tls", "hcsim_tls_tcp", "hcsim_mlx", "bare"])
def test_tls_mlx_programs_and_the_bare_ring_are_measured_when_somebody_asks_for_them(tmp_path: Path, name: str) -> None:
    if reason := PEERS[name].missing():
        pytest.skip(reason)
    output = tmp_path / "rows.json"
    result = run("--ranks", "3", "--sizes", "4KB", "--peers", name, "--repeat", "1", "--json", str(output))
    assert result.exit_code == 0, result.output
    assert json.loads(output.read_text())[0][f"{name}_s"] > 0


@pytest.mark.slow
def test_halves_are_measured_with_whoever_adds_them(tmp_path: Path) -> None:
    output, dtype = tmp_path / "rows.json", "bfloat16"
    arguments = ("--ranks", "2", "--sizes", "600004", "--repeat", "1", "--json", str(output))
    result = run("--peers", "hcsim,gloo,mpi,bare", "--dtype", dtype, *arguments)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(output.read_text())
    assert row["dtype"] == dtype
    assert all(row[f"{name}_s"] > 0 for name in ("hcsim", "gloo"))
    assert row["mpi_s"] is row["bare_s"] is None
    assert f"bare is left out: it adds no {dtype}" in result.output
    assert f"all-reduce of {dtype}" in result.output


def test_the_ratio_is_ours_over_theirs() -> None:
    measured = {
        "hcsim": allreduce.Measured(durations_s=[1.0, 2.0, 9.0]),
        "hcsim_tcp": allreduce.Measured(durations_s=[6.0]),
        "mpi": allreduce.Measured(durations_s=[4.0, 4.0, 1.0]),
    }
    row = allreduce.row(2, 4096, measured)
    assert (row["hcsim_s"], row["mpi_s"], row["ratio_mpi"], row["ratio_gloo"]) == (2.0, 4.0, 0.5, None)
    assert (row["tcp_ratio_mpi"], row["ratio_hcsim_tcp"]) == (1.5, 2.0 / 6.0)


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("elements", [1, 1000, 251 * 1024 + 3])
def test_every_wrong_element_is_counted(dtype: str, ranks: int, elements: int) -> None:
    teeth = Teeth(dtype, ranks)
    total = np.zeros(elements, dtype_named(dtype))
    for rank in range(ranks):
        total += teeth.values(elements, 1, rank % 2)
    assert teeth.count_wrong(total, ranks, ranks // 2) == 0
    assert elements == 1 or total.max() > ranks
    total[elements // 2] += total.dtype.type(1)
    assert teeth.count_wrong(total, ranks, ranks // 2) == 1


@pytest.mark.slow
def test_ranks_that_do_not_start_are_reported_with_their_last_words() -> None:
    def broken(rank_commands: list[list[str]]) -> list[list[str]]:
        return [[sys.executable, "-c", "raise SystemExit('no such library')"] for _ in rank_commands]

    peer = msgspec.structs.replace(PEERS["gloo"], launch=broken)
    with pytest.raises(TeamFailed, match="no such library"), running(peer, 2, "auto", "float32"):
        pass


@pytest.mark.slow
def test_ranks_that_end_early_are_reported() -> None:
    with running(PEERS["hcsim"], 2, "auto", "float32") as team, pytest.raises(TeamFailed, match="a rank ended"):
        team.take(Turn(elements=-1, iterations=1))
