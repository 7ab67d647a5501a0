"""An address that leads to another machine than was believed, or to the caller itself, is not used."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from operator import eq, ne
from pathlib import Path

import pytest

from hcsim.errors import DeadlineExceeded, PeerRefused, WrongPeer
from hcsim.identity.keys import ClusterSecret, NodeKey
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.keys import load_node_key
from hcsim.real.tls import ClusterTls
from hcsim.runtime.channel import Listener
from tests.real.namespaces import Machine, ip
from tests.real.together import digest, together

SECRET = ClusterSecret(bytes(range(16)))
US, PEER, OTHER = (NodeKey(bytes([number]) * 32) for number in (1, 2, 3))


def member(key: NodeKey) -> RealHost:
    return RealHost(RealOptions(key.node_id[:8], tls=ClusterTls(key, SECRET), shared_memory=False))


async def note(listener: Listener, callers: asyncio.Queue[str]) -> None:
    """Note who calls."""
    while True:
        channel = await listener.accept()
        callers.put_nowait(channel.identity)
        await channel.close()


def with_hosts(body: Callable[[RealHost, RealHost, RealHost], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), member(US) as us, member(PEER) as peer, member(OTHER) as other:
            await body(us, peer, other)

    asyncio.run(main())


@pytest.mark.parametrize("wrong", ["us", "other"])
def test_an_address_that_leads_elsewhere_is_left_out_and_not_tried_again(wrong: str) -> None:
    async def body(us: RealHost, peer: RealHost, other: RealHost) -> None:
        right_listener = await peer.listen("127.0.0.1:0")
        port = right_listener.address.rpartition(":")[2]
        wrong_listener = await (us if wrong == "us" else other).listen(f"[::1]:{port}")
        callers: asyncio.Queue[str] = asyncio.Queue()
        us.spawn(note(wrong_listener, callers), name="note callers")
        for _ in range(3):
            channel = await us.connect(f"[::1]|127.0.0.1:{port}", timeout_s=10, is_peer=partial(eq, PEER.node_id))
            assert channel.identity == PEER.node_id
            accepted = await right_listener.accept()
            assert accepted.identity == US.node_id
            await accepted.close()
            await channel.close()
        assert await callers.get() == US.node_id
        assert callers.empty()

    with_hosts(body)


def test_a_node_that_only_meets_itself_is_told_at_once() -> None:
    async def body(us: RealHost, peer: RealHost, other: RealHost) -> None:
        listener = await us.listen("127.0.0.1:0")
        for is_peer in (partial(eq, PEER.node_id), partial(ne, US.node_id)):
            with pytest.raises(WrongPeer) as wrong:
                await us.connect(listener.address, timeout_s=600, is_peer=is_peer)
            assert wrong.value.identity == US.node_id
        await (await us.connect(listener.address, timeout_s=10)).close()  # it may want to meet itself

    with_hosts(body)


def test_an_address_that_led_elsewhere_is_tried_again_once_no_other_answers() -> None:
    async def body(us: RealHost, peer: RealHost, other: RealHost) -> None:
        first = await peer.listen("127.0.0.1:0")
        port = first.address.rpartition(":")[2]
        wrong = await other.listen(f"[::1]:{port}")
        address, is_peer = f"[::1]|127.0.0.1:{port}", partial(eq, PEER.node_id)
        await (await us.connect(address, timeout_s=10, is_peer=is_peer)).close()
        await first.close()
        await wrong.close()
        second = await peer.listen(f"[::1]:{port}")
        with pytest.raises((DeadlineExceeded, PeerRefused)):
            await us.connect(address, timeout_s=0.5, is_peer=is_peer)
        channel = await us.connect(address, timeout_s=10, is_peer=is_peer)
        assert channel.peer == second.address
        await channel.close()

    with_hosts(body)


def test_addresses_that_were_exchanged_are_both_tried_again() -> None:
    async def body(us: RealHost, peer: RealHost, other: RealHost) -> None:
        right = await peer.listen("127.0.0.1:0")
        port = right.address.rpartition(":")[2]
        wrong = await other.listen(f"[::1]:{port}")
        address, is_peer = f"[::1]|127.0.0.1:{port}", partial(eq, PEER.node_id)
        await (await us.connect(address, timeout_s=10, is_peer=is_peer)).close()
        for listener in (right, wrong):
            await listener.close()
        right, wrong = await peer.listen(f"[::1]:{port}"), await other.listen(f"127.0.0.1:{port}")
        with pytest.raises(WrongPeer):
            await us.connect(address, timeout_s=10, is_peer=is_peer)
        channel = await us.connect(address, timeout_s=10, is_peer=is_peer)
        assert channel.identity == PEER.node_id
        await channel.close()

    with_hosts(body)


# Machines that all have the address of their virtual machines' network, and tell each other so.

OF_VIRTUAL_MACHINES = "192.168.64.1"


def add_virtual_network(machine: Machine) -> None:
    ip("-n", machine.namespace, "link", "add", "bridge100", "type", "bridge")
    ip("-n", machine.namespace, "addr", "add", f"{OF_VIRTUAL_MACHINES}/24", "dev", "bridge100")
    ip("-n", machine.namespace, "link", "set", "bridge100", "up")


@pytest.mark.slow
def test_members_that_have_an_address_in_common_train_over_another(tmp_path: Path) -> None:
    with together(tmp_path, "ab") as cluster:
        for machine in cluster.lan:
            add_virtual_network(machine)
        job = cluster.write(2, 30)
        both = []
        for machine in cluster.lan:
            at = f"at=[{OF_VIRTUAL_MACHINES},{machine.ip}]"
            words = ("--set", f"name={machine.name}", "--set", "device=cpu", "--set", at)
            both.append(machine.hcsim("run", "--real", str(job), *words))
        assert [process.ends() for process in both] == [0, 0], [process.text for process in both]
        assert digest(both[0]) == digest(both[1])
        for process in both:
            assert "was not reached" not in process.text, process.text
            assert "was lost" not in process.text, process.text


@pytest.mark.slow
def test_a_network_of_virtual_machines_is_not_announced(tmp_path: Path) -> None:
    with together(tmp_path, "ab") as cluster:
        for machine in cluster.lan:
            add_virtual_network(machine)
        cluster.write(2, 100_000)
        one, _ = cluster.start("a", "b")
        one.says("training begins")
        status = cluster.lan["b"].hcsim("cluster", "status", "--peer", cluster.lan["a"].ip, "--look", "10 ms")
        assert status.ends() == 0, status.text
        assert cluster.lan["b"].ip in status.text
        assert OF_VIRTUAL_MACHINES not in status.text


# Addresses that mean something else on each cable.

LINK_LOCAL = "169.254.2.2"
LISTEN = """if True:
    import asyncio, sys
    from pathlib import Path
    from hcsim.real.host import RealHost, RealOptions
    from hcsim.real.keys import load_node_key, load_secret
    from hcsim.real.tls import ClusterTls

    async def main(home):
        tls = ClusterTls(load_node_key(home), load_secret(home, "home"))
        async with RealHost(RealOptions("here", tls=tls)) as host:
            listener = await host.listen("0.0.0.0:52416")
            print("listens", flush=True)
            while True:
                await (await listener.accept()).close()

    asyncio.run(main(Path(sys.argv[1])))
