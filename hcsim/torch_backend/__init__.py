"""The torch.distributed backend `hcsim`: `init_process_group("hcsim")`, in both worlds.

Importing this package registers the backend. Where hcsim is installed, torch imports it at the end of its own
import. That import may have been triggered here, so this package imports torch last, when everything that torch
looks up is defined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hcsim.torch_backend.options import DEVICES, NAME, Options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Options", "register"]


def register() -> None:
    """Register the backend with torch.distributed; idempotent."""
    import torch.distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


def _create(options: Any, backend_options: object | None) -> ProcessGroup:
    """Create a group. The import is deferred because torch itself imports this module."""
    from hcsim.torch_backend.process_group import create

    return create(options, backend_options)


register()
