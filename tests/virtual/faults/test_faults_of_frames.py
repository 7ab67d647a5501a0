"""Frames that arrive other than they were sent: one each, and then never again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hcsim.config import FlippedBit, Restart, StaleStep, WrongSize
from hcsim.runtime.channel import Payload, Phantom
from hcsim.runtime.frame import Header, Kind
from hcsim.virtual.world import World
from tests.virtual.faults.arena import connected, until, world_with


def exchange(world: World, frames: list[tuple[Header, Payload]], *, between: tuple[str, str] = ("a", "b")) -> list[Any]:
    """Send the frames from 1 s on, a second apart; what arrives."""

    async def main() -> list[Any]:
        near, far = await connected(world, *between)
        arrived = []
        for at_s, (header, payload) in enumerate(frames, start=1):
            await until(at_s)
            await near.send(header, payload)
            arrived.append(await far.recv(lambda _: None))
        assert near.streams[0].outstanding == 0
        return arrived

    return world.run(main())


def numbers(count: int, **header: Any) -> tuple[Header, memoryview]:
    data = np.arange(count, dtype=np.float32).data.cast("B")
    return Header(len(data), **header), data


def differing_bits(one: Payload, other: Payload) -> int:
    pair = np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)
    return int(np.unpackbits(pair).sum())


def test_one_bit_of_one_payload_is_flipped_on_the_way():
    frames = [numbers(1000, step=step) for step in range(4)]
    arrived = exchange(world_with(FlippedBit(at_s=1.5, between=("a", "b"))), frames)
    assert [header for header, _ in arrived] == [header for header, _ in frames]
    assert [differing_bits(payload, sent) for (_, payload), (_, sent) in zip(arrived, frames, strict=True)] == [
        0,
        1,
        0,
        0,
    ]


def test_another_seed_flips_another_bit_and_two_faults_two_of_them():
    fault = FlippedBit(at_s=0.5, between=("a", "b"))
    one, again = (bytes(exchange(world_with(fault), [numbers(1000)])[0][1]) for _ in range(2))
    assert one == again
    both = exchange(world_with(fault, FlippedBit(at_s=0.6, between=("a", "b"))), [numbers(1000)] * 3)
    assert [differing_bits(payload, numbers(1000)[1]) for _, payload in both] == [1, 1, 0]
    assert bytes(both[0][1]) == one  # the other fault changed nothing about this one


@pytest.mark.parametrize(("of", "struck"), [("data", 3), ("control", 1), ("any", 1)])
def test_a_bit_is_flipped_where_there_is_one_and_in_the_frames_that_are_meant(of, struck):
    frames = [
        (Header(0), memoryview(b"")),
        numbers(10, kind=Kind.CONTROL),
        (Header(40), Phantom(40)),
        numbers(10),
    ]
    arrived = exchange(world_with(FlippedBit(at_s=0.5, between=("a", "b"), of=of)), frames)
    assert arrived[2][1] == Phantom(40)
    found = [differing_bits(arrived[i][1], frames[i][1]) for i in (0, 1, 3)]
    assert found == [int(i == struck) for i in (0, 1, 3)]


def test_the_other_direction_and_other_peers_are_untouched():
    fault = FlippedBit(at_s=0.5, between=("a", "b"), of="any")
    for between in (("b", "a"), ("a", "c"), ("c", "b")):
        [(_, payload)] = exchange(world_with(fault), [numbers(1000)], between=between)
        assert differing_bits(payload, numbers(1000)[1]) == 0


def test_a_fault_waits_for_a_connection_of_a_later_life():
    world = world_with(FlippedBit(at_s=0.5, between=("a", "b")), Restart(at_s=0.6, node="a", down_s=0.1))

    async def main() -> int:
        await connected(world)
        await until(1.0)
        near, far = await connected(world)
        header, sent = numbers(100)
        await near.send(header, sent)
        return differing_bits((await far.recv(lambda _: None))[1], sent)

    assert world.run(main()) == 1


@pytest.mark.parametrize("longer", [True, False])
@pytest.mark.parametrize("phantom", [True, False])
def test_a_segment_of_the_wrong_size_says_so_in_its_header(longer, phantom):
    sent = numbers(1000, total=8000, offset=4000)
    if phantom:
        sent = (sent[0], Phantom(4000))
    fault = WrongSize(at_s=1.5, between=("a", "b"), by_bytes=8, longer=longer)
    right, wrong, after = exchange(world_with(fault), [sent] * 3)
    assert right[0] == after[0] == sent[0]
    assert wrong[0].length == wrong[1].nbytes == (4008 if longer else 3992)
    assert wrong[0].total == (8008 if longer else 8000)
    if not phantom:
        assert bytes(wrong[1])[:3992] == bytes(sent[1])[:3992]


def test_a_frame_too_short_to_be_shortened_is_left_alone():
    frames = [numbers(0), numbers(10, kind=Kind.CONTROL), numbers(1), numbers(3)]
    arrived = exchange(world_with(WrongSize(at_s=0.5, between=("a", "b"), by_bytes=8)), frames)
    assert [header.length for header, _ in arrived] == [0, 40, 4, 4]


def test_a_segment_of_an_earlier_step_comes_again_in_the_place_of_a_later_one():
    frames = [numbers(10 + step, operation=step // 2, step=step % 2) for step in range(6)]
    arrived = exchange(world_with(StaleStep(at_s=2.5, between=("a", "b"))), frames)
    assert [(header.operation, header.step) for header, _ in arrived] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 0),
        (2, 0),
        (2, 1),
    ]
    assert bytes(arrived[3][1]) == bytes(frames[2][1])
