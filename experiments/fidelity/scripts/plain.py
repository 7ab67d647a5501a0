"""An autoencoder whose parameters are changed by hand, without an optimizer."""

import torch
from loop import begin, repeat, shared
from torch import nn

steps = begin()
model = shared(
    nn.Sequential(
        nn.Linear(400, 300), nn.GELU(), nn.Linear(300, 20), nn.Linear(20, 300), nn.GELU(), nn.Linear(300, 400)
    )
)
data = torch.randn(2048, 400)


def step() -> torch.Tensor:
    batch = data[torch.randint(0, len(data), (128,))]
    loss = (model(batch) - batch).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    return loss


repeat(step, steps)
