"""A parameter server behind an HTTPS tunnel: nginx has the certificate, and workers come through it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hcsim import Group, real_group
from hcsim.config import Cluster, Training
from hcsim.errors import AdmissionRefused, ChannelError, DeadlineExceeded, HcsimError
from hcsim.identity.keys import SECRET_BYTES, ClusterSecret, NodeKey
from hcsim.launch.real import RealNode, train_in_cluster
from hcsim.node import ClusterJob
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.keys import credentials, new_secret, save_secret
from hcsim.real.tls import ClusterTls
from hcsim.training.parameter_server.messages import ANSWERS, QUESTIONS, Join, MessageConnection, RequestRefused
from hcsim.training.run import Point, Report, Run
from hcsim.training.tasks import task
from hcsim.training.trainer import train
from hcsim.transport.admission import AdmittedHost
from hcsim.units import PositiveSeconds
from tests.conftest import free_addresses
from tests.real.nginx import Nginx, needs_nginx

pytestmark = [pytest.mark.slow, needs_nginx]
SEED = 9
PATIENT = "parameter_server:grace_s=20"
"""A worker whose connection is lost is waited for: what is learned does not depend on how soon it is back."""
SETTINGS = Training(
    task="convex", strategy=PATIENT, compressor="topk:0.1+ef", steps=50, batch=8, timeout_s=PositiveSeconds(20)
)
GUARD_S = 40.0


class Behind:
    """A job whose server is behind nginx, and what is done meanwhile."""

    def __init__(self, folder: Path) -> None:
        public, here = (int(address.rpartition(":")[2]) for address in free_addresses(2))
        self.nginx = Nginx(folder, public, here)
        self.settings = replace(SETTINGS, server=f"{self.nginx.address}/ps", listen=f"ws://127.0.0.1:{here}/ps")

    def train(self, at_step: Callable[[int], Awaitable[None]] | None = None) -> list[Any]:
        """By rank, how a training with three ranks ended; `at_step` is called after each of the first rank's."""
        return asyncio.run(self._train(at_step))

    async def _train(self, at_step: Callable[[int], Awaitable[None]] | None) -> list[Any]:
        peers = free_addresses(3)
        onlooker = Onlooker(at_step)

        async def on_rank(rank: int) -> Report:
            async with real_group(rank, peers) as group:
                return await train(group, self.settings, SEED, onlooker if rank == 0 else None)

        async with asyncio.timeout(GUARD_S), self.nginx:
            reports = await asyncio.gather(*map(on_rank, range(3)), return_exceptions=True)
            await asyncio.gather(*onlooker.doing)
            return reports


class Onlooker:
    def __init__(self, at_step: Callable[[int], Awaitable[None]] | None) -> None:
        self._at_step = at_step
        self._lock = asyncio.Lock()
        self.doing: list[asyncio.Future[None]] = []

    def point(self, rank: int, point: Point) -> None:
        if self._at_step is not None:
            self.doing.append(asyncio.ensure_future(self._do(point.step)))

    def finished(self, run: Run) -> None:
        """What was done is awaited by whoever asked for it."""

    async def _do(self, step: int) -> None:
        assert self._at_step is not None
        async with self._lock:
            await self._at_step(step)


@pytest.fixture
def behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Behind:
    """nginx's certificate is of an authority that this machine trusts, as it does public ones."""
    found = Behind(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(found.nginx.authority))
    return found


def digest_over_tcp(virtual: Any) -> str:
    async def program(group: Group) -> Report:
        return await train(group, SETTINGS, SEED)

    (only,) = {report.sha256 for report in virtual.run(3, program)}
    return only


def digests(reports: list[Any]) -> set[str]:
    failed = [report for report in reports if isinstance(report, BaseException)]
    assert not failed, failed
    return {report.sha256 for report in reports}


def test_training_through_the_tunnel_ends_as_over_tcp(behind: Behind, virtual: Any) -> None:
    assert digests(behind.train()) == {digest_over_tcp(virtual)}
    assert behind.nginx.calls() == [101, 101]  # the worker beside the server goes there directly


def test_a_tunnel_that_is_cut_and_restored_changes_nothing_of_what_is_learned(behind: Behind, virtual: Any) -> None:
    """Error feedback would show a push that counted twice, or that was lost, in every later step."""

    cuts: list[int] = []

    async def cut(step: int) -> None:
        if step in (3, 18, 33):
            await behind.nginx.stop()
            await asyncio.sleep(0.1)  # callers find nobody there
            await behind.nginx.start()
            cuts.append(step)

    assert digests(behind.train(cut)) == {digest_over_tcp(virtual)}
    assert cuts == [3, 18, 33]


