"""How ranks reach each other: plainly on one machine, protected between machines, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.engine.local import network_settings
from hcsim.errors import ConfigError
from tests.torch_backend.ranks import Meeting, Ranks

ELSEWHERE = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "HCSIM_ADDRESSES": "192.0.2.7"}


@pytest.mark.parametrize(
    "environment",
    [{}, {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"}, {"MASTER_ADDR": "localhost"}],
)
def test_ranks_of_one_machine_need_no_protection(environment: dict[str, str]) -> None:
    way = network_settings(environment)
    assert way.hosts == ("127.0.0.1",)
    assert way.proved is None


def test_ranks_on_several_machines_are_refused_without_protection() -> None:
    with pytest.raises(ConfigError, match=r"several machines \(192\.0\.2\.7\).*HCSIM_CLUSTER.*HCSIM_INSECURE=1"):
        network_settings(ELSEWHERE)


def test_a_process_is_reached_at_its_own_hosts_and_protected_by_those_of_all() -> None:
    assert network_settings({}, ["127.0.0.1"], ["127.0.0.1", "::1"]).hosts == ("127.0.0.1",)
    with pytest.raises(ConfigError, match=r"several machines \(127\.0\.0\.1, 192\.0\.2\.7\)"):
        network_settings({}, ["127.0.0.1"], ["192.0.2.7"])
    assert network_settings({"HCSIM_INSECURE": "1"}, ["192.0.2.8"], ["192.0.2.7"]).hosts == ("192.0.2.8",)


def test_who_trusts_the_network_says_so() -> None:
    way = network_settings({**ELSEWHERE, "HCSIM_INSECURE": "1"})
    assert way.hosts == ("192.0.2.7",)
    assert way.insecure


def test_a_cluster_that_this_machine_has_not_joined_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCSIM_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="nowhere"):
        network_settings({**ELSEWHERE, "HCSIM_CLUSTER": "nowhere"})


# A process decides on its way once: these need ranks of their own.


@pytest.fixture
def new_ranks() -> Iterator[Ranks]:
    processes = Ranks()
    yield processes
    processes.close()


def made_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HCSIM_HOME", str(folder))
    result = CliRunner().invoke(app, ["cluster", "create", "--name", "lab"])
    assert result.exit_code == 0, result.output
    return str(folder)


def train_as_member(us: Meeting, homes: list[str]) -> tuple[float, str]:
    os.environ.update(HCSIM_HOME=homes[us.rank], HCSIM_CLUSTER="lab")
    dist.init_process_group(
        "hcsim",
        init_method=f"file://{us.file}",
        rank=us.rank,
        world_size=us.size,
        timeout=timedelta(seconds=20 if homes[0] == homes[1] else 5),
    )
    tensor = torch.full((100_000,), us.rank + 1.0)
    try:
        dist.all_reduce(tensor)
        dist.barrier()
    except RuntimeError as error:
        return 0.0, str(error)
    return float(tensor[-1]), ""


@pytest.mark.slow
def test_members_of_a_cluster_reduce_under_tls(
    new_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = made_home(tmp_path / "home", monkeypatch)
    assert new_ranks.run(train_as_member, [home] * 3, size=3, backend="") == [(6.0, "")] * 3


@pytest.mark.slow
def test_a_rank_with_another_secret_is_refused(
    new_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = [made_home(tmp_path / name, monkeypatch) for name in ("ours", "theirs")]
    for total, error in new_ranks.run(train_as_member, homes, size=2, backend=""):
        assert total == 0.0
        assert "rank" in error
