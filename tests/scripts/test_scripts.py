"""A script on a virtual cluster: what it computes, and how long that takes there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from hcsim.config import Crash, KernelCurve, Pause, Restart, Scenario, ScriptKernels, parse_scenario
from hcsim.runtime.host import Work
from hcsim.runtime.work_time import seconds
from hcsim.scripts.fork_server import START_METHOD
from hcsim.scripts.ipc import ended_how
from hcsim.scripts.processes import RankProcesses
from hcsim.scripts.run import simulate_script
from hcsim.virtual.hardware import machine_of
from tests.scripts.conftest import Runner
from tests.switches import on_switch

FOUR = ("mac-0", "mac-1", "mac-2", "mac-3")
TWO = FOUR[:2]

ALL_REDUCE = """
dist.init_process_group("gloo")
data = torch.full((1 << 20,), float(dist.get_rank() + 1))
dist.all_reduce(data.clone())
began = time.perf_counter()
dist.all_reduce(data)
tell([data.unique().tolist(), time.perf_counter() - began])
"""


def minis(count: int, rate: str = "1 Gb/s") -> Scenario:
    return parse_scenario(
        f"""
        name = "minis"
        effects = "all"
        medium = [{{ kind = "ethernet", name = "switch", rate = "{rate}" }}]
        node = [{{ name = "mini", count = {count}, machine = "M4", links = ["switch"] }}]
        """,
        "minis",
    )


@pytest.mark.parametrize("rate_bps", [1e9, 10e9])
def test_an_all_reduce_takes_what_the_ring_takes_by_the_book(run_well: Runner, rate_bps: float) -> None:
    told = run_well(on_switch(FOUR, rate=f"{rate_bps / 1e9:g} Gb/s", latency="0.1 ms"), ALL_REDUCE)
    size_bytes, ranks = 4 << 20, 4
    by_the_book_s = 2 * (ranks - 1) * (0.1e-3 + size_bytes / ranks * 8 / rate_bps)
    for rank in range(ranks):
        values, seconds = told.value(rank)
        assert values == [10.0]
        assert seconds == pytest.approx(by_the_book_s, abs=3 * 0.1e-3)  # they begin a few latencies apart


DDP = """
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 64), torch.nn.Linear(64, 4)
)
replica = DistributedDataParallel(model, bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
draws = torch.Generator().manual_seed(7)
for step in range(4):
    inputs = torch.randn(8, 1, 8, 8, generator=draws)
    labels = torch.randint(0, 4, (8,), generator=draws)
    mine = slice(4 * rank, 4 * rank + 4)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(replica(inputs[mine]), labels[mine]).backward()
    optimizer.step()
tell([value.flatten().tolist() for value in model.parameters()])
"""


def trained_alone() -> list[torch.Tensor]:
    """The same training in one process, on the ranks' batches together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draws = torch.Generator().manual_seed(7)
    for _ in range(4):
        inputs = torch.randn(8, 1, 8, 8, generator=draws)
        labels = torch.randint(0, 4, (8,), generator=draws)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [value.detach().flatten() for value in model.parameters()]


@pytest.mark.slow
def test_data_parallel_training_learns_what_one_process_learns_and_the_same_each_time(run_well: Runner) -> None:
    first, again = (run_well(minis(2), DDP) for _ in range(2))
    for ours, alone in zip(first.value(0), trained_alone(), strict=True):
        torch.testing.assert_close(torch.tensor(ours), alone, rtol=1e-4, atol=1e-6)
    assert first.by(0) == first.by(1)
    assert first.lines == again.lines
    assert first.run.trace_sha256 == again.run.trace_sha256
    assert [record.steps_s for record in first.run.ranks] == [record.steps_s for record in again.run.ranks]
    assert len(first.run.ranks[0].steps_s) == 4


@pytest.mark.slow
def test_gradients_travel_while_others_are_computed(run_well: Runner) -> None:
    """In small buckets most of them are there when the last ones come; in one, they all travel after that."""
    text = """
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
    replica = DistributedDataParallel(model, bucket_cap_mb=float(sys.argv[1]))
    inputs = torch.randn(1024, 256)
    for step in range(2):
        began = time.perf_counter()
        replica(inputs).sum().backward()
    tell(time.perf_counter() - began)
    """
    scenario = minis(2, "5 Gb/s")
    in_buckets, in_one = (run_well(scenario, text, size).value(0) for size in ("0.6", "100"))
    assert in_buckets < 0.8 * in_one


@pytest.mark.slow
def test_a_call_and_a_computation_at_once_take_less_than_one_after_the_other(run_well: Runner) -> None:
    text = """
    dist.init_process_group()
    data, matrix = torch.ones(1 << 20), torch.ones(1024, 1024)
    def timed(*acts):
        dist.barrier()
        began = time.monotonic()
        for wait in [act() for act in acts]:
            if wait is not None:
                wait.wait()
        return time.monotonic() - began
    def call():
        return dist.all_reduce(data, async_op=True)
    def compute():
        for _ in range(5):
            matrix @ matrix
    timed(call)
    tell([timed(call), timed(compute), timed(call, compute)])
    """
    call_s, compute_s, both_s = run_well(minis(2, "5 Gb/s"), text).value(0)
    assert max(call_s, compute_s) - 1e-9 <= both_s < 0.75 * (call_s + compute_s)


@pytest.mark.slow
def test_a_faster_link_saves_time(run_well: Runner) -> None:
    slow, fast = (run_well(minis(2, rate), DDP).run for rate in ("100 Mb/s", "10 Gb/s"))
    assert fast.seconds < 0.5 * slow.seconds
    assert max(load.share for load in fast.loads) < max(load.share for load in slow.loads) <= 1


def test_work_is_charged_by_the_roofline_of_the_machine(run_well: Runner) -> None:
    text = """
    a = torch.ones(512, 512)
    began = time.perf_counter()
    a @ a
    middle = time.perf_counter()
    a.view(-1).t()
    a + a
    tell([middle - began, time.perf_counter() - middle])
    """
    scenario = minis(1)
    machine = machine_of(scenario.nodes[0])
    product_s, sum_s = run_well(scenario, text).value(0)
    reading_s = 1e-6
    assert product_s == pytest.approx(seconds(machine, Work(flops=2 * 512**3)) + reading_s, abs=1e-9)
    assert sum_s == pytest.approx(seconds(machine, Work(moved_bytes=3 * 4 * 512**2)) + reading_s, abs=1e-9)


def test_where_kernels_were_measured_work_is_charged_by_their_curves_and_a_step_its_rest(run_well: Runner) -> None:
    text = """
    a = torch.ones(512, 512)
    began = time.perf_counter()
    a @ a
    middle = time.perf_counter()
    for _ in range(10):
        a + a
    summed = time.perf_counter()
    a.requires_grad_()
    a.grad = torch.zeros(512, 512)
    optimizer = torch.optim.SGD([a])
    before = time.perf_counter()
    optimizer.step()
    tell([middle - began, summed - middle, time.perf_counter() - before])
    """
    curves = (
        KernelCurve("matmul", ((1e6, 1e-3), (1e9, 1.0))),
        KernelCurve("elementwise", ((1e3, 1e-3),)),
        KernelCurve("update", ((1e3, 1e-3),)),
    )
    scenario = minis(1)
    machine = replace(machine_of(scenario.nodes[0]), kernels=curves, step_s=0.25)
    scenario = replace(scenario, nodes=(replace(scenario.nodes[0], machine=machine),))
    product_s, sums_s, step_s = run_well(scenario, text).value(0)
    size_bytes, reading_s = 4 * 512**2, 1e-6
    assert product_s == pytest.approx(1e-3 + 0.999 * (2 * 512**3 - 1e6) / 999e6 + reading_s)
    assert sums_s == pytest.approx(10 * 3 * size_bytes * 1e-6 + reading_s)
    assert step_s == pytest.approx(3 * size_bytes * 1e-6 + 0.25, rel=0.01)


def test_a_script_whose_own_kernels_were_timed_takes_their_times_and_other_kernels_those_of_their_kind(
    run_well: Runner,
) -> None:
    text = """
    a = torch.ones(64, 64)
    began = time.perf_counter()
    a @ a
    middle = time.perf_counter()
    a @ a.t()
    tell([middle - began, time.perf_counter() - middle])
    """
    own = KernelCurve("matmul", ((2.0 * 64**3, 5e-3),), signature="mm.default(64x64 64x64)")
    general = (KernelCurve("matmul", ((1.0, 2e-3), (1e9, 2e-3))),)
    scenario = minis(1)
    machine = replace(machine_of(scenario.nodes[0]), kernels=general, hand_over_s=1.0, step_s=1.0)
    named = {"script.py": 5e-3, "other.py": 2e-3}
    for name, product_s in named.items():
        known = replace(machine, scripts=(ScriptKernels(name, kernels=(own,)),))
        node = replace(scenario.nodes[0], machine=known)
        product, transposed = run_well(replace(scenario, nodes=(node,)), text).value(0)
        assert product == pytest.approx(product_s, abs=1e-5)
        assert transposed == pytest.approx(2e-3, abs=1e-5)


def test_a_crash_ends_the_process_and_the_others_are_told_whose_machine_it_was(run_text: Runner) -> None:
    text = """
    print(os.getpid())
    dist.init_process_group("gloo")
    try:
        while True:
            dist.all_reduce(torch.ones(1 << 18))
            time.sleep(0.1)
    except RuntimeError as error:
        tell([type(error).__name__, error.peer])
    """
    told = run_text(on_switch(FOUR, [Crash(at_s=1.03, node="mac-2", clean=True)]), text)
    assert [record.code for record in told.run.ranks] == [0, 0, None, 0]
    assert [told.value(rank)[0] for rank in (0, 1, 3)] == ["CallFailed"] * 3
    assert 2 in [told.value(rank)[1] for rank in (0, 1, 3)]
    assert not _lives(int(told.by(2)[0]))
    assert told.run.seconds < 2


@pytest.mark.slow
def test_a_machine_that_hangs_holds_up_the_others_for_as_long(run_well: Runner) -> None:
    text = """
    dist.init_process_group("gloo")
    for _ in range(10):
        dist.all_reduce(torch.ones(1 << 18))
        time.sleep(0.1)
    """
    undisturbed = run_well(on_switch(TWO), text).run.seconds
    held_up = run_well(on_switch(TWO, [Pause(at_s=0.55, node="mac-1", duration_s=2.0)]), text).run.seconds
    assert held_up == pytest.approx(undisturbed + 2.0, abs=0.15)


@pytest.mark.slow
def test_groups_of_some_ranks_and_messages_between_two(run_well: Runner) -> None:
    text = """
    from datetime import timedelta
    dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2], backend="gloo"), dist.new_group([3, 1])]
    mine = torch.tensor([rank])
    dist.all_reduce(mine, group=pairs[rank % 2])
    told = [None] * 4
    dist.all_gather_object(told, {"rank": rank, "sum": mine.item()})
    token = torch.tensor([rank])
    if rank:
        dist.recv(token, rank - 1)
    if rank < 3:
        dist.send(token + 10, rank + 1)
    tell([told, token.item()])
    """
    told = run_well(on_switch(FOUR), text)
    everybody = [{"rank": rank, "sum": 2 if rank % 2 == 0 else 4} for rank in range(4)]
    assert [told.value(rank) for rank in range(4)] == [[everybody, token] for token in (0, 10, 20, 30)]


@pytest.mark.slow
def test_after_a_failure_the_group_can_be_made_anew(run_well: Runner) -> None:
    text = """
    from datetime import timedelta
    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    try:
        if dist.get_rank() == 0:
            time.sleep(20)
        dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        print("failed")
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    data = torch.ones(4)
    dist.all_reduce(data)
    tell(data.tolist())
    """
    told = run_well(on_switch(TWO), text)
    assert [told.by(rank) for rank in range(2)] == [["failed", "[2.0, 2.0, 2.0, 2.0]"]] * 2


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_has_ended_is_told_in_time(run_text: Runner) -> None:
    text = """
    from datetime import timedelta
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    dist.barrier()
    if dist.get_rank():
        dist.barrier()
    """
    told = run_text(on_switch(TWO), text)
    assert [record.code for record in told.run.ranks] == [0, 1]
    assert "rank 0" in told.run.ranks[1].error
    assert told.run.seconds <= 41


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "code", "reason"),
    [
        ("os._exit(3)", 3, "its process ended without a word, with status 3"),
        ("os.kill(os.getpid(), 11)", -11, "its process was ended by SIGSEGV"),
        ("sys.exit(5)", 5, "it exited with status 5"),
        ("sys.exit(True)", 1, "it exited with status 1"),
        ("sys.exit(-1)", 255, "it exited with status 255"),
        ("sys.exit(2**70)", 255, "it exited with status 255"),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
    ],
)
def test_a_rank_that_dies_does_not_leave_the_others_waiting(
    run_text: Runner, death: str, code: int, reason: str
) -> None:
    text = f"""
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        {death}
    dist.barrier()
    """
    told = run_text(on_switch(TWO), text)
    assert [record.code for record in told.run.ranks] == [1, code]
    assert told.run.ranks[1].error == reason
    assert f"(rank 1) failed: {reason}" in told.run.ranks[0].error


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (0, "ended with 0"),
        (-9, "was ended by SIGKILL"),
        (-40, "was ended by signal 40"),
        (-999, "was ended by signal 999"),
    ],
)
def test_the_end_of_a_process_has_words_whatever_its_number(code: int, said: str) -> None:
    assert ended_how(code) == said


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["dist.init_process_group('gloo'); dist.barrier()", "dist.TCPStore('x', 1).get('y')"])
def test_who_begins_to_wait_for_a_rank_that_has_failed_before_is_told_too(run_text: Runner, waits: str) -> None:
    text = f"""
    rank = int(os.environ["RANK"])
    if rank == 0:
        raise ValueError("no data here")
    time.sleep(rank - 1)
    {waits}
    """
    told = run_text(on_switch(FOUR[:3]), text)
    assert [record.code for record in told.run.ranks] == [1, 1, 1]
    for record in told.run.ranks[1:]:
        assert re.search(r"rank 0\)? failed: ValueError: no data here", record.error)
    assert told.run.seconds < 40


