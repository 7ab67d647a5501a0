"""What the kernels of somebody's own training script take on this machine, in the steps of that script.

A step takes longer than its kernels: Python runs between them, autograd keeps its graph, data are loaded. All of that
lies in the gaps between kernels, so a kernel's time here is its own and that of the gap before it. The stopwatch makes
each gap longer, by about the same. With kernels kᵢ, gaps gᵢ and the time T of undisturbed steps, that is the o of

    Σ (kᵢ + max(gᵢ − o, 0)) = T.

Where the kernels alone, one by one, take longer than a whole step, as on a device that works while Python goes on, they
are shortened in proportion instead.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from hcsim.config.machine import BY_FLOPS, Basis, KernelCurve, KernelKind, Machine, ScriptKernels
from hcsim.errors import UNDECODABLE, HcsimError
from hcsim.real.sockets import free_ports
from hcsim.runtime.host import KernelGroup, Work
from hcsim.runtime.work_time import seconds
from hcsim.scripts.ipc import ended_how
from hcsim.twin.timing import rounded, summary

MEASURED_S = 30.0
"""Steps are timed for about so long at most."""
_FEWEST_TURNS = 1


class ScriptJob(msgspec.Struct, frozen=True):
    """What a process that times a script has to know."""

    script: str
    arguments: tuple[str, ...]
    device: str
    port: int
    limit_s: float
    result: str
    """The file for the `ScriptTimes`."""


class TimedKernel(msgspec.Struct, frozen=True, array_like=True):
    """A kernel of a step."""

    signature: str
    kind: KernelKind
    flops: float
    moved_bytes: float
    dtype: str
    lasted_s: float
    gap_s: float
    """What the program did before it, and what the stopwatch adds."""


class TimedTurn(msgspec.Struct, frozen=True):
    """Undisturbed steps, and one whose kernels were timed."""

    plain_s: list[float]
    kernels: list[TimedKernel]


class ScriptTimes(msgspec.Struct, frozen=True):
    """What was timed in a script's process."""

    turns: list[TimedTurn]
    device: str
    backward_passes: int
    ended: bool
    """Whether the script came to its end before enough steps were timed."""
    code: int = 0
    error: str = ""


