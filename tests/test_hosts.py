"""`--hosts` takes names, and the hostfiles of other programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hcsim.errors import ConfigError
from hcsim.launch.hosts import HostEntry, read_hosts, without_here
from hcsim.real.interfaces import host_name

MLX = [HostEntry("mini.local", ("10.0.42.1", "10.0.42.2")), HostEntry("air.local")]


def test_names_are_separated_by_commas_and_may_be_given_several_times() -> None:
    assert read_hosts(["a, ann@b", "c"]) == (HostEntry("a"), HostEntry("ann@b"), HostEntry("c"))


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ('[{"ssh": "mini.local", "ips": ["10.0.42.1", "10.0.42.2"]}, {"ssh": "air.local", "ips": []}]', MLX),
        (
            '{"backend": "ring", "envs": [], "hosts": [{"ssh": "mini.local", "ips": ["10.0.42.1", "10.0.42.2"], '
            '"rdma": [null]}, {"ssh": "air.local"}]}',
            MLX,
        ),
        (
            "# ours\nmini slots=1\n\nair slots=4 max_slots=8  # the small one\nstudio\n",
            [HostEntry("mini"), HostEntry("air", (), 4), HostEntry("studio")],
        ),
        ("mini:2\nair:1\n", [HostEntry("mini", (), 2), HostEntry("air")]),
    ],
    ids=["mlx.launch", "mlx.distributed_config", "Open MPI", "MPICH"],
)
def test_a_file_of_another_program_is_read(tmp_path: Path, text: str, entries: list[HostEntry]) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    assert [*read_hosts([str(file)])] == entries


def test_this_machine_in_a_file_is_not_another_one(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(f'[{{"ssh": "{host_name()}", "ips": ["10.0.42.1"]}}, {{"ssh": "mini.invalid"}}]')
    there, here = without_here(read_hosts([str(file)]))
    assert there == (HostEntry("mini.invalid"),)
    assert here is not None
    assert here.ips == ("10.0.42.1",)
    there, here = without_here(read_hosts(["localhost,mini.invalid"]))
    assert (len(there), here) == (1, HostEntry("localhost"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("mini slot=1", "line 1: 'slot=1' – did you mean"),
        ("mini slots=many", "line 1: 'slots=many'"),
        ('[{"host": "mini"}]', "missing required field `ssh`"),
        ("[", "expected [{"),
        ("# nobody", "there is no machine in it"),
        ("mini\nmini", "mini is there twice"),
        ("-oProxyCommand=x", "is not the name of a host"),
        ('[{"ssh": ""}]', "is not the name of a host"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_in_a_line(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_hosts([str(file)])
    assert told.partition(" –")[0] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("given", ["a,,b", "a,a", "", "-l", "hosts.json", "/nowhere/hosts"])
def test_names_that_cannot_be_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        read_hosts([given])


@pytest.mark.parametrize("name", ["a\\u001b[31m", "a\\u0000", "a" * 400], ids=["escape", "null", "long"])
def test_a_hostfile_whose_names_ssh_cannot_take_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(f'[{{"ssh": "{name}"}}]')
    with pytest.raises(ConfigError, match="is not the name of a host") as caught:
        read_hosts([str(file)])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_a_hostfile_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text('[{"ssh": "mini.local"}]', encoding="utf-8-sig")
    assert [host.ssh for host in read_hosts([str(file)])] == ["mini.local"]
