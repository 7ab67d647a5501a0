"""What lies on a disk as a file: trained models, and what describes the checkpoints of torch programs."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from experiments.hostile import mutations
from experiments.hostile.parsers import Parse, Parser, headed
from hcsim.checkpoints.parts import CheckpointShard, Item, parts_in, step_folder, write_part
from hcsim.errors import HcsimError
from hcsim.training.layout import Layout
from hcsim.training.model_file import load_model, save_model
from hcsim.training.tasks import task

_STEP = 7


def file_parsers() -> Iterator[Parser]:
    """One for each kind of file."""
    yield Parser("model", [_model()], partial(_open, load_model), headed)
    sealed = mutations.sealed(mutations.json_lines, _with_seal)
    yield Parser("torch checkpoint", [_description()], partial(_open, _read_description), sealed)


@contextmanager
def _open(read: Callable[[Path], object]) -> Iterator[Parse]:
    with tempfile.TemporaryDirectory() as folder:
        path = step_folder(Path(folder), _STEP) / "rank-0-of-1.json"
        path.parent.mkdir()

        def parse(data: bytes) -> None:
            path.write_bytes(data)
            read(path)

        yield parse


def _model() -> bytes:
    of = task("convex")
    length = Layout.of([block.shapes for block in of.blocks]).length
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        save_model(path, of, np.arange(length, dtype=np.float32), {"steps": "3"})
        return path.read_bytes()


def _description() -> bytes:
    items = [
        Item(("weight",), "float32", (3, 4), (0, 0), (3, 4)),
        Item(("bias",), "float32", (4,), (0,), (2,), stored="bias-of-0"),
        Item(("state", 0, "step"), plain={"$dict": [["step", 7], ["state", {"$tensor": "weight"}]]}),
    ]
    part = CheckpointShard(saving="1f", step=_STEP, rank=0, world=1, size_bytes=4, sha256="ab", items=items)
    with tempfile.TemporaryDirectory() as folder:
        write_part(Path(folder), part, b"data")
        return (step_folder(Path(folder), _STEP) / f"{part.stem}.json").read_bytes()


def _with_seal(data: bytes) -> bytes:
    body = data.removesuffix(b"\n").rpartition(b"\n")[0]
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def _read_description(path: Path) -> None:
    _, troubles = parts_in(path.parent.parent, _STEP)
    if troubles:
        raise HcsimError(troubles[0])
