"""From what a person typed to what the program needs; every refusal says what would be valid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from hcsim.cli import screen
from hcsim.cli.cluster import home
from hcsim.cluster.coordinator.policy import Policy
from hcsim.config import Cluster, Job, Scenario, Training, load_scenario, parse_scenario, shipped_scenarios
from hcsim.config.explain import explain
from hcsim.config.scenario import first_nodes
from hcsim.errors import ConfigError
from hcsim.launch import RealNode
from hcsim.real.tls import TlsFiles
from hcsim.runtime.address import split_address
from hcsim.transport.wire import MAX_FRAME_BYTES, Wire
from hcsim.units import PositiveBytes, PositiveSeconds, decode_quantity, did_you_mean

_WAIT_S = 300.0

T = TypeVar("T")
TableT = TypeVar("TableT", Job, Training)


class Others(msgspec.Struct, frozen=True):
    """Machines that are started from here."""

    hosts: tuple[str, ...] = ()
    program: str = "hcsim"
    """What hcsim is called there."""


def scenario(
    name: str | None, seed: int | None, changes: Mapping[str, object], *, needed: bool, text: str | None = None
) -> Scenario | None:
    """The scenario of that name, file or text, with what the options change in it; a real run can do without."""
    if name is None and not needed:
        return None
    if name is None:
        screen.scenarios(stderr=True)
        raise ConfigError("give a scenario: one of these names, or a TOML file")
    try:
        loaded = load_scenario(name) if text is None else parse_scenario(text, "standard input")
    except ConfigError:
        if text is None and not Path(name).exists():
            screen.scenarios(stderr=True)
            hint = did_you_mean(name, shipped_scenarios())
            raise ConfigError(f"{name}: there is no such file, and none of these is called so{hint}") from None
        raise
    return replace(loaded, seed=loaded.seed if seed is None else seed, job=_changed(loaded.job, changes))


def script_scenario(name: str | None, seed: int | None, nodes: int | None) -> Scenario:
    """The cluster that a script runs on: all of a scenario's nodes, or the first of them, with what happens to them."""
    if name is None:
        screen.scenarios(stderr=True)
        raise ConfigError("on which cluster? Give --scenario: one of these names, or a TOML file")
    chosen = scenario(name, seed, {}, needed=True)
    assert chosen is not None
    if nodes is None or nodes == len(chosen.nodes):
        return chosen
    if nodes > len(chosen.nodes):
        raise ConfigError(f"--nodes {nodes}: {chosen.name} has {len(chosen.nodes)}")
    return first_nodes(chosen, nodes)


def training(loaded: Training | None, changes: Mapping[str, object], further: Mapping[str, object]) -> Training | None:
    """What is to be learned: what a scenario says, with what the options change in it; None where neither does."""
    if loaded is None and all(value is None for value in changes.values()):
        return None
    return _changed(loaded or Training(), {**changes, **further})


def real_job(chosen: Scenario | None, changes: Mapping[str, object]) -> Job:
    """The job for a real run; of a scenario, that is all that a real machine can use."""
    if chosen is None:
        return _changed(Job(), changes)
    if chosen.job.payload == "phantom":
        raise ConfigError(f"{chosen.name}: its job has phantoms for a payload, which cannot cross a real network")
    if chosen.job.compute is not None:
        raise ConfigError(f"{chosen.name}: its job computes, which is modelled: a real machine has nothing to do there")
    return chosen.job


def wire(stripes: int | None, segment: str | None, wait: str | None) -> Wire:
    """How messages travel."""
    default = Wire()
    segment_bytes = default.segment_bytes if segment is None else int(_quantity("--segment", segment, PositiveBytes))
    if segment_bytes > MAX_FRAME_BYTES:
        raise ConfigError(f'--segment = "{segment}": a piece has at most {MAX_FRAME_BYTES >> 20} MiB')
    return Wire(
        stripes=default.stripes if stripes is None else stripes,
        segment_bytes=segment_bytes,
        connect_timeout_s=_WAIT_S if wait is None else float(_quantity("--wait", wait, PositiveSeconds)),
    )


def look_s(text: str) -> float:
    """How long to look around."""
    return float(_quantity("--look", text, PositiveSeconds))


def expires_s(text: str) -> float:
    """How long an invitation is good for."""
    return float(_quantity("--expires", text, PositiveSeconds))


def peers(text: str | None) -> tuple[str, ...]:
    """The addresses of all ranks."""
    addresses = tuple(part.strip() for part in (text or "").split(","))
    if not all(addresses):
        raise ConfigError("--real needs --peers: the addresses of all ranks in order, such as mini.local,studio.local")
    return addresses


