"""Two networks that train against each other, each with an optimizer of its own."""

import torch
from loop import begin, repeat, shared
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

steps = begin()
maker = shared(
    nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 784), nn.Tanh())
)
judge = shared(nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(256, 1)))
makes = torch.optim.Adam(maker.parameters(), lr=2e-4, betas=(0.5, 0.999))
judges = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
data = torch.rand(1024, 784)


def step() -> torch.Tensor:
    real = data[torch.randint(0, len(data), (64,))]
    fake = maker(torch.randn(64, 32))
    answers = judge(torch.cat([real, fake.detach()]))
    judged = binary_cross_entropy_with_logits(answers, torch.cat([torch.ones(64, 1), torch.zeros(64, 1)]))
    judges.zero_grad()
    judged.backward()
    judges.step()
    loss = binary_cross_entropy_with_logits(judge(fake), torch.ones(64, 1))
    makes.zero_grad()
    loss.backward()
    makes.step()
    return loss


repeat(step, steps)
