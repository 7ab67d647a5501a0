"""A convolutional network with batch norms, on images from a DataLoader that shifts them with numpy."""

import numpy as np
import torch
from loop import begin, repeat, shared
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class Shifted(Dataset):
    """Images, each shifted by another number of columns."""

    def __init__(self) -> None:
        self.images = np.random.default_rng(0).standard_normal((512, 3, 24, 24)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(np.roll(self.images[index], index % 5, axis=2)), index % 10


def endless(loader: DataLoader):
    while True:
        yield from loader


steps = begin()
model = shared(
    nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 10),
    )
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
batches = endless(DataLoader(Shifted(), batch_size=16, shuffle=True, drop_last=True))


def step() -> torch.Tensor:
    images, labels = next(batches)
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


repeat(step, steps)
