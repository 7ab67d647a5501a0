"""A checkpoint's tensors, put together from the pieces that its ranks saved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hcsim.checkpoints.parts import Part, Piece, data_file
from hcsim.checkpoints.plain import dtype_of
from hcsim.errors import CheckpointError


class Tensors:
    """As one of the ranks has them that saved them; without a rank, those that stand for all ranks."""

    def __init__(self, folder: Path, parts: Mapping[int, Part], rank: int | None = None) -> None:
        self._folder = folder
        self._parts = parts
        self._rank = rank
        self._files: dict[int, Any] = {}

    def names(self, within: str) -> list[str]:
        """Those under that path, without it."""
        found = {name for part in self._parts.values() for name in part.pieces if name.startswith(within)}
        return sorted(name.removeprefix(within) for name in found if self._matters(name))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None where there is none of that name."""
        return next((piece.shape for _, piece in self._pieces(name)), None)

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor that is there."""
        return dtype_of(self._pieces(name)[0][1].dtype)

    def elements(self, name: str, lo: int, hi: int) -> Tensor:
        """Some elements of a tensor, from whichever parts have them."""
        pieces = self._pieces(name)
        if not pieces:
            raise self._lacking(name)
        found = torch.empty(hi - lo, dtype=self.dtype(name))
        have = 0
        for rank, piece, first, last in _covering(pieces, lo, hi):
            found[first - lo : last - lo] = self._file(rank).get_slice(name)[first - piece.lo : last - piece.lo]
            have += last - first
        if have != hi - lo:
            raise self._lacking(name)
        return found

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        self.check(name)
        shape = self.shape(name)
        assert shape is not None
        return self.elements(name, 0, math.prod(shape)).view(shape)

    def check(self, name: str) -> None:
        """Raise unless all of it is here."""
        pieces = self._pieces(name)
        size = math.prod(pieces[0][1].shape) if pieces else 0
        if not pieces or sum(last - first for _, _, first, last in _covering(pieces, 0, size)) != size:
            raise self._lacking(name)

    def saved_by(self, rank: int, path: str) -> Tensor:
        """One that every rank has for itself."""
        tensor: Tensor = self._file(rank).get_tensor(path)
        return tensor.view(self._parts[rank].pieces[path].shape)

    def _matters(self, name: str) -> bool:
        """What others alone had does not; nor do, to another number of ranks, buffers that the first had not."""
        own = [part.pieces[name] for part in self._parts.values() if name in part.pieces]
        return bool(self._pieces(name)) or (self._rank is None and not all(piece.first for piece in own))

    def _pieces(self, name: str) -> list[tuple[int, Piece]]:
        """With the ranks that have them; our own are first."""
        found = [(rank, part.pieces[name]) for rank, part in self._parts.items() if name in part.pieces]
        us = self._rank
        if us is None and all(piece.first for _, piece in found if piece.own):
            us = 0
        ours = [(rank, piece) for rank, piece in found if rank == us]
        return ours + [(rank, piece) for rank, piece in found if rank != us and not piece.own]

    def _lacking(self, name: str) -> CheckpointError:
        first = self._parts[0]
        pieces = [part.pieces[name] for part in self._parts.values() if name in part.pieces]
        if any(piece.own for piece in pieces):
            return CheckpointError(
                f"{name.removeprefix('model/')} differs among the {first.world} ranks that saved it: only "
                f"{first.world} ranks can go on from it, each from its own"
            )
        return CheckpointError(f"the checkpoint of step {first.step} has {'not all of' if pieces else 'no'} {name}")

    def _file(self, rank: int) -> Any:
        if rank not in self._files:
            self._files[rank] = safe_open(data_file(self._folder, self._parts[rank]), framework="pt")
        return self._files[rank]


def _covering(pieces: Sequence[tuple[int, Piece]], lo: int, hi: int) -> Iterator[tuple[int, Piece, int, int]]:
    """Which elements to take from which piece, each from one; ranks in several groups may have the same."""
    gaps = [(lo, hi)]
    for rank, piece in pieces:
        left = []
        for first, last in gaps:
            start, end = max(first, piece.lo), min(last, piece.hi)
            if start < end:
                yield rank, piece, start, end
                left += [(first, start), (end, last)]
            else:
                left.append((first, last))
        gaps = [(first, last) for first, last in left if first < last]
