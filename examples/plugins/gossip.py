"""A strategy: every rank steps alone and tells its neighbours in a ring how it has moved since it last told them.

CHOCO-SGD (Koloskova, Stich and Jaggi, ICML 2019). What is sent is the compressed difference between a rank's parameters
and what its neighbours believe them to be, so what a compressor leaves out is sent later: error feedback is built in.
A higher gamma brings ranks together sooner, and with a coarse compressor too soon.

    hcsim run mixed-home --plugin examples/plugins/gossip.py --task digits --strategy gossip:0.4 --compressor int8
"""

import asyncio
from itertools import pairwise

import msgspec
import numpy as np

from hcsim import Phantom
from hcsim.compressors.base import Ident
from hcsim.plugins import register_strategy
from hcsim.training.aggregation import Bench


class Gossip(msgspec.Struct, frozen=True):
    gamma: float = 0.4

    async def train(self, run):
        group, learner = run.group, run.learner
        talk = Talk(run, self.gamma)
        for step in run.steps():
            loss = await learner.gradients(run.batches.batch(step, group.rank))
            await run.update(step)
            with learner.ledger.spent_on("exchange"):
                await talk.exchange(step)
                if step + 1 == run.settings.steps:  # all end with the same model: the average
                    await group.all_reduce(learner.replica.parameters, "mean")
            await run.settle(step, nothing, loss)


class Talk:
    def __init__(self, run, gamma):
        self.group, self.gamma, self.theta = run.group, gamma, run.learner.replica.parameters
        self.coder = getattr(run.compressor, "inner", run.compressor)
        self.bench = Bench(run.group.host, run.learner.ledger, self.coder)
        self.tensors = run.learner.layout.tensors
        self.shapes = [tensor.shape for tensor in self.tensors]
        self.cuts = list(pairwise(np.cumsum([0, *map(self.coder.size_bytes, self.shapes)]).tolist()))
        rank, size = run.group.rank, run.group.size
        self.neighbours = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
        if not isinstance(self.theta, Phantom):
            self.believed = {each: self.theta.copy() for each in (rank, *self.neighbours)}

    async def exchange(self, step):
        ours = await self.bench.encode(self.shapes, lambda: self.encoded(step))
        room = [ours if isinstance(ours, Phantom) else np.empty_like(ours) for _ in self.neighbours]
        places = zip(self.neighbours, room, strict=True)
        await asyncio.gather(*[self.group.sendrecv(ours, rank, into, rank) for rank, into in places])
        told = dict(zip((self.group.rank, *self.neighbours), (ours, *room), strict=True))
        await self.bench.decode(self.shapes, lambda: self.mix(told, step), len(told))

    def encoded(self, step):
        if isinstance(self.theta, Phantom):
            return Phantom(self.cuts[-1][1])
        moved = self.theta - self.believed[self.group.rank]
        return np.concatenate([self.coder.encode(t.view(moved), Ident(t.name, step)) for t in self.tensors])

    def mix(self, told, step):
        if isinstance(self.theta, Phantom):
            return
        for rank, payload in told.items():
            for tensor, (lo, hi) in zip(self.tensors, self.cuts, strict=True):
                self.coder.add(payload[lo:hi], tensor.view(self.believed[rank]), Ident(tensor.name, step))
        for rank in self.neighbours:
            gap = self.believed[rank] - self.believed[self.group.rank]
            self.theta += self.gamma / len(self.neighbours) * gap


async def nothing():
    pass


register_strategy("gossip", Gossip)
