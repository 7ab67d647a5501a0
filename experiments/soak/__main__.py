"""What a cluster keeps of its speed while faults strike it, and what must hold meanwhile: `make soak`.

Four machines in network namespaces train over ports of 1 Gb/s (Linux, root), or in the virtual world (`--virtual`).
`kill`: every 30 s one is killed and started again some seconds later. `mixed`: every 25 s another kind of fault.
Retained is the number of steps in periods with a fault, relative to the calm periods between them. All must end with
the parameters of a virtual run with the same members at the same steps, hold bounded descriptors and memory, write a
bounded number of lines and no traceback, and never stand still for long. Exit status 1: something of this did not hold.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from msgspec.structs import replace

from experiments.soak.figures import Piece, keep, kept, losses, summary, table, violations
from experiments.soak.history import History
from experiments.soak.job import NAMES, job
from experiments.soak.real import Broken, soak
from experiments.soak.schedule import CALM_EVERY, PROFILES, WARM_UP, Profile
from experiments.soak.task import Paced
from experiments.soak.virtual import simulate
from hcsim.config import parse_scenario
from hcsim.selftest.script import train
from tests.real.namespaces import obstacle
from tests.switches import on_switch

LEAST_PERIODS = WARM_UP + CALM_EVERY


def reference(steps: int, history: History) -> str:
    """The parameters' digest of a virtual run with the same members at the same steps."""
    settings = parse_scenario(job(steps, "low_latency"), "the soak's job").training
    assert settings is not None
    (step, first), *later = history.plan()
    assert step == 0
    outcome = train(on_switch(NAMES), settings, first=first, plan=later, what=Paced(sleeps=False))
    return outcome.sha256()


def run(name: str, minutes: float, asked: argparse.Namespace, folder: Path) -> Piece:
    """One profile, for so long."""
    profile: Profile = PROFILES[name]
    periods = max(LEAST_PERIODS, round(60 * minutes / profile.period_s))
    held = None
    if asked.virtual:
        history, plan, digests = simulate(profile, periods, asked.seed, asked.preset)
    else:
        history, plan, digests, held = soak(profile, periods, asked.seed, asked.preset, folder)
        digests.append(reference(history.count, history))
    calm, lost = losses(history, plan)
    world = "virtual" if asked.virtual else "real"
    piece = Piece(
        world,
        name,
        asked.preset,
        asked.seed,
        profile.period_s,
        history.count,
        calm,
        lost,
        history.longest_gap_s(),
        held,
    )
    if asked.explain:
        for strike, loss in zip(plan.strikes, lost, strict=False):
            print(f"{strike.kind}, {strike.victim}, for {strike.lasts_s:.1f} s: {loss}")
            since_s = plan.origin_s + strike.at_s
            print(*history.told(since_s, since_s + profile.period_s), sep="\n")
    return replace(piece, broken=(*history.splits(), *violations(piece, digests)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="in all")
    parser.add_argument("--profile", choices=[*PROFILES, "both"], default="both", help="both: each half of the time")
    parser.add_argument("--preset", choices=["home", "low_latency"], default="low_latency", help="heartbeats")
    parser.add_argument("--seed", type=int, default=1, help="of the faults; pieces of one study have different ones")
    parser.add_argument("--virtual", action="store_true", help="in the virtual world")
    parser.add_argument(
        "--record", type=Path, help="append the figures to this file, and show what all in it add up to"
    )
    parser.add_argument("--explain", action="store_true", help="show what the members noted after each fault")
    asked = parser.parse_args()
    if not asked.virtual and (why_not := obstacle()):
        sys.exit(why_not)
    names = [*PROFILES] if asked.profile == "both" else [asked.profile]
    folder = Path(tempfile.mkdtemp(prefix="hcsim-soak-"))
    pieces = []
    for name in names:
        within = folder / name
        within.mkdir()
        try:
            pieces.append(run(name, asked.minutes / len(names), asked, within))
        except Broken as broken:
            sys.exit(f"{name}: {broken}\n(what the members kept is in {within})")
        if asked.record is not None:
            keep(pieces[-1], asked.record)
    together = pieces if asked.record is None else kept(asked.record)
    print(*table(together), *summary(together), sep="\n")
    if any(piece.broken for piece in pieces):
        sys.exit(f"what the members kept is in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
