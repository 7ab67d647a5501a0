"""The report of a sweep: its figures with the numbers that they show, its cells, and how to run it again."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from experiments.figures import STUDIES, files_of
from hcsim.report.page import Commands, Figure, Page, Section, Table, Text, write_page

_SHOWN = ("study", "task", "strategy", "compressor", "algorithm", "link", "variant", "world", "seed", "step_s",
          "samples_per_s", "speedup", "error")  # fmt: skip
_METADATA = re.compile(r"<metadata>.*?</metadata>|<\?xml.*?\?>|<!DOCTYPE.*?>", re.DOTALL)
_IDS = re.compile(r'((?:\bid="|href="#|url\(#))')
_MOST_ROWS = 2000


def write_report(
    path: Path, cells: pd.DataFrame, out: Path, about: Mapping[str, object], problems: Mapping[str, str]
) -> None:
    """Write a page of the figures in `out`, which the sweep has just drawn."""
    studies = list(dict.fromkeys(cells["study"]))
    sections = [_study(study, out, problems.get(study, "")) for study in studies]
    versions = about["versions"]
    assert isinstance(versions, dict)
    facts = [
        ("commit", str(about["commit"]) + (" with changes" if about["dirty"] else "")),
        ("code sha256", str(about["code_sha256"])), ("seeds", ", ".join(map(str, _list(about["seeds"])))),
        *((str(name), str(version)) for name, version in versions.items()),
    ]  # fmt: skip
    facts = [(what, value) for what, value in facts if value]
    failed = int(cells["error"].notna().sum())
    subtitle = f"{len(cells)} runs, simulated" + (f"; {failed} of them failed" if failed else "")
    again = Section("Make it again", (Commands((str(about["command"]),)), Table(("", ""), tuple(facts), left=("",))))
    write_page(path, Page(f"Sweep: {', '.join(studies)}", subtitle, (*sections, _cells(cells), again)))


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else [value]


def _study(study: str, out: Path, problem: str) -> Section:
    if study not in STUDIES:
        return Section(study, (Text("This study has no figure: its runs are in the table below."),))
    if problem:
        return Section(study, (Text(f"No figure: its rows are not what it shows ({problem})."),))
    files = sorted(file for file in out.glob("*.svg") if re.fullmatch(files_of(study), file.stem))
    figures = [
        Figure(file.stem.replace("_", " "), _inline(file), _numbers(file.with_suffix(".csv")), file.stem, paper=True)
        for file in files
    ]
    return Section(study, tuple(figures))


def _inline(file: Path) -> str:
    """Return a drawing as a part of the page. Names within it are its own: several are on one page."""
    return _IDS.sub(rf"\g<1>{file.stem}-", _METADATA.sub("", file.read_text(encoding="utf-8"))).strip()


def _numbers(file: Path) -> Table:
    with file.open(encoding="utf-8", newline="") as rows:
        headings, *body = list(csv.reader(rows))
    return Table(tuple(headings), tuple(map(tuple, body)))


def _cells(cells: pd.DataFrame) -> Section:
    """Return what every run came to; columns in which all are alike say nothing and are left out."""
    names = [name for name in _SHOWN if name in cells and cells[name].nunique(dropna=False) > 1]
    if not names:
        return Section("All runs", ())
    rows = tuple(
        tuple("" if pd.isna(value) else f"{value:.6g}" if isinstance(value, float) else str(value) for value in row)
        for row in cells[names].head(_MOST_ROWS).itertuples(index=False, name=None)
    )
    more = f" The first {_MOST_ROWS} of {len(cells)} are here." if len(cells) > _MOST_ROWS else ""
    words = f"{len(cells)} runs; unfold the numbers.{more}"
    return Section("All runs", (Figure("", "", Table(tuple(names), rows), "cells", words),))
