"""A trained model as a file in the safetensors format.

The file has each tensor under its own name, and in its metadata the task, the digest of the parameters and
information about the run. It is written atomically.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from hcsim.errors import ConfigError
from hcsim.files import write_whole
from hcsim.training.layout import Layout
from hcsim.training.learner import digest
from hcsim.training.task import Task
from hcsim.training.tasks import task

_FORMAT = "hcsim model 1"


class SavedModel(msgspec.Struct, frozen=True):
    """A model that was read from a file."""

    task: Task
    parameters: npt.NDArray[np.float32]
    about: Mapping[str, str]
    """The metadata of the file."""


def save_model(path: Path, of: Task, parameters: npt.NDArray[np.float32], about: Mapping[str, str]) -> None:
    """Write the parameters to a file; an older file is replaced once the new one is complete."""
    layout = Layout.of([block.shapes for block in of.blocks])
    tensors = {tensor.name: np.array(tensor.view(parameters)) for tensor in layout.tensors}
    metadata = {"format": _FORMAT, "task": of.name, "sha256": str(digest(parameters)), **about}
    try:
        write_whole(path, safetensors.numpy.save(tensors, metadata))
    except OSError as error:
        raise ConfigError(f"{path}: the model cannot be written: {error.strerror}") from None


def load_model(path: Path) -> SavedModel:
    """Read a model, and verify its digest."""
    try:
        path.open("rb").close()  # of whatever it cannot open safetensors says that it is not there
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or 'this cannot be read').lower()}") from None
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            about: dict[str, str] = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: this is not a model that was saved whole: {error}") from None
    if about.get("format") != _FORMAT:
        raise ConfigError(f"{path}: hcsim did not save this model (its format is {about.get('format')!r})")
    of = task(about.get("task", ""))
    layout = Layout.of([block.shapes for block in of.blocks])
    parameters = np.empty(layout.length, np.float32)
    for tensor in layout.tensors:
        found = tensors.get(tensor.name)
        if found is None or found.shape != tensor.shape or found.dtype != np.float32:
            there = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise ConfigError(f"{path}: {tensor.name} is {there}, but {of.name} has float32 {list(tensor.shape)}")
        tensor.view(parameters)[...] = found
    if strange := [name for name in tensors if name not in {tensor.name for tensor in layout.tensors}]:
        raise ConfigError(f"{path}: {of.name} has no tensor {', '.join(strange)}")
    if digest(parameters) != about.get("sha256"):
        raise ConfigError(f"{path}: the parameters are not those that were saved (their SHA-256 differs)")
    return SavedModel(of, parameters, about)