@pytest.mark.slow
def test_a_group_without_the_rank_that_has_failed_goes_on(run_text: Runner) -> None:
    text = """
    rank = int(os.environ["RANK"])
    if rank == 2:
        raise ValueError("no data here")
    dist.init_process_group("gloo", init_method="file:///pair", rank=rank, world_size=2)
    data = torch.ones(1)
    dist.all_reduce(data)
    tell(data.item())
    """
    told = run_text(on_switch(FOUR[:3]), text)
    assert [record.code for record in told.run.ranks] == [0, 0, 1]
    assert [told.value(rank) for rank in (0, 1)] == [2.0, 2.0]


@pytest.mark.slow
def test_a_machine_that_is_started_again_after_its_script_failed_takes_part_again(run_text: Runner) -> None:
    text = """
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("not yet")
    store = dist.TCPStore("x", 1)
    if os.environ["RANK"] == "1":
        time.sleep(40)
        store.set("ready", "yes")
    store.get("ready")
    dist.init_process_group("gloo")
    dist.barrier()
    print("met")
    """
    told = run_text(on_switch(TWO, [Restart(at_s=5.0, node="mac-1")]), text)
    assert [record.code for record in told.run.ranks] == [0, 0]
    assert told.by(0) == ["met"]


def test_the_clock_and_sleep_are_the_machines_own(run_well: Runner) -> None:
    text = """
    began = time.time(), time.monotonic_ns()
    time.sleep(3600)
    while time.time() < began[0] + 3600.001:
        pass
    tell([time.time() - began[0], (time.monotonic_ns() - began[1]) / 1e9, time.gmtime(began[0]).tm_year])
    """
    told = run_well(on_switch(("mac",)), text)
    passed_s, elapsed_s, year = told.value(0)
    assert passed_s == pytest.approx(3600.001, abs=1e-5)
    assert elapsed_s == pytest.approx(passed_s, abs=1e-5)
    assert year == 2026
    assert told.run.seconds == pytest.approx(3600.001, abs=1e-4)


