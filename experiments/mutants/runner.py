"""Runs what is to be run, in copies of the tree, a process for each."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import msgspec

from experiments.mutants.chase import UNPATCHED, Chase, Job, next_unpatched
from experiments.mutants.hunt import Broken, Outcome, Shrunk
from experiments.mutants.ledger import Entry, Known, Ledger, digest_of
from experiments.mutants.patches import Patch
from experiments.mutants.tree import command, copied, environment, sources
from hcsim.errors import HcsimError

CHUNK = 4
"""Seeds of one process: it takes a second to start."""
LOOK_S = 0.2
"""How often a thread looks whether its process is to be ended."""


class Runner:
    """The copies, and the processes that run in them."""

    def __init__(self, folder: Path, patches: Mapping[str, Patch], ledger: Ledger, shrink_runs: int) -> None:
        self._ledger = ledger
        self._shrink_runs = shrink_runs
        self._folder = folder
        self._patches: dict[str, Patch | None] = {UNPATCHED: None, **patches}
        files = sources()
        self._digests = {name: digest_of(files, patch) for name, patch in self._patches.items()}
        self._trees: dict[str, Path] = {}
        self._stopping = Event()

    def known(self, tree: str) -> Known:
        """What is known of a tree."""
        return self._ledger.known(self._digests[tree])

    def run(self, chases: Sequence[Chase], first: int, workers: int) -> Iterator[Chase]:
        """Run until all is known; gives each mutant when it is found or has escaped."""
        left = list(chases)
        running: dict[Job, Future[Entry]] = {}
        with ThreadPoolExecutor(workers) as pool:
            try:
                while True:
                    while len(running) < workers and (job := self._next(chases, first, running)) is not None:
                        running[job] = pool.submit(self._entry, job, self._tree(job.tree))
                    for chase in [each for each in left if each.is_over]:
                        left.remove(chase)
                        yield chase
                    if not running:
                        return
                    wait(running.values(), return_when=FIRST_COMPLETED)
                    for job, future in list(running.items()):
                        if future.done():
                            del running[job]
                            self._ledger.add(future.result())
            finally:
                self._stopping.set()

    def _next(self, chases: Sequence[Chase], first: int, running: Mapping[Job, object]) -> Job | None:
        """What all mutants want to know is run before what one of them wants, and low seeds before high ones."""
        jobs = [job for chase in chases if (job := chase.next(running, CHUNK)) is not None]
        if jobs:
            return min(jobs, key=lambda job: (job.tree != UNPATCHED, not job.shrink, job.seed))
        until = first + max(chase.tried for chase in chases) - 1
        return next_unpatched(self.known(UNPATCHED), until, first, running, CHUNK)

    def _tree(self, name: str) -> Path:
        if name not in self._trees:
            self._trees[name] = copied(self._folder / name, self._patches[name])
        return self._trees[name]

    def _entry(self, job: Job, tree: Path) -> Entry:
        digest = self._digests[job.tree]
        if job.shrink:
            outcome = self._outcome(tree, "shrink", str(job.seed), job.shrink, str(self._shrink_runs))
            assert outcome.shrunk is not None
            return Entry(digest, seed=job.seed, shrunk=self._compared(outcome.shrunk), cpu_s=outcome.cpu_s)
        what = "every" if job.tree == UNPATCHED else "seeds"
        outcome = self._outcome(tree, what, str(job.seed), str(job.many))
        return Entry(digest, (job.seed, job.seed + outcome.ran - 1), outcome.broken, cpu_s=outcome.cpu_s)

    def _compared(self, shrunk: Shrunk) -> Shrunk:
        """With what the unpatched tree makes of the shrunk scenario."""
        with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
            file.write(shrunk.scenario)
            file.flush()
            outcome = self._outcome(self._tree(UNPATCHED), "replay", file.name)
        broken: tuple[Broken, ...] = outcome.broken
        return msgspec.structs.replace(shrunk, also_unpatched=broken[0].invariants if broken else ())

    def _outcome(self, tree: Path, *arguments: str) -> Outcome:
        """What `hunt` says in a copy."""
        process = subprocess.Popen(
            command("experiments.mutants.hunt", *arguments),
            cwd=tree,
            env=environment(tree),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # an interrupt is for us, and we end it
        )
        while True:
            try:
                out, err = process.communicate(timeout=LOOK_S)
                break
            except subprocess.TimeoutExpired:
                if self._stopping.is_set():
                    process.kill()
        said = err.strip().splitlines()
        if process.returncode:
            raise HcsimError(
                f"{tree.name}: {' '.join(arguments)} ended with {process.returncode}: {said[-1] if said else ''}"
            )
        outcome = msgspec.json.decode(out.splitlines()[-1], type=Outcome)
        if Path(outcome.package) != (tree / "hcsim").resolve():
            raise HcsimError(f"{tree.name}: hcsim was imported from {outcome.package}, not from the copy")
        return outcome
