"""What all tables of a scenario share: strict keys, names without units, a few checked types."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z")]
Mtu: TypeAlias = Annotated[int, Meta(ge=576, le=65535)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
Count: TypeAlias = Annotated[int, Meta(ge=1)]


def _key(attribute: str) -> str:
    return re.sub(r"_(bps|Bps|s|bytes|flops)$", "", attribute)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename=_key):
    """A table of the file. A key is the attribute without its unit; an unknown one is refused."""
