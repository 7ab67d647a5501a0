"""`python -m hcsim.scripts.rank SEAT CONVERSATION ARENA`: a rank that begins anew (see `nursery`)."""

from __future__ import annotations

import sys

import msgspec

from hcsim.scripts.nursery import Seat
from hcsim.scripts.rank.script import run_script

run_script(msgspec.json.decode(sys.argv[1], type=Seat), int(sys.argv[2]), int(sys.argv[3]))
