"""This machine's rank of a script on a real cluster."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from hcsim.config import Cluster
from hcsim.errors import ConfigError
from hcsim.launch.real import RealNode
from hcsim.real.keys import new_secret, save_secret
from hcsim.scripts.member import ScriptSpec, run_in_cluster


def test_a_port_that_is_taken_is_told_before_anybody_counts_on_this_machine(tmp_path: Path) -> None:
    save_secret(tmp_path, "home", new_secret())
    path = tmp_path / "script.py"
    path.write_text("")
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as taken:
        control, gradients = (each.getsockname()[1] for each in (free, taken))
        free.close()
        cluster = Cluster(nodes=1, discovery_port=control, gradient_port=gradients, discover=False)
        here = RealNode(tmp_path, hosts=("127.0.0.1",))
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{gradients}"):
            asyncio.run(run_in_cluster(here, cluster, ScriptSpec.read(path, []), tell=told.append))
    assert not told


def test_a_coordinator_is_for_training(tmp_path: Path) -> None:
    cluster = Cluster(nodes=1, coordinator="127.0.0.1:1")
    with pytest.raises(ConfigError, match="coordinator is for training"):
        asyncio.run(run_in_cluster(RealNode(tmp_path), cluster, ScriptSpec(str(tmp_path), (), "")))
