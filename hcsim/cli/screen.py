"""The output of a run: a progress line while it runs, a table at the end, and errors in a line or two.

Results go to standard output, everything else to standard error. Without a terminal there is no progress
line; each repeat gets a line of its own instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from rich import box
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hcsim.transport.admission_queue import one_line, plain

if TYPE_CHECKING:
    from hcsim.config import Job, Training
    from hcsim.jobs import JobRepeat
    from hcsim.training.run import Point, Report

T = TypeVar("T")
_LONGEST = 10_000
"""The longest message that is shown. A part of it may come from another machine."""
_LONGEST_CELL = 100
_MOST_ROWS = 20
"""Of evaluations in the table at the end."""
UNREAD = 141
"""The exit status that shells use for a program whose output nobody reads any more, as in `hcsim doctor | head -1`."""


class Screen(Console):
    """A console whose reader may go away: the program then ends as others in a pipeline do."""

    def on_broken_pipe(self) -> None:
        """End with a status of its own: 1 would say that something had failed."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(UNREAD) from None


_under_progress: list[Screen] = []
"""The consoles that show a progress line: what is printed beside them would end up in the line."""


def _console(*, stderr: bool) -> Screen:
    if _under_progress and (stderr or sys.stdout.isatty()):
        return _under_progress[-1]
    return Screen(stderr=stderr)


def _text(message: str) -> Text:
    """Return the message without terminal control sequences: many messages contain names and reasons of other
    machines."""
    return Text(plain(message) if len(message) <= _LONGEST else plain(message[:_LONGEST]) + "…")


def cell(content: str) -> str:
    """Return text from another machine as one cell of a table."""
    return one_line(content, _LONGEST_CELL)


def complain(message: str) -> None:
    """Show an error."""
    _console(stderr=True).print(Text.assemble(("error: ", "bold red"), _text(message)), soft_wrap=True)


def note(message: str) -> None:
    """Show a message that is not a result."""
    _console(stderr=True).print(_text(message), soft_wrap=True)


def say(line: str) -> None:
    """Show a line of the result."""
    _console(stderr=False).print(_text(line), soft_wrap=True)


def show(table: Table, *, stderr: bool = False) -> None:
    """Show a table of the result verbatim: [fd00::2] is not markup, and the :a: of an address is not an emoji."""
    Screen(stderr=stderr, markup=False, emoji=False).print(table)


def scenarios(*, stderr: bool = False) -> None:
    """List the shipped scenarios with their descriptions."""
    from hcsim.config import parse_scenario, shipped_scenarios

    table = Table(box=None, pad_edge=False, show_header=False)
    for name, path in shipped_scenarios().items():
        table.add_row(name, parse_scenario(path.read_text(encoding="utf-8"), str(path)).description)
    Screen(stderr=stderr).print(table)


