"""A stream: one direction of a connection, as TCP would carry it.

While it has something to send it is one flow; its rate is its share of the network, bounded by

    rate ≤ min(window, cwnd)/RTT, and ≤ the loss model's cap

cwnd starts at ten segments and grows once in a round trip by what was sent in it, so it doubles
every RTT under load. A message arrives one latency (plus jitter, plus what a loss or a full queue costs)
after its last byte left, never before the one ahead of it. A stream stops between two messages while
the receiver has a window's worth unread.

Consecutive messages of a busy stream need no new sharing: the flow just goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil, inf, sqrt
from typing import TYPE_CHECKING

import msgspec

from hcsim.config import Tcp
from hcsim.rng import stream as random_stream
from hcsim.runtime.channel import EMPTY, Payload
from hcsim.runtime.frame import Header
from hcsim.telemetry.trace import Event
from hcsim.virtual.links import Path, merged
from hcsim.virtual.sharing import Flow

if TYPE_CHECKING:
    from hcsim.virtual.network import Gate, Network

RTO_S = 0.2
"""TCP's smallest retransmission time-out: what a loss in a message's last packets costs."""
TAIL_PACKETS = 3
"""A loss among these has no three duplicate ACKs behind it, so only the time-out finds it."""

NS = 1_000_000_000


class Message(msgspec.Struct, frozen=True):
    """Something that travels: its size on the wire, and who takes it when it has arrived."""

    size_bytes: int
    arrive: Callable[..., None]
    header: Header | None = None
    """None at the end of the connection, behind all frames."""
    payload: Payload = EMPTY


def frame_event(now_ns: int, kind: str, where: str, frame: Header) -> Event:
    """What the trace says of a frame."""
    return (now_ns, kind, where, frame.kind, frame.operation, frame.bucket, frame.step, frame.offset, frame.length)


class Stream:
    """One direction of a connection."""

    __slots__ = (
        "_arrival_ns", "_at_half", "_burst", "_changed_ns", "_counted_from", "_cwnd", "_due", "_earned", "_held",
        "_idle_since_ns", "_jitter", "_jitter_s", "_latency_ns", "_loop", "_loss", "_loss_bound", "_mss", "_net",
        "_not_before_ns", "_packet_loss", "_queues", "_rate", "_remaining", "_rtt_s", "_ticking", "_unacknowledged",
        "_uneven", "_window_bytes", "acks_blocked", "blocked", "dead", "flow", "gates", "interfaces", "name",
        "number", "on_pushed_dead", "on_room", "outstanding", "queue", "queued_bytes",
    )  # fmt: skip

    def __init__(self, net: Network, number: int, name: str, there: Path, back: Path) -> None:
        tcp = net.tcp
        self._net = net
        self._loop = net.loop
        self.name = name
        self.queue: deque[Message] = deque()
        self.queued_bytes = 0
        self.outstanding = 0
        """Bytes that arrived and that the receiver has not read."""
        self.on_room: Callable[[], None] | None = None
        self.blocked = False
        """A partition holds what we send."""
        self.acks_blocked = False
        """A partition holds the acknowledgements: after one window's worth we wait."""
        self.dead = False
        self.on_pushed_dead: Callable[[], None] | None = None
        """Called for the first message that is sent after the other end is gone."""
        self._at_half: Callable[[], None] | None = None
        self._held: deque[Message] = deque()
        """What has come and may not be delivered yet; whatever comes after it waits behind it."""
        self._unacknowledged = 0
        """While acknowledgements are held: bytes that the sender takes for unread."""
        self._window_bytes = tcp.window_bytes
        self._not_before_ns = 0
        self.number = number
        self.gates: tuple[Gate, ...] = ()
        self.interfaces = (there.medium, there.arrives_by)
        """What it leaves and arrives by; a connection keeps them."""
        self._retime(there, back)
        uses = merged((there.uses, 1.0), (back.uses, tcp.ack_share))
        self.flow = Flow(number, uses, there.weight, inf) if uses else None
        self._mss = there.mtu - tcp.header_bytes
        self._cwnd = float(tcp.initial_window_segments * self._mss) if tcp.slow_start else inf
        self._jitter = random_stream(net.seed, "jitter", name)
        self._packet_loss = there.loss
        self._loss = random_stream(net.seed, "loss", name)
        self._loss_bound = loss_bound_bytes_ps(tcp, self._mss, self._rtt_s, there)
        self._queues = tuple(hop.queue for hop in there.hops if hop.queue is not None)
        self._uneven = bool(there.jitter_s or there.loss or self._queues)
        self._rate = 0.0
        self._remaining = 0.0
        self._changed_ns = 0
        self._arrival_ns = 0
        self._idle_since_ns = 0
        self._earned = 0.0
        """Bytes that left since the last look at the congestion window, and will open it."""
        self._counted_from = 0.0
        """What remained of the message at the head when it was last counted."""
        self._burst = 0
        """Bytes of the messages that left since the stream was last idle."""
        self._due = 0
        self._ticking = False
        if self.flow is not None:
            self.flow.bound = self._bound()

    def _retime(self, there: Path, back: Path) -> None:
        self._latency_ns = round(there.latency_s * NS)
        self._jitter_s = there.jitter_s
        self._rtt_s = there.latency_s + back.latency_s + there.jitter_s + back.jitter_s

    def push(self, message: Message) -> None:
        """Queue a message behind those that are already there."""
        queue = self.queue
        queue.append(message)
        self.queued_bytes += message.size_bytes
        if len(queue) == 1:
            self._burst = 0
            self._begin()

    def consumed(self, size_bytes: int) -> None:
        """The receiver has read that much; a stream that waited for room goes on."""
        stalled = not self._has_room()
        self.outstanding -= size_bytes
        if stalled and self.queue and self._has_room():
            # The news of the open window takes its time to get back to the sender.
            self._loop.call_at_ns(self._loop.now_ns + self._latency_ns, self._resume)

    def obstruct(self, *, data: bool, acks: bool) -> None:
        """Say what a partition holds back from now on: what we send, the acknowledgements of it, or both."""
        if data and not self.blocked and self._remaining > 0.0:
            self._pause()
        opened, acks_opened = self.blocked and not data, self.acks_blocked and not acks
        if acks != self.acks_blocked:
            self._unacknowledged = self.outstanding if acks else 0
        self.blocked, self.acks_blocked = data, acks
        # TCP notices at its next retransmission.
        when = self._loop.now_ns + round(RTO_S * NS)
        if opened:
            self._not_before_ns = max(self._not_before_ns, self._arrival_ns, when)
            if self._held:
                self._loop.call_at_ns(self._not_before_ns, self._let_go)
        if opened or acks_opened:
            self._loop.call_at_ns(when, self._resume)

    def hold_until(self, when_ns: int) -> None:
        """Let nothing arrive before that time; whatever has left by then arrives at once."""
        self._not_before_ns = max(self._not_before_ns, when_ns)

    def when_half_sent(self, act: Callable[[], None]) -> None:
        """Do something when part of a message has left: now, or half-way through the next of several packets."""
        if self._rate > 0.0 and self._loop.now_ns > self._changed_ns and self.queue[0].size_bytes > self._mss:
            act()
        else:
            self._at_half = act

    @property
    def burst_bytes(self) -> float:
        """What has left since it was last idle."""
        if self._rate <= 0.0:
            return 0.0
        left = self.queue[0].size_bytes - self._remaining
        return self._burst + left + self._rate * ((self._loop.now_ns - self._changed_ns) / NS)

    @property
    def unfinished(self) -> bool:
        """Whether something waits to leave, or is under way."""
        return bool(self.queue) or self._arrival_ns > self._loop.now_ns or bool(self._held)

    def kill(self) -> None:
        """Nothing more leaves and nothing more arrives."""
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
        """The path changed under us: another latency, loss, or cost per byte."""
        self._retime(there, back)
        self._packet_loss = there.loss
        self._uneven = bool(there.jitter_s or there.loss or self._queues)
        self._loss_bound = loss_bound_bytes_ps(self._net.tcp, self._mss, self._rtt_s, there)
        uses = merged((there.uses, 1.0), (back.uses, self._net.tcp.ack_share))
        if self.flow is None:
            if uses:
                self.flow = Flow(self.number, uses, there.weight, self._bound())
        elif uses != self.flow.uses or there.weight != self.flow.weight:
            sending = self.flow.wanted
            if sending:
                self._pause()
            self._net.sharing.forget(self.flow)
            self.flow = Flow(self.number, uses, there.weight, self._bound()) if uses else None
            if self.flow is None:  # nothing holds it back any more
                self._remaining = 0.0
                self._begin()
            elif sending:
                self._net.start(self)
        else:
            self._net.bound(self.flow, self._bound())

    # The life of the message at the head of the queue.

    def _begin(self) -> None:
        if self.dead:
            if self.on_pushed_dead is not None:
                self.on_pushed_dead()
            return
        if self.flow is None:
            while self.queue and not self.blocked and not self.dead and self._has_room():
                self._left(self.queue[0])
            return
        if self.blocked or not self._has_room():
            return
        message = self.queue[0]
        if self._net.tcp.restart_after_idle:
            self._restart_if_idle()
        self._remaining = self._counted_from = float(message.size_bytes)
        self._changed_ns = self._loop.now_ns
        for gate in self.gates:
            gate.watch()
        self._net.start(self)

    def _has_room(self) -> bool:
        """Whether the receiver's window lets another message leave."""
        return self.outstanding < self._window_bytes and self._unacknowledged < self._window_bytes

    def _resume(self) -> None:
        """Go on after a stall or a partition, unless that happened already."""
        if self.dead or self.blocked or not self.queue:
            return
        if self._remaining > 0.0:
            if self._rate == 0.0:
                self._changed_ns = self._loop.now_ns
                self._net.start(self)
        else:
            self._begin()

    def _pause(self) -> None:
        self._advance(self._loop.now_ns)
        self._due += 1
        self._rate = 0.0
        assert self.flow is not None
        self._net.stop(self.flow)

    def rate_changed(self, rate: float) -> None:
        """Take a new rate from now on, and work out anew when the message will have left."""
        loop = self._loop
        now_ns = loop.now_ns
        self._advance(now_ns)
        self._rate = rate
        self._due += 1
        if rate > 0.0:
            loop.call_at_ns(now_ns + ceil(self._remaining / rate * NS), Stream._sent, self, self._due)
            if self._at_half is not None:
                self._set_half_time(now_ns)
            if self._cwnd < self._window_bytes and not self._ticking:
                self._ticking = True
                loop.call_at_ns(now_ns + round(self._rtt_s * NS), self._tick)

    def _set_half_time(self, now_ns: int) -> None:
        if self._at_half is not None and self.queue[0].size_bytes > self._mss:
            self._loop.call_at_ns(now_ns + ceil(self._remaining / self._rate * NS / 2), self._at_half)
            self._at_half = None

    def _advance(self, now_ns: int) -> None:
        if self._rate > 0.0:
            self._remaining = max(self._remaining - self._rate * ((now_ns - self._changed_ns) / NS), 1e-9)
        self._changed_ns = now_ns

    def _sent(self, due: int) -> None:
        if due != self._due or self.dead:
            return
        message = self.queue[0]
        self._remaining = 0.0
        if self._cwnd < self._window_bytes:
            self._earned += self._counted_from
        self._left(message)

    def _left(self, message: Message) -> None:
        """The head's last byte is out: it will arrive; the next one follows at once."""
        net = self._net
        now = self._loop.now_ns
        self.queue.popleft()
        self.queued_bytes -= message.size_bytes
        if self.acks_blocked:
            self._unacknowledged += message.size_bytes
        arrival = now + self._latency_ns
        if self._uneven:
            arrival += self._delay_ns(message.size_bytes)
        if arrival < self._arrival_ns:
            arrival = self._arrival_ns
        self._arrival_ns = arrival
        self._loop.call_at_ns(arrival, Stream._arrive, self, message)
        if self.on_room is not None:
            self.on_room()
        if self.flow is None:
            return
        if self.queue and not self.blocked and self._has_room():
            self._remaining = self._counted_from = float(self.queue[0].size_bytes)
            self._changed_ns = now
            self._due += 1
            self._loop.call_at_ns(now + ceil(self._remaining / self._rate * NS), Stream._sent, self, self._due)
            if self._at_half is not None:
                self._set_half_time(now)
        else:
            self._rate = 0.0
            self._idle_since_ns = now
            net.stop(self.flow)

    def _arrive(self, message: Message) -> None:
        if self.dead:
            return
        # Where the way is closed, what was in the air will have to be sent again.
        if self.blocked or self._held or self._loop.now_ns < self._not_before_ns:
            self._held.append(message)
            if not self.blocked and len(self._held) == 1:
                self._loop.call_at_ns(self._not_before_ns, self._let_go)
            return
        self.outstanding += message.size_bytes
        header = message.header
        if header is None:
            self._net.trace.record((self._loop.now_ns, "deliver", self.name, "fin"))
            message.arrive()
        else:
            self._net.trace.record(frame_event(self._loop.now_ns, "deliver", self.name, header))
            message.arrive(header, message.payload)

    def _let_go(self) -> None:
        """What was held arrives, in its order, unless something holds it longer."""
        if self._loop.now_ns < self._not_before_ns:
            self._loop.call_at_ns(self._not_before_ns, self._let_go)
        elif not self.blocked:
            held, self._held = self._held, deque()
            for message in held:
                self._arrive(message)

    def _delay_ns(self, size_bytes: int) -> int:
        """What jitter, loss and full queues add to the latency of one message. In a queue stands what others have
        sent, and no more than they have since they were idle; what we sent ourselves took its time to leave."""
        self._burst += size_bytes
        delay_s = 0.0
        if self._jitter_s > 0.0:
            delay_s += self._jitter.expovariate(1.0 / self._jitter_s)
        if self._packet_loss > 0.0:
            delay_s += self._retransmission_s(size_bytes)
        for resource, buffer_bytes in self._queues:
            if resource.capacity > 0.0 and self._net.sharing.is_full(resource):
                delay_s += min(buffer_bytes, self._net.burst_bytes(resource, self)) / resource.capacity
        return round(delay_s * NS)

    def _retransmission_s(self, size_bytes: int) -> float:
        """One round trip when a packet of the message is hit, a time-out when it is one of the last."""
        packets = ceil(size_bytes / self._mss)
        tail = min(packets, TAIL_PACKETS)
        draw = self._loss.random()
        kept_tail = (1.0 - self._packet_loss) ** tail
        if draw < 1.0 - kept_tail:
            return max(RTO_S, self._rtt_s)
        return self._rtt_s if draw < 1.0 - kept_tail * (1.0 - self._packet_loss) ** (packets - tail) else 0.0

    # The congestion window.

    def _bound(self) -> float:
        window = min(float(self._window_bytes), self._cwnd)
        return min(window / self._rtt_s if self._rtt_s > 0.0 else inf, self._loss_bound)

    def _tick(self) -> None:
        """A round trip has passed: the window opens by what has left in it, to twice its size at most."""
        self._ticking = False
        if self.dead or self.flow is None:
            return
        sending = self._remaining > 0.0 and self._rate > 0.0
        if sending:
            self._advance(self._loop.now_ns)
            self._earned += self._counted_from - self._remaining
            self._counted_from = self._remaining
        self._cwnd += min(self._earned, self._cwnd)
        self._earned = 0.0
        self._net.bound(self.flow, self._bound())
        # A stream held back by its share rather than by its window needs no further ticks.
        if sending and self._cwnd < self._window_bytes and self._rate * self._rtt_s * 2.0 >= self._cwnd:
            self._ticking = True
            self._loop.call_at_ns(self._loop.now_ns + round(self._rtt_s * NS), self._tick)

    def _restart_if_idle(self) -> None:
        idle_s = (self._loop.now_ns - self._idle_since_ns) / NS
        if self._net.tcp.slow_start and idle_s > max(RTO_S, self._rtt_s):
            self._cwnd = float(self._net.tcp.initial_window_segments * self._mss)
            self._earned = 0.0
            assert self.flow is not None
            self._net.bound(self.flow, self._bound())


def loss_bound_bytes_ps(tcp: Tcp, mss: int, rtt_s: float, path: Path) -> float:
    """What TCP can sustain when each packet is lost with the path's probability."""
    loss = path.loss
    if loss <= 0.0 or rtt_s <= 0.0 or tcp.loss_model == "none":
        return inf
    if tcp.loss_model == "mathis":
        return mss / rtt_s * sqrt(1.5 / loss)
    if tcp.loss_model == "pftk":  # Padhye, Firoiu, Towsley and Kurose, with one ACK per packet
        timeouts = RTO_S * min(1.0, 3.0 * sqrt(3.0 * loss / 8.0)) * loss * (1.0 + 32.0 * loss**2)
        return mss / (rtt_s * sqrt(2.0 * loss / 3.0) + timeouts)
    if tcp.loss_model == "cubic":
        return float(1.054 * (rtt_s / loss) ** 0.75 * mss / rtt_s)
    return path.rate_bytes_ps * (1.0 - loss)
