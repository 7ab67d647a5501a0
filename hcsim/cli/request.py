"""From the arguments to the one kind of run that they mean. Every error says what would be valid.

Each kind of run takes the options and settings that apply to it, and rejects the remaining ones by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hcsim.cli import screen
from hcsim.cli.settings import (
    MemorySettings,
    PredictionSettings,
    Settings,
    ThisMachine,
    TimelineSettings,
    WireSettings,
    seconds,
)
from hcsim.config import Cluster, Job, Scenario, Training, load_scenario, parse_scenario, shipped_scenarios
from hcsim.config.scenario import first_nodes
from hcsim.errors import ConfigError
from hcsim.loops import how_to_build, missing_loops
from hcsim.registry import load_plugin
from hcsim.runtime.address import split_address
from hcsim.transport.groups import Wire
from hcsim.units import did_you_mean

if TYPE_CHECKING:
    from hcsim.cli.options import BenchOptions, ProbeOptions, RankOptions, ReplayOptions, RunOptions
    from hcsim.cli.ranks import ManualRank
    from hcsim.cli.recording import RecordingFiles
    from hcsim.cli.twin import ChosenTwin
    from hcsim.cluster.coordinator.messages import CoordinatorPolicy
    from hcsim.launch.real import RealNode
    from hcsim.real.tls import TlsFiles

_WAIT_S = 300.0
_NO_SCRIPT = "without a script (what a script is given stands after --)"
_BY_ITSELF = "with `hcsim run --real`"


def run(options: RunOptions) -> bool:
    """`hcsim run`. Return whether the run succeeded."""
    _prepare(options.plugin)
    learned = {f"training.{name}": getattr(options, name) for name in ("task", "strategy", "compressor", "steps")}
    if options.what is not None and options.what.endswith(".py"):
        trained = {f"--{name.removeprefix('training.')}": value for name, value in learned.items()}
        only(_NO_SCRIPT, {**trained, "--save": options.save, "--dashboard": options.dashboard or None})
        return (_script_for_real if options.real else _script)(options, Settings(options.set))
    given = {f"-- {' '.join(options.arguments)}": True} if options.arguments else {}
    only("with a script (a file that ends with .py)", {"--scenario": options.scenario, **given})
    text, attended = _standard_input(options.what)
    chosen = _scenario(options.what, text, options.seed) if options.what or not options.real else None
    settings = Settings(options.set, {**learned, "cluster.nodes": options.nodes})
    training = _training(chosen, settings)
    if options.real:
        return _cluster_for_real(options, chosen, settings, training, attended=attended)
    assert chosen is not None  # it was needed
    return _virtual(options, chosen, settings, training)


def bench(options: BenchOptions) -> bool:
    """`hcsim bench`. Return whether all results were right."""
    from hcsim.cli.ranks import run_virtual

    _prepare(options.plugin)
    names = ("operation", "size", "dtype", "repeat", "algorithm")
    settings = Settings(options.set, {f"job.{name}": getattr(options, name) for name in names})
    text, _ = _standard_input(options.scenario)
    chosen = _scenario(options.scenario, text, options.seed)
    chosen = replace(chosen, job=settings.take("job", chosen.job))
    chosen, wire, files = _modelled(chosen, settings, _traced(options))
    bands = settings.take("prediction", PredictionSettings(), ("bands",)).bands
    settings.finish({"training": "with `hcsim run`", "cluster": "with `hcsim run`"})
    return run_virtual(chosen, wire, _reported(files, "bench", options), bands)


def replay(options: ReplayOptions) -> bool:
    """`hcsim replay`. Return whether all ranks came to the end."""
    from hcsim.cli.replay import ReplayJob, run_replay

    if options.traces is None:
        raise ConfigError("give the traces, PREFIX of PREFIX.0.et, …, and a scenario")
    _prepare(options.plugin)
    settings = Settings(options.set, {})
    chosen = _scenario(options.scenario, None, options.seed)
    outputs = {"--trace": options.trace, "--timeline": options.timeline, "--chakra": None, "--report": None}
    chosen, wire, files = _modelled(chosen, settings, outputs)
    settings.finish(dict.fromkeys(("training", "job", "cluster"), "with `hcsim run`"))
    if options.times not in (None, "recorded", "modelled"):
        raise ConfigError(f'--times {options.times}: "recorded" or "modelled"')
    modelled = options.times == "modelled"
    return run_replay(ReplayJob(options.traces, options.nodes, modelled, options.repeat or 1, files), chosen, wire)


def rank(options: RankOptions) -> bool:
    """`hcsim rank`. Return whether the run succeeded."""
    _prepare(options.plugin)
    settings = Settings(options.set, {"job.operation": options.operation, "training.task": options.task})
    text, _ = _standard_input(options.job)
    chosen = _scenario(options.job, text, options.seed) if options.job is not None else None
    training = _training(chosen, settings)
    files = tls(options.tls_cert, options.tls_key, options.tls_ca)
    wire = _wire(settings, _WAIT_S if options.wait is None else seconds("--wait", options.wait))
    outputs = {"--trace": None, "--timeline": options.timeline, "--chakra": None, "--report": None}
    recorded = _recorded(settings, outputs, None)
    _apart({"--save": options.save, **outputs})
    if training is not None:
        ignored = _ignores_memory(settings)
        here = settings.take("machine", ThisMachine(), ("device", "metrics"))
        twin = _twin(None, settings)
        settings.finish({"machine": _BY_ITSELF, "cluster": _BY_ITSELF})
        place = replace(_place(options, files, here), files=recorded)
        from hcsim.cli.memory import check_here
        from hcsim.cli.training import train_real

        check_here(training, len(place.peers), place.rank, here.device, ignored=ignored)
        return train_real(training, _seed(options.seed, chosen), place, wire, here.device, options.save, twin)
    job = _checked_real(chosen.name if chosen else "--set", settings.take("job", chosen.job if chosen else Job()))
    here = settings.take("machine", ThisMachine(), ("metrics",))
    learned = "where something is learned (--task)"
    settings.finish({"machine": _BY_ITSELF, "machine.device": learned, "cluster": _BY_ITSELF})
    only(learned, {"--save": options.save, "--seed": options.seed})
    from hcsim.cli.ranks import run_real

    return run_real(job, replace(_place(options, files, here), files=recorded), wire)


def probe(options: ProbeOptions) -> None:
    """`hcsim probe`."""
    from hcsim.cli import cluster, probe_script
    from hcsim.cli import probe as measuring
    from hcsim.cli.options import CLUSTER

    out, device, report, as_json = options.out, options.device, options.report, options.json
    of_cluster = {"--cluster": options.of_cluster or None, "--name": options.name, "--peer": options.peer}
    elsewhere = {**of_cluster, "--hosts": options.hosts}
    if options.script is not None:
        only("without a script", {**elsewhere, "--task": options.task})
        asked = probe_script.ScriptRequest(options.script, options.arguments or (), device, options.minutes)
        probe_script.probe_script(out, asked, report, as_json=as_json)
    elif options.task is not None:
        only("without --task", {**elsewhere, "--minutes": options.minutes})
        probe_script.probe_task(out, options.task, device, as_json=as_json)
    elif options.of_cluster:
        only_here = {"--device": None if device == "auto" else device, "--minutes": options.minutes or None}
        only("without --cluster", {**only_here, "--hosts": options.hosts})
        name, peers = options.name or CLUSTER, options.peer or ()
        measuring.probe_cluster(out, cluster.home(), name, peers, report, as_json=as_json)
    elif options.member:
        from hcsim.cli.probe_hosts import print_probed

        print_probed(device, options.minutes or 0.0)
    else:
        only("with --cluster", {"--name": options.name, "--peer": options.peer})
        if options.hosts:
            measuring.probe_others(out, options.hosts, device, options.minutes or 0.0, options.program)
        measuring.probe(out, device, options.minutes or 0.0, report, as_json=as_json)


def shipped_scenario(name: str | None) -> Scenario:
    """Return the scenario of that name or file."""
    return _scenario(name, None, None)


def coordinator_policy(workers: int, begin: int | None, least: int, heartbeat: str, silence: str) -> CoordinatorPolicy:
    """Return the policy by which a coordinator treats its workers."""
    from hcsim.cluster.coordinator.messages import CoordinatorPolicy

    return CoordinatorPolicy(
        workers=workers,
        begin=begin,
        least=least,
        heartbeat_s=seconds("--heartbeat", heartbeat),
        silence_s=seconds("--silence", silence),
    )


def tls(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """Return the TLS files. Either all or none must be given."""
    from hcsim.real.tls import TlsFiles

    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise ConfigError("TLS needs all three of --tls-cert, --tls-key and --tls-ca")
    return TlsFiles(cert, key, ca)


def only(where: str, given: Mapping[str, object]) -> None:
    """Reject those of these options that were given: they apply only to `where`."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ConfigError(f"{', '.join(names)}: only {where}")


