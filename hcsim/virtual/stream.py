"""A stream: one direction of a connection, as TCP would carry it.

While it has something to send it is one flow; its rate is its share of the network (see `port_queue.py` for ports with
queues), bounded by

    rate ≤ min(window, congestion window)/RTT, and ≤ what the loss model and the two hosts allow

A message arrives one latency (plus jitter, plus what a loss or a full queue costs; see `Delays`)
after its last byte left, never before the one ahead of it. A stream stops between two messages while
the receiver has a window's worth unread.

Consecutive messages of a busy stream need no new sharing: the flow just goes on.

The congestion window starts at ten segments and grows once in a round trip by what was sent in it, so it doubles every
RTT under load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil, inf, sqrt

import msgspec

from hcsim.config import Tcp
from hcsim.rng import stream as random_stream
from hcsim.runtime.channel import EMPTY, Payload, SegmentCounts
from hcsim.runtime.frame import Header
from hcsim.telemetry.trace import Event
from hcsim.virtual.environment import NS
from hcsim.virtual.links import Path, merged
from hcsim.virtual.network import FluidNetwork, Gate
from hcsim.virtual.port_queue import PortQueues
from hcsim.virtual.rate_allocator import Flow, Resource
from hcsim.virtual.two_way_traffic import slowed

NEVER_NS = 1 << 63
"""A time later than any event."""
RTO_S = 0.2
"""The minimum retransmission timeout of TCP, which a loss in the last packets of a message costs."""
SLOW_START_DELAY_S = 4e-3
"""The queueing delay at which CUBIC ends its slow start (HyStart), so that a connection has so much more in flight than
the path holds."""
TAIL_PACKETS = 3
"""A loss among this many last packets gets no three duplicate ACKs, so only the timeout detects it."""


class StreamMessage(msgspec.Struct, frozen=True):
    """A unit of transfer: its size on the wire, and the callback for its arrival."""

    size_bytes: int
    arrive: Callable[..., None]
    header: Header | None = None
    """None if no frame ends with it: it is the end of the connection, behind all frames, or a part of a frame."""
    payload: Payload = EMPTY
    exposed_bytes: int | None = None
    """The bytes exposed to jitter and loss, if not the size: the whole frame that it completes, or 0."""


def frame_event(now_ns: int, kind: str, where: str, frame: Header) -> Event:
    return (now_ns, kind, where, frame.kind, frame.operation, frame.bucket, frame.step, frame.offset, frame.length)


class CongestionWindow:
    """The congestion window. It grows by the bytes sent, up to the receive window."""

    __slots__ = ("_counted_from", "_earned", "_initial", "_most", "is_opening", "size_bytes", "ticking")

    def __init__(self, initial_bytes: int, most_bytes: int) -> None:
        self._initial = float(initial_bytes)
        self._most = most_bytes
        self.size_bytes = self._initial
        self.is_opening = self._initial < most_bytes
        """Whether it is smaller than the receive window."""
        self.ticking = False
        """Whether the end of a round trip is scheduled."""
        self._earned = 0.0
        """Bytes sent since it last grew, which make it grow next."""
        self._counted_from = 0.0
        """Remaining bytes of the current message at the last count."""

    def next(self, message_bytes: float) -> None:
        """Start counting another message."""
        self._counted_from = message_bytes

    def count(self, remaining_bytes: float) -> None:
        """Count what has left, given the remaining bytes of the message."""
        self._earned += self._counted_from - remaining_bytes
        self._counted_from = remaining_bytes

    def open(self) -> None:
        """Grow by the bytes sent in the last round trip, at most to twice the size."""
        self.size_bytes += min(self._earned, self.size_bytes)
        self.is_opening = self.size_bytes < self._most
        self._earned = 0.0

    def restart(self) -> None:
        """Return to the initial window, after an idle period."""
        self.size_bytes = self._initial
        self.is_opening = self._initial < self._most
        self._earned = 0.0


class Delays:
    """The extra delay of messages by jitter, loss and full queues."""

    __slots__ = ("_jitter", "_jitter_s", "_loss", "_mss", "_net", "_packet_loss", "_queues", "lost_segments")

    def __init__(self, net: FluidNetwork, name: str, path: Path, mss: int) -> None:
        self._net = net
        self._mss = mss
        self._jitter = random_stream(net.seed, "jitter", name)
        self._loss = random_stream(net.seed, "loss", name)
        self.lost_segments = 0.0
        """How many are lost on average, by the path's loss and by full queues."""
        self.follow(path)

    @staticmethod
    def on(path: Path) -> bool:
        """Return whether the delay along this path varies."""
        return bool(path.jitter_s or path.loss or any(hop.queue is not None for hop in path.hops))

    def follow(self, path: Path) -> None:
        """Adapt to a change of the path."""
        self._jitter_s = path.jitter_s
        self._packet_loss = path.loss
        self._queues = tuple(hop.queue for hop in path.hops if hop.queue is not None)

    def draw_s(
        self, size_bytes: int, rtt_s: float, flow: Flow | None, sending_s: float = 0.0, sent_bytes: int = 0
    ) -> float:
        """Return the extra delay of the next message of a stream that has sent so much in that time, without a break.

        A queue contains at most what other flows have sent since they were last idle. The flow's own data are not
        counted: the time to send them is already in its rate. So is the time that it has waited for others, by sharing
        the line with them."""
        delay_s = 0.0
        if self._jitter_s > 0.0:
            delay_s += self._jitter.expovariate(1.0 / self._jitter_s)
        if self._packet_loss > 0.0:
            delay_s += self._retransmission_s(size_bytes, rtt_s)
        for resource, buffer_bytes in self._queues:
            if resource.capacity > 0.0 and self._net.sharing.is_full(resource):
                before_us_bytes = self._net.burst_bytes(resource, flow)
                waited_s = max(sending_s - sent_bytes / resource.capacity, 0.0)
                delay_s += max(min(buffer_bytes, before_us_bytes) / resource.capacity - waited_s, 0.0)
                self.lost_segments += before_us_bytes >= buffer_bytes
        return delay_s

    def _retransmission_s(self, size_bytes: int, rtt_s: float) -> float:
        """Return one RTT if a packet of the message is lost, a timeout if it is one of the last, else 0."""
        packets = ceil(size_bytes / self._mss)
        self.lost_segments += self._packet_loss * packets
        tail = min(packets, TAIL_PACKETS)
        draw = self._loss.random()
        kept_tail = (1.0 - self._packet_loss) ** tail
        if draw < 1.0 - kept_tail:
            return max(RTO_S, rtt_s)
        return rtt_s if draw < 1.0 - kept_tail * (1.0 - self._packet_loss) ** (packets - tail) else 0.0


