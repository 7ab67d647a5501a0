"""A device that takes the time of another machine."""

from __future__ import annotations

import asyncio
import time

import pytest

from experiments.peers.crew import free_ports
from hcsim import real_group, simulate_training
from hcsim.config import Attachment, Ethernet, Machine, Node, Scenario, Training
from hcsim.config.check import complete
from hcsim.errors import ConfigError
from hcsim.real.hardware import SleepingDevice, check_device
from hcsim.real.host import RealHost, RealOptions
from hcsim.runtime.host import Work
from hcsim.training.run import Report
from hcsim.training.trainer import train
from hcsim.units import BitRate, ByteRate, FlopRate, PositiveShare, Seconds

WHOLE = PositiveShare(1.0)
MACHINE = Machine("slow", FlopRate(1e6), ByteRate(1e9), efficiency_compute=WHOLE, overhead_s=Seconds(0))


def test_work_takes_no_less_than_on_the_machine() -> None:
    async def main() -> None:
        device = SleepingDevice(MACHINE)
        began_s = time.monotonic()
        results = await asyncio.gather(*(device.run(Work(10_000.0), lambda n=n: n) for n in range(3)))
        assert results == [0, 1, 2]
        assert time.monotonic() - began_s >= 0.03
        device.close()

    asyncio.run(main())


def test_that_this_machine_is_slower_is_told_once() -> None:
    told: list[str] = []

    async def main() -> None:
        device = SleepingDevice(MACHINE, told.append)
        await device.run(Work(100_000.0), lambda: None)
        await device.run(Work(kernels=0), lambda: time.sleep(0.01))  # which is not modelled
        assert told == []
        for _ in range(2):
            await device.run(Work(10.0), lambda: time.sleep(0.01))
        device.close()

    asyncio.run(main())
    assert len(told) == 1
    assert told[0].startswith("device sleep:slow: this machine is slower: work of 0.01 ms there takes ")


def test_it_has_the_name_and_the_chip_of_the_machine_and_computes_here() -> None:
    async def main() -> None:
        async with RealHost(RealOptions("a", device="sleep:M4")) as host:
            assert (host.device.name, host.device.chip.name, host.device.torch_name) == ("sleep:M4", "M4", "cpu")
            assert host.device.exercise("matmul", 1 << 20)() is None

    asyncio.run(main())


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'device "sleep:M44": there is no machine "M44" \(did you mean M4\?\)'):
        check_device("sleep:M44")


@pytest.mark.parametrize("task", ["convex", "resnet50"])
def test_a_training_ends_with_the_bits_and_bytes_of_the_simulated_one(task: str) -> None:
    """ResNet-50 has no data, so that only bytes are alike."""
    switch = Ethernet("switch", BitRate(1e9))
    nodes = tuple(Node(name, "M4", "home", (Attachment("switch"),)) for name in "ab")
    settings = Training(task=task, steps=2, strategy="ddp" if task == "convex" else "local_sgd:2")
    simulated = simulate_training(complete(Scenario("two", nodes, media=(switch,), seed=3)), settings).values()
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]

    async def rank(number: int) -> Report:
        async with real_group(number, addresses, device="sleep:M4") as group:
            return await train(group, settings, 3)

    async def main() -> list[Report]:
        return await asyncio.gather(rank(0), rank(1))

    real = asyncio.run(main())
    assert [report.sha256 for report in real] == [report.sha256 for report in simulated]
    assert [report.sent_bytes for report in real] == [report.sent_bytes for report in simulated]