def _script(options: RunOptions, settings: Settings) -> bool:
    """Run a torch script on all machines of a scenario, or on the first ones."""
    from hcsim.cli.script import run_script

    only("with --real", {"--hosts": options.hosts, "--state": options.state})
    if options.scenario is None:
        screen.scenarios(stderr=True)
        raise ConfigError("on which cluster? Give --scenario: one of these names, or a TOML file")
    chosen = _scenario(options.scenario, None, options.seed)
    if options.nodes is not None and options.nodes > len(chosen.nodes):
        raise ConfigError(f"--nodes {options.nodes}: {chosen.name} has {len(chosen.nodes)}")
    if options.nodes is not None and options.nodes < len(chosen.nodes):
        chosen = first_nodes(chosen, options.nodes)
    chosen, wire, files = _modelled(chosen, settings, _traced(options))
    settings.finish({"training": _NO_SCRIPT, "job": _NO_SCRIPT, "cluster": "with --real"})
    files = _reported(files, "run", options)
    return run_script(Path(str(options.what)), options.arguments or [], chosen, wire, files)


def _script_for_real(options: RunOptions, settings: Settings) -> bool:
    """Run this machine's rank of a torch script on a real cluster."""
    from hcsim.cli.script import run_script_for_real

    only("in a virtual run", {"--scenario": options.scenario, **_traced(options)})
    only("in a virtual run, or without a script", {"--seed": options.seed})
    everywhere = "without a script; start it on every machine"
    only(everywhere, {"--hosts": options.hosts, "--state": options.state})
    cluster = settings.take("cluster", Cluster())
    if options.nodes is not None:
        cluster = replace(cluster, nodes=options.nodes)
    machine = settings.take("machine", ThisMachine(device="cpu"), ("cluster", "name", "at", "metrics"))
    settings.finish({"training": _NO_SCRIPT, "job": _NO_SCRIPT, "machine": everywhere})
    return run_script_for_real(_here(machine, None), cluster, Path(str(options.what)), options.arguments or [])


