"""All ranks must be about to do the same; those that are not say so, by name, before anything is done."""

from __future__ import annotations

import msgspec
import numpy as np

from hcsim.collectives.buffers import array_of
from hcsim.collectives.group import Group
from hcsim.config.training import Training
from hcsim.errors import UNDECODABLE, ConfigError


class Intent(msgspec.Struct, frozen=True):
    """What a rank is about to do."""

    settings: Training
    seed: int
    model: str
    """Fingerprint of the task's data and shapes."""
    measure: str = ""
    """What the collectives' choices depend on beside these."""


async def agree(group: Group, ours: msgspec.Struct) -> None:
    """Return if all ranks intend the same; otherwise it is a `ConfigError` on all of them."""
    text = np.frombuffer(msgspec.json.encode(ours, enc_hook=float), np.uint8)
    lengths = [int(array_of(length)[0]) for length in await group.all_gather(np.array([text.size]))]
    texts = [array_of(each).tobytes() for each in await group.all_gather(text, lengths)]
    for rank, theirs in enumerate(texts):
        if theirs != texts[0]:
            try:
                unlike = difference(texts[0], theirs, "rank 0", f"rank {rank}")
            except UNDECODABLE as error:
                unlike = f"what one of them has said cannot be read ({error})"
            raise ConfigError(f"ranks 0 and {rank} were started with unlike settings: {unlike}")


def difference(one: bytes, other: bytes, here: str, there: str) -> str:
    """Between what two of them are about to do, with the names of both; raises one of `UNDECODABLE`."""
    first, second = (_flat(msgspec.json.decode(text, type=dict[str, object])) for text in (one, other))
    unlike = [name for name in first if first[name] != second.get(name)]
    return ", ".join(f"{name} is {first[name]} on {here} and {second.get(name)} on {there}" for name in unlike)


def _flat(intent: dict[str, object]) -> dict[str, object]:
    settings = intent.pop("settings", None)
    return {**settings, **intent} if isinstance(settings, dict) else intent
