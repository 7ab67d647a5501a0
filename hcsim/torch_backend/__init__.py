"""The torch.distributed backend `hcsim`: `init_process_group("hcsim")`, in both worlds.

Importing this registers it. Where hcsim is installed, torch does that by itself.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hcsim.torch_backend.options import Options

__all__ = ["DEVICES", "NAME", "Options", "register"]

NAME = "hcsim"
DEVICES = ["cpu", "cuda", "mps"]


def register() -> None:
    """Tell torch.distributed of the backend; the second time nothing happens."""
    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


def _create(options: Any, backend_options: object | None) -> ProcessGroup:
    """Only now is the rest imported: torch itself imports this module."""
    from hcsim.torch_backend.process_group import create

    return create(options, backend_options)


register()
