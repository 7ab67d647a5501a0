"""Faults that leave one member of a cluster alive and of no use, for good, each as the text of a scenario.

The sick member is always `mac-2` of machines `mac-1` to `mac-4`. The others have all that they need to finish.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import get_args

from hcsim.config import Misbehaviour


def _fault(kind: str, **keys: object) -> str:
    given = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    return f'[[fault]]\nkind = "{kind}"\nat = "3 s"\n{given}\n'


SICK_MEMBERS: Mapping[str, str] = {
    "slow cable": _fault("link_change", medium="switch", node="mac-2", rate="30 kb/s"),
    "stuck device": _fault("stuck_device", node="mac-2"),
    "throttled device": _fault("throttle", node="mac-2", factor=0.001),
    "paused": _fault("pause", node="mac-2"),
    "cable pulled": _fault("cable_pulled", node="mac-2", medium="switch"),
    "clogged with one peer": _fault("clog", between=["mac-2", "mac-3"]),
    "parted from one peer": _fault("partition", sides=[["mac-2"], ["mac-3"]]),
    "parted from one peer, one way": _fault("partition", sides=[["mac-2"], ["mac-3"]], oneway=True),
    **{
        f"{port} port {how}": _fault("blocked_port", node="mac-2", port=port, how=how)
        for port in ("gradient", "discovery")
        for how in ("closed", "silent")
    },
    **{f"misbehaves: {how}": _fault("misbehave", node="mac-2", how=how) for how in get_args(Misbehaviour)},
    **{
        f"misbehaves to one peer: {how}": _fault("misbehave", node="mac-2", how=how, to="mac-3")
        for how in get_args(Misbehaviour)
    },
}
"""By a name for people: `[[fault]]` tables to put at the end of a scenario."""