def tls(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """The TLS files, all or none."""
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise ConfigError("TLS needs all three of --tls-cert, --tls-key and --tls-ca")
    return TlsFiles(cert, key, ca)


def coordinator_policy(workers: int, least: int, heartbeat: str, silence: str) -> Policy:
    """How a coordinator treats its workers."""
    return Policy(
        workers=workers,
        least=least,
        heartbeat_s=float(_quantity("--heartbeat", heartbeat, PositiveSeconds)),
        silence_s=float(_quantity("--silence", silence, PositiveSeconds)),
    )


def metrics_at(text: str | None) -> str | None:
    """Where metrics are served: at a port of this machine alone, or where `host:port` says."""
    if text is None:
        return None
    try:
        split_address(address := f"127.0.0.1:{text}" if text.isdecimal() else text)
    except ConfigError:
        raise ConfigError(f"--metrics-port {text}: give a port, or host:port such as 0.0.0.0:9400") from None
    return address


def cluster(table: Cluster | None, nodes: int | None, others: int = 0) -> Cluster:
    """Who is waited for, with what the options change in it; where others are started from here, for all of them."""
    given = table or Cluster()
    if nodes is None and given.nodes is None and others:
        nodes = 1 + others
    return given if nodes is None else replace(given, nodes=nodes)


def others(hosts: str | None, program: str | None) -> Others:
    """Who is started from here."""
    names = tuple(part.strip() for part in hosts.split(",")) if hosts is not None else ()
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"--hosts {hosts}: give each machine once, as ssh knows it, such as mini.local,studio.local")
    return Others(names, program or "hcsim")


def clustered(scenario: Scenario, nodes: int | None) -> Scenario:
    """A scenario whose nodes find each other; without a figure, all of them are waited for."""
    given = cluster(scenario.cluster, nodes)
    there = len(scenario.nodes)
    given = given if given.nodes is not None else replace(given, nodes=there)
    if given.needed > there:
        real = "" if there else "; to train on the machines of your cluster, say --real"
        raise ConfigError(f"work begins with {given.needed} nodes, and {scenario.name} has {there} [[node]]{real}")
    return replace(scenario, cluster=given)


def to_learn(settings: Training | None) -> Training:
    """What a cluster that finds itself trains."""
    if settings is None:
        raise ConfigError(
            "what is to be trained? Give --task, or a file with a [training] table; "
            "for a collective among fixed ranks, give --peers and --rank"
        )
    return settings


def here(
    cluster: str | None, name: str | None, at: str | None, state: Path | None, device: str | None, metrics: str | None
) -> RealNode:
    """This machine's place in a real cluster."""
    if name is not None and not (name.strip() and name.isprintable()):
        raise ConfigError(f"--name {name!r}: give a name that the others can read")
    hosts = tuple(part.strip() for part in at.split(",")) if at is not None else ()
    for host in hosts:
        if host.count(":") == 1 or "]:" in host:
            raise ConfigError(
                f"--at {host}: give a host; its ports are the job's discovery_port and gradient_port of [cluster]"
            )
        split_address(f"[{host}]:1" if ":" in host else f"{host}:1")
    return RealNode(home(), cluster or "home", name or "", hosts, device or "auto", state, metrics_at(metrics))


def only(where: str, given: Mapping[str, object]) -> None:
    """Refuse what was given of these options: they do something only there."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ConfigError(f"{', '.join(names)}: only {where}")


def apart(outputs: Mapping[str, Path | None]) -> None:
    """Refuse two that would be written over each other; a device, such as /dev/null, takes any number."""
    taken: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is not None and (path.is_file() or not path.exists()):
            other = taken.setdefault(path.resolve(), option)
            if other != option:
                raise ConfigError(f"{other}, {option}: both are {path}; give each a file of its own")


def _quantity(option: str, text: str, kind: type[T]) -> T:
    try:
        return msgspec.convert(text, kind, dec_hook=decode_quantity)
    except msgspec.ValidationError as error:
        raise ConfigError(f'{option} = "{text}": {error}') from None


def _changed(table: TableT, changes: Mapping[str, object]) -> TableT:
    given = {key: value for key, value in changes.items() if value is not None}
    kind = type(table)
    try:
        read = msgspec.convert(given, kind, dec_hook=decode_quantity)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--{explain(error, given, kind)}") from None
    attributes = [field.name for field in msgspec.structs.fields(kind) if field.encode_name in given]
    return replace(table, **{name: getattr(read, name) for name in attributes})
