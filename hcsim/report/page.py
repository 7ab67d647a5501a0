"""A page that stands by itself: a title, sections of text, tables and figures, and the commands that make it again.

    page = Page("Four Macs", "digits by ddp", sections=(
        Section("Where the time goes", (Text("…"), Figure("Steps", svg, Table(("machine", "compute"), rows)))),
        Section("Again", (Commands(("hcsim run four-macs-1gbe",)),)),
    ))
    write_page(Path("report.html"), page)

Everything that is passed as text is escaped; only `Figure.svg` is taken as it is, and comes from `chart` or `home`. The
page has no scripts, and asks for nothing: a browser is told so (Content-Security-Policy). The numbers of a figure are
below it, as a table that unfolds and as a file in the page. Equal input makes equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias
from urllib.parse import quote

import msgspec

from hcsim.errors import ConfigError
from hcsim.files import write_whole

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for the page: its own style, and nothing else."""
_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), *range(127, 160)), "�")
"""Names of machines may have them, and HTML may not."""

PALETTE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --line: #dfe3e8; --ink: #1b1f24; --soft: #5b6672;
  --good: #12734a; --warn: #8a5a00; --bad: #b3261e; --accent: #0b63b0;
  --compute: #0b63b0; --encode: #c4711a; --wait: #97a1ad; --idle: #d3d8de; --network: #7d4fa3; --fault: #b3261e;
  --c0: #0b63b0; --c1: #c2571a; --c2: #2f7f45; --c3: #8a4fa3; --c4: #96741b; --c5: #b83a62;
  --c6: #1f7f84; --c7: #6b6b6b; --c8: #60801a; --c9: #8c4b3c; --c10: #4a52a8; --c11: #946fa8;
}
@media (prefers-color-scheme: dark) { :root:not(.light) {
  --page: #14171b; --card: #1d2126; --line: #343a42; --ink: #e8ebee; --soft: #a0aab5;
  --good: #4fc88d; --warn: #e0ac4a; --bad: #ff8a80; --accent: #6db4f2;
  --compute: #6db4f2; --encode: #eda55b; --wait: #6a747f; --idle: #3b434c; --network: #b78ddb; --fault: #ff8a80;
  --c0: #6db4f2; --c1: #f0935c; --c2: #63c483; --c3: #c18fdc; --c4: #d8b553; --c5: #f083a6;
  --c6: #5cc5ca; --c7: #a3a3a3; --c8: #a9cf55; --c9: #d6907f; --c10: #9aa2f2; --c11: #d0b3e0;
} }
"""
"""The colours of all pages, in the light and in the dark."""
COLOURS = 12
"""Of lines: --c0 to --c11."""
DRAWING = """
.drawn text { font: 13px system-ui, sans-serif; fill: var(--ink) }
.drawn .soft { fill: var(--soft) } .drawn .grid { stroke: var(--line) }
.drawn .box { fill: var(--card); stroke: var(--line) } .drawn .halo { stroke: var(--card); stroke-width: 4px;
  paint-order: stroke }
"""
"""The style of what is drawn here."""
_STYLE = """
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1080px; margin: 0 auto; padding: 20px 16px 40px }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere }
h2 { font-size: 20px; margin: 32px 0 8px } h3 { font-size: 15px; margin: 18px 0 6px }
p { margin: 6px 0; max-width: 80ch; overflow-wrap: anywhere } .soft { color: var(--soft) }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 4px 18px 16px;
  margin-top: 14px; min-width: 0 }
section > h2 { margin-top: 12px }
.figures { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); padding-top: 14px }
.figures b { display: block; font-size: 24px; font-weight: 650; font-variant-numeric: tabular-nums; line-height: 1.2 }
.figures small { color: var(--soft); display: block }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 4px 24px }
.charts > * { min-width: 0 }
figure { margin: 12px 0 }
figcaption { font-weight: 600; margin-bottom: 4px }
.paper { background: #fff; border-radius: 6px; padding: 6px }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); vertical-align: top }
td { overflow-wrap: anywhere } .n { white-space: nowrap }
th { color: var(--soft); font-weight: 500; font-size: 13px }
tr:last-child td { border-bottom: 0 }
.l { text-align: left }
.numbers td, .numbers th { white-space: nowrap; overflow-wrap: normal }
details { margin: 4px 0; font-size: 14px } summary { cursor: pointer; color: var(--soft) }
a { color: var(--accent) }
pre { background: var(--page); border: 1px solid var(--line); border-radius: 6px; padding: 8px 12px; margin: 6px 0;
  overflow-x: auto; font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
svg { width: 100%; height: auto; display: block }
.drawn { overflow-x: auto } .drawn svg { min-width: 460px; max-width: 720px }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--soft); margin: 4px 0 }
.key i { display: inline-block; width: 18px; height: 0; border-top: 3px solid; vertical-align: middle;
  margin-right: 6px }
.key i.dashed { border-top-style: dashed } .key i.block { height: 10px; width: 10px; border: 0; border-radius: 2px }
@media (max-width: 640px) { section { padding: 2px 12px 12px } h1 { font-size: 22px }
  th, td { padding: 4px 8px 4px 0 } }
@media print { main { max-width: none; padding: 0 } section { break-inside: avoid-page; border: 0; padding: 0 }
  .numbers, summary { display: none } h2 { break-after: avoid } .scroll { overflow: visible }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact } }
