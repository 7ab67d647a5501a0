"""What is between machines: each joins a group with the others for a moment, over their network.

The machine that asks starts the others through ssh, and sends them, by that connection, a secret that exists for this
run alone. Each answers with its address, receives those of all, and does every collective with the others, over TLS
and admitted as members of a cluster are. A machine ends when its input ends, or when its time is over.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from hcsim.collectives.group import Group
from hcsim.collectives.select import Options
from hcsim.doctor import why_no_report
from hcsim.errors import ConfigError, HcsimError
from hcsim.identity.keys import SECRET_BYTES, SEED_BYTES, ClusterSecret, NodeKey
from hcsim.real.host import RealHost, RealOptions
from hcsim.real.interfaces import reachable_at
from hcsim.real.keys import credentials
from hcsim.real.ssh import start_ssh, text_lines
from hcsim.real.tls import ClusterTls
from hcsim.runtime.address import address_at
from hcsim.selftest.arena import VirtualArena
from hcsim.selftest.collectives import SEGMENT_BYTES, Digests, digests_of, every_collective
from hcsim.selftest.contracts import ContractBroken, require
from hcsim.selftest.runner import SelftestReport, SelftestResult, anonymous
from hcsim.transport.admission import AdmittedHost
from hcsim.transport.groups import GroupMembership, Wire

NAME = "between"
LIMIT_S = 90.0
_MARK = "hcsim selftest: "
"""Before each line that is meant for the machine that asks: shells say other things too."""
_REMEDY = "let this Python through both firewalls (hcsim doctor); one network, without client isolation"
_TIMEOUT_S = 30.0


class GroupInvitation(msgspec.Struct, frozen=True):
    """What a machine is told first."""

    secret: str
    """In hexadecimal digits."""
    rank: int
    world: int


class GroupResult(msgspec.Struct, frozen=True):
    """What it tells at the end."""

    digests: Digests
    rates_Bps: tuple[float, ...]
    latencies_s: tuple[float, ...]
    """To each rank."""
    error: str = ""


async def take_part(
    invited: GroupInvitation, tell: Callable[[str], Awaitable[None]], others: Callable[[], Awaitable[Sequence[str]]]
) -> GroupResult:
    """Listen, tell the address, learn those of all, and do every collective with them."""
    key, secret = NodeKey(os.urandom(SEED_BYTES)), ClusterSecret(bytes.fromhex(invited.secret))
    options = RealOptions(f"rank {invited.rank}", seed=secrets.randbits(64), tls=ClusterTls(key, secret))
    async with asyncio.timeout(LIMIT_S), RealHost(options) as host:
        inside = AdmittedHost(host, credentials(key, secret))
        hosts = reachable_at(host.interfaces())
        listener = await inside.listen(address_at(hosts, 0))
        port = int(listener.address.rpartition(":")[2])
        await tell(address_at(hosts, port))
        addresses = tuple(await others())
        us = GroupMembership(invited.rank, addresses, wire=Wire(segment_bytes=SEGMENT_BYTES))
        first, second = range(invited.world // 2), range(invited.world // 2, invited.world)
        groups = (tuple(first), tuple(second)) if invited.world >= 4 else ()
        async with await Group.open(inside, us, Options(timeout_s=_TIMEOUT_S, groups=groups), listener) as group:
            digests = await every_collective(group)
            links = await group.measure()
            await group.barrier()
        return GroupResult(digests, links.bandwidth_Bps[invited.rank], links.latency_s[invited.rank])


async def be_member() -> None:
    """Take part as the machine at the other end of standard input and output says."""

    async def tell(text: str) -> None:
        sys.stdout.write(f"{_MARK}{text}\n")
        sys.stdout.flush()

    async def addresses() -> list[str]:
        return msgspec.json.decode(await asyncio.to_thread(sys.stdin.readline), type=list[str])

    invited = msgspec.json.decode(await asyncio.to_thread(sys.stdin.readline), type=GroupInvitation)
    try:
        result = await take_part(invited, tell, addresses)
    except TimeoutError:
        result = GroupResult({}, (), (), f"did not end within {LIMIT_S:g} s")
    except HcsimError as error:
        result = GroupResult({}, (), (), str(error))
    await tell(msgspec.json.encode(result).decode())


class _Member:
    """A machine through ssh."""

    def __init__(self, host: str, process: asyncio.subprocess.Process) -> None:
        self.host = host
        self._process = process
        self._said: list[str] = []

    async def send(self, what: object) -> None:
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # why it has ended is told by `receive`
            self._process.stdin.write(msgspec.json.encode(what) + b"\n")
            await self._process.stdin.drain()

    async def receive(self) -> str:
        """Return its next line for us. Raises `ContractBroken` if it ends instead."""
        async for line in text_lines(self._process.stdout):
            if line.startswith(_MARK):
                return line.removeprefix(_MARK)
            self._said.append(line)
        finding = why_no_report(self.host, await self._process.wait(), "\n".join(self._said))
        raise ContractBroken(f"{self.host}: {finding.found} → {finding.remedy}")


@asynccontextmanager
async def _started(hosts: Sequence[str], program: str) -> AsyncIterator[list[_Member]]:
    processes = []
    try:
        for host in hosts:
            process = await start_ssh(host, (program, "selftest", "--member"))
            processes.append(process)
        yield [_Member(host, process) for host, process in zip(hosts, processes, strict=True)]
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
        await asyncio.gather(*(process.wait() for process in processes))


async def check_between(hosts: Sequence[str], program: str) -> list[SelftestResult]:
    """Do every collective with these machines; the results."""
    clock = asyncio.get_running_loop().time
    began_s, world = clock(), 1 + len(hosts)
    try:
        async with asyncio.timeout(LIMIT_S):
            results = await _together(hosts, program, world)
    except TimeoutError:
        return [SelftestResult(NAME, "bad", f"did not end within {LIMIT_S:g} s", _REMEDY, seconds=LIMIT_S)]
    except HcsimError as error:
        return [SelftestResult(NAME, "bad", anonymous(str(error)), _REMEDY, seconds=round(clock() - began_s, 2))]
    took_s = round(clock() - began_s, 2)
    expected = await asyncio.to_thread(digests_of, VirtualArena([f"rank{rank}" for rank in range(world)]), world)
    wrong = [
        f"{name} on {('this machine', *hosts)[rank]}"
        for rank, (result, right) in enumerate(zip(results, expected, strict=True))
        for name, digest in right.items()
        if result.digests.get(name) != digest
    ]
    if wrong:
        what = f"other bits than simulated: {', '.join(wrong)}"
        return [SelftestResult(NAME, "bad", what, _REMEDY, seconds=took_s)]
    what = f"{len(expected[0])} collectives of {world} machines have the simulated bits, over TLS"
    found = [SelftestResult(NAME, "good", what, seconds=took_s)]
    for rank, host in enumerate(hosts, 1):
        there, back = results[0], results[rank]
        rates = f"{8e-9 * there.rates_Bps[rank]:.2g} Gb/s there, {8e-9 * back.rates_Bps[0]:.2g} back"
        what = f"{host}: {rates}, {1000 * there.latencies_s[rank]:.2g} ms"
        found.append(SelftestResult(NAME, "good", what, seconds=0.0))
    return found


async def _together(hosts: Sequence[str], program: str, world: int) -> list[GroupResult]:
    secret = secrets.token_bytes(SECRET_BYTES).hex()
    async with _started(hosts, program) as members:
        for rank, member in enumerate(members, 1):
            await member.send(GroupInvitation(secret, rank, world))
        ours: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def tell(address: str) -> None:
            ours.set_result(address)

        async def addresses() -> list[str]:
            theirs = await asyncio.gather(*(member.receive() for member in members))
            everyones = [await ours, *theirs]
            for member in members:
                await member.send(everyones)
            return everyones

        first = await take_part(GroupInvitation(secret, 0, world), tell, addresses)
        results = [first]
        for member in members:
            said = await member.receive()
            try:
                result = msgspec.json.decode(said, type=GroupResult)
            except msgspec.MsgspecError:
                raise HcsimError(f"{member.host} runs another version of hcsim: it answered {said[:80]!r}") from None
            require(not result.error, f"{member.host}: {result.error}")
            results.append(result)
        return results


async def check_host(
    host: str, program: str, names: Sequence[str], tell: Callable[[str], None], limit_s: float
) -> SelftestReport | SelftestResult:
    """Have another machine test itself; its report, or why there is none."""
    try:
        command = (program, "selftest", "--json", *names)
        process = await start_ssh(host, command, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE)
    except ConfigError as error:
        return SelftestResult(host, "bad", str(error), "install OpenSSH", seconds=0.0)
    said: list[str] = []

    async def follow() -> None:
        async for line in text_lines(process.stderr):
            said.append(line)
            tell(f"{host}: {line}")

    following = asyncio.create_task(follow(), name=f"what {host} says")
    try:
        async with asyncio.timeout(limit_s):
            assert process.stdout is not None
            output = (await process.stdout.read()).decode(errors="replace")
            await following
            status = await process.wait()
    except TimeoutError:
        what = f"did not end within {limit_s:g} s"
        return SelftestResult(host, "bad", what, f"ssh {host} hcsim selftest", seconds=limit_s)
    finally:
        following.cancel()
        if process.returncode is None:
            process.terminate()
            await process.wait()
    try:
        return msgspec.json.decode(output[output.index("{") : output.rindex("}") + 1], type=SelftestReport)
    except (ValueError, msgspec.MsgspecError):
        finding = why_no_report(host, status, "\n".join(said) or output)
        return SelftestResult(host, "bad", finding.found, finding.remedy, seconds=0.0)