@pytest.mark.slow
def test_timeit_takes_the_machines_time_too(run_well: Runner) -> None:
    text = """
    import timeit
    tell([timeit.timeit(lambda: time.sleep(7), number=2), timeit.default_timer() - time.perf_counter()])
    """
    took_s, ahead_s = run_well(on_switch(("mac",)), text).value(0)
    assert took_s == pytest.approx(14, abs=1e-4)
    assert ahead_s == pytest.approx(0, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wait", "ends"),
    [
        ("asyncio.run(asyncio.sleep(0.01, 'slept'))", "slept"),
        ("multiprocessing.Queue().get(timeout=0.01)", "Empty"),
        ("next(concurrent.futures.as_completed([concurrent.futures.Future()], timeout=0.01))", "TimeoutError"),
    ],
)
def test_who_waits_for_other_processes_and_threads_waits_no_longer_than_it_said(
    run_well: Runner, wait: str, ends: object
) -> None:
    """They run in real time, and the simulated one stands still meanwhile."""
    text = f"""
    import asyncio, concurrent.futures, multiprocessing
    try:
        tell({wait})
    except Exception as error:
        tell(type(error).__name__)
    """
    told = run_well(on_switch(("mac",)), text)
    assert told.value(0) == ends
    assert told.run.seconds == 0


