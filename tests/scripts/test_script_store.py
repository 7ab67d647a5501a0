"""The store of a simulated cluster, held to what torch's own does, and to the network between."""

from __future__ import annotations

import pytest

from hcsim.config import Crash
from tests.scripts.conftest import Runner
from tests.switches import on_switch

TWO = ("mac-0", "mac-1")

STORE = """
from datetime import timedelta
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
"""


@pytest.mark.slow
def test_it_answers_as_torchs_own_store_does(run_well: Runner) -> None:
    text = (
        STORE
        + """
def exercised(store):
    yield store.set("a", "one"), store.get("a"), store.check(["a"]), store.check(["a", "b"])
    yield store.add("n", 5), store.add("n", -2), store.get("n")
    yield store.compare_set("a", "one", "two"), store.compare_set("a", "one", "three"), store.get("a")
    yield store.compare_set("new", "", "first"), store.get("new"), store.compare_set("none", "x", "y")
    yield store.append("a", "!"), store.append("fresh", "."), store.get("a"), store.get("fresh")
    yield store.multi_set(["x", "y"], ["1", "2"]), store.multi_get(["y", "x", "n"])
    yield store.wait(["x", "a"]), store.wait(["y"], timedelta(seconds=1))
    yield store.delete_key("x"), store.delete_key("x"), store.check(["x"])
    yield store.set("empty", ""), store.get("empty"), store.set("empty", "full"), store.get("empty")

if dist.get_rank() == 0:
    ours = dist.PrefixStore("ours", store)
    theirs = dist.PrefixStore("theirs", dist.HashStore())
    for mine, torchs in zip(exercised(ours), exercised(theirs)):
        print("same" if mine == torchs else f"{mine} != {torchs}")
"""
    )
    assert run_well(on_switch(TWO), text).by(0) == ["same"] * 9


@pytest.mark.slow
@pytest.mark.parametrize("made", [
    'dist.TCPStore(os.environ["MASTER_ADDR"], 29511, world, rank == 0, timedelta(seconds=9))',
    'dist.FileStore("store-of-the-script", world)',
])  # fmt: skip
def test_a_store_that_the_script_makes_itself_is_reached_over_the_simulated_network(
    run_well: Runner, made: str
) -> None:
    text = f"""
from datetime import timedelta
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = {made}
store.set(f"from {{rank}}", "yes")
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
x = torch.ones(3) * (rank + 1)
dist.all_reduce(x)
tell([x.tolist(), store.get(f"from {{1 - rank}}").decode()])
"""
    told = run_well(on_switch(TWO), text)
    assert told.value(0) == told.value(1) == [[3.0] * 3, "yes"]


@pytest.mark.slow
def test_a_rank_waits_for_what_another_sets_and_each_call_is_a_round_trip(run_well: Runner) -> None:
    text = (
        STORE
        + """
if dist.get_rank() == 0:
    time.sleep(2)
    store.set("ready", "yes")
else:
    store.check(["ready"])
    began = time.perf_counter()
    store.check(["ready"])
    asked = time.perf_counter()
    tell([store.get("ready").decode(), time.perf_counter(), asked - began])
"""
    )
    value, when_s, round_trip_s = run_well(on_switch(TWO, latency="5 ms"), text).value(1)
    assert value == "yes"
    assert when_s == pytest.approx(2.005, abs=0.001)
    assert round_trip_s == pytest.approx(0.010, abs=0.0005)


@pytest.mark.slow
def test_who_waits_in_vain_is_told_after_its_timeout(run_well: Runner) -> None:
    text = (
        STORE
        + """
began = time.perf_counter()
try:
    store.wait(["never"], timedelta(seconds=7))
except dist.DistStoreError as error:
    tell([str(error), time.perf_counter() - began])
"""
    )
    said, seconds = run_well(on_switch(TWO), text).value(1)
    assert "never took longer than 7 s" in said
    assert seconds == pytest.approx(7, abs=0.01)


@pytest.mark.slow
def test_it_goes_with_the_machine_that_keeps_it(run_text: Runner) -> None:
    text = (
        STORE
        + """
store.set(f"here {dist.get_rank()}", "")
time.sleep(2)
store.set_timeout(timedelta(seconds=10))
try:
    store.get("here 0")
except (dist.DistNetworkError, dist.DistStoreError) as error:
    print(error)
"""
    )
    told = run_text(on_switch(TWO, [Crash(at_s=1.0, node="mac-0", clean=True)]), text)
    assert [record.code for record in told.run.ranks] == [None, 0]
    assert "the store on mac-0" in told.by(1)[-1]


@pytest.mark.slow
def test_large_values_are_kept_and_those_that_are_too_large_are_refused_as_such(run_well: Runner) -> None:
    text = (
        STORE
        + """
if dist.get_rank() == 0:
    store.set("large", b"x" * (8 << 20))
    try:
        store.set("larger", b"x" * (17 << 20))
    except dist.DistStoreError as error:
        print(error)
tell(len(store.get("large")))
"""
    )
    told = run_well(on_switch(TWO), text)
    assert told.value(0) == told.value(1) == 8 << 20
    assert "larger is too large for the store on mac-0" in told.by(0)[0]