"""
DIAL = """if True:
    import asyncio, sys
    from pathlib import Path
    from hcsim.real.host import RealHost, RealOptions
    from hcsim.real.keys import load_node_key, load_secret
    from hcsim.real.tls import ClusterTls

    async def main(home, address, wanted):
        tls = ClusterTls(load_node_key(home), load_secret(home, "home"))
        async with RealHost(RealOptions("here", tls=tls)) as host:
            is_peer = wanted.__eq__ if wanted else None
            channel = await host.connect(address, timeout_s=30, is_peer=is_peer)
            print("reached", channel.identity, "from", channel.ends[0])
            await channel.close()

    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
"""


def give(machine: Machine, device: str, address: str) -> None:
    """An IPv6 address counts at once, rather than when nobody else turned out to have it."""
    at_once = ["nodad"] if ":" in address else []
    ip("-n", machine.namespace, "addr", "add", address, "dev", device, *at_once)


@pytest.mark.slow
@pytest.mark.parametrize("version", [4, 6])
def test_a_link_local_address_is_dialled_by_every_interface_that_has_one(tmp_path: Path, version: int) -> None:
    """The route leads to a machine on the switch; the wanted one has the same address, on a cable."""
    with together(tmp_path, "abc") as cluster:
        a, b, c = cluster.lan
        ip("-n", a.namespace, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", b.namespace)
        for machine in (a, b):
            ip("-n", machine.namespace, "link", "set", "eth1", "up")
        first, second, host = ("169.254.1.1/16", "169.254.2.1/16", LINK_LOCAL)
        if version == 6:
            first, second, host = ("fe80::1:1/64", "fe80::2:1/64", "fe80::2:2")
        give(a, "eth0", first)
        give(a, "eth1", second)
        length = first.partition("/")[2]
        give(b, "eth1", f"{host}/{length}")
        give(c, "eth0", f"{host}/{length}")
        if version == 4:
            a.start("sysctl", "-w", "net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.eth1.rp_filter=0").ends()
        for machine in (b, c):
            everywhere = LISTEN if version == 4 else LISTEN.replace("0.0.0.0", "[::]")
            machine.start(sys.executable, "-c", everywhere, str(machine.folder)).says("listens")
        address = f"{host}:52416" if version == 4 else f"[{host}]:52416"
        for wanted, source in ((b, second), (c, first)):
            node = load_node_key(wanted.folder).node_id
            dialling = a.start(sys.executable, "-c", DIAL, str(a.folder), address, node)
            assert dialling.ends() == 0, dialling.text
            assert dialling.lines[-1] == f"reached {node} from {source.partition('/')[0]}"