class ProgressLine:
    """The progress line."""

    def __init__(
        self,
        what: str,
        count: int,
        log: Callable[[str], None] = lambda line: None,
        *,
        simulated: bool = False,
        clock: Callable[[], str] = lambda: "",
    ) -> None:
        """`clock` returns what stands before each message on the screen. A log has times of its own."""
        self._clock = clock
        self._what = what
        self._count = count
        self._log = log
        self._simulated = " simulated" if simulated else ""
        self._console = Screen(stderr=True)
        self._spinner = Spinner("dots", "starting", style="green")
        self._live = Live(self._spinner, console=self._console, refresh_per_second=12.5, transient=True)

    def __enter__(self) -> ProgressLine:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Leave the terminal to another process, whose output would end up in the line."""
        self._stop()
        try:
            yield
        finally:
            self._start()

    def _start(self) -> None:
        if self._console.is_terminal:
            results = sys.stdout
            self._live.start(refresh=True)  # a first message that races with the first frame would stand behind it
            _under_progress.append(self._console)
            if not results.isatty():  # rich would show on the terminal what is written to a file
                sys.stdout = results

    def _stop(self) -> None:
        if self._console.is_terminal:
            _under_progress.remove(self._console)
            self._live.stop()

    def waiting(self, names: Sequence[str]) -> None:
        """Show the peers that are waited for."""
        self._show(f"waiting for {', '.join(names)}" if names else "all ranks are here")

    def lap(self, lap: JobRepeat) -> None:
        """Show that a repeat has finished."""
        self._show(f"{self._what} {lap.number} of {self._count}: {duration(lap.seconds)}{self._simulated}")

    def point(self, point: Point) -> None:
        """Show the progress of a training. Only the steps at which the model was evaluated are logged, or shown
        without a terminal."""
        looked_at = "" if point.score is None else f", held-out {point.score.loss:.4f}"
        how_far = f"{self._what} {point.step} of {self._count}"
        line = f"{how_far}: loss {point.loss:.4f}{looked_at}, {duration(point.time_s)}{self._simulated}"
        self._show(line, passing=point.score is None)

    def together(self, point: Point) -> None:
        """Show the progress of an elastic training: the number of members, and the parts of the step's time."""
        if not self._console.is_terminal and point.score is None:
            return  # every step of a long run comes here
        spent = ", ".join(f"{what} {duration(seconds)}" for what, seconds in point.spent_s.items() if what != "whole")
        looked_at = "" if point.score is None else f", held-out {point.score.loss:.4f}"
        members = counted(point.ranks, "member")
        self._show(
            f"{self._what} {point.step} of {self._count}: {members}, loss {point.loss:.4f}{looked_at}, "
            f"{duration(point.spent_s.get('whole', 0.0))}{self._simulated} a step ({spent}), "
            f"{size(point.sent_bytes)} sent",
            passing=point.score is None,
        )

    def phase(self, what: str) -> None:
        """Show what is being done."""
        self._show(what)

    def news(self, line: str) -> None:
        """Show an event that stays on the screen."""
        self._log(line)
        self._console.print(_text(self._clock() + line), soft_wrap=True)

    def _show(self, line: str, *, passing: bool = False) -> None:
        """Show a line until the next one. One in passing is worth no place in a log."""
        if self._console.is_terminal:
            text = _text(line)
            text.truncate(max(1, self._console.width - 3), overflow="ellipsis")  # rich cannot erase what has wrapped
            self._spinner.update(text=text)
            if not passing:
                self._log(line)
        elif not passing:
            self.news(line)


def report(title: str, job: Job, ranks: int, laps: Sequence[JobRepeat]) -> None:
    """Show the table, and below it the digest of the results."""
    say(title)
    if not laps:
        return
    computing = job.compute is not None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    compute = ["compute"] if computing else []
    for heading in ("repeat", "algorithm", *compute, "time", "bus rate", "sent/rank", "result"):
        table.add_column(heading, justify="left" if heading in ("algorithm", "result") else "right", no_wrap=True)
    for lap in laps:
        table.add_row(
            str(lap.number),
            lap.algorithm,
            *([duration(lap.compute_s)] if computing else []),
            duration(lap.seconds),
            _bus_rate(job, ranks, lap.seconds),
            size(lap.sent_bytes),
            _verdict(lap),
        )
    show(table)
    if laps[-1].sha256 is not None:
        say(f"result sha256 {laps[-1].sha256}")