def _cluster_for_real(
    options: RunOptions, chosen: Scenario | None, settings: Settings, training: Training | None, *, attended: bool
) -> bool:
    """Train with the machines that find each other."""
    from hcsim.cli.elastic import Outputs, RemoteHosts, train_for_real
    from hcsim.cli.memory import check_here
    from hcsim.launch.hosts import read_hosts, without_here
    from hcsim.node import ClusterJob

    listed = read_hosts([options.hosts]) if options.hosts is not None else ()
    there, us = without_here(listed)
    others = RemoteHosts(there)
    for host in others.hosts:
        if host.slots > 1:
            screen.note(f"{host.ssh}: slots={host.slots} is not used: a machine is one node")
    cluster = settings.take("cluster", (chosen.cluster if chosen else None) or Cluster())
    if cluster.nodes is None and others.hosts:  # those that are started from here are waited for
        cluster = replace(cluster, nodes=1 + len(others.hosts))
    wire = _wire(settings, _WAIT_S)
    names = [name for name in ThisMachine.__struct_fields__ if name != "remote_hcsim" or others.hosts]
    machine = settings.take("machine", ThisMachine(at=us.ips if us else ()), names)
    if options.state is not None and machine.state is not None:
        raise ConfigError("--state, --set state: this is given twice")
    here = _here(machine, options.state or (Path(machine.state) if machine.state else None))
    if training is None:
        raise ConfigError(
            "what is to be trained? Give --task, or a file with a [training] table; "
            "for one operation among ranks that you start by hand, `hcsim rank --peers`"
        )
    twin = _twin(options.what if chosen and chosen.twin and chosen.nodes else None, settings)
    ignored = _ignores_memory(settings)
    files = _reported(_recorded(settings, _traced(options), None), "run", options)
    settings.finish({"machine": "with --hosts"})
    log = None if machine.log is None else Path(machine.log)
    _apart({"--save": options.save, **_traced(options), "--set log": log})
    plan = ClusterJob(cluster, training, _seed(options.seed, chosen), wire)
    others = replace(others, program=machine.remote_hcsim)
    outputs = Outputs(files, options.save, options.dashboard, log, twin)
    check_here(training, cluster.needed, 0, here.device, saves=True, ignored=ignored)
    return train_for_real(here, plan, outputs, others, attended=attended)


