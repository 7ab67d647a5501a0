"""An observer that keeps what a run reports, for whoever asks the member how it stands."""

from __future__ import annotations

import msgspec

from hcsim.config.training import Training
from hcsim.runtime.clock import Clock
from hcsim.runtime.host import Host
from hcsim.telemetry.history import HistoryMessage, HistoryStep, RunHistory
from hcsim.training.run import Observer, Point, Run


def summary(settings: Training) -> str:
    """Return what is trained, and how, in words."""
    compressor = "" if settings.compressor == "none" else f", compressor {settings.compressor}"
    return f"{settings.task} by {settings.strategy}{compressor}"


def recorded(host: Host, settings: Training) -> RunHistory:
    """Return an empty history for a member; what it takes in is also noted in the trace's file."""
    chip = host.device.chip
    host.note("machine", chip.name, chip.memory_bytes or 0)
    host.note("job", summary(settings), settings.steps)

    def note(record: HistoryStep | HistoryMessage) -> None:
        if isinstance(record, HistoryStep):
            host.note("progress", *(field for field in msgspec.structs.astuple(record)[1:] if field is not None))
        else:
            host.note("said", record.text)

    return RunHistory(summary(settings), settings.steps, note)


class HistoryObserver:
    """Adds every step to a history, and passes it on to another observer."""

    def __init__(self, history: RunHistory, clock: Clock, observer: Observer | None = None) -> None:
        self._history = history
        self._clock = clock
        self._observer = observer

    def point(self, rank: int, point: Point) -> None:
        """Add a step."""
        spent, score = point.spent_s, point.score
        record = HistoryStep(
            at_s=self._clock.elapsed(),
            step=point.step,
            loss=point.loss,
            ranks=point.ranks,
            samples=point.samples,
            compute_s=spent.get("compute", 0.0),
            encode_s=spent.get("encode", 0.0),
            wait_s=spent.get("wait", 0.0),
            whole_s=spent.get("whole", 0.0),
            held_out=None if score is None else score.loss,
            accuracy=None if score is None else score.accuracy,
        )
        self._history.step(record)
        if self._observer is not None:
            self._observer.point(rank, point)

    def finished(self, run: Run) -> None:
        """Pass it on."""
        if self._observer is not None:
            self._observer.finished(run)
