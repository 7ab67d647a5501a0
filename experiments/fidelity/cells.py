"""The cells of the lab: what is done, where, and which of them are for calibration.

A third of the cells, chosen by a hash of their names, calibrates the networks; errors are reported of the others alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from experiments.fidelity.homes import EMULATED, MEDIA
from experiments.fidelity.program import MAC, OLD, Collectives, Trainings
from hcsim.config import Machine

KB, MB = 1 << 10, 1 << 20
ALGORITHMS = ("ring", "tree", "centralized", "halving_doubling", "recursive_doubling", "hierarchical", "auto")
SIZES = (4 * KB, 64 * KB, 1 * MB, 16 * MB, 64 * MB)
OTHERS = {"broadcast": ("tree", "ring"), "all_gather": ("ring", "direct"), "reduce_scatter": ("ring", "halving")}
SHARED_KIND = "shared air and WAN"
LONGEST_LAP_S = 2.2
"""Of one repeat, by what its bytes take at least."""
CELL_S = 1.2
FEWEST, MOST = 2, 60
_CALIBRATING = 3
_WARM_REPEATS = 2
_STEPS = 4
_METHODS = (
    ("ddp", "none"), ("ddp", "int8+ef"), ("ddp", "topk:0.01+ef"), ("ddp", "powersgd:4+ef"),
    ("local_sgd:4", "none"), ("diloco:4", "none"), ("diloco:4", "int8+ef"),
    ("parameter_server", "none"), ("parameter_server", "topk:0.01+ef"),
)  # fmt: skip
SHARED_SIZES = (4 * KB, 64 * KB, 1 * MB, 4 * MB)
"""Where a second moves fewer bytes."""
_SHARED_METHODS = (
    ("ddp", "none"), ("ddp", "topk:0.01+ef"), ("local_sgd:4", "none"), ("diloco:4", "int8+ef"),
    ("parameter_server", "topk:0.01+ef"),
)  # fmt: skip


class Cell(msgspec.Struct, frozen=True):
    """A collective operation in a home."""

    medium: str
    hosts: int
    operation: str
    algorithm: str
    size_bytes: int
    together: int = 1
    tls: bool = False

    @property
    def name(self) -> str:
        many = f"x{self.together}" if self.together > 1 else ""
        how = f"{self.algorithm}{'+tls' if self.tls else ''}"
        return f"{self.medium}/{self.hosts}/{self.operation}{many}/{how}/{size_name(self.size_bytes)}"

    @property
    def calibrates(self) -> bool:
        digest = hashlib.sha256(self.name.encode()).digest()
        return not self.tls and int.from_bytes(digest[:4], "big") % _CALIBRATING == 0

    @property
    def least_s(self) -> float:
        """What the busiest port takes for its bytes, roughly."""
        peers = self.hosts - 1
        odd = 1.0 if self.hosts & peers == 0 else 1.0 + 1 / peers
        """Where ranks are no power of two, some hand their parts to others first."""
        whole = {
            "tree": 2 * min(2, peers), "centralized": 2 * peers, "recursive_doubling": odd * peers.bit_length(),
            "hierarchical": 3.8, "halving_doubling": 2 * odd * peers / self.hosts,
        }  # fmt: skip
        parts = {"broadcast": 2, "all_gather": peers, "reduce_scatter": peers / self.hosts}
        share = parts.get(self.operation, whole.get(self.algorithm, 2 * peers / self.hosts))
        return MEDIA[self.medium].least_s(self.together * share * self.size_bytes, self.hosts)

    @property
    def repeats(self) -> int:
        return max(FEWEST, min(MOST, round(CELL_S / (self.least_s + 2e-3))))

    def turn(self, repeats: int) -> Collectives:
        return Collectives(self.operation, self.algorithm, self.size_bytes, repeats, self.together)

    @property
    def warm_up(self) -> Collectives:
        """Short operations open the connections that the cell uses, and fill the caches."""
        short = min(self.size_bytes, 64 * KB)
        return Collectives(self.operation, self.algorithm, short, _WARM_REPEATS, self.together)

    @property
    def setup(self) -> tuple[str, str]:
        """What the group is asked to be ready for, and the device."""
        return (self.algorithm if self.algorithm in ("hierarchical", "auto") else "", "cpu")

    @property
    def kind(self) -> str:
        """The class of cells that the cell is counted in."""
        if self.medium in EMULATED:
            return SHARED_KIND
        if self.tls:
            return "over TLS"
        if self.size_bytes < MB:
            return "4 to 64 KB"
        if self.together > 1:
            return "two at once, from 1 MB"
        if self.medium == "mixed":
            return "asymmetric, from 1 MB"
        if self.size_bytes >= 16 * MB and self.algorithm in ("ring", "halving_doubling"):
            return "rings and halving, from 16 MB"
        return "1 MB" if self.size_bytes < 16 * MB else "others from 16 MB"


class TrainingCell(msgspec.Struct, frozen=True):
    """A training in a home, whose compute is slept for. It never calibrates."""

    medium: str
    hosts: int
    task: str
    strategy: str
    compressor: str

    tls = False
    calibrates = False
    repeats = 2

    @property
    def kind(self) -> str:
        """The class of cells that the cell is counted in."""
        return SHARED_KIND if self.medium in EMULATED else "training step, compute slept"

    @property
    def name(self) -> str:
        return f"{self.medium}/{self.hosts}/{self.task}/{self.strategy}/{self.compressor}"

    @property
    def machine(self) -> Machine:
        """Whose time compute takes."""
        return OLD if self.task == "digits" else MAC

    @property
    def setup(self) -> tuple[str, str]:
        return "", f"sleep:{self.machine.name}"

    @property
    def warm_up(self) -> Trainings:
        """One step, which takes what the first one takes longer."""
        return Trainings(self.task, self.strategy, self.compressor, 1, 1)

    def turn(self, repeats: int) -> Trainings:
        return Trainings(self.task, self.strategy, self.compressor, _STEPS, repeats)


AnyCell: TypeAlias = Cell | TrainingCell


def trainings() -> list[TrainingCell]:
    """Strategies and compressors that end a step within a second or two."""
    long = ("parameter_server", "none")  # more than four seconds
    cells = [TrainingCell("1gb", 2, "resnet50", *how) for how in _METHODS]
    cells += [TrainingCell("1gb", 4, "resnet50", *how) for how in _METHODS if how != long]
    cells += [TrainingCell("1gb", 8, "resnet50", *how) for how in _METHODS if how[1] not in ("none", "int8+ef")]
    sparse = [how for how in _METHODS if how[1] not in ("none", "int8+ef") and how[0] != "parameter_server"]
    cells += [TrainingCell("mixed", 4, "resnet50", *how) for how in (*sparse, ("diloco:4", "int8+ef"))]
    cells += [TrainingCell("100mb", 4, "resnet50", "ddp", each) for each in ("topk:0.01+ef", "powersgd:4+ef")]
    cells += [TrainingCell("100mb", hosts, "digits", *how) for hosts in (2, 4) for how in _METHODS]
    return cells


def shared_trainings() -> list[TrainingCell]:
    """Over shared air and between homes."""
    return [TrainingCell(medium, 4, "digits", *how) for medium in EMULATED for how in _SHARED_METHODS]


def size_name(size_bytes: int) -> str:
    return f"{size_bytes // MB}MB" if size_bytes >= MB else f"{size_bytes // KB}KB"


def collectives(medium: str) -> list[AnyCell]:
    """All that last no longer than they may, by number of hosts and algorithm."""
    cells = _shared(medium) if medium in EMULATED else _collectives(medium)
    return [cell for cell in dict.fromkeys(cells) if cell.least_s <= LONGEST_LAP_S]


def _shared(medium: str) -> Iterator[Cell]:
    for hosts in (2, 3, 4):
        for algorithm in _algorithms(hosts):
            for size_bytes in SHARED_SIZES if hosts != 3 else SHARED_SIZES[1:3]:
                yield Cell(medium, hosts, "all_reduce", algorithm, size_bytes)
    for algorithm in ("ring", "tree"):
        yield Cell(medium, 4, "all_reduce", algorithm, 1 * MB, together=2)
    for operation, algorithms in OTHERS.items():
        for algorithm in algorithms:
            for size_bytes in (64 * KB, 1 * MB):
                yield Cell(medium, 4, operation, algorithm, size_bytes)


def _collectives(medium: str) -> Iterator[Cell]:
    for hosts in (2, 3, 4):
        for algorithm in _algorithms(hosts):
            for size_bytes in SIZES if hosts != 3 else SIZES[1:4]:
                yield Cell(medium, hosts, "all_reduce", algorithm, size_bytes)
    for algorithm in ("ring", "halving_doubling", "tree"):
        for size_bytes in (1 * MB, 16 * MB):
            yield Cell(medium, 4, "all_reduce", algorithm, size_bytes, together=2)
    for algorithm in ("ring", "tree"):
        for size_bytes in (64 * KB, 1 * MB, 16 * MB):
            yield Cell(medium, 2, "all_reduce", algorithm, size_bytes, tls=True)
    for operation, algorithms in OTHERS.items():
        for algorithm in algorithms:
            for size_bytes in (64 * KB, 4 * MB):
                yield Cell(medium, 4, operation, algorithm, size_bytes)


def _algorithms(hosts: int) -> Iterator[str]:
    for algorithm in ALGORITHMS:
        if algorithm != "hierarchical" or hosts == 4:
            yield algorithm
