"""Gradients on their way to the server: one payload per tensor. The receiver validates everything.

A worker's last push may be whole: uncompressed and with its whole residual, so that nothing is lost with the
worker. The server accepts both kinds.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from hcsim.compressors.base import Array, ByteArray, Compressor, Ident
from hcsim.compressors.feedback import ErrorFeedback
from hcsim.compressors.registry import make
from hcsim.errors import CompressionError
from hcsim.runtime.channel import Phantom
from hcsim.runtime.host import joined_work
from hcsim.training.layout import FLOAT_BYTES, Layout
from hcsim.training.learner import Learner
from hcsim.training.optimizer import update_work
from hcsim.training.parameter_server.messages import Push
from hcsim.training.task import Flat

WHOLE = "none"


class ReceivedPush(NamedTuple):
    """A push that arrived and is valid."""

    push: Push
    data: ByteArray | Phantom
    """The payload as it was received."""
    sums: Flat
    """The decoded gradients, as sums over samples."""


class GradientCodec:
    """Packs, validates and unpacks the gradients of one model."""

    def __init__(self, layout: Layout, compressor: Compressor) -> None:
        self.tensors = layout.tensors
        self.compressor = compressor
        self.length = layout.length
        self._dense = compressor if compressor.spec == WHOLE else make(WHOLE, seed=0, rank=0)
        self._exact = [compressor.size_bytes(tensor.shape) for tensor in self.tensors]
        codecs = compressor, self._dense
        self.most_bytes = max(sum(codec.most_bytes(tensor.shape) for tensor in self.tensors) for codec in codecs)
        """The upper bound for the size of a valid push."""
        self.encode_work = joined_work(compressor.encode_work(tensor.shape) for tensor in self.tensors)
        self.decode_work = joined_work(compressor.decode_work(tensor.shape) for tensor in self.tensors)

    def pack(self, gradients: Flat, samples: int, version: int) -> tuple[tuple[int, ...], ByteArray | Phantom]:
        """Return the sizes of the payloads of mean gradients over `samples` samples, and all payloads in one piece.

        The packed gradients are sums over the samples, so that a residual has the same weight whatever the batch
        sizes before and after. Changes the gradients."""
        if isinstance(gradients, Phantom):
            return tuple(self._exact), Phantom(sum(self._exact))
        gradients *= np.float32(samples)
        return self._packed(self.compressor, gradients, version)

    @property
    def owing(self) -> ErrorFeedback | None:
        """The error feedback, if it has a residual."""
        feedback = self.compressor
        return feedback if isinstance(feedback, ErrorFeedback) and feedback.state() else None

    def pack_whole(
        self, owing: ErrorFeedback, gradients: Flat, samples: int, version: int
    ) -> tuple[tuple[int, ...], ByteArray | Phantom]:
        """Pack uncompressed gradients with the whole residual; if the push counts, no residual remains. Changes the
        gradients."""
        assert not isinstance(gradients, Phantom)  # phantoms owe nothing
        gradients *= np.float32(samples)
        for tensor in self.tensors:
            of, out = Ident(tensor.name, version), tensor.view(gradients)
            out[...] = owing.compensated(out, of)
            owing.keep(np.zeros_like(out), of)
        return self._packed(self._dense, gradients, version)

    def _packed(self, compressor: Compressor, sums: Array, version: int) -> tuple[tuple[int, ...], ByteArray]:
        payloads = [compressor.encode(tensor.view(sums), Ident(tensor.name, version)) for tensor in self.tensors]
        return tuple(payload.nbytes for payload in payloads), np.concatenate(payloads)

    def objection(self, push: Push) -> str:
        """Return what is wrong with an announced push; empty if it is valid."""
        if push.compressor not in (self.compressor.spec, WHOLE):
            return f"compressed with {push.compressor!r}, and we expect {self.compressor.spec!r}"
        if len(push.sizes) != len(self.tensors):
            return f"{len(push.sizes)} payloads for {len(self.tensors)} tensors"
        codec = self._codec(push)
        for tensor, size in zip(self.tensors, push.sizes, strict=True):
            if size != codec.size_bytes(tensor.shape) if codec.sized else size > codec.most_bytes(tensor.shape):
                return f"{size} bytes for {tensor.name}, whose shape is {list(tensor.shape)}"
        return ""

    def unpack(self, push: Push, data: ByteArray) -> Array:
        """Return the gradients of a validated push; raise `CompressionError` if the payload is not valid."""
        gradients, codec = np.empty(self.length, np.float32), self._codec(push)
        ends = accumulate(push.sizes, initial=0)
        for tensor, (lo, hi) in zip(self.tensors, pairwise(ends), strict=True):
            out = tensor.view(gradients)
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
                codec.decode(data[lo:hi], out, Ident(tensor.name, push.version))
            if not np.isfinite(out).all():
                raise CompressionError("a gradient is not finite", tensor.name)
        return gradients

    async def decoded(self, push: Push, data: ByteArray | Phantom, learner: Learner) -> Flat:
        """Unpack on a learner's device, in its time; also for phantoms."""
        with learner.ledger.spent_on("encode"):
            if isinstance(data, Phantom):
                return await learner.host.device.run(self.decode_work, lambda: Phantom(FLOAT_BYTES * self.length))
            return await learner.host.device.run(self.decode_work, partial(self.unpack, push, data))

    def _codec(self, push: Push) -> Compressor:
        return self._dense if push.compressor == WHOLE else self.compressor


async def average(learner: Learner, received: Iterable[ReceivedPush]) -> None:
    """Put the mean over all samples in the place of the learner's gradients. Changes the received arrays."""
    terms, mean = [(each.sums, each.push.samples) for each in received], learner.replica.gradients
    elements = len(terms) * learner.layout.length
    work = update_work(2.0 * elements, 5.0 * FLOAT_BYTES * elements)
    if isinstance(mean, Phantom):
        await learner.run(work, lambda: None)
    else:
        await learner.run(work, partial(mean_of_sums, terms, mean))


def mean_of_sums(sums: Iterable[tuple[Any, int]], out: Array) -> None:
    """Compute the mean over all samples from sums, each over a number of samples. Changes the arrays.

    A sum over no samples may hold a worker's residual, so it counts like the others."""
    terms = list(sums)
    each = np.float32(1 / max(1, sum(samples for _, samples in terms)))
    out.fill(0.0)
    for array, _ in terms:
        array *= each  # before they are added up: what is finite stays finite
        out += array