class ScriptCheck(msgspec.Struct, frozen=True):
    """How well steps that were not timed kernel by kernel are predicted by the kernels of other steps."""

    step_s: float
    spread: float
    predicted_s: float
    kernels: int
    """Of a step."""
    distinct: int
    known: float
    """The share of the kernels' time in a step whose operations and shapes were seen in other steps."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.step_s - 1


def time_script(script: Path, arguments: Sequence[str], device: str, most_s: float) -> ScriptTimes:
    """Run the script as the only rank of a torchrun, for as many steps as are timed. Its output goes to standard
    error."""
    environment = dict(os.environ)
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="hcsim-") as folder:
        result = Path(folder, "times.json")
        [port] = free_ports(1)
        limit_s = min(MEASURED_S, most_s / 2)
        job = ScriptJob(str(script.resolve()), tuple(arguments), device, port, limit_s, str(result))
        command = [sys.executable, "-m", "hcsim.twin.script_rank", msgspec.json.encode(job).decode()]
        code = _finished(command, environment, most_s)
        if code is None:
            raise HcsimError(f"{script.name} has not taken enough steps within {most_s / 60:g} min")
        try:
            times = msgspec.json.decode(result.read_bytes(), type=ScriptTimes)
        except (OSError, *UNDECODABLE):
            raise HcsimError(f"{script.name}: its process {ended_how(code)} before steps were timed") from None
    _check(script.name, times)
    return times


def _finished(command: Sequence[str], environment: dict[str, str], most_s: float) -> int | None:
    """Run a command to its end; return its exit status, or None if it took too long. Nothing of it is left."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    try:
        return process.wait(most_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _check(name: str, times: ScriptTimes) -> None:
    """Refuse times of which nothing follows."""
    if times.code:
        raise HcsimError(f"{name} failed: {times.error}")
    if not times.backward_passes:
        raise HcsimError(f"{name} ended without a backward pass of torch: there is no training step to measure")
    if len(times.turns) < _FEWEST_TURNS:
        raise HcsimError(f"{name} ended after too few steps: have it take 10 or more")


class _Step(NamedTuple):
    """The kernels of one step or of several, and the time of as many undisturbed ones."""

    kernels: list[TimedKernel]
    plain_s: float
    steps: int = 1


def script_kernels(name: str, turns: Sequence[TimedTurn], basis: Callable[[float], Basis]) -> ScriptKernels:
    """Return a curve for each operation of the script and its shapes."""
    step, others = _typical(turns)
    factor, added_s = _stopwatch_part(step)

    def lasts_s(kernel: TimedKernel) -> float:
        return factor * kernel.lasted_s + max(kernel.gap_s - added_s, 0.0)

    found: dict[str, list[TimedKernel]] = {}
    for kernel in step.kernels:
        found.setdefault(kernel.signature, []).append(kernel)
    usual = set(found)
    for kernel in others:  # of an evaluation, say
        if kernel.signature not in usual:
            found.setdefault(kernel.signature, []).append(kernel)
    curves = []
    for signature, kernels in found.items():
        first = kernels[0]
        size = first.flops if first.kind in BY_FLOPS else first.moved_bytes
        mean_s = statistics.fmean(map(lasts_s, kernels))
        curves.append(KernelCurve(first.kind, ((size, rounded(mean_s)),), first.dtype, signature=signature))
    return ScriptKernels(name, basis(_spread(turns)), tuple(curves))


def _typical(turns: Sequence[TimedTurn]) -> tuple[_Step, list[TimedKernel]]:
    """Return the step that most turns have, with the median time of each kernel, and the kernels of other steps. Where
    no two steps are alike, all of them count as one long step."""
    sequences = [tuple(kernel.signature for kernel in turn.kernels) for turn in turns]
    usual, times = Counter(sequences).most_common(1)[0]
    plain_s = [each_s for turn in turns for each_s in turn.plain_s]
    if 2 * times < len(turns):
        kernels = [kernel for turn in turns for kernel in turn.kernels]
        return _Step(kernels, len(turns) * statistics.fmean(plain_s), len(turns)), []
    alike = [turn.kernels for turn, sequence in zip(turns, sequences, strict=True) if sequence == usual]
    others = [
        kernel for turn, sequence in zip(turns, sequences, strict=True) if sequence != usual for kernel in turn.kernels
    ]
    return _Step([_median(same) for same in zip(*alike, strict=True)], statistics.median(plain_s)), others


def _median(kernels: Sequence[TimedKernel]) -> TimedKernel:
    return msgspec.structs.replace(
        kernels[0],
        lasted_s=statistics.median(kernel.lasted_s for kernel in kernels),
        gap_s=statistics.median(kernel.gap_s for kernel in kernels),
    )


def _stopwatch_part(step: _Step) -> tuple[float, float]:
    """Return by what to multiply the times of kernels, and what to subtract from the gaps."""
    kernels_s = sum(kernel.lasted_s for kernel in step.kernels)
    left_s = step.plain_s - kernels_s
    if left_s <= 0.0:
        return step.plain_s / kernels_s, float("inf")
    gaps_s = sorted((kernel.gap_s for kernel in step.kernels), reverse=True)
    whole_s = 0.0
    for count, gap_s in enumerate(gaps_s, start=1):
        whole_s += gap_s
        added_s = (whole_s - left_s) / count
        if count == len(gaps_s) or added_s >= gaps_s[count]:
            return 1.0, added_s
    return 1.0, 0.0


def _spread(turns: Sequence[TimedTurn]) -> float:
    return summary([each_s for turn in turns for each_s in turn.plain_s]).spread


def check(name: str, turns: Sequence[TimedTurn], machine: Machine) -> ScriptCheck:
    """Predict the undisturbed steps of every second turn by the kernels of the other turns, and of the machine."""
    if len(turns) > 1:
        known, held_out = turns[0::2], turns[1::2]
    else:
        [turn] = turns
        known, held_out = [TimedTurn(turn.plain_s[0::2], turn.kernels)], [TimedTurn(turn.plain_s[1::2], turn.kernels)]
    own = script_kernels(name, known, lambda spread: Basis("measured", spread=spread))
    step, _ = _typical(held_out)
    signatures = {curve.signature for curve in own.kernels}
    of_known_s = sum(kernel.lasted_s for kernel in step.kernels if kernel.signature in signatures)
    return ScriptCheck(
        step_s=step.plain_s / step.steps,
        spread=_spread(held_out),
        predicted_s=predicted_s(with_script(machine, own).running(name), step.kernels) / step.steps,
        kernels=round(len(step.kernels) / step.steps),
        distinct=len({kernel.signature for kernel in step.kernels}),
        known=of_known_s / sum(kernel.lasted_s for kernel in step.kernels),
    )


def predicted_s(machine: Machine, kernels: Iterable[TimedKernel]) -> float:
    """Return what these kernels take on the machine."""
    groups = [
        KernelGroup(kernel.kind, kernel.flops, kernel.moved_bytes, 1, kernel.dtype, kernel.signature)
        for kernel in kernels
    ]
    return seconds(machine, Work(groups=tuple(groups)))


def with_script(machine: Machine, script: ScriptKernels) -> Machine:
    """Return the machine with this script, instead of an earlier one of that name."""
    others = tuple(each for each in machine.scripts if each.name != script.name)
    return msgspec.structs.replace(machine, scripts=(*others, script))