@pytest.mark.slow
def test_who_sets_no_seed_draws_its_own_numbers_and_always_the_same(run_well: Runner) -> None:
    text = """
    import random
    import numpy as np
    tell([torch.rand(1).item(), np.random.rand(), random.random()])
    """
    first, again = (run_well(on_switch(TWO), text) for _ in range(2))
    assert [first.value(rank) for rank in (0, 1)] == [again.value(rank) for rank in (0, 1)]
    assert all(ours != theirs for ours, theirs in zip(first.value(0), first.value(1), strict=True))
    other = run_well(msgspec.structs.replace(on_switch(TWO), seed=on_switch(TWO).seed + 1), text)
    assert other.value(0) != first.value(0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("before", "early"),
    [
        (b"import sys, scipy.constants\n", True),
        (b"\xef\xbb\xbfimport scipy.constants, sys\n", True),
        ('# coding: latin-1\n"ä"\nfrom scipy.constants import pi\nimport sys\n'.encode("latin-1"), True),
        (b"import sys\nsys.dont_write_bytecode = True\nimport scipy.constants\n", False),
        (b"import sys, own\nimport scipy.constants\n", False),
    ],
)
def test_what_a_script_begins_with_is_imported_early(tmp_path: Path, before: bytes, early: bool) -> None:
    """What comes after anything else may depend on that, and waits for it."""
    (tmp_path / "own.py").touch()
    script = tmp_path / "script.py"
    script.write_bytes(before)
    (tmp_path / "scipy.csv").touch()
    (tmp_path / "scipy").mkdir()
    assert import_and_list(script) == (["scipy.constants"] if early else [])


