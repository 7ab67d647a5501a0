"""Errors as people see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from hcsim.cli import INTERRUPTED, screen
from hcsim.errors import ConfigError, HcsimError, UsageError

BAD_INPUT = 2
FAILED = 1


@contextmanager
def plainly() -> Iterator[None]:
    """Tell a person what is wrong in a line. A programming error keeps its traceback."""
    try:
        yield
    except (ConfigError, UsageError) as error:
        screen.complain(str(error))
        raise typer.Exit(BAD_INPUT) from None
    except HcsimError as error:
        screen.complain(str(error))
        raise typer.Exit(FAILED) from None
    except MemoryError as error:
        screen.complain(f"there is not enough memory for this: {error}" if str(error) else "there is not enough memory")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        screen.note("interrupted")
        raise typer.Exit(INTERRUPTED) from None