def test_a_stranger_who_finds_the_tunnel_is_not_taken_for_a_rank(behind: Behind, virtual: Any) -> None:
    """It knows the protocol, the task and a rank's name; but not the number that the group was told."""
    heard: list[Any] = []

    async def call(step: int) -> None:
        if step != 2:
            return
        async with RealHost(RealOptions("stranger")) as host:
            assert behind.settings.server is not None
            line = MessageConnection(
                await host.connect(behind.settings.server), host.clock, QUESTIONS, ANSWERS, silence_s=5.0
            )
            await line.send(Join("epoch 0", "00001", 1, task("convex").fingerprint))
            heard.append(await line.recv(5.0))
            await line.close()

    assert digests(behind.train(call)) == {digest_over_tcp(virtual)}
    assert [type(each) for each in heard] == [RequestRefused]
    assert "'epoch 0'" in heard[0].reason  # what it said itself, and not what it should have said
    assert "epoch 0 " not in heard[0].reason


def test_a_certificate_that_this_machine_does_not_trust_ends_the_worker(
    behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    impatient = "parameter_server:grace_s=0.1,linger_s=0.1"
    behind.settings = replace(behind.settings, strategy=impatient, steps=2, timeout_s=PositiveSeconds(2))
    _, one, other = behind.train()
    for failed in (one, other):
        assert isinstance(failed, HcsimError)
        assert "certificate" in str(failed)


# In a cluster, whose members have keys and prove who they are.


def test_members_of_a_cluster_prove_themselves_through_the_tunnel(behind: Behind, tmp_path: Path) -> None:
    refused: list[BaseException] = []

    async def strangers(step: int) -> None:
        """One without the cluster's secret, and one without anything."""
        if step != 2:
            return
        key, other = NodeKey(bytes(range(32))), ClusterSecret(bytes(SECRET_BYTES))
        async with RealHost(RealOptions("stranger", tls=ClusterTls(key, other))) as host:
            assert behind.settings.server is not None
            with pytest.raises(AdmissionRefused) as caught:
                await AdmittedHost(host, credentials(key, other)).connect(behind.settings.server)
            refused.append(caught.value)
            line = MessageConnection(
                await host.connect(behind.settings.server), host.clock, QUESTIONS, ANSWERS, silence_s=5.0
            )
            await line.send(Join("elastic", "a", 1, task("convex").fingerprint))
            with pytest.raises((ChannelError, DeadlineExceeded)) as hung_up:
                await line.recv(5.0)
            refused.append(hung_up.value)
            await line.close()

    reports = in_a_cluster(behind, tmp_path, [Onlooker(strangers), None, None])
    assert len(digests(reports)) == 1
    assert {report.steps for report in reports} == {SETTINGS.steps}
    assert len(refused) == 2
    assert behind.nginx.calls().count(101) >= 2


def test_the_next_server_is_reached_through_the_same_tunnel(behind: Behind, tmp_path: Path) -> None:
    """The machine with the server leaves; the next one listens at the same address of its own."""
    leaving = [asyncio.Event() for _ in range(3)]
    reports = in_a_cluster(behind, tmp_path, [Leaver(event, 10) for event in leaving], leaving)
    (left,) = [report for report in reports if report.steps < SETTINGS.steps]
    stayed = [report for report in reports if report is not left]
    assert left.steps >= 10
    assert len(digests(stayed)) == 1
    assert {report.steps for report in stayed} == {SETTINGS.steps}


class Leaver:
    """Leaves after that step, if it is the server then."""

    def __init__(self, event: asyncio.Event, step: int) -> None:
        self._event = event
        self._step = step

    def point(self, rank: int, point: Point) -> None:
        if rank == 0 and point.step == self._step:
            self._event.set()

    def finished(self, run: Run) -> None:
        """Nothing is left to do."""


def in_a_cluster(
    behind: Behind, folder: Path, observers: list[Any], leaving: list[asyncio.Event] | None = None
) -> list[Any]:
    """Train on three real nodes that find each other by their addresses; by node, how it ended."""
    secret = new_secret()
    control, data = free_addresses(3), free_addresses(3)

    async def on_node(number: int) -> Report:
        home = folder / f"node-{number}"
        home.mkdir()
        save_secret(home, "home", secret)
        cluster = Cluster(
            nodes=3,
            discover=False,
            peers=tuple(control),
            discovery_port=_port(control[number]),
            gradient_port=_port(data[number]),
            preset="low_latency",
        )
        node = RealNode(home, name=f"node-{number}", hosts=("127.0.0.1",))
        event = None if leaving is None else leaving[number]
        return await train_in_cluster(
            node, ClusterJob(cluster, behind.settings, SEED), observer=observers[number], leaving=event
        )

    async def main() -> list[Any]:
        async with asyncio.timeout(GUARD_S), behind.nginx:
            reports = await asyncio.gather(*map(on_node, range(3)), return_exceptions=True)
            for onlooker in observers:
                if isinstance(onlooker, Onlooker):
                    await asyncio.gather(*onlooker.doing)
            return reports

    return asyncio.run(main())


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