def _virtual(options: RunOptions, chosen: Scenario, settings: Settings, training: Training | None) -> bool:
    """Run a scenario's own machines: its job, its training, or its cluster."""
    only("with --real", {"--hosts": options.hosts, "--state": options.state})
    if training is None:
        only("with a script, or where something is learned (--task)", {"--nodes": options.nodes})
        shown = {"--save": options.save, "--dashboard": options.dashboard or None}
        only("where something is learned (--task)", shown)
        from hcsim.cli.ranks import run_virtual

        chosen = replace(chosen, job=settings.take("job", chosen.job))
        chosen, wire, files = _modelled(chosen, settings, _traced(options))
        bands = settings.take("prediction", PredictionSettings(), ("bands",)).bands
        settings.finish({"cluster": "where something is learned (--task)"})
        return run_virtual(chosen, wire, _reported(files, "run", options), bands)
    from hcsim.cli.memory import check_nodes
    from hcsim.training.strategies import check_training

    forming = chosen.cluster is not None or settings.has("cluster")
    if forming:
        by_words = chosen.cluster is None
        chosen = _clustered(chosen, settings.take("cluster", chosen.cluster or Cluster()))
        if by_words and chosen.cluster is not None:
            what = "--nodes" if options.nodes is not None else "a setting of [cluster]"
            count = f"{chosen.cluster.needed} of {screen.counted(len(chosen.nodes), 'machine')}"
            screen.note(
                f"{what} makes the machines find each other as a cluster: work begins with {count}; others join it"
            )
    chosen, wire, files = _modelled(chosen, settings, {"--save": options.save, **_traced(options)})
    bands = settings.take("prediction", PredictionSettings(), ("bands",)).bands
    ignored = _ignores_memory(settings)
    settings.finish()
    check_training(training, len(chosen.nodes), len(chosen.homes))
    check_nodes(chosen, training, saves=forming, ignored=ignored)
    files = replace(_reported(files, "run", options), dashboard=options.dashboard)
    if forming:
        from hcsim.cli.elastic import train_virtual_cluster

        return train_virtual_cluster(chosen, training, wire, files, options.save, bands)
    from hcsim.cli.training import train_virtual

    return train_virtual(chosen, training, wire, files, options.save, bands)


