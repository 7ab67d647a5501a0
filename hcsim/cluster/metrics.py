"""Cluster metrics that a node records in its host's registry."""

from __future__ import annotations

from collections.abc import Mapping

from hcsim.cluster.control_connections import ControlConnections
from hcsim.cluster.discovery import Discovery
from hcsim.cluster.health import FailureDetector
from hcsim.cluster.membership import Membership
from hcsim.cluster.probe import Routes
from hcsim.cluster.view import View
from hcsim.runtime.host import Host


class ClusterMetrics:
    """Records counters and histograms, and sets gauges at collection time."""

    def __init__(
        self,
        host: Host,
        membership: Membership,
        lines: ControlConnections,
        discovery: Discovery,
        pulses: Mapping[str, FailureDetector],
        ways: Routes,
    ) -> None:
        self._clock = host.clock
        self._metrics = host.metrics
        self._membership = membership
        self._lines = lines
        self._discovery = discovery
        self._pulses = pulses
        self._ways = ways
        self._view: View | None = None
        self._overdue: dict[str, int] = {}
        self.end = host.metrics.collect(self._tell)
        """Collect a last time, and stop."""

    def beat_sent(self) -> None:
        """Count a heartbeat sent to every connected node."""
        for node in self._lines.nodes:
            self._metrics.counter("hcsim_heartbeats_sent_total", node=self._label(node)).add()

    def looked(self, node: str, pulse: FailureDetector, suspected: str, now: float) -> None:
        """Record a health check of a peer. Peers that were already suspected are ignored."""
        if self._membership.roster.peers[node].suspected:
            return
        overdue = max(0, pulse.overdue(now) - 1)  # the last of them may be on its way
        missed = overdue - self._overdue.get(node, 0)
        self._overdue[node] = overdue
        if missed > 0:
            self._metrics.counter("hcsim_heartbeats_missed_total", node=self._label(node)).add(missed)
        if suspected and self._membership.view.member(node) is not None:
            self._metrics.histogram("hcsim_detection_seconds").observe(pulse.silence_s(now))

    def adopted(self, view: View) -> None:
        before, self._view = self._view, view
        if before is None or not f"{view.lineage}/".startswith(f"{before.lineage}/"):
            kind = "alone" if view.members == (self._membership.us,) else "entered"
        else:
            lost = [m for m in before.members if m not in view.members and m.node not in view.left]
            joined = [m for m in view.members if m not in before.members]
            kind = "lost" if lost else "failed" if view.abrupt else "joined" if joined else "left"
            self._metrics.counter("hcsim_evictions_total").add(len(lost))
            self._metrics.counter("hcsim_joins_total").add(len(joined))
        self._metrics.counter("hcsim_view_changes_total", reason=kind).add()

    def _tell(self) -> None:
        membership, view, now = self._membership, self._membership.view, self._clock.elapsed()
        gauge, counter = self._metrics.gauge, self._metrics.counter
        expected = self._discovery.known
        gauge("hcsim_peers_known").set(len(expected))
        reached = membership.roster.reaches()
        gauge("hcsim_peers_connected").set(sum(node in reached for node in self._lines.nodes))
        gauge("hcsim_peers_suspected").set(sum(not membership.roster.well(node, view) for node in view.nodes))
        for node, pulse in self._pulses.items():
            label = self._label(node)
            # Nobody wonders about the silence of a node that has said goodbye.
            gauge("hcsim_heartbeat_phi", node=label).set(pulse.phi(now) if node in expected else 0.0)
            if pulse.latency_s is not None:
                gauge("hcsim_heartbeat_latency_seconds", node=label).set(pulse.latency_s)
        for node, peer in membership.roster.peers.items():
            line = self._ways.line(peer.status.us)
            if line is not None:
                for direction, rate_Bps in (("out", line.there_Bps), ("in", line.back_Bps)):
                    labels = {"node": self._label(node), "direction": direction}
                    gauge("hcsim_link_bandwidth_bytes_per_second", **labels).set(rate_Bps)
        gauge("hcsim_view_epoch").set(view.epoch)
        gauge("hcsim_view_members").set(len(view.members))
        gauge("hcsim_leader").set(view.rank(membership.us) == 0 and not membership.status.leaving)
        for answer, ballots in membership.votes.items():
            counter("hcsim_ballots_total", answer=answer).value = ballots
        for outcome, rounds in membership.rounds.items():
            counter("hcsim_elections_total", outcome=outcome).value = rounds

    def _label(self, node: str) -> str:
        """Return the node's label, as in its announcement: a readable name, and enough of its id to be unique."""
        return f"{self._membership.roster.peers[node].status.us.name}-{node[:8]}"
