"""Faults that leave one member of a cluster alive and of no use, for good, each as the text of a scenario.

The sick member is always `mac-2` of machines `mac-1` to `mac-4` on one Ethernet medium `switch`, whose home is `home`.
The others have all that they need to finish.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import get_args

from hcsim.config import Misbehaviour


def _fault(kind: str, at: str = "3 s", **keys: object) -> str:
    given = "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
    return f'[[fault]]\nkind = "{kind}"\nat = "{at}"\n{given}\n'


_NEW_VIEW = _fault("restart", at="5 s", node="mac-4")
"""After which all members have something to save, and connections to make."""


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
    "full disk": _fault("full_disk", node="mac-2") + _NEW_VIEW,
    "slow disk": _fault("slow_disk", node="mac-2", takes="30 s") + _NEW_VIEW,
    "few descriptors": _fault("few_descriptors", node="mac-2", connections=3) + _NEW_VIEW,
    "clock a day behind": _fault("clock_jump", at="0 s", node="mac-2", by="-86400 s"),
}
"""By a name for people: `[[fault]]` tables to put at the end of a scenario."""

STRANGERS: Mapping[str, str] = {
    **{
        f"ghosts whose addresses are {answer}": _fault("stranger", home="home", ghosts=20, addresses=answer) + _NEW_VIEW
        for answer in ("refuse", "silent", "absent")
    },
    "ghosts of another cluster": _fault("stranger", home="home", ghosts=20, knows_namespace=False) + _NEW_VIEW,
    "ghosts, and few descriptors": "".join(
        _fault("few_descriptors", node=f"mac-{number}", connections=100) for number in range(1, 5)
    )
    + _fault("stranger", home="home", ghosts=20, addresses="silent")
    + _fault("restart", at="15 s", node="mac-4"),
    "a spoofed name": _fault("stranger", home="home", spoofs="mac-2"),
    "a spoofed name of a machine that starts again": _fault("stranger", home="home", spoofs="mac-2", addresses="silent")
    + _fault("restart", at="5 s", node="mac-2"),
}
"""The same for machines on the local network that are no members; all members have what they need to finish."""
