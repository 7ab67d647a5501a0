"""How fast the simulator is on one core, beside bare SimPy doing the same, in one run.

    python -m experiments.speed --only messages --json speed.json

The bare programs are written as one would write them for SimPy: a process for each message that
waits for the link, lets the bytes and the latency pass, and puts the message into the `Store`
that the receiver gets from. They have none of what hcsim adds: tasks that can be cancelled,
framing, back-pressure, fair sharing, a trace with its hash. hcsim and SimPy take turns, and so do
the cases; each figure is a median over the turns, so that noise hits all alike. `ratio` is hcsim's
rate over SimPy's: above one, hcsim is faster.

A rank sends as many messages in each turn of an all-reduce case, among however many ranks: few do more all-reduces.
So what a rank's start costs weighs the same in all of them.

How much more a message costs among many ranks than among few is measured apart: the many stop now and then, and the
few take a turn. On a machine whose speed changes from one second to the next both then had the same seconds.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from time import perf_counter
from typing import Annotated, Any

import msgspec
import simpy
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments import asked
from hcsim.collectives.group import Group
from hcsim.config import Attachment, Ethernet, Node, Scenario, idealised
from hcsim.runtime.channel import Payload, Phantom
from hcsim.runtime.frame import Header
from hcsim.transport.groups import GroupMembership
from hcsim.units import BitRate, Seconds
from hcsim.virtual.host import VirtualHost
from hcsim.virtual.loop import VirtualLoop
from hcsim.virtual.world import World

Row = dict[str, str | int | float | None]
Process = Generator[simpy.Event, object, None]
Program = Callable[[VirtualHost, int, Sequence[str]], Coroutine[Any, Any, None]]

SLEEPERS = 100
RING = 8
LATENCY_S = 100e-6
FAST_BPS = 1e12
"""So fast that latency is all there is."""
UNLIKE_BPS = [1e9 * (1.0 + 0.37 * node) for node in range(RING)]
FLOW_BYTES = 1 << 20
TENSOR_BYTES = 8 << 20
"""Small enough that no rank's part is cut into segments: messages are the same number in both."""
LINK_BPS = 1e9
PORT = 52416
CASE_S = 60.0
FEW, SOME, MANY = 8, 64, 512
TURNS_BESIDE = 10


class Case(msgspec.Struct, frozen=True):
    """One piece of work, written for both."""

    name: str
    count: int
    """How many things of that name one turn does."""
    bare: Callable[[], None]
    ours: Callable[[], None]
    ranks: int | None = None
    messages: int | None = None
    """How many messages one turn sends, where that is another number."""


class Beside:
    """Something small that something large stops for, several times, while its clock stands still."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.took_s = 0.0
        self.stopped_s = 0.0

    def process(self, env: simpy.Environment, every: float) -> Process:
        """Lives in the large one's world."""
        for _ in range(TURNS_BESIDE):
            yield env.timeout(every)
            self.stopped_s += _duration_s(self._take_turn)

    def _take_turn(self) -> None:
        with ThreadPoolExecutor(1) as elsewhere:  # one world does not run within another
            self.took_s += elsewhere.submit(_duration_s, self._work).result()