def training_report(settings: Training, where: str, reports: Sequence[Report], *, simulated: bool = False) -> None:
    """Show the held-out loss, the distribution of the time, and the digest of the model."""
    say(f"{settings.task} by {settings.strategy}, compressor {settings.compressor}, {where}")
    if not reports:
        return
    from hcsim.training.run import leading

    lead = leading(reports)
    looks = [point for point in lead.points if point.score is not None]
    shown = evenly(looks, _MOST_ROWS)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("step", "time", "training loss", "held-out loss", "accuracy", f"sent by rank {lead.rank}"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in shown:
        assert point.score is not None
        right = "–" if point.score.accuracy is None else f"{100 * point.score.accuracy:.1f} %"
        loss = f"{point.score.loss:.4f}"
        table.add_row(str(point.step), duration(point.time_s), f"{point.loss:.4f}", loss, right, size(point.sent_bytes))
    if shown:
        show(table)
    if len(shown) < len(looks):
        say(f"{len(shown)} of {len(looks)} evaluations are shown")
    slowest = max(reports, key=lambda report: report.duration_s)
    spent = ", ".join(f"{what} {duration(seconds)}" for what, seconds in slowest.spent_s.items())
    before = slowest.points[0].step - 1 if slowest.points else 0  # a checkpoint's, or the others'
    each = slowest.duration_s / max(1, slowest.steps - before)
    steps = f"steps {before + 1} to {slowest.steps}" if before else f"{slowest.steps} steps"
    rate = ""
    if isinstance(settings.batch, str) or "pace=" in settings.strategy:  # steps of these cannot be compared with others
        rate = f", {sum(point.samples for point in lead.points) / slowest.duration_s:.4g} samples a second"
    say(f"{steps} in {duration(slowest.duration_s)}, {duration(each)} each{rate}{', simulated' if simulated else ''}")
    shares = [(report.rank, report.share) for report in reports if report.share is not None]
    if shares:
        each_rank = ", ".join(f"rank {rank} {share.samples}" for rank, share in shares)
        say(f"samples in a step, at the end: {each_rank}")
    if any(share.every > 1 for _, share in shares):
        each_rank = ", ".join(f"rank {rank} {share.steps}" for rank, share in shares)
        say(f"steps of {shares[0][1].every}, at the end: {each_rank}")
    say(f"of it on rank {slowest.rank}, waiting included: {spent}; they may overlap")
    busiest = max(reports, key=lambda report: report.sent_bytes)
    who = "the busiest rank" if len(reports) > 1 else f"rank {busiest.rank}"
    say(f"sent by {who} {size(busiest.sent_bytes)}, headers included")
    digests = list(dict.fromkeys(report.sha256 for report in reports if report.sha256 is not None and report.steps))
    for sha256 in digests:
        say(f"parameters sha256 {sha256}")


def evenly(rows: Sequence[T], most: int) -> list[T]:
    """Return at most so many of the rows, evenly spaced, the last one among them."""
    count = min(most, len(rows))
    return [rows[(i + 1) * len(rows) // count - 1] for i in range(count)]


def title(job: Job, ranks: int, where: str) -> str:
    """Return a one-line description of the job."""
    amount = "" if job.operation == "barrier" else f" of {size(job.size_bytes)} {_kind(job)}"
    return f"{job.operation}{amount}, {counted(ranks, 'rank')}, {where}"


def counted(number: int, what: str) -> str:
    """Return a number with a noun, in the plural where needed."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _kind(job: Job) -> str:
    return "(phantom)" if job.payload == "phantom" else job.dtype


def _verdict(lap: JobRepeat) -> str:
    if lap.wrong is None:
        return "no data"
    return f"{lap.wrong} elements wrong" if lap.wrong else "exact"


def _bus_rate(job: Job, ranks: int, seconds: float) -> str:
    """Return the least rate that each link must carry, which can be compared with the link's capacity.

    This is the bus bandwidth of nccl-tests, so that figures can be compared."""
    share = (ranks - 1) / ranks
    loads = {
        "all_reduce": 2 * share,
        "reduce": 1.0,
        "broadcast": 1.0,
        "all_gather": ranks - 1,
        "gather": ranks - 1,
        "reduce_scatter": share,
        "scatter": share,
        "all_to_all": share,
        "barrier": 0.0,
    }
    rate_bps = 8 * job.size_bytes * loads[job.operation] / seconds if seconds else 0.0
    return f"{rate_bps / 1e6:,.0f} Mb/s" if rate_bps else "–"


def duration(seconds: float) -> str:
    """Return the duration with four digits and a suitable unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"


def size(size_bytes: int) -> str:
    """Return the size with four digits and a suitable unit."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes} B"
