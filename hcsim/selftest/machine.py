"""What only a real machine has: its processor, its disk, its processes, its device and its network."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import secrets
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing as npt

from hcsim.compressors import kernels
from hcsim.compressors.base import Array, Ident
from hcsim.compressors.kernels import plain
from hcsim.compressors.registry import make
from hcsim.doctor import check_announcing
from hcsim.real.hardware import FolderStore, best_torch_device, training_step_error
from hcsim.real.host import RealHost, RealOptions
from hcsim.selftest.contracts import ContractBroken, NotHere, require
from hcsim.training.task import Replica

COMPRESSORS = (
    "none", "zstd", "topk:0.01", "topk:0.3", "randomk:0.01", "randomk:0.7", "fp16", "bf16", "int8", "int8:block=16",
    "int8:block=256,stochastic", "onebit", "powersgd:4",
)  # fmt: skip
LENGTHS = (1, 63, 65, 1000, 300_001)
GRADIENT_ERROR = 1e-3
"""Of the gradient's norm: what another device may differ by from the processor."""
_LOOK_S = 3.0
_END_S = 10.0


def compiled_loops() -> list[ModuleType]:
    """Return the inner loops that the installation compiled and that this processor can run; the last are in use."""
    found = []
    for name in ("compiled", "avx2"):
        try:
            found.append(import_module(f"hcsim.compressors.kernels.{name}"))
        except ImportError:
            continue
    return found


@contextmanager
def using(loops: ModuleType) -> Iterator[None]:
    """Have the compressors of this process use these loops."""
    before = {name: getattr(kernels, name) for name in plain.__all__}
    for name in before:
        setattr(kernels, name, getattr(loops, name))
    try:
        yield
    finally:
        for name, loop in before.items():
            setattr(kernels, name, loop)


def payloads(spec: str, tensor: Array) -> tuple[bytes, bytes]:
    """Return what a compressor sends of the tensor, and what comes out of it."""
    compressor, out, of = make(spec, seed=1, rank=0), np.empty_like(tensor), Ident("w", 3)
    payload = compressor.encode(tensor, of)
    compressor.decode(payload, out, of)
    return payload.tobytes(), out.tobytes()


def check_compressors() -> str:
    """What is decoded is near what was encoded, and the compiled loops make the bytes of the plain ones."""
    compiled = compiled_loops()
    count = 0
    for spec in COMPRESSORS:
        for length in LENGTHS:
            source = np.random.default_rng(length)
            tensor = (source.standard_normal(length) * np.exp(4 * source.standard_normal(length))).astype(np.float32)
            with using(plain):
                sent, decoded = payloads(spec, tensor)
            came = np.frombuffer(decoded, np.float32)
            lost = float(np.linalg.norm(came - tensor) / np.linalg.norm(tensor))
            require(np.isfinite(lost), f"{spec} of {length} elements decodes to finite numbers")
            if spec in ("none", "zstd"):
                require(came.tobytes() == tensor.tobytes(), f"{spec} of {length} elements decodes to what was encoded")
            for loops in compiled:
                with using(loops):
                    same = payloads(spec, tensor)
                name = loops.__name__.rpartition(".")[2]
                what = f"{spec} of {length} elements: the loops `{name}` do what the plain ones do"
                if spec.startswith("powersgd"):  # its sums are added in another order
                    ours, nearly = np.frombuffer(same[1], np.float32), 1e-3 * float(np.abs(came).max())
                    require(np.allclose(ours, came, rtol=1e-3, atol=nearly), what)
                else:
                    require(same == (sent, decoded), f"{what}, bit by bit")
            count += 1
    if not compiled:
        raise NotHere(
            f"{count} round trips are right with the plain loops; none were compiled to be compared with them"
        )
    names = " and ".join(loops.__name__.rpartition(".")[2] for loops in compiled)
    return f"{count} round trips, and the same bytes by the loops {names} as by numpy"


_SECOND_PROCESS = """\
import sys
from pathlib import Path
from hcsim.errors import ConfigError
from hcsim.real.hardware import FolderStore
try:
    FolderStore(Path(sys.argv[1]))
except ConfigError as error:
    print(error)
"""


def check_disk() -> str:
    """What was saved is read again, whole, also by the next process; and only one process has a folder."""
    data = np.random.default_rng(1).bytes(8 << 20)
    with tempfile.TemporaryDirectory(prefix="hcsim-") as name:
        folder = Path(name, "state")
        store = FolderStore(folder)
        began_s = time.monotonic()
        for number in range(5):
            store.save("record", data[number:])
        took_s = (time.monotonic() - began_s) / 5
        require(store.load("record") == data[4:], "a record reads as it was saved last")
        require(store.load("no such record") is None, "a record that was never saved is not there")
        other = [sys.executable, "-c", _SECOND_PROCESS, str(folder)]
        refused = subprocess.run(other, capture_output=True, text=True, check=False)
        require("another process keeps its state there" in refused.stdout, "a second process is refused the folder")
        store.close()
        again = FolderStore(folder)
        require(again.load("record") == data[4:], "a record is there for the next process")
        again.close()
        left = sorted(path.name for path in folder.iterdir() if path.name.startswith("."))
        require(not left, f"nothing half-written is left over: {left}")
        checkpoints = _check_checkpoints(Path(name, "checkpoints"))
    return f"8 MiB are written, flushed to the disk and named in {1000 * took_s:.0f} ms; {checkpoints}"


