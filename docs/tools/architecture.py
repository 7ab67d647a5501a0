"""Draws docs/architecture.svg: the packages of hcsim, and the two worlds under one seam.

    python docs/tools/architecture.py

The colours are readable on a light and on a dark page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parents[1] / "architecture.svg"
WIDTH, HEIGHT = 960, 640
MARGIN, GAP = 20, 10


class Room(NamedTuple):
    """One package: its name and what it does."""

    name: str
    note: str


ENTRY = [
    Room("cli, launch", "start a run"),
    Room("scripts", "torch scripts as ranks"),
    Room("torch_backend", "for torch.distributed"),
    Room("checkpoints", "of torch programs"),
    Room("fuzz", "search for faults"),
    Room("plugins, testing", "your own parts"),
]
START = [
    Room("node", "one machine of a cluster"),
    Room("training", "tasks, strategies, aggregation"),
    Room("compressors", "how a tensor shrinks"),
]
PROTOCOL = [
    Room("cluster", "views, health, discovery"),
    Room("collectives", "plans, executor, cost, verifier"),
    Room("transport, identity", "links, admission, keys"),
]
SEAM = ["Clock", "Channel", "Listener", "Lan", "Device", "Store", "Host"]
VIRTUAL = [
    Room("loop, environment", "asyncio inside SimPy, one event queue"),
    Room("network, links", "shared bandwidth, latency, loss"),
    Room("hardware", "FLOPs and bytes become time"),
    Room("faults", "crash, lid, partition, …"),
]
REAL = [
    Room("host, hardware", "the standard event loop; MPS, CUDA, CPU"),
    Room("tcp, tls, shm", "sockets, TLS 1.3, shared memory"),
    Room("mdns", "discovery on the local network"),
    Room("websocket, grpc", "other carriers"),
]


class Drawing:
    """Collects the elements."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A rounded rectangle."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>')

    def text(self, x: float, y: float, words: str, kind: str) -> None:
        """Centred text."""
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def room(self, x: float, y: float, width: float, room: Room, kind: str) -> None:
        """A box with a name and a note."""
        self.box(x, y, width, 46, kind)
        self.text(x + width / 2, y + 20, room.name, "name")
        self.text(x + width / 2, y + 37, room.note, "note")

    def row(self, x: float, y: float, width: float, rooms: list[Room], kind: str) -> None:
        """Rooms side by side."""
        each = (width - GAP * (len(rooms) - 1)) / len(rooms)
        for index, room in enumerate(rooms):
            self.room(x + index * (each + GAP), y, each, room, kind)


def drawing() -> str:
    """The whole picture."""
    d = Drawing()
    inner = WIDTH - 2 * MARGIN
    d.text(WIDTH / 2, 24, "entry points", "title")
    d.row(MARGIN, 34, inner, ENTRY, "entry")
    d.text(WIDTH / 2, 108, "the same code in both worlds: async def over a Host", "title")
    d.box(MARGIN, 116, inner, 122, "common")
    d.row(MARGIN + GAP, 126, inner - 2 * GAP, START, "shared")
    d.row(MARGIN + GAP, 182, inner - 2 * GAP, PROTOCOL, "shared")
    d.box(MARGIN, 256, inner, 74, "seam")
    d.text(WIDTH / 2, 277, "runtime: the seam, interfaces only", "title")
    each = (inner - GAP * (len(SEAM) + 1)) / len(SEAM)
    for index, name in enumerate(SEAM):
        x = MARGIN + GAP + index * (each + GAP)
        d.box(x, 288, each, 32, "interface")
        d.text(x + each / 2, 309, name, "name")
    half = (inner - 2 * GAP) / 2
    for x, title, rooms, kind in (
        (MARGIN, "virtual: a simulated home", VIRTUAL, "virtual"),
        (MARGIN + half + 2 * GAP, "real: your machines", REAL, "real"),
    ):
        d.box(x, 348, half, 272, f"world {kind}")
        d.text(x + half / 2, 372, title, "title")
        for index, room in enumerate(rooms):
            d.room(x + GAP, 386 + index * 57, half - 2 * GAP, room, kind)
    style = """
    text { font-family: system-ui, sans-serif; text-anchor: middle; fill: #1c2833 }
    .title { font-size: 15px; font-weight: 600 }
    .name { font-size: 13px; font-weight: 600 }
    .note { font-size: 11.5px }
    rect { stroke: #5d6d7e; stroke-width: 1 }
    .page { fill: #ffffff; stroke: none }
    .entry { fill: #f4f6f7 } .common { fill: #eaf2f8 } .shared { fill: #d4e6f1 }
    .seam { fill: #fcf3cf } .interface { fill: #f9e79f }
    .virtual { fill: #d5f5e3 } .real { fill: #fadbd8 } .world { fill-opacity: 0.45 }
    """
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    title = "<title>hcsim: two worlds under one seam</title>"
    page = f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>'
    return "\n".join([head, title, f"<style>{style}</style>", page, *d.parts, "</svg>", ""])


if __name__ == "__main__":
    FILE.write_text(drawing(), encoding="utf-8")
