"""`hcsim` with the soak's task: `python -m experiments.soak.member run --real job.toml …`."""

from __future__ import annotations

from functools import partial

import hcsim.cli
from experiments.soak.task import NAME, Paced
from hcsim.plugins import register_task


def main() -> None:
    register_task(NAME, partial(Paced, sleeps=True))
    hcsim.cli.main()


if __name__ == "__main__":
    main()
