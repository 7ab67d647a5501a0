"""`hcsim run --real` as a member of a cluster, of which it is the only one."""

from __future__ import annotations

from pathlib import Path

import msgspec
from typer.testing import CliRunner

from hcsim.cli.app import app
from hcsim.real.keys import new_secret, save_secret
from tests.conftest import free_addresses

STEPS = 5


def test_the_trace_of_a_member_has_its_views_and_all_its_steps(tmp_path: Path) -> None:
    save_secret(tmp_path, "home", new_secret())
    control, data = (address.rpartition(":")[2] for address in free_addresses(2))
    job, trace = tmp_path / "job.toml", tmp_path / "trace.jsonl"
    job.write_text(
        f"""
        name = "alone"
        cluster = {{ nodes = 1, discover = false, discovery_port = {control}, gradient_port = {data} }}
        training = {{ task = "convex", steps = {STEPS} }}
        """
    )
    command = ["run", "--real", str(job), "--set", "device=cpu", "--set", "at=127.0.0.1", "--trace", str(trace)]
    result = CliRunner().invoke(app, command, env={"HCSIM_HOME": str(tmp_path)})
    assert result.exit_code == 0, result.output
    events = [msgspec.json.decode(line) for line in trace.read_bytes().splitlines()]
    assert [event[4] for event in events if event[1] == "applied"] == [*range(1, STEPS + 1)]
    assert [event[1] for event in events if event[1] in ("view", "synchronised")] == ["view", "synchronised"]
