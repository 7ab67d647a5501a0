"""What can be asked of `hcsim run`: each of its arguments and options, once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer


def _option(section: str, text: str, *names: str, least: int | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=section, min=least)


_WHERE = "Where"
_JOB = "Job (one collective operation)"
_TRAINING = "Training"
_EXCHANGE = "How ranks exchange data"
_CLUSTER = "Cluster (machines that find each other)"
_RANKS = "Ranks by hand (real, instead of a cluster)"
_OUTPUT = "Output"

_SCENARIO = "A scenario file, the name of a shipped one, - for standard input, or a torch script."
_ON = "For a script: the cluster that it runs on, a file or a shipped one."

Text = str | None
Number = int | None
File = Path | None


class Asked(msgspec.Struct, frozen=True):
    """The arguments and options of `hcsim run`, as they were typed."""

    scenario: Annotated[Text, typer.Argument(help=_SCENARIO)] = None
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What a script is given, after --.", show_default=False)
    ] = None

    where: Annotated[Text, _option(_WHERE, _ON, "--scenario")] = None
    real: Annotated[bool, _option(_WHERE, "Run for real; a scenario then only gives the job.", "--real")] = False
    plugin: Annotated[
        list[str] | None, _option(_WHERE, "A plugin to load, a module or a file; may be given several times.")
    ] = None
    seed: Annotated[Number, _option(_WHERE, "Of the model, its batches, jitter, loss, faults.")] = None

    operation: Annotated[Text, _option(_JOB, "all_reduce, broadcast, all_gather, …")] = None
    size: Annotated[Text, _option(_JOB, 'Bytes per rank, such as "64 MiB".')] = None
    dtype: Annotated[Text, _option(_JOB, "float32, bfloat16, int64, …")] = None
    repeat: Annotated[Number, _option(_JOB, "How many times the job is done.")] = None

    task: Annotated[Text, _option(_TRAINING, "What is learned (digits, text, convex, gpt2, …).")] = None
    strategy: Annotated[Text, _option(_TRAINING, "ddp, local_sgd:8, diloco:16, parameter_server, …")] = None
    compressor: Annotated[Text, _option(_TRAINING, "none, topk:0.01+ef, int8, powersgd:4+ef, …")] = None
    steps: Annotated[Number, _option(_TRAINING, "How many steps.")] = None
    batch: Annotated[Number, _option(_TRAINING, "Samples per rank and step.")] = None
    lr: Annotated[float | None, _option(_TRAINING, "Learning rate.")] = None
    device: Annotated[Text, _option(_TRAINING, "Real: cpu, mps, cuda, or auto (the default).")] = None

    algorithm: Annotated[Text, _option(_EXCHANGE, "ring, tree, … or auto.")] = None
    timeout: Annotated[Text, _option(_EXCHANGE, 'How long one operation may take, such as "30 s".')] = None
    stripes: Annotated[Number, _option(_EXCHANGE, "Connections per peer; the same on all ranks.", least=1)] = None
    segment: Annotated[Text, _option(_EXCHANGE, 'Piece that a message is cut into, such as "1 MiB".')] = None

    nodes: Annotated[
        Number,
        _option(_CLUSTER, "With how many nodes work begins; for a virtual script, on how many it runs.", least=1),
    ] = None
    cluster: Annotated[Text, _option(_CLUSTER, 'Real: a cluster that this machine has joined (default "home").')] = None
    name: Annotated[Text, _option(_CLUSTER, "Real: what the others call this machine (default: its host name).")] = None
    at: Annotated[Text, _option(_CLUSTER, "Real: addresses that the others reach this machine at.")] = None
    state: Annotated[File, _option(_CLUSTER, "Real: a folder for what outlives a crash.")] = None
    hosts: Annotated[Text, _option(_CLUSTER, "Real: other machines to start the same on, through ssh: a,b,c.")] = None
    remote_hcsim: Annotated[Text, _option(_CLUSTER, 'With --hosts: what hcsim is called there ("hcsim").')] = None

    peers: Annotated[Text, _option(_RANKS, "host:port of all ranks in order; the default port is 52416.")] = None
    rank: Annotated[Number, _option(_RANKS, "Which of the peers we are, from 0.")] = None
    wait: Annotated[Text, _option(_RANKS, 'How long to wait for the others (default "5 min").')] = None
    tls_cert: Annotated[File, _option(_RANKS, "Our certificate (PEM).")] = None
    tls_key: Annotated[File, _option(_RANKS, "Its key.")] = None
    tls_ca: Annotated[File, _option(_RANKS, "The authority that signed all members' certificates.")] = None
    insecure: Annotated[bool, _option(_RANKS, "Allow plaintext beyond this machine.", "--insecure")] = False

    save: Annotated[File, _option(_OUTPUT, "Write the model that was learned to this file (safetensors).")] = None
    trace: Annotated[File, _option(_OUTPUT, "Write every event to this file, as JSON lines.")] = None
    metrics: Annotated[File, _option(_OUTPUT, "Virtual: write the hosts' final metrics to this file.")] = None
    metrics_port: Annotated[
        Text, _option(_OUTPUT, "Real: serve metrics at this port of this machine, or at host:port.")
    ] = None

    def these(self, *names: str) -> dict[str, object]:
        """Some of them by name; what was not given is None."""
        return {name: None if (value := getattr(self, name)) is False else value for name in names}


def asking(command: Callable[[Asked], None]) -> Callable[..., None]:
    """The command, as typer wants it: with a parameter for each of the fields."""

    def called(**given: Any) -> None:
        command(Asked(**given))

    hints = get_type_hints(Asked, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    defaults = zip(Asked.__struct_fields__, Asked.__struct_defaults__, strict=True)
    parameters = [inspect.Parameter(name, kind, default=value, annotation=hints[name]) for name, value in defaults]
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called