def _prepare(plugins: Sequence[str] | None) -> None:
    """Load the plugins, and say what the installation lacks."""
    if missing := missing_loops():
        screen.note(f"{missing}; to get it: {how_to_build()}")
    for plugin in plugins or ():
        load_plugin(plugin)


def _standard_input(name: str | None) -> tuple[str | None, bool]:
    """Return the job from standard input, if it is requested, and whether the run is attended."""
    if name != "-":
        return None, False
    from hcsim.cli.elastic import read_job

    return read_job()


def _scenario(name: str | None, text: str | None, seed: int | None) -> Scenario:
    """Return the scenario of that name or file, or the one in the text."""
    if name is None:
        screen.scenarios(stderr=True)
        raise ConfigError("give a scenario: one of these names, or a TOML file")
    if name.endswith(".py"):
        raise ConfigError(f"{name}: a script is run by `hcsim run {name}`")
    try:
        loaded = load_scenario(name) if text is None else parse_scenario(text, "standard input")
    except ConfigError:
        if text is None and not Path(name).exists():
            screen.scenarios(stderr=True)
            hint = did_you_mean(name, shipped_scenarios())
            raise ConfigError(f"{name}: there is no such file, and none of these is called so{hint}") from None
        raise
    return loaded if seed is None else replace(loaded, seed=seed)


def _training(chosen: Scenario | None, settings: Settings) -> Training | None:
    """Return the training: that of the scenario with the settings applied; None where neither defines one."""
    loaded = chosen.training if chosen else None
    if loaded is None and not settings.has("training"):
        return None
    return settings.take("training", loaded or Training())


def _modelled(
    chosen: Scenario, settings: Settings, outputs: Mapping[str, Path | None]
) -> tuple[Scenario, Wire, RecordingFiles]:
    """Return the parts of a virtual run besides its job: its TCP model, its message settings and its output files."""
    chosen = replace(chosen, tcp=settings.take("tcp", chosen.tcp))
    wire = _wire(settings, _WAIT_S)
    metrics = settings.take("machine", ThisMachine(), ("metrics",)).metrics
    if metrics is not None and metrics.isdecimal():
        raise ConfigError(f"--set metrics={metrics}: a port is for real runs; give a file for the final metrics")
    files = _recorded(settings, outputs, None if metrics is None else Path(metrics))
    _apart({**outputs, "--set metrics": files.metrics})
    return chosen, wire, files


def _traced(options: RunOptions | BenchOptions) -> dict[str, Path | None]:
    return {
        "--trace": options.trace,
        "--timeline": options.timeline,
        "--chakra": options.chakra,
        "--report": options.report,
    }


def _recorded(settings: Settings, outputs: Mapping[str, Path | None], metrics: Path | None) -> RecordingFiles:
    """Return the files that a run writes as it goes."""
    from hcsim.cli.recording import RecordingFiles

    trace, timeline, chakra, report = (outputs[name] for name in ("--trace", "--timeline", "--chakra", "--report"))
    if timeline is None and report is None:
        return RecordingFiles(trace, metrics, chakra=chakra)
    if report is not None:
        from hcsim.report.page import check_place

        check_place(report)
    steps = settings.take("timeline", TimelineSettings()).timeline_steps
    return RecordingFiles(trace, metrics, timeline=timeline, timeline_steps=steps, report=report, chakra=chakra)


def _reported(files: RecordingFiles, name: str, options: RunOptions | BenchOptions) -> RecordingFiles:
    """Return the files, with the command for the report."""
    if files.report is None:
        return files
    from hcsim.cli.report import command_of

    return replace(files, command=command_of(name, options))


