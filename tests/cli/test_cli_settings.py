"""`--set`: what it changes, and that it reads values as a file does."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hcsim.cli.settings import TABLES, Settings, ThisMachine, WireSettings
from hcsim.config import Cluster, Heartbeat, Job, Tcp, Training, parse_scenario
from hcsim.errors import ConfigError
from hcsim.units import Flops, PositiveBytes, PositiveSeconds, Share


def settings(*words: str) -> Settings:
    return Settings(words)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("batch", "32", "32"),
        ("batch", "[8, 24]", "[8, 24]"),
        ("batch", "8,24", "[8, 24]"),
        ("lr", "1e-3", "1e-3"),
        ("lr", "1", "1"),
        ("momentum", " 0.9 ", "0.9"),
        ("scale_lr", "true", "true"),
        ("optimizer", "adamw", '"adamw"'),
        ("optimizer", '"adamw"', '"adamw"'),
        ("strategy", "diloco:16,lr=0.5", '"diloco:16,lr=0.5"'),
        ("compressor", "topk:0.01+ef", '"topk:0.01+ef"'),
        ("task", "123", '"123"'),
        ("server", "wss://ps.example.org/home", '"wss://ps.example.org/home"'),
        ("timeout", "5 min", '"5 min"'),
        ("bucket", "1 MiB", '"1 MiB"'),
    ],
)
def test_a_value_means_what_it_means_in_a_file(key: str, text: str, value: str) -> None:
    in_a_file = parse_scenario(f'name = "x"\n[training]\n{key} = {value}\n', "x").training
    for word in (f"{key}={text}", f"training.{key}={text}", f" {key} = {text}"):
        assert settings(word).take("training", Training()) == in_a_file


def test_every_table_is_set_on_top_of_what_a_file_says() -> None:
    ours = settings(
        "cluster.heartbeat.interval=500 ms", "peers=a:1,[fd::1]:2", "window=1 MiB", "ack_share=5 %",
        "at=10.0.0.1,fd00::2", "stripes=4", "job.timeout=2 s",
    )  # fmt: skip
    beat = Heartbeat(interval_s=PositiveSeconds(2), timeout_s=PositiveSeconds(20), phi=3.5)
    cluster = ours.take("cluster", Cluster(nodes=3, heartbeat=beat))
    assert cluster == Cluster(
        nodes=3, heartbeat=replace(beat, interval_s=PositiveSeconds(0.5)), peers=("a:1", "[fd::1]:2")
    )
    assert ours.take("tcp", Tcp(headers=False)) == Tcp(
        headers=False, window_bytes=PositiveBytes(1 << 20), ack_share=Share(0.05)
    )
    assert ours.take("machine", ThisMachine()).at == ("10.0.0.1", "fd00::2")
    assert ours.take("wire", WireSettings()).stripes == 4
    job = Job(compute=Flops(2e9), size_bytes=PositiveBytes(12))
    assert ours.take("job", job) == replace(job, timeout_s=PositiveSeconds(2))
    ours.finish()


def test_a_heartbeat_is_checked_with_what_the_file_says_of_it() -> None:
    patient = Cluster(heartbeat=Heartbeat(timeout_s=PositiveSeconds(7200)))
    changed = settings("heartbeat.interval=1 h").take("cluster", patient)
    assert changed.beat.interval_s == 3600
    with pytest.raises(ConfigError, match="longer than the interval"):
        settings("heartbeat.interval=1 h").take("cluster", Cluster())


def test_a_bare_key_of_several_tables_is_that_of_the_one_that_is_used() -> None:
    assert settings("timeout=1 s").take("training", Training()).timeout_s == 1
    assert settings("timeout=1 s").take("job", Job()).timeout_s == 1
    both = settings("job.timeout=1 s", "timeout=2 s")
    assert both.take("training", Training()).timeout_s == 2
    with pytest.raises(ConfigError, match=r"--set job\.timeout: only where nothing is learned"):
        both.finish()


def test_a_key_of_training_alone_says_that_something_is_learned() -> None:
    assert settings("momentum=0.5").has("training")
    assert settings("training.timeout=1 s").has("training")
    assert not settings("timeout=1 s", "size=1 B").has("training")


def test_bare_keys_mean_one_thing_but_for_what_a_job_and_a_training_share() -> None:
    tables: dict[str, list[str]] = {}
    for name, kind in TABLES.items():
        for key in kind.__struct_encode_fields__:
            tables.setdefault(key, []).append(name)
    assert {key: names for key, names in tables.items() if len(names) > 1} == {
        "algorithm": ["training", "job"], "timeout": ["training", "job"],
    }  # fmt: skip
