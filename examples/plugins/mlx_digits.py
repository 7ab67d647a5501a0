"""A task in MLX: scikit-learn's handwritten digits.

hcsim run two-macs-wifi --plugin examples/plugins/mlx_digits.py --task mlx_digits --compressor int8+ef
hcsim run four-macs-churn --plugin examples/plugins/mlx_digits.py --task mlx_digits
"""

import mlx.nn as nn
import numpy as np
from sklearn.datasets import load_digits

from hcsim.mlx.task import MlxData, MlxTask
from hcsim.plugins import register_task

HELD_OUT = 397


def blocks() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 10)]


def digits() -> MlxTask:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    training, held_out = slice(HELD_OUT, None), slice(HELD_OUT)
    return MlxTask(
        "mlx_digits", blocks, MlxData(images[training], labels[training]), MlxData(images[held_out], labels[held_out])
    )


register_task("mlx_digits", digits)