def _check_checkpoints(folder: Path) -> str:
    """Check that a torch program goes on from what it saved last and is whole, and is told of what is not."""
    if not _has_torch():
        return "no checkpoints, as torch is not installed"
    import torch

    from hcsim.checkpoints.loader import load
    from hcsim.checkpoints.saver import Saver

    model, other = torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)
    saver = Saver(folder, model)
    saved = []
    for step in (1, 2):
        torch.nn.init.normal_(model.weight)
        saved.append(model.weight.detach().clone())
        saver.save(step)
    saver.wait()
    found = load(folder)
    found.restore(other)
    require(found.step == 2 and torch.equal(other.weight, saved[1]), "the last checkpoint reads as it was saved")
    *_, newest = sorted(folder.rglob("*.safetensors"))
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = load(folder)
    found.restore(other)
    require(found.step == 1 and torch.equal(other.weight, saved[0]), "a damaged checkpoint is passed over")
    require(any("step 1 is loaded" in str(each.message) for each in told), "and the damage is told")
    return "two checkpoints of a torch program too, of which the damaged one is passed over"


_SCRIPT = """\
import fcntl, os, subprocess, sys
import torch
import torch.distributed as dist

dist.init_process_group("hcsim")
total = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(total)
hold = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
child = subprocess.Popen(
    [sys.executable, "-c", hold + "; time.sleep(600)", f"{sys.argv[1]}.{dist.get_rank()}"],
    stdout=subprocess.PIPE, text=True,
)
child.stdout.readline()
print("total", total.min().item(), total.max().item(), flush=True)
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
"""


def check_processes() -> str:
    """Ranks are started, one is killed, the other is told, and whatever they have started ends with them."""
    from hcsim.config import load_scenario
    from hcsim.scripts.run import simulate_script

    if not _has_torch():
        raise NotHere("torch is not installed")
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="hcsim-") as name:
        script, lock = Path(name, "script.py"), Path(name, "lock")
        script.write_text(_SCRIPT, encoding="utf-8")

        def say(rank: int, stream: int, text: str) -> None:
            said.append(text)

        run = simulate_script(load_scenario("two-macs-wifi"), script, [str(lock)], say=say)
        text = "".join(said)
        require(text.count("total 3.0 3.0") == 2, f"two processes add up what they have; they said: {text[-500:]}")
        require(run.ranks[1].code != 0, "a rank that is killed has not succeeded")
        require(run.ranks[0].code != 0, "the other rank is told of it")
        for rank in range(2):
            require(_is_free(Path(f"{lock}.{rank}")), f"the process that rank {rank} had started ends with it")
    return "two ranks started, one killed, the other told, and no process left over"


def _is_free(path: Path) -> bool:
    """Whether the process that holds the lock ends in time."""
    until_s = time.monotonic() + _END_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                if time.monotonic() > until_s:
                    return False
                time.sleep(0.05)


def _has_torch() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


def check_device() -> str:
    """A step on the best device is right, and its gradients are those of the processor."""
    from hcsim.training.tasks import task

    if not _has_torch():
        raise NotHere("torch is not installed")
    device = best_torch_device()
    for each in dict.fromkeys(("cpu", device)):
        require(not (wrong := training_step_error(each)), f"{each}: {wrong}")
    digits = task("digits")
    expected, found = (_gradient(digits.replica(1, each)) for each in ("cpu", device))
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    limit = GRADIENT_ERROR if device != "cpu" else 0.0
    require(error <= limit, f"{device}: gradients of a convolutional network are off by {error:.2g} of the processor's")
    digest = hashlib.sha256(expected.tobytes()).hexdigest()[:8]
    if device == "cpu":
        return f"cpu, as torch finds neither MPS nor CUDA: a step is right, and repeats itself bit by bit ({digest})"
    return f"{device}: a step is right; gradients of a convolutional network are within {error:.1g} of the processor's"


def _gradient(replica: Replica) -> npt.NDArray[np.float32]:
    replica.forward(np.arange(64))
    for block in reversed(range(4)):
        replica.backward(block)
    return np.array(replica.gradients, np.float32)


def check_mdns() -> str:
    """What this machine announces comes back to it."""

    async def main() -> str:
        async with RealHost(RealOptions("selftest")) as host:
            finding, sees = await check_announcing(host.lan, f"selftest-{secrets.token_hex(4)}", _LOOK_S)
        if finding.state != "good":
            raise ContractBroken(finding.found)
        return f"{finding.found}; {len(sees)} other machines are announced"

    return asyncio.run(main())
