"""An LSTM over time series, whose gradients of two batches are accumulated."""

import torch
from loop import begin, repeat, shared
from torch import nn


class Forecast(nn.Module):
    """The next values of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 96, num_layers=2, batch_first=True), nn.Linear(96, 16)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(series)[0])


steps = begin()
model = shared(Forecast())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.randn(64, 49, 16).cumsum(1)


def step() -> torch.Tensor:
    optimizer.zero_grad()
    for _ in range(2):
        batch = data[torch.randint(0, len(data), (8,))]
        loss = (model(batch[:, :-1]) - batch[:, 1:]).square().mean() / 2
        loss.backward()
    optimizer.step()
    return loss


repeat(step, steps)