@pytest.mark.slow
@pytest.mark.skipif(START_METHOD != "fork", reason="every rank begins anew here")
def test_early_means_once_for_all_ranks(tmp_path: Path, processes: RankProcesses) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, scipy.signal\nprint('_sigtools' in open(f'/proc/{os.getppid()}/maps').read())")
    said: list[str] = []
    simulate_script(on_switch(TWO), script, say=lambda rank, stream, text: said.append(text), processes=processes)
    assert "".join(said).split() == ["True"] * 2


def test_what_lies_beside_a_script_is_not_mistaken_for_a_library_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "pandas.py").touch()
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").touch()
    script = tmp_path / "script.py"
    script.write_text("import pandas, sklearn, scipy.constants")
    assert import_and_list(script) == ["scipy.constants"]


def import_and_list(script: Path) -> list[str]:
    """Which of some modules are there after the early imports of a script."""
    program = f"""
import sys
from hcsim.scripts.environment import import_early
before = list(sys.path)
import_early({str(script)!r})
assert sys.path == before
print(*(name for name in ("pandas", "sklearn", "scipy.constants") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import torch.nowhere", "No module"),
        ("import (", "invalid syntax"),
        pytest.param("x = " + "-" * 20_000 + "1", "MemoryError", id="deep"),
    ],
)
def test_what_cannot_be_imported_is_the_scripts_own_error(run_text: Runner, text: str, said: str) -> None:
    told = run_text(on_switch(TWO), text)
    assert not told.run.succeeded
    assert all(said in " ".join(told.by(rank)) for rank in (0, 1))


@pytest.mark.slow
def test_a_call_that_nobody_waits_for_comes_to_its_end(run_well: Runner) -> None:
    """A script may ask whether it is over again and again: each time takes a moment."""
    text = """
    dist.init_process_group("gloo")
    data = torch.ones(1 << 16)
    work = dist.all_reduce(data, async_op=True)
    asked = 0
    while not work.is_completed():
        asked += 1
    tell([asked > 10, data.sum().item()])
    """
    told = run_well(on_switch(TWO), text)
    assert told.value(0) == told.value(1) == [True, 2.0 * (1 << 16)]


@pytest.mark.slow
def test_processes_that_load_data_are_no_ranks(run_well: Runner) -> None:
    text = """
    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            time.time()
            return torch.tensor(index) ** 2
    dist.init_process_group("gloo")
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=1)
    tell([batch.tolist() for batch in loader])
    """
    told = run_well(on_switch(("mac",)), text)
    assert told.value(0) == [[0, 1, 4, 9], [16, 25, 36, 49]]


@pytest.mark.slow
def test_a_process_that_is_no_rank_sleeps_trains_and_is_told_that_it_has_no_group(run_well: Runner) -> None:
    text = """
    import multiprocessing
    from time import perf_counter, sleep
    def child(queue):
        began = perf_counter()
        sleep(0.01)
        weight = torch.nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        torch.optim.SGD([weight], lr=0.25).step()
        try:
            dist.barrier()
        except Exception as error:
            queue.put([perf_counter() - began > 0.009, weight.item(), str(error)])
    dist.init_process_group("gloo")
    time.sleep(1)
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    process = fork.Process(target=child, args=(queue,))
    process.start()
    tell(queue.get(timeout=20))
    process.join()
    """
    told = run_well(on_switch(("mac",)), text)
    slept, weight, error = told.value(0)
    assert (slept, weight) == (True, 0.75)
    assert "a process that the script has started is no rank" in error
    assert told.run.ranks[0].steps_s == []


@pytest.mark.slow
def test_large_and_small_arrays_share_the_memory_without_touching_each_other(run_well: Runner) -> None:
    text = """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sums = []
    for turn in range(3):
        sizes = [1, 3_000_000, 17, 0, 1_000_003, 64, 5]
        tensors = [torch.full((size,), float(place + rank + turn)) for place, size in enumerate(sizes)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        sums.append([tensor.unique().tolist() for tensor in tensors])
    tell(sums)
    """
    told = run_well(on_switch(TWO), text)
    expected = [[[2.0 * (place + turn) + 1] if place != 3 else [] for place in range(7)] for turn in range(3)]
    assert told.value(0) == told.value(1) == expected


@pytest.mark.slow
def test_sharded_parameters_are_charged_for_what_a_rank_holds(run_well: Runner) -> None:
    """On twice as many ranks an optimizer has half to do on each."""
    text = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    model = torch.nn.Linear(4096, 1024, bias=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4096)).sum().backward()
    began = time.perf_counter()
    optimizer.step()
    tell([time.perf_counter() - began, model.weight.to_local().shape[0]])
    """
    (two_s, rows), (four_s, fewer) = (run_well(minis(ranks), text).value(0) for ranks in (2, 4))
    assert (rows, fewer) == (512, 256)
    overhead_s = machine_of(minis(2).nodes[0]).overhead_s
    assert (two_s - overhead_s) == pytest.approx(2 * (four_s - overhead_s), rel=0.05)


@pytest.mark.slow
def test_what_is_printed_comes_in_the_order_of_virtual_time(run_well: Runner) -> None:
    text = """
    rank = int(os.environ["RANK"])
    for turn in range(3):
        time.sleep(1 + 0.1 * ((rank + turn) % 3))
        print("turn", turn)
    print("at the end, without a newline", end="")
    """
    told = run_well(on_switch(FOUR[:3]), text)
    ends_s = dict.fromkeys(range(3), 0.0)
    expected: list[tuple[float, int, str]] = []
    for turn in range(3):
        for rank in range(3):
            ends_s[rank] += 1 + 0.1 * ((rank + turn) % 3)
            expected.append((ends_s[rank], rank, f"turn {turn}"))
    turns = [(rank, line) for rank, line in told.lines if line.startswith("turn")]
    assert [rank for rank, line in turns if line != "turn 2"] == [
        rank for _, rank, line in sorted(expected) if line != "turn 2"
    ]


@pytest.mark.slow
def test_the_trace_tells_of_steps_and_ends(run_well: Runner) -> None:
    events: list[Any] = []
    run_well(minis(2), DDP, sink=events.extend)
    assert [event[3:] for event in events if event[1] == "step" and event[2] == "mini-1"] == [
        (0, 1), (0, 2), (0, 3), (0, 4)
    ]  # fmt: skip
    assert sorted(event[2:] for event in events if event[1] == "script ended") == [("mini-1", 0, 0), ("mini-2", 1, 0)]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("spawn", ["spawn", "start_processes"])
def test_processes_that_a_script_spawns_are_the_machines(run_well: Runner, spawn: str) -> None:
    text = f"""
    import torch.multiprocessing
    def work(rank, world, text):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
        dist.init_process_group("gloo", rank=rank, world_size=world)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        tell([rank, total.item(), text])
    torch.multiprocessing.{spawn}(work, args=(2, "given"), nprocs=2)
    """
    told = run_well(on_switch(TWO), text)
    assert [told.value(rank) for rank in range(2)] == [[0, 1.0, "given"], [1, 1.0, "given"]]
    assert told.run.seconds > 0


@pytest.mark.parametrize(
    ("start", "complaint"),
    [
        ("torch.multiprocessing.spawn(print, nprocs=3)", "the script spawns 3 processes, and 2 machines run it"),
        ("subprocess.run(['/usr/bin/torchrun', 'inner.py'])", "the script starts torchrun: hcsim is the launcher"),
        (
            "subprocess.run([sys.executable, '-m', 'torch.distributed.run', 'x.py'])",
            "the script starts torch.distributed.run: hcsim is the launcher",
        ),
    ],
)
def test_a_script_that_starts_ranks_outside_of_the_simulation_is_refused(
    run_text: Runner, start: str, complaint: str
) -> None:
    told = run_text(on_switch(TWO), f"import subprocess, torch.multiprocessing\n{start}")
    assert [record.code for record in told.run.ranks] == [1, 1]
    assert all(complaint in record.error for record in told.run.ranks)


@pytest.mark.slow
def test_a_process_outside_of_the_simulation_that_wants_to_be_a_rank_is_refused_at_once(
    run_well: Runner, tmp_path: Path
) -> None:
    text = """
    def work(told):
        try:
            dist.init_process_group("gloo", rank=0, world_size=2)
        except Exception as error:
            open(told, "w").write(str(error))
    if __name__ == "__main__":
        import multiprocessing
        process = multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[1],))
        process.start()
        process.join()
    """
    run_well(on_switch(["a"]), text, str(tmp_path / "told"))
    assert "start ranks by torch.multiprocessing.spawn" in (tmp_path / "told").read_text(encoding="utf-8")