def _checked_real(name: str, job: Job) -> Job:
    """Return the job for a real run, which is all of a scenario that a real machine can use."""
    if job.payload == "phantom":
        raise ConfigError(f"{name}: its job has phantoms for a payload, which cannot cross a real network")
    if job.compute is not None:
        raise ConfigError(f"{name}: its job computes, which is modelled: a real machine has nothing to do there")
    return job


def _clustered(scenario: Scenario, cluster: Cluster) -> Scenario:
    """Return the scenario with a cluster. If the number of nodes is not given, work begins with all of them."""
    there = len(scenario.nodes)
    cluster = cluster if cluster.nodes is not None else replace(cluster, nodes=there)
    if cluster.needed > there:
        real = "" if there else "; to train on the machines of your cluster, say --real"
        raise ConfigError(f"work begins with {cluster.needed} nodes, and {scenario.name} has {there} [[node]]{real}")
    return replace(scenario, cluster=cluster)


def _wire(settings: Settings, wait_s: float) -> Wire:
    travel = settings.take("wire", WireSettings())
    return Wire(stripes=travel.stripes, segment_bytes=int(travel.segment_bytes), connect_timeout_s=wait_s)


def _place(options: RankOptions, files: TlsFiles | None, here: ThisMachine) -> ManualRank:
    """Return the rank and the peers of a process that is started by hand."""
    from hcsim.cli.ranks import ManualRank

    peers = tuple(part.strip() for part in (options.peers or "").split(","))
    if not all(peers):
        raise ConfigError("give --peers: the addresses of all ranks in order, such as mini.local,studio.local")
    return ManualRank(peers, options.rank, files, options.insecure, _metrics_at(here.metrics))


def _here(machine: ThisMachine, state: Path | None) -> RealNode:
    """Return this machine's part in a real cluster."""
    from hcsim.cli.cluster import home
    from hcsim.launch.real import RealNode

    name = machine.name
    if name is not None and not (name.strip() and name.isprintable()):
        raise ConfigError(f"--set name={name!r}: give a name that the others can read")
    for host in machine.at:
        if host.count(":") == 1 or "]:" in host:
            raise ConfigError(
                f"--set at={host}: give a host; its ports are the job's discovery_port and gradient_port of [cluster]"
            )
        split_address(f"[{host}]:1" if ":" in host else f"{host}:1")
    metrics_at = _metrics_at(machine.metrics)
    return RealNode(home(), machine.cluster, name or "", machine.at, machine.device, state, metrics_at)


def _metrics_at(text: str | None) -> str | None:
    """Return the address of the metrics server: a port on the loopback address, or the given `host:port`."""
    if text is None:
        return None
    try:
        split_address(address := f"127.0.0.1:{text}" if text.isdecimal() else text)
    except ConfigError:
        raise ConfigError(f"--set metrics={text}: give a port, or host:port such as 0.0.0.0:9400") from None
    return address


def _apart(outputs: Mapping[str, Path | None]) -> None:
    """Reject two outputs with the same file. A device such as /dev/null takes any number."""
    taken: dict[Path, str] = {}
    for option, path in outputs.items():
        if path is not None and (path.is_file() or not path.exists()):
            other = taken.setdefault(path.resolve(), option)
            if other != option:
                raise ConfigError(f"{other}, {option}: both are {path}; give each a file of its own")


def _twin(job: str | None, settings: Settings) -> ChosenTwin | None:
    """Return the twin of the machines of a real run: the one that is named, or the job's file if it is one."""
    chosen = settings.take("prediction", PredictionSettings())
    path = chosen.twin or (job if job != "-" else None)
    if path is None:
        return None
    from hcsim.cli.twin import chosen_twin

    return chosen_twin(Path(path), chosen.bands)


def _ignores_memory(settings: Settings) -> bool:
    return settings.take("memory", MemorySettings()).ignore_memory


def _seed(asked: int | None, chosen: Scenario | None) -> int:
    """Return the seed. A scenario has already adopted the requested one."""
    return chosen.seed if chosen else 1 if asked is None else asked
