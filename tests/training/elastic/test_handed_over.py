"""What a member hands over to another is not believed before it is checked: also where it is noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from experiments.clusters import ideal
from hcsim.cluster.view import Member, View
from hcsim.collectives.group import Group
from hcsim.compressors.registry import make
from hcsim.config import Training
from hcsim.errors import CollectiveError, RemoteProtocolError
from hcsim.launch.virtual import simulate
from hcsim.training.elastic import standby
from hcsim.training.elastic.standby import ServerReplica, ServerState, ViewStart
from hcsim.training.elastic.synchronise import same_intent
from hcsim.training.elastic.transfer import PIECE_BYTES, StateArrays, relay
from hcsim.training.learner import Learner
from hcsim.training.parameter_server.gradients import GradientCodec
from hcsim.training.strategies import completed, optimizer
from hcsim.training.tasks import task

EXBIBYTES = 1 << 61


class Endless:
    """So many pieces are announced, and each is small."""

    def __init__(self, pieces: int) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return self._pieces

    def __getitem__(self, number: int) -> np.ndarray:
        return np.zeros(8, np.uint8)


class Forged:
    """A parcel whose label says what it likes."""

    def __init__(self, shape: list[int], pieces: int, dtype: str = "|u1") -> None:
        item = {"name": "parameters", "dtype": dtype, "shape": shape}
        self._packed = msgspec.msgpack.encode({"about": b"", "items": [item]}), Endless(pieces)

    def packed(self) -> tuple[bytes, Endless]:
        return self._packed


def failure(give: Callable[[Group], Any], take: Callable[[Group], Any]) -> BaseException:
    """How the second of two ranks ends, when the first one gives this."""

    async def program(group: Group) -> None:
        await (give if group.rank == 0 else take)(group)
        await group.barrier()

    found = simulate(ideal(2, ()).scenario, program).results[1]
    assert isinstance(found, CollectiveError)
    assert found.peer == 0
    return found


@pytest.mark.parametrize(
    ("forged", "says"),
    [
        (Forged([EXBIBYTES], 3), f"it announced 3 pieces, and its label says {EXBIBYTES} bytes"),
        (Forged([EXBIBYTES], EXBIBYTES // PIECE_BYTES), f"there is no room here for {EXBIBYTES} bytes"),
        (Forged([1 << 40, 1 << 40], 0), f"it announced 0 pieces, and its label says {1 << 80} bytes"),
        (Forged([EXBIBYTES], 3, dtype=""), f"it announced 3 pieces, and its label says {EXBIBYTES} bytes"),
        (Forged([-8, -8], 1), "an array of it would have a negative length"),
        (Forged([8], 1, dtype=","), "cannot be read"),
        (Forged([8], 1, dtype="(1000000000,1000)f8"), "cannot be read"),
    ],
)
def test_a_parcel_that_nobody_could_hold_is_refused_before_room_is_made_for_it(forged: Any, says: str) -> None:
    async def carried(group: Group) -> None:
        giving: Mapping[int, StateArrays] = {1: forged} if group.rank == 0 else {}
        await relay(group, [(0, 1)], giving)

    error = failure(carried, carried)
    assert says in str(error)
    assert "rank 0" in str(error)
    assert isinstance(error.__cause__, RemoteProtocolError)


def update(sizes: list[int]) -> bytes:
    push = {"type": "push", "sequence": 1, "version": 0, "samples": 4, "compressor": "int8+ef", "sizes": sizes}
    return msgspec.msgpack.encode({"version": 1, "lr": 0.1, "workers": {}, "pushes": [push]})


@pytest.mark.parametrize(
    ("length", "text", "says"),
    [
        (2941999152278373864, b"", "its update would have 2941999152278373864 bytes beside the gradients"),
        (-5, b"", "its update would have -5 bytes"),
        (9, b"\xc1" * 9, "cannot be read"),
        (None, update([EXBIBYTES]), "payloads for"),
        (None, update([EXBIBYTES] * 3), f"{EXBIBYTES} bytes for"),
    ],
)
def test_a_standby_believes_no_update_that_a_server_cannot_have_made(
    length: int | None, text: bytes, says: str
) -> None:
    settings = completed(Training(strategy="parameter_server", task="convex"), task("convex"), 1)

    async def give(group: Group) -> None:
        sent = [group.send(np.array([len(text) if length is None else length], np.int64), 1)]
        sent += [group.send(np.frombuffer(text, np.uint8), 1)] if text else []
        for each in sent:
            await each

    async def take(group: Group) -> None:
        learner = Learner(group.host, task("convex"), optimizer(settings), 1)
        keeper = ServerReplica(learner, optimizer(settings))
        keeper.state = ServerState()
        before = learner.replica.parameters.copy()  # type: ignore[union-attr]
        try:
            await standby.follow(group, keeper, GradientCodec(learner.layout, make("int8+ef", seed=1, rank=0)), None)
        finally:
            assert np.array_equal(learner.replica.parameters, before)  # type: ignore[arg-type]

    assert says in str(failure(give, take))


def test_settings_that_do_not_have_their_digest_end_the_view_and_blame_nobody() -> None:
    view = View("line", 1, tuple(Member(name, 1, name, f"{name}:1") for name in ("a", "b")))

    async def program(group: Group) -> None:
        await same_intent(group, b"{}", [1, 2], 0, view)

    for found in simulate(ideal(2, ()).scenario, program).results:
        assert isinstance(found, CollectiveError)
        assert "the settings of a did not arrive as it has them" in str(found)
        assert found.peer is None


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (ViewStart(-5, 0, 0), "version -5"),
        (ViewStart(3, -1, 0), "version 3"),
        (ViewStart(3, 12, 1 << 57), f"step {1 << 57} of 10"),
        (-739186029798312757, "port -739186029798312757"),
        (65536, "port 65536"),
    ],
)
def test_nobody_goes_where_no_server_can_be(told: ViewStart | int, says: str) -> None:
    async def agreed(group: Group) -> None:
        if isinstance(told, ViewStart):
            await standby.agreed_start(group, told if group.rank == 0 else ViewStart(), 10)
        else:
            await standby.agreed_port(group, told if group.rank == 0 else 0)

    async def give(group: Group) -> None:
        with pytest.raises(CollectiveError):
            await agreed(group)

    error = failure(give, agreed)
    assert says in str(error)
    assert isinstance(error.__cause__, RemoteProtocolError)
