"""A recommender: embeddings of people and things, and a perceptron on top."""

import torch
from loop import begin, repeat, shared
from torch import nn


class Ratings(nn.Module):
    """The stars that somebody gives something."""

    def __init__(self) -> None:
        super().__init__()
        self.people, self.things = nn.Embedding(2000, 32), nn.Embedding(1000, 32)
        self.top = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, people: torch.Tensor, things: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.people(people), self.things(things)], 1)).squeeze(1)


steps = begin()
model = shared(Ratings())
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
people, things, stars = torch.randint(0, 2000, (20_000,)), torch.randint(0, 1000, (20_000,)), torch.rand(20_000)


def step() -> torch.Tensor:
    some = torch.randperm(20_000)[:512]
    loss = (model(people[some], things[some]) - stars[some]).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


repeat(step, steps)