def loss_bound_bytes_ps(tcp: Tcp, mss: int, rtt_s: float, path: Path) -> float:
    """Return the rate that TCP sustains at the path's loss probability."""
    loss = path.loss
    if loss <= 0.0 or rtt_s <= 0.0 or tcp.loss_model == "none":
        return inf
    reno = mss / rtt_s * sqrt(1.5 / loss)
    if tcp.loss_model == "mathis":
        return reno
    if tcp.loss_model == "pftk":  # Padhye, Firoiu, Towsley and Kurose, with one ACK per packet
        timeouts = RTO_S * min(1.0, 3.0 * sqrt(3.0 * loss / 8.0)) * loss * (1.0 + 32.0 * loss**2)
        return mss / (rtt_s * sqrt(2.0 * loss / 3.0) + timeouts)
    if tcp.loss_model == "cubic":  # which is never slower than Reno (RFC 9438, 4.3 and 5.1)
        return float(max(1.054 * (rtt_s / loss) ** 0.75 * mss / rtt_s, reno))
    return path.rate_bytes_ps * (1.0 - loss)


class VirtualStream:
    """One direction of a connection."""

    __slots__ = (
        "_arrival_ns",
        "_at_half",
        "_began_ns",
        "_buffer_bytes",
        "_burst",
        "_burst_began_ns",
        "_cap",
        "_changed_ns",
        "_comes_from_ns",
        "_comes_until_ns",
        "_congestion",
        "_considered_ns",
        "_delays",
        "_due",
        "_env",
        "_held",
        "_idle_since_ns",
        "_latency_ns",
        "_mss",
        "_net",
        "_not_before_ns",
        "_paths",
        "_ports",
        "_rate",
        "_remaining",
        "_rtt_s",
        "_unacknowledged",
        "_window_bytes",
        "acks_blocked",
        "blocked",
        "dead",
        "flow",
        "gates",
        "has_line",
        "interfaces",
        "name",
        "number",
        "on_pushed_dead",
        "on_room",
        "outstanding",
        "pushed_bytes",
        "queue",
        "queued_bytes",
        "reverse",
        "send_buffer_bytes",
    )  # fmt: skip

    def __init__(self, net: FluidNetwork, name: str, there: Path, back: Path) -> None:
        tcp = net.tcp
        self._net = net
        self._env = net.env
        self.name = name
        self.queue: deque[StreamMessage] = deque()
        self.queued_bytes = 0
        self.pushed_bytes = 0
        """Of all messages so far."""
        self.outstanding = 0
        """Bytes that have arrived and are unread."""
        self.on_room: Callable[[], None] | None = None
        self.blocked = False
        """Whether a partition holds back the data."""
        self.acks_blocked = False
        """Whether a partition holds back the acknowledgements; the stream then stops after one window."""
        self.dead = False
        self.on_pushed_dead: Callable[[], None] | None = None
        """Called for the first message that is sent after the other end is gone."""
        self._at_half: Callable[[], None] | None = None
        self._held: deque[StreamMessage] | None = None
        """Messages that have arrived but may not be delivered yet; later ones wait behind them."""
        self._unacknowledged = 0
        """While acknowledgements are held back: bytes that the sender counts as unread."""
        self._window_bytes = tcp.window_bytes
        self._buffer_bytes = tcp.receive_buffer_bytes
        self._not_before_ns = 0
        self.number = net.add(self)
        self.gates: tuple[Gate, ...] = ()
        self.interfaces = (there.medium, there.arrives_by)
        """The media at the sender and at the receiver, which are fixed for a connection."""
        self.reverse: VirtualStream | None = None
        """The other direction of the connection."""
        self._mss = there.mtu - tcp.header_bytes
        self._retime(there, back)
        self._paths = there, back
        self.has_line = any(hop.queue is not None for hop in there.hops)
        self._ports = PortQueues(net, name, there, self._mss) if there.ports else None
        uses = self._uses()
        self.flow = Flow(self.number, uses, there.weight, inf) if uses else None
        self.send_buffer_bytes: int = tcp.send_buffer_bytes
        """How much a sender may have in the queue when it adds a message."""
        if tcp.autotune and self.flow is not None:
            self.send_buffer_bytes = min(2 * tcp.initial_window_segments * self._mss, tcp.send_buffer_bytes)
        self._congestion = (
            CongestionWindow(tcp.initial_window_segments * self._mss, tcp.window_bytes) if tcp.slow_start else None
        )
        self._delays = Delays(net, name, there, self._mss) if Delays.on(there) else None
        self._rate = 0.0
        self._remaining = 0.0
        self._changed_ns = 0
        self._arrival_ns = 0
        self._began_ns = 0
        """The time when the first byte of the head message left."""
        self._comes_from_ns = self._comes_until_ns = 0
        """The interval in which consecutive messages of several packets arrive."""
        self._idle_since_ns = 0
        self._burst = 0
        """Bytes of the messages that have left since the stream was last idle."""
        self._burst_began_ns = 0
        self._considered_ns = -1
        self._due = 0
        if self.flow is not None:
            self.flow.bound = self._bound()

    def _retime(self, there: Path, back: Path) -> None:
        self._latency_ns = round(there.latency_s * NS)
        self._rtt_s = there.latency_s + back.latency_s + there.jitter_s + back.jitter_s
        self._cap = min(loss_bound_bytes_ps(self._net.tcp, self._mss, self._rtt_s, there), there.cap_bytes_ps)

    def push(self, message: StreamMessage) -> None:
        """Queue a message."""
        queue = self.queue
        queue.append(message)
        self.queued_bytes += message.size_bytes
        self.pushed_bytes += message.size_bytes
        if len(queue) == 1:
            self._burst = 0
            self._burst_began_ns = self._env.now_ns
            self._begin()

    def consumed(self, size_bytes: int) -> None:
        """Count bytes as read by the receiver; a stream that is stopped by back-pressure continues."""
        stalled = not self._has_room()
        self.outstanding -= size_bytes
        if stalled and self.queue and self._has_room():
            # The news of the open window takes its time to get back to the sender.
            self._env.call_at(self._env.now_ns + self._latency_ns, self._resume)
            if self._net.trace.has_intervals:
                self._net.trace.append([(self._env.now_ns, "window opens", self.name)])

    def obstruct(self, *, data: bool, acks: bool) -> None:
        """Set what a partition holds back: the data, their acknowledgements, or both."""
        if data and not self.blocked and self._remaining > 0.0:
            self._pause()
        opened, acks_opened = self.blocked and not data, self.acks_blocked and not acks
        if acks != self.acks_blocked:
            self._unacknowledged = self.outstanding if acks else 0
        self.blocked, self.acks_blocked = data, acks
        # TCP notices at its next retransmission.
        when = self._env.now_ns + round(RTO_S * NS)
        if opened:
            self._not_before_ns = max(self._not_before_ns, self._arrival_ns, when)
            if self._held is not None:
                self._let_go_in_time()
        if opened or acks_opened:
            self._env.call_at(when, self._resume)

    def hold_until(self, when_ns: int) -> None:
        """Delay all arrivals until that time; what has left by then arrives at once."""
        self._not_before_ns = max(self._not_before_ns, when_ns)

    def when_half_sent(self, act: Callable[[], None]) -> None:
        """Call a function when part of a message has left: now, or halfway through the next multi-packet one."""
        if self._rate > 0.0 and self._env.now_ns > self._changed_ns and self.queue[0].size_bytes > self._mss:
            act()
        else:
            self._at_half = act
            if self._rate > 0.0:  # the one at the head begins in this very instant
                self._set_half_time(self._env.now_ns)

    @property
    def burst_bytes(self) -> float:
        """Bytes that have left since the stream was last idle."""
        if self._rate <= 0.0:
            return 0.0
        left = self.queue[0].size_bytes - self._remaining
        return self._burst + left + self._rate * ((self._env.now_ns - self._changed_ns) / NS)

    @property
    def segments(self) -> SegmentCounts:
        """What was sent, and what of it is lost on average."""
        lost = (0.0 if each is None else each.lost_segments for each in (self._delays, self._ports))
        return SegmentCounts(ceil(self.pushed_bytes / self._mss), round(sum(lost)))

    @property
    def unfinished(self) -> bool:
        """Whether data are queued or in flight."""
        return bool(self.queue) or self._arrival_ns > self._env.now_ns or self._held is not None

    @property
    def is_in_message(self) -> bool:
        """Whether a message has arrived in part. A message of one packet arrives whole."""
        now_ns = self._env.now_ns
        if self.dead or self._held is not None or now_ns < self._not_before_ns:
            return False
        if self._comes_from_ns <= now_ns < self._comes_until_ns:
            return True
        if self._remaining <= 0.0 or now_ns < self._began_ns + self._latency_ns:
            return False
        size_bytes = self.queue[0].size_bytes
        has_begun = self._remaining < size_bytes or (self._rate > 0.0 and now_ns > self._changed_ns)
        return has_begun and size_bytes > self._mss

    def kill(self) -> None:
        """End the stream: nothing more leaves or arrives."""
        self.dead = True
        self._due += 1
        self.queue.clear()
        self.queued_bytes = 0
        if self._remaining > 0.0 and self.flow is not None:
            self._remaining = 0.0
            self._rate = 0.0
            self._net.stop(self.flow)
        self._net.forget(self)

    def reroute(self, there: Path, back: Path) -> None:
        """Adapt to a change of the path: its latency, loss, or cost per byte."""
        self._retime(there, back)
        if self._delays is not None:
            self._delays.follow(there)
        elif Delays.on(there):
            self._delays = Delays(self._net, self.name, there, self._mss)
        self._paths = there, back
        self.has_line = any(hop.queue is not None for hop in there.hops)
        if self._ports is not None:
            self._ports.follow(there)
        elif there.ports:
            self._ports = PortQueues(self._net, self.name, there, self._mss)
        uses = self._uses()
        if self.flow is None:
            if uses:
                self.flow = Flow(self.number, uses, there.weight, self._bound())
        elif uses != self.flow.uses or there.weight != self.flow.weight:
            self._replace_flow(uses, there.weight)
        else:
            self._net.bound(self.flow, self._bound())

    def _uses(self) -> tuple[tuple[Resource, float], ...]:
        """Return what a byte takes of each resource, on its way and by its acknowledgement."""
        there, back = self._paths
        tcp, reverse = self._net.tcp, self.reverse
        rides = tcp.piggyback and reverse is not None and bool(reverse.queue)
        uses = merged((there.uses, 1.0), (back.uses, 0.0 if rides else tcp.ack_share))
        return slowed(uses, there, back, self._rtt_s, self._net.sharing) if self.has_line else uses

    def consider_acknowledgements(self) -> None:
        """Adapt to what is in their way, at most once in an instant."""
        if self.flow is None or self._considered_ns == self._env.now_ns:
            return
        uses = self._uses()
        if uses != self.flow.uses:
            self._considered_ns = self._env.now_ns
            self._replace_flow(uses, self.flow.weight)

    def _replace_flow(self, uses: tuple[tuple[Resource, float], ...], weight: float) -> None:
        """Go on as another flow."""
        assert self.flow is not None
        sending = self.flow.wanted
        if sending:
            self._pause()
        self._net.sharing.forget(self.flow)
        self.flow = Flow(self.number, uses, weight, self._bound()) if uses else None
        if self.flow is None:  # nothing holds it back any more
            self._remaining = 0.0
            self._begin()
        elif sending:
            self._net.start(self)

    def _renew_flow(self) -> None:
        """Take another weight where the stream has to share a port with a queue, and see where acknowledgements go."""
        assert self.flow is not None
        weight = self._paths[0].weight
        if self._ports is not None:
            self._ports.draw_weight()
            if neighbours := self._ports.neighbours(self.flow):
                weight = self._ports.weight
                for flow in neighbours:
                    self._net.streams[flow.id].share_port()
        uses = self._uses()
        if uses != self.flow.uses or weight != self.flow.weight:
            self._replace_flow(uses, weight)
        reverse = self.reverse
        if self._net.tcp.piggyback and reverse is not None and reverse.flow is not None and reverse.queue:
            uses = reverse._uses()
            if uses != reverse.flow.uses:
                reverse._replace_flow(uses, reverse.flow.weight)

    def share_port(self) -> None:
        """Take the weight that was drawn for this transfer: another stream sends through a port of this one."""
        if self.flow is not None and self._ports is not None and self.flow.weight != self._ports.weight:
            self._replace_flow(self.flow.uses, self._ports.weight)

    # The life of the message at the head of the queue.

    def _begin(self) -> None:
        if self.dead:
            if self.on_pushed_dead is not None:
                self.on_pushed_dead()
            return
        if self.flow is None:
            while self.queue and not self.blocked and not self.dead and self._has_room():
                if self._at_half is not None and self.queue[0].size_bytes > self._mss:
                    self._half_sent(self._due)
                else:
                    self._left(self.queue[0])
            return
        if self.blocked or not self._has_room():
            return
        if self._congestion is not None and self._net.tcp.restart_after_idle:
            self._restart_if_idle(self._congestion)
        if self._ports is not None or self._net.tcp.piggyback:
            self._renew_flow()
        self._next(self._env.now_ns)
        for gate in self.gates:
            gate.watch()
        self._net.start(self)

    def _next(self, now_ns: int) -> None:
        """Begin to send the head message."""
        self._remaining = float(self.queue[0].size_bytes)
        self._changed_ns = self._began_ns = now_ns
        if self._congestion is not None and self._congestion.is_opening:
            self._congestion.next(self._remaining)

    def _has_room(self) -> bool:
        """Return whether the receive buffer allows another message to leave."""
        return self.outstanding < self._buffer_bytes and self._unacknowledged < self._buffer_bytes

    def _resume(self) -> None:
        """Continue after a stall or a partition, unless it has continued already."""
        if self.dead or self.blocked or not self.queue:
            return
        if self._remaining > 0.0:
            if self._rate == 0.0:
                self._changed_ns = self._env.now_ns
                self._net.start(self)
        else:
            self._begin()

    def _pause(self) -> None:
        self._advance(self._env.now_ns)
        self._due += 1
        self._rate = 0.0
        assert self.flow is not None
        self._net.stop(self.flow)

    def rate_changed(self, rate: float) -> None:
        """Apply a new rate and reschedule the end of the message."""
        env = self._env
        now_ns = env.now_ns
        self._advance(now_ns)
        self._rate = rate
        self._due += 1
        if self._net.tcp.autotune:
            self._grow_buffer(rate)
        if rate > 0.0:
            if self._at_half is not None:
                self._set_half_time(now_ns)
            env.call_at(now_ns + ceil(self._remaining / rate * NS), VirtualStream._sent, self, self._due)
            congestion = self._congestion
            if congestion is not None and congestion.is_opening and not congestion.ticking:
                congestion.ticking = True
                env.call_at(now_ns + round(self._rtt_s * NS), self._tick, congestion)

    def _grow_buffer(self, rate: float) -> None:
        """Have room for twice of what is in flight at this rate, bursts aside. What a buffer has grown, it keeps."""
        twice_bytes = 2.0 * min(rate, self._paths[0].rate_bytes_ps) * (self._rtt_s + SLOW_START_DELAY_S)
        if twice_bytes > self.send_buffer_bytes:
            self.send_buffer_bytes = round(min(twice_bytes, self._net.tcp.send_buffer_bytes))
            if self.on_room is not None:
                self.on_room()

    def _set_half_time(self, now_ns: int) -> None:
        """Reschedule the time when half of the message has left."""
        size_bytes = self.queue[0].size_bytes
        if size_bytes > self._mss:
            to_go = max(self._remaining - size_bytes / 2, 0.0)
            self._env.call_at(now_ns + ceil(to_go / self._rate * NS), self._half_sent, self._due)

    def _half_sent(self, due: int) -> None:
        act = self._at_half
        if due == self._due and act is not None:
            self._at_half = None
            act()

    def _advance(self, now_ns: int) -> None:
        if self._rate > 0.0:
            self._remaining = max(self._remaining - self._rate * ((now_ns - self._changed_ns) / NS), 1e-9)
        self._changed_ns = now_ns

    def _sent(self, due: int) -> None:
        if due != self._due or self.dead:
            return
        message = self.queue[0]
        self._remaining = 0.0
        if self._congestion is not None and self._congestion.is_opening:
            self._congestion.count(0.0)
        self._left(message)

    def _left(self, message: StreamMessage) -> None:
        """Schedule the arrival of the head message; the next one follows at once."""
        net = self._net
        now = self._env.now_ns
        self.queued_bytes -= message.size_bytes
        if self.on_room is not None:
            self.on_room()  # what it pushes goes on, since the head is still there
        self.queue.popleft()
        if self.acks_blocked:
            self._unacknowledged += message.size_bytes
        arrival = now + self._latency_ns
        if self._delays is not None:
            self._burst += message.size_bytes
            exposed = message.size_bytes if message.exposed_bytes is None else message.exposed_bytes
            if exposed:
                sending_s = (now - self._burst_began_ns) / NS
                arrival += round(self._delays.draw_s(exposed, self._rtt_s, self.flow, sending_s, self._burst) * NS)
        if self._ports is not None:
            if self._delays is None:
                self._burst += message.size_bytes
            exposed = message.size_bytes if message.exposed_bytes is None else message.exposed_bytes
            if exposed:
                arrival += round(self._ports.draw_s(exposed, self._rtt_s, self.flow) * NS)
        if arrival < self._arrival_ns:
            arrival = self._arrival_ns
        self._arrival_ns = arrival
        self._env.call_at(arrival, VirtualStream._arrive, self, message)
        if self.flow is None:
            return
        if message.size_bytes > self._mss:
            first_ns = self._began_ns + self._latency_ns
            if first_ns > self._comes_until_ns:
                self._comes_from_ns = first_ns
            self._comes_until_ns = arrival
        if self.queue and not self.blocked and self._has_room():
            self._next(now)
            self._due += 1
            if self._at_half is not None:
                self._set_half_time(now)
            self._env.call_at(now + ceil(self._remaining / self._rate * NS), VirtualStream._sent, self, self._due)
        else:
            self._rate = 0.0
            self._idle_since_ns = now
            net.stop(self.flow)

    def _arrive(self, message: StreamMessage) -> None:
        if self.dead:
            return
        # Where the way is closed, what was in the air will have to be sent again.
        if self.blocked or self._held is not None or self._env.now_ns < self._not_before_ns:
            if self._held is None:
                self._held = deque()
                if not self.blocked:
                    self._let_go_in_time()
            self._held.append(message)
            return
        self.outstanding += message.size_bytes
        header = message.header
        if header is None:
            message.arrive()
        else:
            self._net.trace.record(frame_event(self._env.now_ns, "deliver", self.name, header))
            message.arrive(header, message.payload)

    def _let_go_in_time(self) -> None:
        if self._not_before_ns < NEVER_NS:
            self._env.call_at(self._not_before_ns, self._let_go)

    def _let_go(self) -> None:
        """Deliver the held messages in order, unless they are held longer."""
        if self._env.now_ns < self._not_before_ns:
            self._let_go_in_time()
        elif not self.blocked and self._held is not None:
            held, self._held = self._held, None
            for message in held:
                self._arrive(message)

    # The congestion window.

    def _bound(self) -> float:
        if self._rtt_s <= 0.0:
            return self._cap
        window = float(self._window_bytes)
        if self._congestion is not None:
            window = min(window, self._congestion.size_bytes)
        return min(window / self._rtt_s, self._cap)

    def _tick(self, congestion: CongestionWindow) -> None:
        """Handle the end of a round trip: open the congestion window."""
        congestion.ticking = False
        if self.dead or self.flow is None:
            return
        sending = self._remaining > 0.0 and self._rate > 0.0
        if sending:
            self._advance(self._env.now_ns)
            congestion.count(self._remaining)
        congestion.open()
        self._net.bound(self.flow, self._bound())
        # A stream held back by its share rather than by its window needs no further ticks.
        if sending and congestion.is_opening and self._rate * self._rtt_s * 2.0 >= congestion.size_bytes:
            congestion.ticking = True
            self._env.call_at(self._env.now_ns + round(self._rtt_s * NS), self._tick, congestion)

    def _restart_if_idle(self, congestion: CongestionWindow) -> None:
        idle_s = (self._env.now_ns - self._idle_since_ns) / NS
        if idle_s > max(RTO_S, self._rtt_s):
            congestion.restart()
            assert self.flow is not None
            self._net.bound(self.flow, self._bound())
