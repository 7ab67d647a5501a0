"""What of torch.distributed works with hcsim, beside gloo: found by the probes, and shown in docs/reference/torch.md.

`python -m tests.torch_backend.matrix` writes it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from tests.torch_backend.probe_list import ROWS, try_everything
from tests.torch_backend.ranks import Ranks

Found: TypeAlias = Mapping[tuple[str, str], str]
"""What went wrong, by row and variant; nothing where all was well."""

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "torch.md"
BEGIN, END = "<!-- torch.distributed: python -m tests.torch_backend.matrix -->\n", "<!-- torch.distributed ends -->"
BACKENDS = ("hcsim", "gloo")
SIZE = 4


def find(ranks: Ranks, backend: str, size: int = SIZE) -> Found:
    """Try everything."""
    found: Found = ranks.run(try_everything, backend, size=size, backend="")[0]
    return found


def table(found: Mapping[str, Found]) -> str:
    """As Markdown."""
    lines = [f"| | {' | '.join(BACKENDS)} |", "|---" * (len(BACKENDS) + 1) + "|"]
    for row in ROWS:
        cells = [_cell({variant: not text for (r, variant), text in found[b].items() if r == row}) for b in BACKENDS]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown() -> str:
    """What the document has now."""
    return DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def _cell(works: Mapping[str, bool]) -> str:
    good = [variant for variant, well in works.items() if well]
    bad = [variant for variant, well in works.items() if not well]
    if not bad:
        return "yes"
    if not good:
        return "no"
    return f"all but {', '.join(bad)}" if len(bad) <= len(good) else f"only {', '.join(good)}"


def write() -> None:
    """Put the table into the document."""
    ranks = Ranks()
    made = table({backend: find(ranks, backend) for backend in BACKENDS})
    ranks.close()
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(text.replace(BEGIN + shown() + END, BEGIN + made + END), encoding="utf-8")


if __name__ == "__main__":
    write()