"""


_SHORT = 14
"""A cell of up to so many characters stays on one line."""


class Text(msgspec.Struct, frozen=True):
    """A paragraph."""

    text: str
    soft: bool = False


class Table(msgspec.Struct, frozen=True):
    """A table; the first column and those named in `left` are words, the others numbers."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[str, ...] = ()
    title: str = ""


class Figure(msgspec.Struct, frozen=True):
    """A drawing, with the numbers that it shows."""

    title: str
    svg: str
    """Markup, which is not escaped."""
    numbers: Table | None = None
    name: str = "figure"
    """Of the file with the numbers, without its end."""
    caption: str = ""
    paper: bool = False
    """Whether it was drawn for white paper."""


class Facts(msgspec.Struct, frozen=True):
    """Large figures beside each other: what it is, the figure, and words below it."""

    facts: tuple[tuple[str, str, str], ...]


class Commands(msgspec.Struct, frozen=True):
    """Lines for a shell, or the text of a file."""

    lines: tuple[str, ...]
    title: str = ""
    folded: bool = False


class Row(msgspec.Struct, frozen=True):
    """Parts side by side, where there is room."""

    parts: tuple[Part, ...]


Part: TypeAlias = Text | Table | Figure | Facts | Commands | Row


class Section(msgspec.Struct, frozen=True):
    """A part of a page under a heading; without parts it is left out."""

    title: str
    parts: tuple[Part, ...]


class Page(msgspec.Struct, frozen=True):
    """A page."""

    title: str
    subtitle: str = ""
    sections: tuple[Section, ...] = ()


def html(page: Page) -> str:
    """Return the page as one file of HTML."""
    title = text_of(page.title)
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{PALETTE}{_STYLE}{DRAWING}</style>"
    )
    subtitle = f'<p class="soft">{text_of(page.subtitle)}</p>' if page.subtitle else ""
    body = "\n".join(_section(section) for section in page.sections if section.parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>\n'
        f"<h1>{title}</h1>{subtitle}\n{body}\n</main></body></html>\n"
    )


def check_place(path: Path | None) -> None:
    """Reject, before anything is done, a place where no page can be."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(f"--report {path}: give a file in a folder that there is")


def write_page(path: Path, page: Page) -> None:
    """Write the page; what cannot be written is an error that names the file."""
    try:
        write_whole(path, html(page).encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def text_of(text: str) -> str:
    """Return the text as HTML shows it."""
    return escape(text.translate(_CONTROLS))


def csv_of(table: Table) -> str:
    """Return a table as CSV."""
    return "".join(",".join(map(_csv_cell, row)) + "\n" for row in (table.headings, *table.rows))


def _csv_cell(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if any(mark in cell for mark in ',"\r\n') else cell


def _section(section: Section) -> str:
    heading = f"<h2>{text_of(section.title)}</h2>" if section.title else ""
    return f"<section>{heading}{''.join(map(_part, section.parts))}</section>"


def _part(part: Part) -> str:
    match part:
        case Text(text, soft):
            return f"<p{' class=soft' if soft else ''}>{text_of(text)}</p>"
        case Table():
            return (f"<h3>{text_of(part.title)}</h3>" if part.title else "") + _table(part)
        case Figure():
            return _figure(part)
        case Facts(facts):
            return f'<div class="figures">{"".join(_fact(*fact) for fact in facts)}</div>'
        case Commands():
            return _commands(part)
        case Row(parts):
            return f'<div class="charts">{"".join(f"<div>{_part(each)}</div>" for each in parts)}</div>'


def _fact(what: str, figure: str, below: str) -> str:
    return f"<div><small>{text_of(what)}</small><b>{text_of(figure)}</b><small>{text_of(below)}</small></div>"


def _commands(part: Commands) -> str:
    lines = f"<pre>{text_of(chr(10).join(part.lines))}</pre>"
    if part.folded:
        return f"<details><summary>{text_of(part.title)}</summary>{lines}</details>"
    return (f"<h3>{text_of(part.title)}</h3>" if part.title else "") + lines


def _table(table: Table) -> str:
    left = [not number or heading in table.left for number, heading in enumerate(table.headings)]

    def row(cells: Sequence[str], tag: str) -> str:
        marked: Iterable[str] = (
            f"<{tag}{_class(cell, is_left)}>{text_of(cell)}</{tag}>" for cell, is_left in zip(cells, left, strict=True)
        )
        return f"<tr>{''.join(marked)}</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    return f'<div class="scroll"><table>{row(table.headings, "th")}{body}</table></div>'


def _class(cell: str, is_left: bool) -> str:
    names = [*(["l"] if is_left else []), *(["n"] if len(cell) <= _SHORT else [])]
    return f' class="{" ".join(names)}"' if names else ""


def _figure(figure: Figure) -> str:
    kind = "paper" if figure.paper else "drawn"
    caption = f'<p class="soft">{text_of(figure.caption)}</p>' if figure.caption else ""
    numbers = ""
    if figure.numbers is not None:
        table = figure.numbers
        file = text_of(f"{figure.name}.csv")
        link = f'<a download="{file}" href="data:text/csv;charset=utf-8,{quote(csv_of(table))}">{file}</a>'
        numbers = f'<details class="numbers"><summary>the numbers</summary><p>{link}</p>{_table(table)}</details>'
    heading = f"<figcaption>{text_of(figure.title)}</figcaption>" if figure.title else ""
    return f'<figure>{heading}<div class="{kind}">{figure.svg}</div>{caption}{numbers}</figure>'
