"""`python -m hcsim.scripts.rank SEAT CONVERSATION ARENA`: a rank that is started without forking (see
`fork_server`).
"""

from __future__ import annotations

import sys

import msgspec

from hcsim.scripts.environment import RankSpec, import_early
from hcsim.scripts.rank.script import run_script

seat = msgspec.json.decode(sys.argv[1], type=RankSpec)
import_early(seat.script)  # which is no part of its work, as it is none where ranks are forked
run_script(seat, int(sys.argv[2]), int(sys.argv[3]))
