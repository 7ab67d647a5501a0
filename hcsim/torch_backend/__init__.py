"""The torch.distributed backend `hcsim`: `init_process_group("hcsim")`, in both worlds.

Importing this registers it. Where hcsim is installed, torch does that by itself, at the end of its own import; which
may be one that began here, so torch is imported last, when all that it looks for is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hcsim.torch_backend.options import DEVICES, NAME, Options

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Options", "register"]


def register() -> None:
    """Tell torch.distributed of the backend; the second time nothing happens."""
    import torch.distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


def _create(options: Any, backend_options: object | None) -> ProcessGroup:
    """Only now is the rest imported: torch itself imports this module."""
    from hcsim.torch_backend.process_group import create

    return create(options, backend_options)


register()