def bare_timers(count: int) -> None:
    env = simpy.Environment()

    def sleeper(number: int) -> Process:
        for _ in range(count // SLEEPERS):
            yield env.timeout(0.001 * (number + 1))

    for number in range(SLEEPERS):
        env.process(sleeper(number))
    env.run()


def our_timers(count: int) -> None:
    async def sleeper(number: int) -> None:
        for _ in range(count // SLEEPERS):
            await asyncio.sleep(0.001 * (number + 1))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(SLEEPERS):
                group.create_task(sleeper(number))

    loop = VirtualLoop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def bare_ring(rounds: int, rates_bps: Sequence[float], size_bytes: int) -> None:
    """In each round every node sends to the next one, over its own link, and receives from the one before."""
    env = simpy.Environment()
    inboxes = [simpy.Store(env) for _ in rates_bps]
    links = [simpy.Resource(env) for _ in rates_bps]

    def message(sender: int) -> Process:
        with links[sender].request() as turn:
            yield turn
            yield env.timeout(size_bytes * 8 / rates_bps[sender])
        yield env.timeout(LATENCY_S)
        yield inboxes[(sender + 1) % len(inboxes)].put(size_bytes)

    def node(rank: int) -> Process:
        for _ in range(rounds):
            env.process(message(rank))
            yield inboxes[rank].get()

    for rank in range(len(rates_bps)):
        env.process(node(rank))
    env.run()


def bare_free_ring(rounds: int, nodes: int, delay_s: float, beside: Beside | None = None) -> None:
    """The same where no message ever waits for another, so that a link is nothing but its delay."""
    env = simpy.Environment()
    if beside is not None:
        env.process(beside.process(env, rounds * delay_s / TURNS_BESIDE))
    inboxes = [simpy.Store(env) for _ in range(nodes)]

    def message(receiver: int) -> Process:
        yield env.timeout(delay_s)
        yield inboxes[receiver].put("message")

    def node(rank: int) -> Process:
        for _ in range(rounds):
            env.process(message((rank + 1) % nodes))
            yield inboxes[rank].get()

    for rank in range(nodes):
        env.process(node(rank))
    env.run()


def our_ring(rounds: int, rates_bps: Sequence[float], payload: Payload, *, ideal: bool = True) -> None:
    """As the bare rings, through channels; not ideal, flows share with each other's acknowledgements."""
    header = Header(payload.nbytes)

    async def node(host: VirtualHost, rank: int, addresses: Sequence[str]) -> None:
        listener = await host.listen(addresses[rank])
        there = await host.connect(addresses[(rank + 1) % len(addresses)])
        back = await listener.accept()
        back.limit(payload.nbytes)
        for _ in range(rounds):
            await there.send(header, payload)
            await back.recv(_anywhere)

    run_world(rates_bps, node, ideal=ideal)


def _anywhere(_header: Header) -> None:
    return None


def our_all_reduces(count: int, ranks: int, beside: Beside | None = None) -> None:
    tensor = Phantom(TENSOR_BYTES)
    rounds, delay_s = ring_rounds(ranks)

    async def node(host: VirtualHost, rank: int, addresses: Sequence[str]) -> None:
        async with await Group.open(host, GroupMembership(rank, tuple(addresses))) as group:
            for _ in range(count):
                await group.all_reduce(tensor, algorithm="ring")

    def prepare(world: World) -> None:
        if beside is not None:
            every_ns = round(count * rounds * delay_s * 1e9 / TURNS_BESIDE)
            world.loop.env.process(beside.process(world.loop.env, every_ns))

    run_world(list(repeat(LINK_BPS, ranks)), node, prepare=prepare)


def ring_rounds(ranks: int) -> tuple[int, float]:
    """How many rounds one all-reduce takes, and how long each lasts."""
    return 2 * (ranks - 1), LATENCY_S + TENSOR_BYTES / ranks * 8 / LINK_BPS


def run_world(
    rates_bps: Sequence[float],
    node: Program,
    *,
    ideal: bool = True,
    prepare: Callable[[World], None] = lambda world: None,
) -> None:
    """Run a program on nodes with these rates; it gets its host, its rank, and where each rank listens."""
    scenario = ring_scenario(rates_bps)
    world = World(idealised(scenario) if ideal else scenario)
    prepare(world)
    ranks = {host.name: rank for rank, host in enumerate(world.hosts)}
    addresses = [f"{host.name}:{PORT}" for host in world.hosts]
    for outcome in world.run_on_all(lambda host: node(host, ranks[host.name], addresses)):
        if isinstance(outcome, BaseException):
            raise outcome


def ring_scenario(rates_bps: Sequence[float]) -> Scenario:
    """Nodes on one switch, each with its own rate."""
    switch = Ethernet("switch", BitRate(FAST_BPS), latency_s=Seconds(LATENCY_S))
    links = [Attachment("switch", BitRate(rate_bps)) for rate_bps in rates_bps]
    nodes = tuple(Node(f"node-{rank}", "ideal", switch.home, (link,)) for rank, link in enumerate(links))
    return Scenario("ring", nodes, media=(switch,))


def all_reduces(ranks: int, many: int = MANY) -> int:
    """How many all-reduces take about as many rounds as one among many does."""
    return ring_rounds(many)[0] // ring_rounds(ranks)[0]


def all_reduce_case(ranks: int) -> Case:
    """Ring all-reduces of a phantom; each takes 2(n − 1) rounds of n messages."""
    count = all_reduces(ranks)
    rounds, delay_s = ring_rounds(ranks)
    return Case(
        "all-reduces",
        count,
        lambda: bare_free_ring(count * rounds, ranks, delay_s),
        lambda: our_all_reduces(count, ranks),
        ranks,
        count * rounds * ranks,
    )


def cases() -> list[Case]:
    timers, messages, flows = 200_000, 40_000, 20_000
    free_bps = list(repeat(math.inf, RING))
    return [
        Case("timers", timers, lambda: bare_timers(timers), lambda: our_timers(timers)),
        Case(
            "messages",
            messages,
            lambda: bare_free_ring(messages // RING, RING, LATENCY_S),
            lambda: our_ring(messages // RING, free_bps, Phantom(0)),
            RING,
        ),
        Case(
            "flows",
            flows,
            lambda: bare_ring(flows // RING, UNLIKE_BPS, FLOW_BYTES),
            lambda: our_ring(flows // RING, UNLIKE_BPS, Phantom(FLOW_BYTES)),
            RING,
        ),
        Case(
            "tcp-flows",
            flows,
            lambda: bare_ring(flows // RING, UNLIKE_BPS, FLOW_BYTES),
            lambda: our_ring(flows // RING, UNLIKE_BPS, Phantom(FLOW_BYTES), ideal=False),
            RING,
        ),
        *(all_reduce_case(ranks) for ranks in (FEW, SOME, MANY)),
    ]


class Turns(msgspec.Struct):
    """How long one case took, each time."""

    case: Case
    bare_s: list[float] = []
    ours_s: list[float] = []

    @property
    def may_go_on(self) -> bool:
        """No new turn after a minute."""
        return sum(self.bare_s) + sum(self.ours_s) < CASE_S

    def take(self) -> None:
        """Both, one after the other."""
        self.bare_s.append(_duration_s(self.case.bare))
        self.ours_s.append(_duration_s(self.case.ours))

    def row(self) -> Row:
        """What came of it."""
        case, bare, ours = self.case, statistics.median(self.bare_s), statistics.median(self.ours_s)
        messages = case.messages or case.count
        return {
            "case": case.name,
            "ranks": case.ranks,
            "hcsim_per_s": case.count / ours,
            "simpy_per_s": case.count / bare,
            "ratio": bare / ours,
            "hcsim_us_per_message": 1e6 * ours / messages,
            "simpy_us_per_message": 1e6 * bare / messages,
        }


def measure(chosen: Sequence[Case], turns: int, each: Callable[[], object]) -> list[Row]:
    """All cases in turn, several times: a machine's slow minute is then no single case's. `each` hears of each turn."""
    taken = [Turns(case) for case in chosen]
    for _ in range(turns):
        for one in taken:
            if one.may_go_on:
                one.take()
            each()
    return [one.row() for one in taken]


def _duration_s(work: Callable[[], Any]) -> float:
    start_s = perf_counter()
    work()
    return perf_counter() - start_s


def table(rows: list[Row]) -> Table:
    result = Table(title="the simulator on one core", box=box.SIMPLE_HEAD)
    for heading in ("", "ranks", "hcsim /s", "SimPy /s", "ratio", "hcsim µs each", "SimPy µs each"):
        result.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        result.add_row(*(_cell(value) for value in row.values()))
    return result


def growth(few: int, many: int) -> dict[str, float]:
    """How many times as much a message costs among many ranks as among few, of hcsim and of SimPy."""
    few_count = all_reduces(few, many)
    (few_rounds, few_delay_s), (many_rounds, many_delay_s) = ring_rounds(few), ring_rounds(many)
    ours = Beside(lambda: our_all_reduces(few_count, few))
    bare = Beside(lambda: bare_free_ring(few_count * few_rounds, few, few_delay_s))
    ours_s = _duration_s(lambda: our_all_reduces(1, many, ours))
    bare_s = _duration_s(lambda: bare_free_ring(many_rounds, many, many_delay_s, bare))
    messages = many_rounds * many / (TURNS_BESIDE * few_count * few_rounds * few)
    return {
        name: (total_s - beside.stopped_s) / beside.took_s / messages
        for name, total_s, beside in (("hcsim", ours_s, ours), ("simpy", bare_s, bare))
    }


def _cell(value: str | int | float | None) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "–" if value is None else str(value)


def _show(shown: Table, grown: dict[str, float]) -> None:
    console = Console()
    console.print(shown)
    if grown:
        among = f"among {MANY} ranks as among {FEW}, in the same seconds"
        console.print(f"a message costs {grown['hcsim']:.2f} times as much {among}; SimPy's {grown['simpy']:.2f}")


def main(
    only: Annotated[str, typer.Option(help="Cases to measure.")] = "timers,messages,flows,tcp-flows,all-reduces",
    turns: Annotated[int, typer.Option(min=1, max=100, help="Turns of each, of which the median counts.")] = 5,
    json_file: Annotated[str | None, typer.Option("--json", help="Write one row per case to this file.")] = None,
) -> None:
    """The simulator's speed on one core, beside bare SimPy in the same run."""
    known = list(dict.fromkeys(case.name for case in cases()))
    wanted = asked.chosen(only, known)
    asked.check_json(json_file)
    chosen = [case for case in cases() if case.name in wanted]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        with_growth = "all-reduces" in wanted
        task = progress.add_task("measuring", total=turns * len(chosen) + with_growth)
        rows = measure(chosen, turns, lambda: progress.advance(task))
        grown = growth(FEW, MANY) if with_growth else {}
    shown = table(rows)
    if grown:
        rows[-1] |= {f"{name}_growth": factor for name, factor in grown.items()}
    asked.hand_over(json_file, rows, lambda: _show(shown, grown))


if __name__ == "__main__":
    asked.run(main)
