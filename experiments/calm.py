"""What it costs a cluster to be ready for faults that do not come: `python -m experiments.calm --beside FOLDER`.

Machines in network namespaces (Linux, root) train while nothing happens to them, as this checkout does it and as the
one in FOLDER does, whose C parts have to be built (`make install` there). The two take turns, in pairs whose order
changes, so that what else runs on the computer weighs alike on both. A figure is steps per second as the first machine
tells at the end; the median of the pairs' ratios counts. Every machine shares this one's processors, so all that a
member computes beside its steps shows.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from pathlib import Path

from tests.real.namespaces import lan, obstacle
from tests.real.together import join

JOB = """
name = "calm"
seed = 1
[cluster]
preset = "low_latency"
nodes = {nodes}
[training]
task = "convex"
algorithm = "ring"
steps = {steps}
evaluate_every = 10
"""
STEPS = 1500
PROGRAM = "import hcsim.cli; hcsim.cli.main()"


def steps_per_s(checkout: Path, nodes: int, folder: Path) -> float:
    """Of one run."""
    folder.mkdir()
    job = folder / "job.toml"
    job.write_text(JOB.format(nodes=nodes, steps=STEPS))
    python = ("env", f"PYTHONPATH={checkout}", sys.executable, "-c", PROGRAM)
    with lan(folder, "abcdefgh"[:nodes]) as machines:
        join(*machines)
        members = [
            machine.start(*python, "run", "--real", str(job), *_options(checkout, name=machine.name, device="cpu"))
            for machine in machines
        ]
        for member in members:
            if member.ends() != 0:
                sys.exit(f"{checkout}: {member.machine.name} failed:\n{member.text}")
        told = re.search(r"^(\d+) steps in ([\d.]+) s", members[0].text, re.MULTILINE)
    assert told is not None, members[0].text
    return int(told[1]) / float(told[2])


def _options(checkout: Path, **settings: str) -> list[str]:
    """Settings as that checkout's command takes them: an older one has an option for each."""
    if (checkout / "hcsim" / "cli" / "settings.py").exists():
        return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return [word for key, value in settings.items() for word in (f"--{key}", value)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, required=True, help="another checkout")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--nodes", type=int, default=3, choices=range(2, 9))
    asked = parser.parse_args()
    if why_not := obstacle():
        sys.exit(why_not)
    checkouts = {"this": Path(__file__).parents[1], "beside": asked.beside.resolve()}
    if not (checkouts["beside"] / "hcsim").is_dir():
        sys.exit(f"{asked.beside} is no checkout of hcsim: it has no folder hcsim")
    ratios = []
    with tempfile.TemporaryDirectory() as scratch:
        for pair in range(asked.pairs):
            order = list(checkouts) if pair % 2 else list(reversed(checkouts))
            rates = {
                name: steps_per_s(checkouts[name], asked.nodes, Path(scratch) / f"{pair}-{name}") for name in order
            }
            ratios.append(rates["this"] / rates["beside"])
            print(f"{rates['this']:.1f} and {rates['beside']:.1f} steps/s: {ratios[-1]:.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
