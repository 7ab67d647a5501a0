"""What crosses a mesh's links, told when somebody looks: the links count it anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hcsim.runtime.frame import Kind
from hcsim.runtime.metrics import Counter, Metrics
from hcsim.transport.link import Link

_ANSWERS = {Kind.HELLO: "taken", Kind.ABORT: "refused", Kind.LATER: "later"}


class Traffic:
    """Brings a host's network figures up to date with the counts of a mesh's links."""

    def __init__(self, metrics: Metrics, addresses: Sequence[str], links: Mapping[int, Link]) -> None:
        self._metrics = metrics
        self._addresses = addresses
        self._links = links
        self._told: dict[int, tuple[int, int, int, int]] = {}
        self.end = metrics.collect(self._tell)
        """The mesh is closed: what its links counted is told, and nothing more comes."""

    def opened(self) -> None:
        """A link is there."""
        self._metrics.counter("hcsim_links_opened_total").add()

    def greeted(self, answer: Kind) -> None:
        """A caller has its answer."""
        self._metrics.counter("hcsim_hellos_total", answer=_ANSWERS[answer]).add()

    def _tell(self) -> None:
        for rank, link in self._links.items():
            counts = (link.sent_bytes, link.received_bytes, link.sent_frames, link.received_frames)
            told = self._told.get(rank, (0, 0, 0, 0))
            self._told[rank] = counts
            for series, now, before in zip(self._series(self._addresses[rank]), counts, told, strict=True):
                series.add(now - before)

    def _series(self, peer: str) -> tuple[Counter, ...]:
        counter = self._metrics.counter
        return (
            counter("hcsim_link_sent_bytes_total", peer=peer),
            counter("hcsim_link_received_bytes_total", peer=peer),
            counter("hcsim_link_sent_frames_total", peer=peer),
            counter("hcsim_link_received_frames_total", peer=peer),
        )
