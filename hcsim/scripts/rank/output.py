"""The script's standard output and error: lines that the simulator prints, in the order of its time."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Any

from hcsim.scripts.conversation import Printed
from hcsim.scripts.rank.simulator import Simulator


class _Told(io.RawIOBase):
    """Bytes go to the simulator; in a process that is no rank, where they went before."""

    def __init__(self, simulator: Simulator, stream: int) -> None:
        self._simulator = simulator
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rank = os.getpid()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream

    def write(self, data: Any) -> int:
        if os.getpid() == self._rank:
            self._simulator.tell(Printed(self._stream, self._decode(bytes(data))))
            return len(data)
        return os.write(self._stream, data)


def install(simulator: Simulator) -> None:
    """Have `sys.stdout` and `sys.stderr` go there."""
    for stream, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(_Told(simulator, stream))
        text = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
