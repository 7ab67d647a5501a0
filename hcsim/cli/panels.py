"""Help in sections: the options of a command with many of them, under the headings that they were given."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand


class Sectioned(TyperCommand):
    """Heads each group of options with its `rich_help_panel`, as plain text that can be piped and searched."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write the sections, in the order in which their first options come."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
