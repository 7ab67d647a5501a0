"""`hcsim run`: from all that was asked for to the one kind of run that it means.

Each kind takes its options and refuses by name those that only another one has.
"""

from __future__ import annotations

from pathlib import Path

from hcsim.cli import options
from hcsim.cli.asked import Asked
from hcsim.cli.attended import read_job
from hcsim.cli.recording import Files
from hcsim.config import Scenario, Training
from hcsim.registry import load_plugin
from hcsim.transport.wire import Wire

_JOB = ("operation", "size", "dtype", "repeat")
_EXCHANGE = ("algorithm", "timeout")
_LEARNED = ("task", "strategy", "compressor", "steps", "batch", "lr")
_IN_CLUSTER = ("cluster", "name", "at", "state", "hosts")
_TLS = ("tls_cert", "tls_key", "tls_ca")
_BY_HAND = (*_TLS, "wait", "insecure")
_VIRTUAL = ("trace", "metrics")
_REAL = (*_IN_CLUSTER, "remote_hcsim", "metrics_port")


def perform(asked: Asked) -> bool:
    """Do it; whether all went well."""
    for plugin in asked.plugin or ():
        load_plugin(plugin)
    options.apart({"--save": asked.save, "--trace": asked.trace, "--metrics": asked.metrics})
    wire = options.wire(asked.stripes, asked.segment, asked.wait)
    if asked.scenario is not None and asked.scenario.endswith(".py"):
        theirs = (*_JOB, *_EXCHANGE, *_LEARNED, "save", "device", "rank", "peers")
        _only(asked, "without a script (what a script is given stands after --)", *theirs)
        return _script_together(asked) if asked.real else _script(asked, wire)
    options.only(
        "with a script (a file that ends with .py)", {"--scenario": asked.where, "--": asked.arguments or None}
    )
    text, attended = read_job() if asked.scenario == "-" else (None, False)
    changes = asked.these(*_JOB, *_EXCHANGE)
    chosen = options.scenario(asked.scenario, asked.seed, changes, needed=not asked.real, text=text)
    given = chosen.training if chosen else None
    settings = options.training(given, asked.these(*_LEARNED), asked.these(*_EXCHANGE))
    if settings is None:
        _only(asked, "where something is learned (--task)", "save", "device")
    else:
        _only(asked, "where nothing is learned", *_JOB)
    if asked.hosts is None:
        _only(asked, "with --hosts", "remote_hcsim")
    if not asked.real:
        assert chosen is not None  # it was needed
        return _virtual(asked, chosen, settings, wire)
    _only(asked, "in a virtual run", "metrics")
    if asked.rank is None and asked.peers is None:
        return _together(asked, chosen, settings, wire, attended)
    _only(asked, "in a virtual run, or where machines find each other", "trace")
    return _by_hand(asked, chosen, settings, wire)


def _script(asked: Asked, wire: Wire) -> bool:
    """A torch script on a scenario's machines."""
    from hcsim.cli.script import run_script

    _only(asked, "with --real", *_REAL)
    _only(asked, "without a script, with --peers and --rank", *_BY_HAND)
    home = options.script_scenario(asked.where, asked.seed, asked.nodes)
    return run_script(Path(str(asked.scenario)), asked.arguments or [], home, wire, _files(asked))


def _script_together(asked: Asked) -> bool:
    """This machine's rank of a torch script on a real cluster."""
    from hcsim.cli.script import run_script_together

    options.only("in a virtual run", {"--scenario": asked.where})
    _only(asked, "in a virtual run", *_VIRTUAL)
    _only(asked, "in a virtual run, or without a script", "seed", "stripes", "segment")
    _only(asked, "without a script; start it on every machine", "hosts", "remote_hcsim", "state")
    _only(asked, "without a script, with --peers and --rank", *_BY_HAND)
    here = options.here(asked.cluster, asked.name, asked.at, None, "cpu", asked.metrics_port)
    cluster = options.cluster(None, asked.nodes)
    return run_script_together(here, cluster, Path(str(asked.scenario)), asked.arguments or [])


def _together(asked: Asked, chosen: Scenario | None, settings: Training | None, wire: Wire, attended: bool) -> bool:
    """Train with the machines that find each other."""
    from hcsim.cli.together import train_together
    from hcsim.node import Plan

    _only(asked, "with --peers and --rank", *_BY_HAND)
    here = options.here(asked.cluster, asked.name, asked.at, asked.state, asked.device, asked.metrics_port)
    others = options.others(asked.hosts, asked.remote_hcsim)
    cluster = options.cluster(chosen.cluster if chosen else None, asked.nodes, len(others.hosts))
    plan = Plan(cluster, options.to_learn(settings), _seed(asked, chosen), wire)
    return train_together(here, plan, _files(asked), asked.save, others, attended=attended)


def _by_hand(asked: Asked, chosen: Scenario | None, settings: Training | None, wire: Wire) -> bool:
    """One rank of those that `--peers` lists."""
    from hcsim.cli.place import Place

    _only(asked, "without --peers and --rank", *_IN_CLUSTER, "nodes")
    tls = options.tls(asked.tls_cert, asked.tls_key, asked.tls_ca)
    metrics_at = options.metrics_at(asked.metrics_port)
    place = Place(options.peers(asked.peers), asked.rank, tls, asked.insecure, metrics_at)
    if settings is not None:
        from hcsim.cli.train import train_real

        return train_real(settings, _seed(asked, chosen), place, wire, asked.device or "auto", asked.save)
    from hcsim.cli.real import run_real

    _only(asked, "in a virtual run", "seed")
    return run_real(options.real_job(chosen, asked.these(*_JOB, *_EXCHANGE)), place, wire)


def _virtual(asked: Asked, chosen: Scenario, settings: Training | None, wire: Wire) -> bool:
    """A scenario's own machines: its job, its training, or its cluster."""
    from hcsim.cli.virtual import run_virtual

    _only(asked, "with --real", "peers", "rank", *_BY_HAND, "device", *_REAL)
    if settings is None:
        _only(asked, "with a script, or where something is learned (--task)", "nodes")
        return run_virtual(chosen, wire, _files(asked))
    if chosen.cluster is not None or asked.nodes is not None:
        from hcsim.cli.together import simulate_together

        return simulate_together(options.clustered(chosen, asked.nodes), settings, wire, _files(asked), asked.save)
    from hcsim.cli.train import train_virtual

    return train_virtual(chosen, settings, wire, _files(asked), asked.save)


def _seed(asked: Asked, chosen: Scenario | None) -> int:
    """The seed: a scenario has taken over what was asked for."""
    return chosen.seed if chosen else 1 if asked.seed is None else asked.seed


def _files(asked: Asked) -> Files:
    return Files(asked.trace, asked.metrics)


def _only(asked: Asked, where: str, *names: str) -> None:
    """These say something only there."""
    options.only(where, {f"--{name.replace('_', '-')}": value for name, value in asked.these(*names).items()})
