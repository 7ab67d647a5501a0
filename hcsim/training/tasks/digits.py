"""Handwritten digits: scikit-learn's 1,797 images of 8 × 8 pixels, and a small convolutional network.

There is no batch normalisation and no dropout: a worker's gradient depends on its own samples alone, so that
several workers compute what one would.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from hcsim.errors import ConfigError
from hcsim.files import file_of
from hcsim.rng import generator
from hcsim.training.task import Defaults
from hcsim.training.tasks.torch_task import Data, Model, TorchTask, as_tensor

IMAGES = 1797
HELD_OUT = 397
"""Samples, which leaves 1,400 to train on."""
SPLIT_SEED = 0
"""The split is the same in every run, whatever its seed."""


def modules() -> Sequence[nn.Module]:
    """The network, in blocks."""
    return [
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU()),
        nn.Sequential(nn.Linear(64, 10)),
    ]


def table() -> npt.NDArray[Any]:
    """A row for each image: its 64 pixels, and which digit it is.

    From scikit-learn's own file, as long as it is where it is today: to import scikit-learn for it takes a second.
    """
    if (file := file_of("sklearn", "datasets", "data", "digits.csv.gz")) is not None:
        try:
            with gzip.open(file, "rt", encoding="ascii") as lines:
                return np.array([line.split(",") for line in lines], np.float64).reshape(IMAGES, 65)
        except (OSError, EOFError, ValueError) as error:
            raise ConfigError(f"{file} is damaged ({error}): install scikit-learn again") from error
    from sklearn.datasets import load_digits

    found = load_digits()
    return np.column_stack([found.data, found.target])


def digits() -> TorchTask:
    """The task."""
    found = table()
    order = generator(SPLIT_SEED, "digits").permutation(len(found))
    images = (found[order, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    labels = found[order, -1].astype(np.int64)
    held_out = Data(as_tensor(images[:HELD_OUT]), as_tensor(labels[:HELD_OUT]))
    training = Data(as_tensor(images[HELD_OUT:]), as_tensor(labels[HELD_OUT:]))
    return TorchTask("digits", Model(modules, 2**0.5), training, held_out, Defaults(lr=0.05, momentum=0.9, batch=16))
