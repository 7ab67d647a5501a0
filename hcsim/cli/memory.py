"""What a training needs of memory, before it begins: nothing runs that does not fit."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from hcsim.cli import screen
from hcsim.config import Scenario, Training
from hcsim.config.machine import usable_bytes
from hcsim.errors import ConfigError
from hcsim.training.fitting import Alternative, Fit, Room, alternatives, fits_of, smallest_mac_gib
from hcsim.training.tasks import task

_SHOWN = 4
IGNORED = "--set ignore_memory=true"


def check_nodes(scenario: Scenario, settings: Training, *, saves: bool, ignored: bool) -> None:
    """Refuse a training that does not fit into the memory of the scenario's machines, and show what would."""
    rooms = [Room.of(node, rate_Bps=scenario.line_rate_bps(node) / 8) for node in scenario.nodes]
    _check(settings, rooms, fits_of(settings, rooms, saves=saves), ignored=ignored)


def check_here(
    settings: Training, ranks: int, rank: int, device: str, *, saves: bool = False, ignored: bool = False
) -> None:
    """Refuse a training whose part of this rank does not fit into this machine's memory."""
    from hcsim.real.hardware import SLEEP

    if device.startswith(SLEEP) or task(settings.task).phantom:
        return  # phantoms take no memory, and are refused where nothing sleeps
    rooms = [_this_machine(device)] * ranks
    mirrored = device not in ("cpu", "auto")
    fits = fits_of(settings, rooms, saves=saves, mirrored=mirrored)
    _check(settings, rooms, [fits[rank]], ignored=ignored)


def _this_machine(device: str) -> Room:
    from hcsim.real.hardware import this_chip

    chip = this_chip()
    memory = chip.memory_bytes
    if memory is None:
        return Room("this machine", chip.name, None, None)
    on_gpu = chip.name if device in ("mps", "auto") else ""
    return Room("this machine", chip.name, memory, usable_bytes(on_gpu, memory))


def _check(settings: Training, rooms: Sequence[Room], fits: Sequence[Fit], *, ignored: bool) -> None:
    unfit = [fit for fit in fits if not fit.fits]
    if not unfit:
        return
    worst = max(unfit, key=lambda fit: fit.need.total - (fit.room.usable_bytes or 0))
    assert worst.room.installed_bytes is not None
    assert worst.room.usable_bytes is not None
    said = (
        f"{worst.room.name} ({worst.room.machine}) needs {screen.size(worst.need.total)} to train {settings.task}, and "
        f"can use {screen.size(worst.room.usable_bytes)} of its {screen.size(worst.room.installed_bytes)} of memory"
    )
    if ignored:
        screen.note(f"{said}: a real one would fail, and this run goes on ({IGNORED})")
        return
    screen.show(_needs(fits), stderr=True)
    for line in _what_fits(alternatives(settings, rooms), max(fit.need.total for fit in unfit)):
        screen.note(line)
    raise ConfigError(f"{said}; {IGNORED} trains all the same")


def _needs(fits: Sequence[Fit]) -> Table:
    """Return a table with a column for each kind of machine."""
    groups: dict[tuple[object, ...], list[Fit]] = {}
    for fit in fits:
        groups.setdefault((fit.room.machine, fit.room.usable_bytes, fit.need), []).append(fit)
    table = Table(box=box.SIMPLE)
    table.add_column("needs")
    for members in groups.values():
        first = members[0].room
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        table.add_column(f"{screen.cell(first.name)}{more}\n{screen.cell(first.machine)}", justify="right")
    columns = [members[0] for members in groups.values()]
    for part in columns[0].need.parts:
        if any(fit.need.parts[part] for fit in columns):
            table.add_row(part, *(screen.size(fit.need.parts[part]) for fit in columns))
    table.add_section()
    table.add_row("together", *(screen.size(fit.need.total) for fit in columns))
    for words, each in (("can use", "usable_bytes"), ("installed", "installed_bytes")):
        sizes = [getattr(fit.room, each) for fit in columns]
        table.add_row(words, *("unknown" if size is None else screen.size(size) for size in sizes))
    return table


def _what_fits(found: Sequence[Alternative], most_bytes: int) -> list[str]:
    lines = [f"  {each.words}: {screen.size(each.most_bytes)}" for each in found[:_SHOWN]]
    if (size := smallest_mac_gib(most_bytes)) is not None:
        lines.append(f"  machines with {size} GiB")
    return ["what would fit:", *lines] if lines else ["no smaller batch and no Mac would do"]
